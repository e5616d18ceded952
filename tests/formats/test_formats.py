"""What every format promises."""

import pytest
import torch

from leyden.errors import ConfigError
from leyden.formats import Dense, Format, Weight
from leyden.formats.fp8 import FP8, MXFP8, FP8Block, FP8Channel
from leyden.formats.int4 import Int4
from leyden.formats.int8 import Int8
from leyden.formats.nvfp4 import NVFP4

FORMATS = {
    "dense": Dense(),
    "fp8": FP8(),
    "fp8 static": FP8(input_scale=True),
    "fp8_channel": FP8Channel(),
    "fp8_block": FP8Block(),
    "mxfp8": MXFP8(),
    "int4 g128": Int4(),
    "int4 g32 asymmetric": Int4(32, symmetric=False),
    "int4 rows": Int4(None, scale_dtype=torch.float16),
    "int8 g128": Int8(128),
    "int8 rows": Int8(scale_dtype=torch.float16),
    "nvfp4": NVFP4(),
    "nvfp4 w4a4": NVFP4(input_scale=True),
    "nvfp4 4/6": NVFP4(four_over_six=True),
}
every = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def stack(experts: int = 3, n: int = 256, k: int = 256) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randn(experts, n, k, generator=random) * torch.tensor([1.0, 0.01, 30.0])[:experts, None, None]


@every
def test_tensors_are_what_quantize_makes(format: Format) -> None:
    for weight in (stack(), stack()[0]):
        made = format.quantize(weight)
        promised = format.tensors(tuple(weight.shape), torch.float32)
        assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in made.items()} == promised


@every
def test_close_to_the_matrix(format: Format) -> None:
    weight = stack()
    error = (format.dequantize(format.quantize(weight), torch.float32) - weight).flatten(1).norm(dim=1)
    bits = torch.tensor([4 if "4" in format.name else 32 if format.name == "dense" else 8])
    assert (error / weight.flatten(1).norm(dim=1) < {4: 0.16, 8: 0.04, 32: 1e-9}[bits.item()]).all()


@every
def test_zeros_stay_zeros(format: Format) -> None:
    assert not format.dequantize(format.quantize(torch.zeros(128, 128)), torch.float32).any()


@every
def test_a_stack_is_its_matrices(format: Format) -> None:
    whole, each = format.quantize(stack()), [format.quantize(matrix) for matrix in stack()]
    for name, tensor in whole.items():
        assert torch.equal(tensor.view(torch.uint8), torch.stack([one[name] for one in each]).view(torch.uint8))
    values = torch.stack([format.dequantize(one, torch.bfloat16) for one in each])
    assert torch.equal(format.dequantize(whole, torch.bfloat16), values)


@every
@pytest.mark.parametrize(("dim", "axis"), [(-2, 1), (-1, 2), (1, 1), (0, 0)])
def test_shards_are_parts_of_the_matrix(format: Format, dim: int, axis: int) -> None:
    stored = format.quantize(stack(2))
    values = format.dequantize(stored, torch.float32)
    for rank in range(2):
        shard = format.shard(stored, dim, rank, 2)
        assert all(tensor.is_contiguous() for tensor in shard.values())
        assert torch.equal(format.dequantize(shard, torch.float32), values.chunk(2, axis)[rank])


@every
def test_weight_holds_any_format(format: Format) -> None:
    weight = Weight(3, 256, 256, dtype=torch.float32)
    weight.allot(format)
    assert all(parameter.requires_grad == (format.name == "dense") for parameter in weight.parameters())
    weight.load_state_dict(format.quantize(stack()))
    assert torch.equal(weight.dense(), format.dequantize(format.quantize(stack()), torch.float32))
    assert format.name in repr(weight)
    members = weight.members([2, 0])
    assert members.keys() == {0, 2}
    assert all(torch.equal(member, weight.dense()[i]) for i, member in members.items())


@pytest.mark.parametrize("format", [NVFP4(), MXFP8()])
def test_rows_that_do_not_fill_their_blocks_are_refused(format: Format) -> None:
    with pytest.raises(ConfigError, match=f"{format.name} stores {format.multiple} columns .* 40"):
        format.tensors((16, 40), torch.bfloat16)


@pytest.mark.parametrize(
    ("format", "shape", "dim", "world", "message"),
    [
        (NVFP4(), (16, 48), -1, 2, "nvfp4 cannot divide 48 columns among 2 ranks: it stores 16"),
        (FP8Block(), (384, 128), 0, 2, "fp8_block cannot divide 384 rows among 2 ranks: it stores 128"),
        (FP8Block(), (300, 128), 0, 3, "fp8_block cannot divide 300 rows among 3 ranks"),
        (MXFP8(), (3, 32, 64), 0, 2, "mxfp8 cannot divide 3 matrices among 2 ranks"),
    ],
)
def test_borders_inside_a_block_are_refused(
    format: Format, shape: tuple[int, ...], dim: int, world: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        format.shard(format.quantize(torch.randn(shape)), dim, 0, world)
