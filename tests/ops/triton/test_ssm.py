"""Mamba for rows of few tokens against the references."""

import pytest
import torch

from leyden.ops.reference import mamba as reference_mamba
from tests.ops.triton.inputs import close, step_inputs

triton = pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

import triton.language as tl  # noqa: E402

from leyden.ops.triton import ssm  # noqa: E402


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("heads", "groups", "dim", "n"), [(6, 2, 8, 12), (4, 1, 32, 16)])
def test_mamba_step(draw, device: str, heads: int, groups: int, dim: int, n: int, fused: bool):
    arguments, window, ssm_state, batch = step_inputs(draw, device, heads, groups, dim, n)
    states = [(window.clone(), ssm_state.clone()) for _ in range(2)]
    for _ in range(2):  # the second step reads what the first one wrote
        wanted = reference_mamba.mamba_step(*arguments, *states[0], batch)
        got = ssm.mamba_step(*arguments, *states[1], batch, shape=(16, 4, 128), fused=fused)
        close(got, wanted, atol=1e-4)
        close(states[1][0], states[0][0])
        close(states[1][1], states[0][1])
        batch.past += 1


@pytest.mark.parametrize("fused", [False, True])
def test_states_of_16_bits_are_rounded_at_random(draw, device: str, fused: bool):
    arguments, window, exact, batch = step_inputs(draw, device, 4, 1, 32, 16)
    batch.past += 1
    exact[1, 0, 0, :2] = torch.tensor([1e6, -1e6])  # has to stay finite
    rounded = exact.half().clamp(-65504, 65504)
    exact = rounded.float()
    before = rounded.clone()
    wanted = ssm.mamba_step(*arguments, window.clone(), exact, batch, fused=fused)
    got = ssm.mamba_step(*arguments, window.clone(), rounded, batch, 10, fused=fused)
    close(got, wanted)  # the step itself sees nothing of the rounding
    assert rounded.isfinite().all() and torch.equal(rounded[0], before[0])
    normal = exact.abs() > 2**-14
    normal[0], normal[4] = False, False  # slots that no row has
    last = 2.0 ** (exact.abs().clamp(2**-14, 65504).log2().floor() - 10)  # value of the last bit
    off = ((rounded.float() - exact.clamp(-65504, 65504)) / last)[normal]
    assert off.abs().max() < 1 and off.abs().max() > 0.8
    assert abs(float(off.mean())) < 0.03  # 6,000 errors, uniform over one bit if they were independent
    again = before.clone()
    ssm.mamba_step(*arguments, window.clone(), again, batch, 10, fused=fused)
    assert torch.equal(again, rounded)
    # The reference throws the same dice. What it rounds differs in the last bits of fp32, so a few fall elsewhere.
    by_reference = before.clone()
    reference_mamba.mamba_step(*arguments, window.clone(), by_reference, batch, 10)
    assert (by_reference != rounded)[1:4].float().mean() < 0.01
    batch.past += 1
    other = before.clone()
    ssm.mamba_step(*arguments, window.clone(), other, batch, 10, fused=fused)
    assert (other != rounded)[1:4].float().mean() > 0.25


