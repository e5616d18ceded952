"""Every kernel against its reference, on shapes that no block size divides and on the shapes of blocks."""

import pytest
import torch
from torch import Tensor

from leyden.formats import Weight
from leyden.formats.fp8 import FP8
from leyden.ops.reference import attention as reference_attention
from leyden.ops.reference import draft as reference_draft
from leyden.ops.reference import linear as reference_linear
from leyden.ops.reference import mamba as reference_mamba
from leyden.ops.reference import moe as reference_moe
from leyden.ops.reference import norm as reference_norm
from leyden.ops.rows import Rows

triton = pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

import triton.language as tl  # noqa: E402

from leyden.ops.triton import attention, conv, linear, moe, norm, qkv, scan, ssm  # noqa: E402

CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture
def draw(device: str):
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device)

    return made


def weight(matrix: Tensor) -> Weight:
    made = Weight(*matrix.shape, dtype=matrix.dtype).requires_grad_(False)
    made.weight = torch.nn.Parameter(matrix, requires_grad=False)
    return made


def close(got: Tensor, wanted: Tensor, **options: float) -> None:
    torch.testing.assert_close(got, wanted, **{**CLOSE, **options})


def rows(device: str, past: list[int], lens: list[int] | None = None, page: int = 4, tokens: int = 64) -> Rows:
    """Slots 1, 2, ...; every slot's pages in mixed order."""
    lens = lens or [1] * len(past)
    per = tokens // page
    table = torch.randperm(len(past) * per, generator=torch.Generator().manual_seed(1)).add(1).view(len(past), per)
    starts = torch.tensor([0, *lens]).cumsum(0)
    ints = (starts, torch.tensor(past), torch.arange(len(past), 0, -1), table)
    starts, before, slots, table = (t.to(device, torch.int32) for t in ints)
    return Rows(tuple(lens), starts, before, slots, table)


@pytest.mark.parametrize("size", [24, 64])
def test_norms(draw, monkeypatch, size: int):
    x, residual, z, w = draw(5, size), draw(5, size), draw(5, 2 * size)[:, size:], draw(size)
    close(norm.rms_norm(x, w, 1e-5), reference_norm.rms_norm(x, w, 1e-5))
    for got, wanted in zip(
        norm.add_rms_norm(x, residual, w, 1e-5), reference_norm.add_rms_norm(x, residual, w, 1e-5), strict=True
    ):
        close(got, wanted)
    close(norm.gated_norm(x, z, w, 4, 1e-5), reference_norm.gated_norm(x, z, w, 4, 1e-5))
    monkeypatch.setattr(norm, "_MANY_ROWS", 1)
    for groups in (6, 4) if size == 24 else (4, 8):
        close(norm.gated_norm(x, z, w, groups, 1e-5), reference_norm.gated_norm(x, z, w, groups, 1e-5))


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


@pytest.mark.parametrize(("lens", "kernel"), [([1, 1, 1], 4), ([35, 2, 17], 4), ([20, 5, 1], 2)])
def test_causal_conv(draw, device: str, lens: list[int], kernel: int):
    batch = rows(device, past=[0, 5, 2], lens=lens)
    x, w, bias = draw(batch.tokens, 60)[:, 7:47], draw(40, kernel), draw(40)
    state = draw(5, kernel - 1, 40)
    wanted_state = state.clone()
    close(conv.causal_conv(x, w, bias, state, batch), reference_mamba.causal_conv(x, w, bias, wanted_state, batch))
    assert torch.equal(state, wanted_state)
    batch.past.zero_()
    close(conv.causal_conv(x, w, None, None, batch), reference_mamba.causal_conv(x, w, None, None, batch))


def step_inputs(draw, device: str, heads: int, groups: int, dim: int, n: int, lens: list[int] | None = None):
    inner, channels = heads * dim, heads * dim + 2 * groups * n
    batch = rows(device, past=[0, 5, 2], lens=lens)
    count = batch.tokens
    window, ssm_state = draw(5, 3, channels), draw(5, heads, dim, n)
    arguments = (
        draw(count, inner + channels + heads), draw(channels, 4), draw(channels), draw(heads), draw(heads),
        draw(heads, scale=5.0), (1e-3, float("inf")), draw(inner), groups, 1e-5,
    )  # fmt: skip
    return arguments, window, ssm_state, batch


