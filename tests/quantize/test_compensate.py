import pytest
import torch
from torch import Tensor

from leyden.formats import Grid
from leyden.formats.int4 import Int4
from leyden.formats.nvfp4 import NVFP4
from leyden.quantize.compensate import compensate

FORMATS = [NVFP4(), NVFP4(four_over_six=True), Int4(32), Int4(None, scale_dtype=torch.float32)]


def inputs(tokens: int = 2000, k: int = 192) -> Tensor:
    """Correlated, as activations are."""
    random = torch.Generator().manual_seed(0)
    mixing = torch.randn(k, k, generator=random) * torch.rand(k, generator=random)
    return torch.randn(tokens, k, generator=random) @ mixing / k**0.5


def one_by_one(format: Grid, weight: Tensor, products: Tensor) -> Tensor:
    """Optimal brain surgery without any shortcut, in fp64: after each column, the rest moves to where it serves the
    outputs best, by the inverse of what is left of the products."""
    steps = format.steps(format.quantize(weight)).double()
    rest, done = weight.double().clone(), torch.empty_like(weight, dtype=torch.float64)
    products = products.double() + 0.01 * products.diagonal().mean() * torch.eye(len(products), dtype=torch.float64)
    for column in range(weight.shape[1]):
        inverse = torch.linalg.inv(products[column:, column:])
        units = (rest[:, column] / steps[:, column]).float()
        done[:, column] = format.snap(units).double() * steps[:, column]
        error = (rest[:, column] - done[:, column]) / inverse[0, 0]
        rest[:, column:] -= error[:, None] * inverse[0]
    return done.float()


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: repr(format))
def test_outputs_are_nearer_than_with_plain_rounding(format: Grid) -> None:
    weight = torch.randn(64, 192, generator=torch.Generator().manual_seed(1))
    x = inputs()
    plain, better = format.quantize(weight), compensate(format, weight, x.T @ x)
    values, expected = format.dequantize(better, torch.float32), one_by_one(format, weight, x.T @ x)
    assert (values - expected).abs().gt(1e-5).float().mean() < 0.01  # roundings of fp32 may tip a tie

    def error(values: Tensor) -> float:
        return (x @ (values - weight).T).square().mean().item()

    assert error(values) < 0.7 * error(format.dequantize(plain, torch.float32))
    assert error(values) == pytest.approx(error(expected), rel=0.02)
    assert better.keys() == plain.keys()
    for name, tensor in plain.items():
        assert better[name].dtype == tensor.dtype and better[name].shape == tensor.shape
        if "scale" in name:
            assert torch.equal(better[name].float(), tensor.float())


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: repr(format))
def test_independent_inputs_leave_nothing_to_make_up_for(format: Grid) -> None:
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(1))
    plain = format.dequantize(format.quantize(weight), torch.float32)
    for products in (torch.eye(96) * 7, torch.zeros(96, 96)):
        assert torch.equal(format.dequantize(compensate(format, weight, products), torch.float32), plain)


def test_inputs_that_cannot_be_used() -> None:
    weight = torch.randn(16, 32)
    tensors = compensate(Int4(32), weight, torch.full((32, 32), float("nan")))
    assert torch.equal(tensors["weight_packed"], Int4(32).quantize(weight)["weight_packed"])
