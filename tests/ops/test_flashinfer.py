"""FlashInfer's kernels get what they state that they want, and what they give is what our ops give."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from leyden import ops
from leyden.errors import ConfigError
from leyden.ops import flashinfer
from leyden.ops.reference.mamba import mamba_step
from leyden.ops.reference.moe import experts
from leyden.ops.rows import Rows
from tests import packages
from tests.batches import SMALL, pool, rows, weight
from tests.ops.test_mamba import NO_LIMIT, Mixer

FLAG = "--mamba-backend flashinfer"


def kernel(op: ops.Op, format: str = "dense") -> Any:
    return op._kernels["cuda", format]


def arguments(mixer: Mixer, count: int, conv: Tensor, ssm: Tensor, row: Rows, rounds: int = 0) -> tuple[object, ...]:
    taken = (mixer.conv_weight, mixer.conv_bias, mixer.A_log, mixer.D, mixer.dt_bias, NO_LIMIT, mixer.norm_weight)
    return mixer.projected[:count], *taken, SMALL.n_groups, 1e-5, conv, ssm, row, rounds


@pytest.mark.parametrize(
    ("dtype", "state", "close"),
    [
        (torch.float32, torch.float32, 2e-5),
        (torch.bfloat16, torch.float16, 2e-2),
        (torch.float16, torch.bfloat16, 2e-2),
    ],
)
def test_a_step_is_ours(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, state: torch.dtype, close: float) -> None:
    calls = packages.flashinfer(monkeypatch)
    mixer = Mixer(dtype=dtype)
    made = pool(SMALL, slots=6, conv_dtype=dtype, ssm_dtype=state)
    made.conv.normal_()
    made.ssm.normal_()
    made.ssm[0, 3] = float("nan")  # what a new sequence finds there does not matter
    row = rows(made, [(5, 7, 1), (3, 0, 1), (1, 12, 1)])
    wanted_conv, wanted_ssm = made.conv[0].clone(), made.ssm[0].clone()
    wanted = mamba_step(*arguments(mixer, 3, wanted_conv, wanted_ssm, row))
    found = kernel(flashinfer.step(FLAG, "vertical"))(*arguments(mixer, 3, made.conv[0], made.ssm[0], row))
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, atol=close, rtol=close)
    torch.testing.assert_close(made.ssm[0], wanted_ssm, atol=close / 8, rtol=close / 8)
    assert torch.equal(made.conv[0], wanted_conv)
    assert calls == [{"seed": None, "rounds": 10, "algorithm": "vertical"}]


def test_padding_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    packages.flashinfer(monkeypatch)
    mixer, made = Mixer(), pool(SMALL, slots=4)
    made.ssm.normal_()
    row = rows(made, [(2, 3, 1), (0, 3, 1)])
    before = made.ssm[0].clone()
    kernel(flashinfer.step(FLAG))(*arguments(mixer, 2, made.conv[0], made.ssm[0], row))
    changed = (made.ssm[0] != before).flatten(1).any(1)
    assert changed.tolist() == [False, False, True, False]


def test_random_bits_are_of_the_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = packages.flashinfer(monkeypatch)
    step, mixer = kernel(flashinfer.step(FLAG)), Mixer()
    for past, state in (([3, 9], torch.float16), ([4, 10], torch.float16), ([4, 10], torch.float32)):
        made = pool(SMALL, slots=4, ssm_dtype=state)
        step(*arguments(mixer, 2, made.conv[0], made.ssm[0], rows(made, [(1, past[0], 1), (2, past[1], 1)]), 5))
    assert [(call["seed"], call["rounds"]) for call in calls] == [(12, 5), (14, 5), (None, 5)]


def test_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = packages.flashinfer(monkeypatch)
    mixer, made = Mixer(), pool(SMALL)
    done = kernel(flashinfer.step(FLAG))(*arguments(mixer, 0, made.conv[0], made.ssm[0], rows(made, [])))
    assert done.shape == (0, SMALL.mamba_inner) and calls == []


def test_a_step_has_a_reference_like_other_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    packages.flashinfer(monkeypatch)
    step, mixer, made = flashinfer.step(FLAG), Mixer(), pool(SMALL)
    taken = arguments(mixer, 1, made.conv[0], made.ssm[0], rows(made, [(1, 0, 1)]))
    assert torch.equal(step(*taken), mamba_step(*taken))  # here, on a CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_ours(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    calls = packages.flashinfer(monkeypatch)
    monkeypatch.setattr(ops.experts, "_kernels", {})
    flashinfer.register_experts("--moe-backend flashinfer_cutlass")
    up, down = weight(8, 24, 16, dtype=dtype), weight(8, 16, 24, dtype=dtype, seed=1)
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(5, 16, generator=draw).to(dtype)
    ids, weights = torch.randn(5, 8, generator=draw).topk(3).indices, torch.rand(5, 3, generator=draw)
    wanted = experts(x, ids, weights, up, down)
    for stack in (up, down):
        stack.format = flashinfer.Cutlass()
    multiply = kernel(ops.experts, up.format.name)
    packages.assert_near(multiply(x, ids, weights, up, down), wanted)
    assert multiply(x[:0], ids[:0], weights[:0], up, down).shape == (0, 16)
    assert calls == [{"atomics": False}]
    assert torch.equal(ops.experts(x, ids, weights, up, down), wanted)  # on a CPU the reference, as ever


def test_a_limit_of_time_steps_is_refused() -> None:
    flashinfer.check_limit(FLAG, (0.0, float("inf")))
    flashinfer.check_limit(FLAG, (0.0, 1e308))
    for limit in ((0.001, float("inf")), (0.0, 0.1)):
        with pytest.raises(ConfigError, match=rf"{FLAG}: .*time_step_limit of \[.*\]; leave the flag away"):
            flashinfer.check_limit(FLAG, limit)


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packages.flashinfer(monkeypatch)
    import flashinfer as package
    import flashinfer.mamba as mamba

    monkeypatch.setattr(mamba, "selective_state_update", lambda state, x: x)
    with pytest.raises(ConfigError, match=f"{FLAG}: .*selective_state_update of .* takes other parameters .*argument"):
        flashinfer.step(FLAG)
    monkeypatch.setattr(package, "ActivationType", type("ActivationType", (), {}))
    with pytest.raises(ConfigError, match="has no relu"):
        flashinfer.register_experts("--moe-backend flashinfer_cutlass")


def test_what_is_given_is_what_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[set[str]] = []

    def take(**options: object) -> None:
        given.append(set(options))

    mixer, made = Mixer(), pool(SMALL)
    flashinfer.Step(take, "auto")(*arguments(mixer, 1, made.conv[0], made.ssm[0], rows(made, [(1, 3, 1)])))
    packages.flashinfer(monkeypatch)
    import flashinfer.fused_moe as fused

    monkeypatch.setattr(ops.experts, "_kernels", {})
    take.__signature__ = inspect.signature(fused.cutlass_fused_moe)  # type: ignore[attr-defined]
    monkeypatch.setattr(fused, "cutlass_fused_moe", take)
    flashinfer.register_experts("--moe-backend flashinfer_cutlass")
    up, down = weight(2, 24, 16), weight(2, 16, 24)
    kernel(ops.experts, flashinfer.Cutlass.name)(torch.ones(1, 16), torch.ones(1, 1).long(), torch.ones(1, 1), up, down)
    assert given == [set(flashinfer._UPDATE), set(flashinfer._EXPERTS)]
