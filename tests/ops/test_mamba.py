from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leyden import ops
from leyden.config.model import ModelConfig
from leyden.model.context import Context
from leyden.ops.rows import Rows
from tests.batches import CLOSE, SMALL, pool, rows

DATA = Path(__file__).parent.parent / "data"
NO_LIMIT = (0.0, float("inf"))


class Mixer:
    """Random arguments of the ops of one mamba layer, and the layer without its two projections, from them."""

    def __init__(self, config: ModelConfig = SMALL, seed: int = 0, dtype: torch.dtype = torch.float32):
        draw = torch.Generator().manual_seed(seed)

        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=draw) * scale).to(dtype)

        heads = config.mamba_num_heads
        self.config = config
        self.conv_weight = randn(config.conv_dim, config.conv_kernel, scale=0.5)
        self.conv_bias = randn(config.conv_dim, scale=0.1) if config.use_conv_bias else None
        self.A_log = torch.linspace(-3, 3, heads)
        self.D = randn(heads).float()
        self.dt_bias = randn(heads).float()
        self.norm_weight = 1 + randn(config.mamba_inner, scale=0.1)
        self.projected = randn(45, config.mamba_inner + config.conv_dim + heads)

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        config = self.config
        return projected.split([config.mamba_inner, config.conv_dim, config.mamba_num_heads], dim=-1)

    def scan(self, projected: Tensor, conv: Tensor | None, ssm: Tensor | None, row: Rows, chunk: int = 8) -> Tensor:
        config, width = self.config, self.config.n_groups * self.config.ssm_state_size
        z, xBC, dt = self._split(projected)
        xBC = ops.causal_conv(xBC, self.conv_weight, self.conv_bias, conv, row)
        x, B, C = xBC.split([config.mamba_inner, width, width], dim=-1)
        x = x.unflatten(-1, (config.mamba_num_heads, -1))
        B, C = (t.unflatten(-1, (config.n_groups, -1)) for t in (B, C))
        limit = config.time_step_limit
        y = ops.ssd_scan(x, dt, B, C, self.A_log, self.D, self.dt_bias, limit, chunk, ssm, row)
        return ops.gated_norm(y.flatten(1), z, self.norm_weight, config.n_groups, 1e-5)

    def step(self, projected: Tensor, conv: Tensor, ssm: Tensor, row: Rows) -> Tensor:
        config = self.config
        taken = (self.conv_weight, self.conv_bias, self.A_log, self.D, self.dt_bias, config.time_step_limit)
        return ops.mamba_step(projected, *taken, self.norm_weight, config.n_groups, 1e-5, conv, ssm, row)


