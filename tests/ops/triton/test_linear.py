"""Products of few rows against the references, and embeddings."""

import pytest
import torch

from leyden.formats import Weight
from leyden.formats.fp8 import FP8
from leyden.ops.reference import linear as reference_linear
from tests.ops.triton.inputs import close, weight

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import linear  # noqa: E402


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("square", [False, True])
def test_products(draw, count: int, square: bool):
    x, up, down = draw(count, 88), draw(40, 88, scale=0.1), draw(24, 40)
    wanted = reference_linear.linear(x, weight(up))
    wanted = wanted.relu().square() if square else wanted
    if count == 1:
        close(linear.vector(x, up, square, shape=(4, 32, 1)), wanted)
    else:
        for splits in (1, 3):
            close(linear.narrow(x, up, square, shape=(16, 16, splits, 2, 4)), wanted)
    close(linear.linear(x, weight(up)), reference_linear.linear(x, weight(up)))
    halves = x.half(), weight(up.half())
    logits = linear.linear(*halves, torch.float32)
    assert logits.dtype == torch.float32
    close(logits, reference_linear.linear(*halves).float(), atol=2e-3)
    close(linear.mlp(x, weight(up), weight(down)), reference_linear.mlp(x, weight(up), weight(down)), atol=1e-4)


@pytest.mark.parametrize(
    ("count", "split", "warps", "depth"), [(2, 1, 1, 1), (8, 2, 4, 2), (9, 1, 2, 3), (16, 4, 4, 4)]
)
def test_products_in_bfloat16(draw, count: int, split: int, warps: int, depth: int):
    """Bands that end beyond the matrix, columns that do not divide among the warps, more steps ahead than there are."""
    x, matrix, cut = (
        draw(count, 248)[:, 8:200].bfloat16(),
        draw(40, 192, scale=0.1).bfloat16(),
        linear.Cut(split, warps, depth),
    )
    wanted = reference_linear.linear(x.float(), weight(matrix.float()))
    close(linear.few(x, matrix, True, torch.float32, cut), wanted.relu().square(), atol=1e-4)
    to = draw(count, 80)[:, 16:56].bfloat16()
    close(linear.few(x, matrix, False, torch.float32, cut, to), wanted + to)
    # the interpreter does not round to nearest
    close(linear.add_linear(x, weight(matrix), to).float(), wanted + to, rtol=2**-7)
    close(linear.linear(x, weight(matrix)).float(), wanted, rtol=2**-7)


@pytest.mark.parametrize("count", [1, 5, 70])
def test_products_in_fp8(draw, device: str, count: int):
    x, stored = draw(count, 96), Weight(40, 96, dtype=torch.float32, format=FP8()).requires_grad_(False).to(device)
    for name, part in stored.format.quantize(draw(40, 96)).items():
        stored.parts[name].copy_(part)
    close(linear.linear_fp8(x, stored), reference_linear.linear(x, stored), atol=1e-4)
    if count < 70:
        x = x.bfloat16()
        close(linear.linear_fp8(x, stored, torch.float32), reference_linear.linear(x.float(), stored), atol=1e-4)


def test_embed(draw, device: str):
    table, ids = draw(10, 24), torch.tensor([9, 0, 3], device=device)
    assert torch.equal(linear.embed(ids, weight(table)), table[ids])
