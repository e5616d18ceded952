"""Products with quantised matrices against their dequantised definition."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leyden import ops
from leyden.formats import Format, Weight
from leyden.formats.fp8 import FP8, MXFP8, FP8Block, FP8Channel
from leyden.formats.gguf import Blocks
from leyden.formats.int4 import Int4
from leyden.formats.int8 import Int8
from leyden.formats.nvfp4 import NVFP4
from leyden.ops.cpu.program import available

if available:
    from leyden.ops.cpu.matrix import matrix
from tests.ops.cpu.test_kernels import among_nan, close, solid

pytestmark = pytest.mark.skipif(not available, reason="the kernels need a C compiler")

FORMATS: dict[str, Format] = {
    "nvfp4": NVFP4(),
    "nvfp4 four over six": NVFP4(four_over_six=True, input_scale=True),
    "int4 of 32": Int4(group=32),
    "int4 of 64 in fp16": Int4(group=64, scale_dtype=torch.float16),
    "int4 of rows": Int4(group=None, scale_dtype=torch.float32),
    "int8 of 64": Int8(64, torch.float32),
    "int8 of 32": Int8(32),
    "int8 of rows": Int8(),
    "fp8": FP8(),
    "fp8 channel": FP8Channel(),
    "fp8 block": FP8Block(),
    "mxfp8": MXFP8(),
    "q8_0": Blocks("Q8_0"),
    "q4_0": Blocks("Q4_0"),
}
SHAPES = [(50, 64), (7, 192), (33, 320)]
REFUSED = {"int4 asymmetric": Int4(group=32, symmetric=False), "q4_k": Blocks("Q4_K")}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(format: Format, *shape: int, dtype: torch.dtype, seed: int = 0) -> Weight:
    made = Weight(*shape, dtype=dtype, format=format).requires_grad_(False)
    scales = torch.logspace(-1, 1, shape[-2])[:, None]  # rows of different sizes
    for name, part in format.quantize((draw(*shape, seed=seed) * scales).to(dtype)).items():
        framed = solid(part) if part.dtype in (torch.float32, torch.bfloat16) and part.dim() else part
        made._parameters[name] = nn.Parameter(framed, requires_grad=False)
    return made


def agree(op: ops.Op, *arguments: Any, scale: float = 1.0) -> None:
    kernel = op._kernels["cpu", next(a.format.name for a in arguments if isinstance(a, Weight))]
    assert kernel.__module__.startswith("leyden.ops.cpu")
    close(kernel(*arguments), op.reference(*arguments), scale)


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_linear_in_fp32(name: str, shape: tuple[int, int], count: int) -> None:
    agree(ops.linear, among_nan(draw(count, shape[1], seed=1)), weight(FORMATS[name], *shape, dtype=torch.float32))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 20])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_linear_in_bf16(name: str, shape: tuple[int, int], count: int) -> None:
    x, made = among_nan(draw(count, shape[1], seed=1).bfloat16()), weight(FORMATS[name], *shape, dtype=torch.bfloat16)
    exact = made.format.dequantize(dict(made.named_parameters()), torch.float32)
    expected = x.float() @ exact.T
    # Products are wrong by parts of themselves, which add up like noise: 2^-9 where weights are rounded to BF16, 2^-16
    # of the largest x where codes are taken as they are. The sum is rounded once.
    ready = matrix(made).ready(x)[1] is not None and count <= 8
    noise = (x.float().square() @ exact.square().T).sqrt()
    error = (ops.linear(x, made).float() - expected).abs()
    assert (error <= expected.abs() * 2**-8 + noise * (2**-12 if ready else 2**-7)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_embed_gives_the_dequantised_rows(name: str, dtype: torch.dtype) -> None:
    table, ids = weight(FORMATS[name], 20, 192, dtype=dtype), torch.tensor([3, 19, 0, 3])
    assert torch.equal(ops.embed(ids, table), ops.embed.reference(ids, table))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 5, 30])
@pytest.mark.parametrize("name", FORMATS)
def test_experts(name: str, count: int, dtype: torch.dtype) -> None:
    format, size, inner = FORMATS[name], 64, 128
    up, down = (
        Weight(6, *shape, dtype=dtype, format=format).requires_grad_(False) for shape in ((inner, size), (size, inner))
    )
    for made, seed in ((up, 1), (down, 2)):
        parts = [format.quantize((draw(*made.shape[1:], seed=seed + 10 * e) / 10).to(dtype)) for e in range(6)]
        for key in parts[0]:
            made._parameters[key] = nn.Parameter(torch.stack([part[key] for part in parts]), requires_grad=False)
    ids = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:3] for i in range(count)])
    x, weights = draw(count, size, seed=3).to(dtype), draw(count, 3, seed=4).abs()
    agree(ops.experts, x, ids, weights, up, down, scale=8)
    shared = weight(format, inner, size, dtype=dtype), weight(format, size, inner, dtype=dtype)
    agree(ops.mlp, x, *shared, scale=8)
    agree(ops.moe, x, ids, weights, up, down, *shared, scale=8)


@pytest.mark.parametrize("name", REFUSED)
def test_what_kernels_do_not_know_the_reference_does(name: str) -> None:
    matrix = Weight(8, 256, dtype=torch.float32, format=REFUSED[name]).requires_grad_(False)
    for part in matrix.parameters():
        part.zero_()
    x = draw(2, 256)
    assert torch.equal(ops.linear(x, matrix), ops.linear.reference(x, matrix))


def test_codes_of_all_values() -> None:
    """Every code of every format, with the scales 1 and the smallest ones."""
    for format in (NVFP4(), Int4(group=32), FP8(), MXFP8()):
        made = weight(format, 16, 256, dtype=torch.float32)
        codes = made._parameters["weight_packed" if isinstance(format, Int4) else "weight"]
        every = torch.arange(256, dtype=torch.uint8)
        if "fp8" in format.name:
            every = torch.where(every & 127 == 127, 0, every)  # not the two NaN
        codes.view(torch.uint8).flatten(1)[:, :128].copy_(every.view(2, 128).repeat(8, 1))
        ids = torch.arange(16)
        assert torch.equal(ops.embed(ids, made), ops.embed.reference(ids, made)), format.name
        made.dtype = torch.bfloat16
        agree(ops.linear, draw(1, 256).bfloat16(), made, scale=8)