def numpy_mixer(mixer: Mixer, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(output, conv state, SSM state) of one sequence from its start, one token after the other, in fp64."""

    def wide(t: Any) -> np.ndarray:
        return t.double().numpy()

    def silu(a: np.ndarray) -> np.ndarray:
        return a / (1 + np.exp(-a))

    config = mixer.config
    heads, dim, groups, n = config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size
    inner, reach = config.mamba_inner, config.conv_kernel - 1
    low, high = config.time_step_limit
    seen = np.zeros((reach, config.conv_dim))
    state = np.zeros((heads, dim, n))
    outputs = []
    for p in wide(projected):
        z, column, dt = p[:inner], p[inner : inner + config.conv_dim], p[-heads:]
        window = np.vstack([seen, column])
        seen = window[1:]
        mixed = (window * wide(mixer.conv_weight).T).sum(0)
        if mixer.conv_bias is not None:
            mixed += wide(mixer.conv_bias)
        mixed = silu(mixed)
        x = mixed[:inner].reshape(heads, dim)
        B = mixed[inner : inner + groups * n].reshape(groups, n)
        C = mixed[inner + groups * n :].reshape(groups, n)
        y = np.zeros((heads, dim))
        for h in range(heads):
            delta = np.clip(np.log1p(np.exp(dt[h] + wide(mixer.dt_bias)[h])), low, high)
            g = h // (heads // groups)
            state[h] = np.exp(-np.exp(wide(mixer.A_log)[h]) * delta) * state[h] + delta * np.outer(x[h], B[g])
            y[h] = state[h] @ C[g] + wide(mixer.D)[h] * x[h]
        gated = (y.reshape(-1) * silu(z)).reshape(groups, -1)
        gated /= np.sqrt((gated**2).mean(-1, keepdims=True) + 1e-5)
        outputs.append(gated.reshape(-1) * wide(mixer.norm_weight))
    return tuple(torch.from_numpy(np.array(a)).float() for a in (outputs, seen, state))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_groups": 1},
        {"n_groups": 2},
        {"n_groups": 4, "mamba_num_heads": 8},
        {"conv_kernel": 3},
        {"use_conv_bias": False},
        {"time_step_limit": (0.4, 1.1)},
    ],
    ids=str,
)
def test_d30_against_numpy(changes: dict[str, Any]) -> None:
    config = replace(SMALL, **changes)
    mixer = Mixer(config)
    expected, conv, ssm = numpy_mixer(mixer, mixer.projected)

    chunked = pool(config)
    found = mixer.scan(mixer.projected, chunked.conv[0], chunked.ssm[0], rows(chunked, [(2, 0, 45)]))
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(chunked.conv[0, 2], conv, **CLOSE)
    torch.testing.assert_close(chunked.ssm[0, 2], ssm, **CLOSE)

    stepped = pool(config)
    steps = [
        mixer.step(token[None], stepped.conv[0], stepped.ssm[0], rows(stepped, [(2, t, 1)]))
        for t, token in enumerate(mixer.projected)
    ]
    torch.testing.assert_close(torch.cat(steps), expected, **CLOSE)
    torch.testing.assert_close(stepped.ssm[0, 2], ssm, **CLOSE)


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 64])
def test_the_chunk_size_is_only_a_matter_of_speed(chunk: int) -> None:
    mixer = Mixer()
    row = Context.packed([45]).wide
    reference = mixer.scan(mixer.projected, None, None, row)
    torch.testing.assert_close(mixer.scan(mixer.projected, None, None, row, chunk), reference, **CLOSE)


@pytest.mark.parametrize("seed", range(5))
def test_cut_anywhere_with_the_state_carried(seed: int) -> None:
    mixer, cache = Mixer(seed=seed), pool(SMALL)
    whole = mixer.scan(mixer.projected, None, None, Context.packed([45]).wide)
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, 45), size=9, replace=False)).tolist()
    parts = []
    for start, end in zip([0, *cuts], [*cuts, 45], strict=True):
        row = rows(cache, [(1, start, end - start)])
        run = mixer.step if end - start == 1 else mixer.scan
        parts.append(run(mixer.projected[start:end], cache.conv[0], cache.ssm[0], row))
    torch.testing.assert_close(torch.cat(parts), whole, **CLOSE)


def test_rows_of_one_call_equal_rows_alone() -> None:
    mixer = Mixer()
    lens, begun = [3, 21, 1, 8, 12], [0, 5, 2, 0, 9]
    together, alone = pool(SMALL, slots=6), pool(SMALL, slots=6)
    draw = torch.Generator().manual_seed(9)
    for array in (together.conv, together.ssm):
        array.copy_(torch.randn(array.shape, generator=draw))
    alone.conv.copy_(together.conv)
    alone.ssm.copy_(together.ssm)
    batch = [(slot, past, n) for slot, past, n in zip([4, 1, 5, 2, 3], begun, lens, strict=True)]
    found = mixer.scan(mixer.projected, together.conv[0], together.ssm[0], rows(together, batch))
    for (slot, past, n), part, output in zip(batch, mixer.projected.split(lens), found.split(lens), strict=True):
        expected = mixer.scan(part, alone.conv[0], alone.ssm[0], rows(alone, [(slot, past, n)]))
        torch.testing.assert_close(output, expected, **CLOSE)
    torch.testing.assert_close(together.conv, alone.conv, **CLOSE)
    torch.testing.assert_close(together.ssm, alone.ssm, **CLOSE)


@pytest.mark.parametrize("lens", [[1, 1, 1, 1], [4, 9, 2, 13]], ids=["step", "scan"])
def test_padding_rows_touch_nobody(lens: list[int]) -> None:
    mixer = Mixer()
    dirty, clean = pool(SMALL), pool(SMALL)
    for state in (dirty.conv, dirty.ssm):
        state[:, 0] = float("nan")
    padded = [(0, 3, lens[0]), (2, 5, lens[1]), (3, 0, lens[2]), (0, 0, lens[3])]
    parts = mixer.projected[: sum(lens)].split(lens)
    run = mixer.step if max(lens) == 1 else mixer.scan
    found = run(torch.cat(parts), dirty.conv[0], dirty.ssm[0], rows(dirty, padded)).split(lens)
    expected = run(torch.cat(parts[1:3]), clean.conv[0], clean.ssm[0], rows(clean, padded[1:3])).split(lens[1:3])
    torch.testing.assert_close(found[1:3], expected, **CLOSE)
    torch.testing.assert_close(dirty.conv[:, 1:], clean.conv[:, 1:], **CLOSE)
    torch.testing.assert_close(dirty.ssm[:, 1:], clean.ssm[:, 1:], **CLOSE)


def test_strong_decay_gives_neither_infinity_nor_nan() -> None:
    mixer = Mixer()
    mixer.dt_bias += 40  # exp of the sums above the diagonal would overflow
    mixer.projected.requires_grad_()
    out = mixer.scan(mixer.projected, None, None, Context.packed([45]).wide, chunk=32)
    out.sum().backward()
    assert out.isfinite().all()
    assert mixer.projected.grad.isfinite().all()


def test_gradients_stay_within_their_row() -> None:
    mixer = Mixer()
    mixer.projected.requires_grad_()
    learned = [mixer.conv_weight, mixer.conv_bias, mixer.A_log, mixer.D, mixer.dt_bias, mixer.norm_weight]
    for t in learned:
        t.requires_grad_()
    mixer.scan(mixer.projected, None, None, Context.packed([20, 25]).wide)[:20].square().sum().backward()
    assert mixer.projected.grad[20:].abs().max() == 0
    assert mixer.projected.grad[:20].abs().sum() > 0
    for t in learned:
        assert t.grad.isfinite().all()
        assert t.grad.abs().sum() > 0


def test_the_gradient_does_not_depend_on_the_chunks() -> None:
    grads = []
    for chunk in (4, 45):
        mixer = Mixer()
        mixer.projected.requires_grad_()
        mixer.scan(mixer.projected, None, None, Context.packed([30, 15]).wide, chunk).square().sum().backward()
        grads.append(mixer.projected.grad)
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_bf16_conv_and_scan_are_fp32_rounded_once() -> None:
    mixer = Mixer(dtype=torch.bfloat16)
    row = Context.packed([45]).wide
    _, xBC, dt = mixer._split(mixer.projected)
    found = ops.causal_conv(xBC, mixer.conv_weight, mixer.conv_bias, None, row)
    exact = ops.causal_conv(xBC.float(), mixer.conv_weight.float(), mixer.conv_bias.float(), None, row)
    assert torch.equal(found, exact.bfloat16())

    x, B, C = found.split([48, 24, 24], dim=-1)
    x, B, C = x.unflatten(-1, (6, -1)), B.unflatten(-1, (2, -1)), C.unflatten(-1, (2, -1))
    per_head = (mixer.A_log, mixer.D, mixer.dt_bias, NO_LIMIT, 8, None, row)
    exact = ops.ssd_scan(x.float(), dt.float(), B.float(), C.float(), *per_head)
    assert torch.equal(ops.ssd_scan(x, dt, B, C, *per_head), exact.bfloat16())


@pytest.mark.parametrize("ssm_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_step_and_scan_agree_in_bf16(ssm_dtype: torch.dtype) -> None:
    mixer = Mixer(dtype=torch.bfloat16)
    dtypes = {"conv_dtype": torch.bfloat16, "ssm_dtype": ssm_dtype}
    stepped, scanned = pool(SMALL, **dtypes), pool(SMALL, **dtypes)
    for cache in (stepped, scanned):
        mixer.scan(mixer.projected[:20], cache.conv[0], cache.ssm[0], rows(cache, [(2, 0, 20)]))
    args = [(cache.conv[0], cache.ssm[0], rows(cache, [(2, 20, 1)])) for cache in (stepped, scanned)]
    step, scan = mixer.step(mixer.projected[20:21], *args[0]), mixer.scan(mixer.projected[20:21], *args[1])
    torch.testing.assert_close(step, scan, atol=2**-7, rtol=2**-7)
    assert stepped.ssm.dtype == ssm_dtype
    torch.testing.assert_close(stepped.ssm, scanned.ssm)
    assert torch.equal(stepped.conv, scanned.conv)


def cut(lens: list[int], past: list[int], slots: list[int]) -> Rows:
    starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    return Rows(tuple(lens), starts, torch.tensor(past, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32))


def states(mixer: Mixer, slots: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """(conv, SSM, ring) of one layer with random states, the ring full of NaN."""
    config = mixer.config
    draw = torch.Generator().manual_seed(3)
    conv = torch.randn(slots, config.conv_kernel - 1, config.conv_dim, generator=draw)
    ssm = torch.randn(slots, config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size, generator=draw)
    ring = torch.full((slots, 5, config.conv_dim + config.mamba_num_heads), float("nan"))
    return conv, ssm, ring


def parameters(mixer: Mixer) -> tuple[Any, ...]:
    return mixer.conv_weight, mixer.conv_bias, mixer.A_log, mixer.D, mixer.dt_bias, mixer.config.time_step_limit


def test_verify_gives_what_the_scan_gives_and_leaves_the_states_alone():
    mixer = Mixer()
    conv, ssm, ring = states(mixer)
    before = conv.clone(), ssm.clone()
    row = cut([3, 1, 5, 2], past=[7, 0, 9, 2], slots=[4, 1, 2, 5])
    projected = mixer.projected[: row.tokens]
    got = ops.mamba_verify(
        projected, *parameters(mixer), mixer.norm_weight, mixer.config.n_groups, 1e-5, conv, ssm, ring, row
    )
    assert torch.equal(conv, before[0]) and torch.equal(ssm, before[1])
    torch.testing.assert_close(got, mixer.scan(projected, conv, ssm, row), **CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_replay_over_any_accepted_tokens_is_decoding_them(seed):
    mixer = Mixer(seed=seed)
    draw = np.random.default_rng(seed)
    conv, ssm, ring = states(mixer)
    straight = conv.clone(), ssm.clone()
    past = torch.tensor([0, 4], dtype=torch.int32)
    slots = torch.tensor([3, 1])
    for _ in range(8):
        lens = draw.integers(1, 6, 2).tolist()
        row = cut(lens, past=past.tolist(), slots=slots.tolist())
        at = int(draw.integers(0, 30))
        projected = mixer.projected[at : at + row.tokens]
        ops.mamba_verify(
            projected, *parameters(mixer), mixer.norm_weight, mixer.config.n_groups, 1e-5, conv, ssm, ring, row
        )
        counts = [int(draw.integers(0, n + 1)) for n in lens]
        ops.mamba_replay(*parameters(mixer), mixer.config.n_groups, conv, ssm, ring, slots, past, torch.tensor(counts))
        for i, count in enumerate(counts):
            if count:
                start = int(row.starts[i])
                taken = cut([count], past=[int(past[i])], slots=[int(slots[i])])
                mixer.scan(projected[start : start + count], *straight, taken)
        past += torch.tensor(counts, dtype=torch.int32)
        torch.testing.assert_close(conv[slots], straight[0][slots])
        torch.testing.assert_close(ssm[slots], straight[1][slots], **CLOSE)


def test_verification_with_partial_acceptance_against_the_published_vector():
    data = {k: torch.from_numpy(v) for k, v in np.load(DATA / "spec" / "replay_ssm.npz").items() if k != "cfg"}
    state = data["S0"][None].clone()
    A_log, D, dt_bias = (-data["A"]).log(), data["D"], data["dt_bias"]
    steps, tokens = data["dt_raw"].shape[:2]
    for step in range(steps):
        inputs = [data[name][step] for name in ("x", "dt_raw", "B", "C")]
        trial = state.clone()
        row = cut([tokens], past=[1], slots=[0])
        y = ops.ssd_scan(*inputs, A_log, D, dt_bias, NO_LIMIT, tokens, trial, row)
        torch.testing.assert_close(y, data["y"][step], atol=1e-5, rtol=1e-5)
        accepted = int(data["num_accepted"][step]) + 1  # the token that is certain, and the drafts that were right
        taken = [t[:accepted] for t in inputs]
        ops.ssd_scan(*taken, A_log, D, dt_bias, NO_LIMIT, tokens, state, cut([accepted], past=[1], slots=[0]))
        torch.testing.assert_close(state[0], data["state_after"][step], atol=1e-5, rtol=1e-5)