@triton.jit
def round_states(
    states, A_log, past, out, DIM: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr
):
    """As the steps do it, programs (head and part, row)."""
    parts = (DIM + BLOCK - 1) // BLOCK
    head, start = tl.program_id(0) // parts, tl.program_id(0) % parts * BLOCK
    p, n = ssm._rows(start, BLOCK, ROUNDS), tl.arange(0, N)
    at = ((tl.program_id(1) * (tl.num_programs(0) // parts) + head) * DIM + p)[:, None] * N + n[None, :]
    state = tl.load(states + at, mask=(p < DIM)[:, None], other=0.0)
    calls = ssm._calls(start, head, n, DIM, N, BLOCK)
    log_rate, position = tl.load(A_log + head), tl.load(past + tl.program_id(1))
    stored = ssm._stored(state, out.dtype.element_ty, log_rate, position, calls, ROUNDS)
    tl.store(out + at, stored, mask=(p < DIM)[:, None])


@pytest.mark.parametrize("rounds", [5, 10])
@pytest.mark.parametrize(("dim", "block"), [(4, 8), (16, 16), (20, 8), (20, 32), (64, 32)])
def test_random_bits_are_those_of_the_reference(draw, device: str, dim: int, block: int, rounds: int):
    state, rate = draw(3, 2, dim, 16), torch.tensor([0.7, -1.5], device=device)
    state[0] *= 2.0 ** torch.linspace(-30, 20, 16, device=device)  # far below and above the normal numbers of fp16
    past = torch.tensor([3, 4, 1_000_000], dtype=torch.int32, device=device)
    found = torch.empty_like(state, dtype=torch.float16)
    round_states[(2 * -(-dim // block), 3)](state, rate, past, found, dim, 16, block, rounds)
    wanted = reference_mamba.at_random(state, rate, past, rounds)
    assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_guesses(draw, device: str, dtype: torch.dtype):
    """Three rows of up to four tokens: nothing moves while they are checked, and then as many as were right."""
    lens, right = [3, 1, 4], torch.tensor([2, 1, 0], device=device)
    arguments, window, exact, batch = step_inputs(draw, device, 4, 2, 16, 8, lens)
    ssm_state, ring, wanted_ring = exact.to(dtype), draw(5, 5, 4 * 16 + 2 * 2 * 8 + 4), draw(5, 5, 100)
    wanted_ring = ring.clone()
    before = window.clone(), ssm_state.clone()
    wanted = reference_mamba.mamba_verify(*arguments, window, ssm_state, wanted_ring, batch)
    got = ssm.mamba_verify(*arguments, window, ssm_state, ring, batch)
    close(got, wanted, atol=1e-4)
    assert torch.equal(ring, wanted_ring) and torch.equal(window, before[0]) and torch.equal(ssm_state, before[1])

    recurrence = (*arguments[1:7], arguments[8])
    if dtype == torch.float16:  # rounded at random once, at the last token: sums differ in their last bits, dice do not
        states = [(window.clone(), ssm_state.clone()) for _ in range(2)]
        reference_mamba.mamba_replay(*recurrence, *states[0], ring, batch.slots, batch.past, right, 5)
        ssm.mamba_replay(*recurrence, *states[1], ring, batch.slots, batch.past, right, 5)
        assert (states[0][1] != states[1][1]).float().mean() < 0.01
    reference_mamba.mamba_replay(*recurrence, *before, ring, batch.slots, batch.past, right)
    ssm.mamba_replay(*recurrence, window, ssm_state, ring, batch.slots, batch.past, right)
    close(window, before[0])
    if dtype == torch.float32:
        close(ssm_state, before[1])
    else:
        close(ssm_state.float(), before[1].float(), atol=2e-3, rtol=2e-3)
        assert torch.equal(ssm_state[batch.slots[2]], before[1][batch.slots[2]])


@pytest.mark.parametrize(
    ("dtype", "activations", "period", "shape"),
    [
        (torch.float32, torch.float32, 4, None),
        (torch.float16, torch.float32, 16, (1, 8, 2, 4, 128)),
        (torch.float16, torch.float16, 16, None),
    ],
)
def test_steps_that_write_their_state_now_and_then(
    draw, device: str, dtype: torch.dtype, activations: torch.dtype, period: int, shape
):
    """20 tokens of three rows that begin at 0, 5 and 2 and fold at other steps; one of them is folded early, twice."""
    arguments, window, exact, batch = step_inputs(draw, device, 4, 2, 16, 8)
    batch.slots = torch.tensor([1, 2, 3], dtype=torch.int32, device=device)
    recent = torch.full((5, period - 1, 4 * 16 + 2 * 8 + 4), torch.nan, device=device)
    exact[1] = torch.nan  # nobody has written there: the row starts from nothing
    window, recent = window.to(activations), recent.to(activations)
    ours, theirs, plain = ([window.clone(), exact.to(dtype, copy=True), recent.clone()] for _ in range(3))
    began = torch.tensor([9, 0, 5, 2, 9], dtype=torch.int32, device=device)
    options = {"atol": 1e-4} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 4e-3}
    recurrence = (*arguments[3:4], *arguments[5:7], arguments[8])
    for step in range(20):
        inputs = draw(*arguments[0].shape).to(activations), *arguments[1:]
        wanted = reference_mamba.mamba_lazy_step(*inputs, *theirs, began, batch, 5)
        got = ssm.mamba_lazy_step(*inputs, *ours, began, batch, 5, shape)
        close(got, wanted, **options)
        if dtype == torch.float32:
            close(got, reference_mamba.mamba_step(*inputs, *plain[:2], batch), **options)
        batch.past += 1
        if step in (8, 13):
            held = torch.maximum(began[batch.slots], batch.past // period * period)[2:]
            early = batch.slots[2:], held, batch.past[2:] - held, 5
            reference_mamba.mamba_fold(*recurrence, *theirs[1:], *early)
            ssm.mamba_fold(*recurrence, *ours[1:], *early)
            began[3] = batch.past[2]
            assert dtype != torch.float32 or (ours[1][3] - plain[1][3]).abs().max() < 1e-4
    close(ours[0], theirs[0])
    close(ours[1][1:4].float(), theirs[1][1:4].float(), **options)
    if activations == dtype == torch.float32:
        close(ours[1][1:4], theirs[1][1:4])
    elif activations == torch.float32:
        assert (ours[1] != theirs[1])[1:4].float().mean() < 0.02  # the same dice; sums differ in their last bits
        assert theirs[1][1:4].isfinite().all() and torch.equal(ours[1][4], theirs[1][4])