WALKS = (16, 2, 4, 255), (32, 1, 4, 255)
SCANS = {  # of rows of up to 35 tokens
    "one segment": scan.Shape(64, 16, *WALKS),
    "segments of one chunk": scan.Shape(16, 16, *reversed(WALKS)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cannot multiply BF16
@pytest.mark.parametrize("shape", SCANS.values(), ids=SCANS)
def test_ssd_scan(draw, device: str, dtype: torch.dtype, shape: scan.Shape):
    """Rows shorter than a chunk, of whole chunks, and longer, in one segment and more; one starts from nothing."""
    heads, groups, dim, n = 4, 2, 24, 12
    batch = rows(device, past=[0, 5, 2], lens=[5, 16, 35])
    tokens = batch.tokens
    mixed = draw(tokens, heads * dim + 2 * groups * n).to(dtype)
    x, B, C = mixed.split([heads * dim, groups * n, groups * n], dim=-1)
    x, B, C = x.unflatten(1, (heads, dim)), B.unflatten(1, (groups, n)), C.unflatten(1, (groups, n))
    dt = draw(tokens, heads + 3)[:, 3:].to(dtype)
    recurrence = (draw(heads), draw(heads), draw(heads), (1e-3, float("inf")), 16)
    state = draw(5, heads, dim, n).to(torch.float16 if dtype == torch.float16 else torch.float32)
    exact = [t.float() for t in (x, dt, B, C)]
    wanted_state = state.float().clone()
    wanted = reference_mamba.ssd_scan(*exact, *recurrence, wanted_state, batch)
    wanted_state = wanted_state.to(state.dtype)
    off = 2e-5 if dtype == torch.float32 else 2e-3
    got = scan.ssd_scan(x, dt, B, C, *recurrence, state, batch, shape)
    assert (got.float() - wanted).norm() < off * wanted.norm()
    close(state, wanted_state, atol=20 * off, rtol=20 * off)
    batch.past.zero_()
    wanted = reference_mamba.ssd_scan(*exact, *recurrence, None, batch)
    got = scan.ssd_scan(x, dt, B, C, *recurrence, None, batch, shape)
    assert (got.float() - wanted).norm() < off * wanted.norm()


@pytest.mark.parametrize("segment", [16, 32])
def test_segments_of_unequal_rows(draw, device: str, segment: int):
    """The last segment of a row may be full or not, and one row may have many where others have one."""
    batch = rows(device, past=[0, 5, 2], lens=[1, 81, 64])
    x, B, C, dt = draw(146, 3, 8), draw(146, 1, 8), draw(146, 1, 8), draw(146, 3)
    recurrence = (draw(3), draw(3), draw(3), (1e-3, float("inf")), 16)
    got_state = draw(5, 3, 8, 8)
    wanted_state = got_state.clone()
    wanted = reference_mamba.ssd_scan(x, dt, B, C, *recurrence, wanted_state, batch)
    got = scan.ssd_scan(x, dt, B, C, *recurrence, got_state, batch, scan.Shape(segment, 16))
    assert (got - wanted).norm() < 2e-5 * wanted.norm()
    close(got_state, wanted_state)


def test_ssd_scan_of_extremes(draw, device: str):
    """Time steps of zero, states that are gone within a token or stay: logs of decays in the thousands, no infinity."""
    batch = rows(device, past=[3], lens=[50])
    x, B, C = draw(50, 3, 8), draw(50, 1, 8), draw(50, 1, 8)
    dt, A_log = draw(50, 3, scale=100.0), torch.tensor([-20.0, 0.0, 2.0], device=device)
    recurrence = (A_log, draw(3), draw(3), (0.0, float("inf")), 16)
    got_state = draw(4, 3, 8, 8)
    wanted_state = got_state.clone()
    wanted = reference_mamba.ssd_scan(x, dt, B, C, *recurrence, wanted_state, batch)
    got = scan.ssd_scan(x, dt, B, C, *recurrence, got_state, batch, scan.Shape(16, 16))
    assert (got - wanted).norm() < 1e-4 * wanted.norm()
    assert (got_state - wanted_state).norm() < 1e-4 * wanted_state.norm()


@pytest.mark.parametrize("lens", [[1], [256], [257], [8192], [40_000], [700, 64, 2000], [128] * 64, [1] * 70 + [9000]])
def test_segments_of_a_scan_are_enough_and_their_states_small(monkeypatch, lens: list[int]):
    """Programs for every multiprocessor if a row is long enough for that, and never many more states than programs."""
    grids = {}

    class Launched:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid: tuple[int, int, int]):
            return lambda *arguments, **options: grids.setdefault(self.name, (grid, arguments))

    for name in ("_chunks", "_states", "_pass", "_scan"):
        monkeypatch.setattr(scan, name, Launched(name))
    tokens = sum(lens)
    x, B = torch.empty(tokens, 64, 64, device="meta"), torch.empty(tokens, 8, 128, device="meta")
    dt, heads = torch.empty(tokens, 64, device="meta"), torch.empty(64, device="meta")
    batch = Rows(tuple(lens), *(torch.empty(len(lens) + 1, device="meta") for _ in range(3)))
    state = torch.empty(2, 64, 64, 128, device="meta")
    scan.ssd_scan(x, dt, B, B, heads, heads, heads, (0.0, 1.0), 128, state, batch)
    programs, segments, _ = grids["_scan"][0]
    assert programs * segments >= (512 if max(lens) > 2000 else 64)
    assert ("_states" in grids) == ("_pass" in grids) == (segments > 1) == (max(lens) > 256)
    if segments > 1:
        states = grids["_states"][1][3]
        assert states.numel() <= 2 * (1024 + 64) * 64 * 128


@pytest.mark.parametrize("lens", [None, [3, 1, 17, 9], [4, 1, 3, 2]])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(6, 2, 8), (4, 1, 16)])
def test_attention(draw, device: str, heads: int, kv: int, dim: int, lens: list[int] | None):
    batch = rows(device, past=[0, 250, 30, 7], lens=lens, tokens=280)
    tokens = batch.tokens
    q, k, v = draw(tokens, heads, dim), draw(tokens, kv, dim), draw(tokens, kv, dim)
    cache = draw(2, 4 * 70 + 1, 4, kv, dim)
    wanted_cache = cache.clone()
    reference_attention.kv_write(k, v, wanted_cache, batch)
    attention.kv_write(k, v, cache, batch)
    assert torch.equal(cache, wanted_cache)
    close(attention.attention(q, cache, batch), reference_attention.attention(q, cache, batch))


