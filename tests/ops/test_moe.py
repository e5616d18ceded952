import numpy as np
import pytest
import torch
from torch import Tensor

from leyden import ops
from tests.batches import weight

H, WIDTH, E, K = 16, 12, 8, 2
draw = torch.Generator().manual_seed(11)
GATE = torch.randn(E, H, generator=draw)
X = torch.randn(9, H, generator=draw)
UP, DOWN = weight(E, WIDTH, H), weight(E, H, WIDTH, seed=1)


def numpy_layer(x: Tensor, gate: Tensor, bias: Tensor, factor: float) -> np.ndarray:
    """The routed part of one MoE layer, token by token, in fp64."""
    x, gate, bias = x.double().numpy(), gate.double().numpy(), bias.double().numpy()
    up, down = UP.weight.double().numpy(), DOWN.weight.double().numpy()
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        scores = 1 / (1 + np.exp(-gate @ row))
        chosen = np.argsort(-(scores + bias), kind="stable")[:K]
        for e in chosen:
            out[t] += scores[e] / scores[chosen].sum() * factor * down[e] @ np.maximum(up[e] @ row, 0) ** 2
    return out


def layer(x: Tensor, gate: Tensor, bias: Tensor, factor: float) -> Tensor:
    ids, weights = ops.route(x, gate, bias, K, scale=factor)
    return ops.experts(x, ids, weights, UP, DOWN)


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (X, torch.zeros(E)),
        (X, torch.tensor([5.0] + [0.0] * (E - 1))),
        (X, 64 + 0.01 * torch.arange(E)),
        (-X.abs(), torch.zeros(E)),
    ],
    ids=["no_bias", "one_bias", "large_bias", "negative_logits"],
)
def test_d30_against_numpy(x: Tensor, bias: Tensor, factor: float) -> None:
    gate = GATE.abs() if (x <= 0).all() else GATE
    if gate is not GATE:
        assert (x @ gate.T).max() < 0
    found = layer(x, gate, bias, factor)
    assert np.abs(found.numpy() - numpy_layer(x, gate, bias, factor)).max() < 1e-5


def test_d30_the_routed_part_scales_with_the_factor() -> None:
    bias = torch.zeros(E)
    assert torch.equal(layer(X, GATE, bias, 2.0), 2 * layer(X, GATE, bias, 1.0))
    torch.testing.assert_close(layer(X, GATE, bias, 2.5), 2.5 * layer(X, GATE, bias, 1.0))


def test_d30_large_biases_are_told_apart_in_a_bf16_model() -> None:
    bias = 64 + 0.01 * torch.arange(E)  # all 64 in bf16
    ids, _ = ops.route(X.bfloat16(), torch.zeros(E, H), bias, 2)
    assert ids.tolist() == [[7, 6]] * len(X)


def test_equal_keys_go_to_the_lower_index() -> None:
    ids, weights = ops.route(X, torch.zeros(E, H), torch.zeros(E), 3)
    assert ids.tolist() == [[0, 1, 2]] * len(X)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


def test_the_bias_does_not_weigh() -> None:
    bias = torch.tensor([9.0, 8.0] + [0.0] * (E - 2))
    ids, weights = ops.route(X, GATE, bias, 2, normalize=False)
    assert ids.tolist() == [[0, 1]] * len(X)
    torch.testing.assert_close(weights, (X @ GATE.T).sigmoid()[:, :2])


def test_groups_limit_the_choice_also_with_negative_keys() -> None:
    # groups {0,1} {2,3} {4,5} {6,7}; two best keys sum highest in the second and the fourth
    bias = torch.tensor([-1.0, -9, -3, -3, -9, -9, -2, -3])
    ids, _ = ops.route(X, torch.zeros(E, H), bias, 3, groups=4, kept=2)
    assert ids.tolist() == [[6, 2, 3]] * len(X), "expert 0 has the best key, but its group is not kept"


def test_experts_rounds_the_fp32_sum_once() -> None:
    up, down = (weight(*w.shape, dtype=torch.bfloat16) for w in (UP, DOWN))
    ids, weights = ops.route(X, GATE, torch.zeros(E), K)
    x = X.bfloat16()
    each = [ops.experts(x, ids[:, j : j + 1], torch.ones(len(X), 1), up, down).float() for j in range(K)]
    expected = sum(y * weights[:, j : j + 1] for j, y in enumerate(each))
    found = ops.experts(x, ids, weights, up, down).float()
    # one rounding, to nearest: half a unit in the last of 8 bits; a little more for the products of the fp32 sum
    assert ((found - expected).abs() <= expected.abs() * 2**-8 * 1.0001).all()


def test_tokens_do_not_see_each_other() -> None:
    together = layer(X, GATE, torch.zeros(E), 1.0)
    alone = torch.cat([layer(x[None], GATE, torch.zeros(E), 1.0) for x in X])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)


def test_gradients_reach_gate_and_experts() -> None:
    gate, x = GATE.clone().requires_grad_(), X.clone().requires_grad_()
    up, down = weight(E, WIDTH, H).requires_grad_(), weight(E, H, WIDTH, seed=1).requires_grad_()
    ids, weights = ops.route(x, gate, torch.zeros(E), K)
    ops.experts(x, ids, weights, up, down).square().sum().backward()
    hit = torch.bincount(ids.flatten(), minlength=E) > 0
    for grad in (up.weight.grad, down.weight.grad):
        assert grad.isfinite().all()
        assert torch.equal(grad.flatten(1).abs().sum(1) > 0, hit)
    assert gate.grad.abs().sum() > 0
    assert x.grad.isfinite().all()
