"""Router and experts against their references."""

import pytest
import torch
from torch import Tensor

from leyden.ops.reference import linear as reference_linear
from leyden.ops.reference import moe as reference_moe
from leyden.ops.reference import norm as reference_norm
from tests.ops.triton.inputs import close, weight

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import moe  # noqa: E402


@pytest.mark.parametrize("count", [1, 3, 10])
@pytest.mark.parametrize(("groups", "kept", "normalize"), [(1, 1, True), (4, 2, False), (12, 5, True)])
def test_route(draw, count: int, groups: int, kept: int, normalize: bool, monkeypatch):
    x, gate, bias = draw(count, 72), draw(12, 72, scale=0.1), draw(12, scale=0.3)
    gate[3], bias[3] = gate[7], bias[7]  # a tie: the lower index wins
    arguments = (x, gate, bias, 4, groups, kept, normalize, 2.5)
    ids, weights = reference_moe.route(*arguments)
    for own in (0, 512):
        monkeypatch.setattr(moe, "ROUTE_ROWS", own)
        got_ids, got = moe.route(*arguments)
        assert torch.equal(got_ids, ids)
        close(got, weights)


@pytest.mark.parametrize("shape", [None, (1, 1, 1), (2, 2, 2), (4, 2, 3)])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2)])
def test_router_on_tensor_cores(draw, groups: int, kept: int, shape, monkeypatch):
    """Rows and columns that nothing divides, and rows that are apart."""
    x, gate, bias = draw(19, 96).bfloat16()[:, :80], draw(32, 80, scale=0.1), draw(32, scale=0.3)
    gate[3], bias[3] = gate[7], bias[7]
    monkeypatch.setattr(moe, "_route", None)
    arguments = (x, gate, bias, 5, groups, kept, True, 2.5)
    ids, weights = reference_moe.route(*arguments)
    got_ids, got = moe._routed(*arguments, shape=shape)
    assert torch.equal(got_ids, ids)
    close(got, weights)


def test_the_router_on_tensor_cores_is_as_exact_as_in_fp32(draw, monkeypatch):
    x, gate = draw(24, 512).bfloat16(), draw(16, 512, scale=0.05)
    truth = (x.double() @ gate.double().t()).sigmoid()

    def off(ids: Tensor, scores: Tensor) -> float:
        return float((scores.double() - truth.gather(1, ids)).norm() / truth.norm())

    monkeypatch.setattr(moe, "_route", None)
    assert torch.equal(moe._in_thirds(gate).double().sum(0), gate.double())
    arguments = x, gate, draw(16) * 0, 16, 1, 1, False, 1.0
    assert off(*moe.route(*arguments)) < 1.5 * off(*reference_moe.route(*arguments)) < 1e-6


@pytest.mark.parametrize("count", [1, 2])
def test_router_behind_a_sum(draw, count: int):
    x, residual, w, gate, bias = (
        draw(count, 72),
        draw(count, 72),
        draw(72),
        draw(12, 72, scale=0.1),
        draw(12, scale=0.3),
    )
    got = moe.add_norm_route(x, residual, w, 1e-5, gate, bias, 4, 4, 2, True, 2.5)
    hidden, total = reference_norm.add_rms_norm(x, residual, w, 1e-5)
    ids, weights = reference_moe.route(hidden, gate, bias, 4, 4, 2, True, 2.5)
    close(got[0], hidden)
    assert torch.equal(got[1], total) and torch.equal(got[2], ids)
    close(got[3], weights)


@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_experts(draw, count: int, device: str):
    k, inner, total, shared = 40, 24, 6, 56
    x, up, down = draw(count, k), draw(total, inner, k, scale=0.2), draw(total, k, inner, scale=0.2)
    shared_up, shared_down = draw(shared, k, scale=0.2), draw(k, shared, scale=0.2)
    ids = torch.stack([torch.randperm(total) for _ in range(count)]).to(device)[:, :3]  # as a sort leaves them
    weights = draw(count, 3).abs()
    wanted = reference_moe.experts(x, ids, weights, weight(up), weight(down))
    close(moe.experts(x, ids, weights, weight(up), weight(down)), wanted, atol=1e-4)
    wanted = wanted + reference_linear.mlp(x, weight(shared_up), weight(shared_down))
    got = moe.moe(x, ids, weights, *(weight(w) for w in (up, down, shared_up, shared_down)))
    close(got, wanted, atol=1e-4)


def test_experts_that_nobody_chose_cost_nothing(draw, device: str):
    """Their weights are NaN here: whoever touched them would show it."""
    x, up, down = draw(20, 40), draw(6, 24, 40), draw(6, 40, 24)
    up[4], down[4] = torch.nan, torch.nan
    ids = torch.tensor([[0, 5], [3, 1]] * 10, device=device)
    for count in (1, 4, 20):
        assert moe.experts(x[:count], ids[:count], draw(count, 2), weight(up), weight(down)).isfinite().all()