@pytest.mark.parametrize("lens", [None, [3, 1, 17, 9], [4, 1, 3, 2]])
def test_attention_over_8_bit_floats(draw, device: str, lens: list[int] | None):
    batch = rows(device, past=[0, 150, 30, 7], lens=lens, tokens=180)
    tokens, scales = batch.tokens, (0.25, 0.5)
    # numbers that the cache can hold: the interpreter rounds others in its own way
    k, v = (draw(tokens, 2, 16).to(torch.float8_e4m3fn).float() * scale for scale in scales)
    k[0, 0, 0] = 1000.0  # becomes the largest number
    q = draw(tokens, 6, 16)
    cache = draw(2, 4 * 45 + 1, 4, 2, 16).to(torch.float8_e4m3fn)
    wanted_cache = cache.clone()
    reference_attention.kv_write(k, v, wanted_cache, batch, *scales)
    attention.kv_write(k, v, cache, batch, *scales)
    assert torch.equal(cache.view(torch.uint8), wanted_cache.view(torch.uint8))
    close(attention.attention(q, cache, batch, *scales), reference_attention.attention(q, cache, batch, *scales))


@pytest.mark.parametrize("lens", [None, [2, 1, 3, 2, 1, 2]])
def test_attention_around_the_borders_of_tiles(draw, device: str, lens: list[int] | None):
    """Rows with fewer keys than a tile, a tile and one more; a query that sees nothing of a program's keys."""
    past = [0, 14, 15, 62, 63, 127]
    batch = rows(device, past, lens, tokens=132)
    q, cache = draw(batch.tokens, 6, 16), draw(2, 6 * 33 + 1, 4, 2, 16)
    got = attention.attention(q, cache, batch)
    close(got, reference_attention.attention(q, cache, batch))
    assert torch.equal(got, attention.attention(q, cache, batch))
    assert bool((attention._cells[q.device] == -1).all())


