import numpy as np
import torch

from leyden import ops
from tests.batches import CLOSE

draw = torch.Generator().manual_seed(3)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=draw)


def test_rms_norm_formula() -> None:
    x, weight = randn(5, 24), randn(24)
    wide = x.double().numpy()
    expected = weight.numpy() * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), torch.from_numpy(expected).float(), **CLOSE)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5).abs().max() == 0


def test_rms_norm_rounds_once() -> None:
    x, weight = randn(16, 40).bfloat16(), randn(40).bfloat16()
    found = ops.rms_norm(x, weight, 1e-5)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, ops.rms_norm(x.float(), weight.float(), 1e-5).bfloat16())


def test_add_rms_norm_reads_the_rounded_sum() -> None:
    x, residual, weight = randn(16, 40).bfloat16(), randn(16, 40).bfloat16(), randn(40).bfloat16()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, (x.float() + residual.float()).bfloat16())
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))


def test_gated_norm_gates_first_and_norms_each_group() -> None:
    y, z, weight = randn(3, 24), randn(3, 24), randn(24)
    g = y.double().numpy() * z.double().numpy() / (1 + np.exp(-z.double().numpy()))
    blocks = g.reshape(3, 4, 6)
    expected = (blocks / np.sqrt((blocks**2).mean(-1, keepdims=True) + 1e-5)).reshape(3, 24) * weight.numpy()
    torch.testing.assert_close(ops.gated_norm(y, z, weight, 4, 1e-5), torch.from_numpy(expected).float(), **CLOSE)


def test_gated_norm_rounds_once() -> None:
    y, z, weight = randn(3, 24).bfloat16(), randn(3, 24).bfloat16(), randn(24).bfloat16()
    exact = ops.gated_norm(y.float(), z.float(), weight.float(), 2, 1e-5)
    assert torch.equal(ops.gated_norm(y, z, weight, 2, 1e-5), exact.bfloat16())
