"""Against the gguf package, which defines the layouts."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor

from leyden.config.gguf import KINDS, write
from leyden.errors import ConfigError
from leyden.formats.gguf import Blocks, File, from_nvfp4_blocks, to_nvfp4_blocks
from leyden.formats.nvfp4 import NVFP4

READ = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q4_K", "Q5_K", "Q6_K"]
WRITTEN = ["Q8_0", "Q4_0"]
FP16_AT = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0]} | {
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "MXFP4": [], "NVFP4": [],
}  # fmt: skip


def random_blocks(kind: str, n: int = 24, blocks: int = 3) -> np.ndarray:
    """Every bit at random, but for the scales: those are finite."""
    random = np.random.default_rng(0)
    found = random.integers(0, 256, (n, blocks, KINDS[kind].bytes), np.uint8)
    if kind == "MXFP4":
        found[..., 0] %= 252  # no infinities
    for at in FP16_AT[kind]:
        scales = random.normal(0, 0.1, (n, blocks, 1)).astype(np.float16)
        found[..., at : at + 2] = scales.view(np.uint8)
    return found.reshape(n, -1)


def theirs(kind: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[kind]


def test_table_of_kinds() -> None:
    for name, kind in KINDS.items():
        assert theirs(name).value == kind.id
        assert gguf.GGML_QUANT_SIZES[theirs(name)] == (kind.size, kind.bytes)
    assert set(KINDS) == {*READ, "NVFP4", "F32", "F16", "BF16"}


@pytest.mark.parametrize("kind", READ)
def test_dequantize_bit_for_bit(kind: str) -> None:
    blocks = random_blocks(kind)
    expected = dequantize(blocks, theirs(kind))
    found = Blocks(kind).dequantize({"weight": torch.from_numpy(blocks)}, torch.float32)
    assert (found.numpy().view(np.uint32) == expected.view(np.uint32)).all()
    stacked = torch.from_numpy(np.stack([blocks, blocks[::-1]]))
    assert torch.equal(Blocks(kind).dequantize({"weight": stacked}, torch.float32)[1], found.flip(0))
    assert Blocks(kind).tensors(tuple(found.shape), torch.float32) == {"weight": (blocks.shape, torch.uint8)}


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 320, generator=random) * torch.rand(64, 1, generator=random)
    weight[3, 32:64] = 0
    weight[4, :32] = torch.arange(32) - 16  # halves, and two of the same magnitude
    weight = weight.to(dtype)
    expected = quantize(weight.float().numpy(), theirs(kind))
    assert (Blocks(kind).quantize(weight)["weight"].numpy() == expected).all()


def test_nvfp4_blocks() -> None:
    blocks = random_blocks("NVFP4")
    scales = [36 * block + i for block in range(3) for i in range(4)]
    blocks[:, scales] &= 127  # sign bits are not looked at
    blocks[0, 0] = 0x7F  # a scale that counts as zero
    weight, scale = from_nvfp4_blocks(torch.from_numpy(blocks))
    tensors = {"weight": weight, "weight_scale": scale, "weight_scale_2": torch.ones(())}
    found = NVFP4().dequantize(tensors, torch.float32)
    assert (found.numpy() == dequantize(blocks, theirs("NVFP4"))).all()
    assert not found[0, :16].any()
    blocks[:, scales] %= 127
    assert (to_nvfp4_blocks(weight, scale).numpy() == blocks).all()


def test_nvfp4_blocks_of_a_stack() -> None:
    stored = NVFP4().quantize(torch.randn(3, 32, 128, generator=torch.Generator().manual_seed(0)))
    blocks = to_nvfp4_blocks(stored["weight"], stored["weight_scale"])
    assert blocks.shape == (3, 32, 72)
    weight, scale = from_nvfp4_blocks(blocks)
    assert torch.equal(weight, stored["weight"])
    assert torch.equal(scale.view(torch.uint8), stored["weight_scale"].view(torch.uint8))


def test_kinds_that_are_not_read_or_not_written() -> None:
    with pytest.raises(ConfigError, match="must be of kind Q4_0, .*; found IQ2_XXS"):
        Blocks("IQ2_XXS")
    with pytest.raises(ConfigError, match="can be written are Q8_0, Q4_0; Q4_K is only read"):
        Blocks("Q4_K").quantize(torch.zeros(2, 256))
    with pytest.raises(ConfigError, match="q4_k stores 256 columns at a time; a matrix has 2688"):
        Blocks("Q4_K").tensors((16, 2688), torch.bfloat16)


def test_file_maps_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    values: dict[str, tuple[str, Tensor]] = {
        "a": ("F32", torch.randn(3, 5)),
        "b": ("BF16", torch.randn(2, 3, 4).bfloat16()),
        "c": ("F16", torch.randn(7).half()),
        "d": ("Q8_0", Blocks("Q8_0").quantize(torch.randn(2, 64))["weight"]),
    }
    shapes = {name: ((2, 64) if kind == "Q8_0" else tuple(value.shape), kind) for name, (kind, value) in values.items()}
    with path.open("wb") as file:
        for at, (_, value) in zip(write(file, {"general.architecture": "x"}, shapes), values.values(), strict=True):
            file.seek(at)
            file.write(value.view(-1).view(torch.uint8).numpy().tobytes())
    with File(path) as opened:
        for name, (_, value) in values.items():
            found = opened.get_tensor(name)
            assert torch.equal(found, value) and found.dtype == value.dtype
            found.zero_()  # a view of its own: the file does not change
    with File(path) as opened:
        assert torch.equal(opened.get_tensor("a"), values["a"][1])