@pytest.mark.parametrize(("heads", "past"), [(2, 4500), (40, 1030)])
def test_attention_in_many_parts(draw, device: str, heads: int, past: int):
    """Programs with several tiles, the last one with a piece of one; more queries to join than programs."""
    batch = rows(device, [past], tokens=4504)
    q, cache = draw(1, heads, 16), draw(2, 1127, 4, 1, 16)
    close(attention.attention(q, cache, batch), reference_attention.attention(q, cache, batch))
    assert bool((attention._cells[q.device] == -1).all())


@pytest.mark.parametrize("past", [[0], [37], [9, 3]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_queries_keys_and_values(draw, device: str, past: list[int], dtype: torch.dtype):
    """Of one token in one launch, of more in several."""
    batch = rows(device, past)
    x, cache = draw(len(past), 40), draw(2, 33, 4, 2, 8).to(dtype)
    matrices = [weight(draw(size, 40, scale=0.2)) for size in (48, 16, 16)]
    wanted = cache.clone()
    k, v = (reference_linear.linear(x, one).unflatten(-1, (-1, 8)) for one in matrices[1:])
    reference_attention.kv_write(k, v, wanted, batch, 0.5, 0.25)
    got = qkv.qkv_write(x, *matrices, cache, batch, 0.5, 0.25)
    close(got, reference_linear.linear(x, matrices[0]).unflatten(-1, (-1, 8)))
    # the interpreter rounds to 8 bits in its own way, one step apart
    close(cache.float(), wanted.float(), rtol=2e-5 if dtype == torch.float32 else 0.13)


@pytest.mark.parametrize(("past", "lens"), [([9, 3], [1, 1]), ([0, 5, 30], [3, 1, 7])])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_queries_keys_and_values_of_some_tokens(
    draw, device: str, past: list[int], lens: list[int], dtype: torch.dtype
):
    """In one launch. A column for each token, of numbers that the cache can hold: the interpreter rounds others in its
    own way."""
    batch = rows(device, past, lens)
    x = torch.eye(128, device=device)[torch.arange(batch.tokens, device=device) * 11].bfloat16()
    cache = draw(2, 65, 4, 2, 12).to(dtype)
    matrices = [weight(draw(size, 128).to(torch.float8_e4m3fn).bfloat16()) for size in (36, 24, 24)]
    q, k, v = (reference_linear.linear(x, one).unflatten(-1, (-1, 12)) for one in matrices)
    wanted = cache.clone()
    reference_attention.kv_write(k, v, wanted, batch, 0.5, 0.25)
    assert torch.equal(qkv.qkv_write(x, *matrices, cache, batch, 0.5, 0.25), q)
    assert torch.equal(cache.float(), wanted.float())


@pytest.mark.parametrize(("causal", "window", "sinks"), [(False, None, False), (True, 5, True), (False, 100, True)])
def test_block_attention(draw, device: str, causal: bool, window: int | None, sinks: bool):
    """Blocks of a drafter, one of them without a context."""
    batch = rows(device, past=[0, 70, 9], lens=[5, 3, 1], tokens=80)
    q, k, v = draw(9, 6, 8), draw(9, 2, 8), draw(9, 2, 8)
    arguments = (q, k, v, draw(2, 3 * 20 + 1, 4, 2, 8), batch, causal, window, draw(6) if sinks else None)
    close(attention.block_attention(*arguments), reference_draft.block_attention(*arguments))
