"""Every kernel against its reference, on shapes that no vector divides and on shapes of whole vectors.

Inputs lie in memory full of NaN, so that whoever reads beside them shows it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leyden import ops
from leyden.formats import Weight
from leyden.model.context import Context
from leyden.ops.cpu.program import available
from leyden.ops.rows import Rows

pytestmark = pytest.mark.skipif(not available, reason="the kernels need a C compiler")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WEIGHTS = [torch.float32, torch.bfloat16]  # of matrices
NO_LIMIT = (0.0, float("inf"))


def among_nan(x: Tensor) -> Tensor:
    """A copy of x [..., n] whose rows have NaN before, behind and between them."""
    flat = x.reshape(-1, x.shape[-1])
    frame = torch.full((len(flat) + 2, x.shape[-1] + 7), float("nan"), dtype=x.dtype)
    inner = frame[1:-1, 3 : 3 + x.shape[-1]]
    inner.copy_(flat)
    return inner


def solid(x: Tensor) -> Tensor:
    """A contiguous copy of x with NaN before and behind it."""
    frame = torch.full((x.numel() + 32,), float("nan"), dtype=x.dtype)
    inner = frame[13 : 13 + x.numel()]
    inner.copy_(x.flatten())
    return inner.view(x.shape)


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    random = torch.Generator().manual_seed(0)
    return lambda *shape, scale=1.0: torch.randn(shape, generator=random) * scale


def weight(matrix: Tensor) -> Weight:
    made = Weight(*matrix.shape, dtype=matrix.dtype).requires_grad_(False)
    made.weight = nn.Parameter(solid(matrix), requires_grad=False)
    return made


def both(op: ops.Op, *arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
    """What the kernel makes of the arguments, and what the reference does."""
    kernel = op._kernels["cpu", "dense"]
    assert kernel.__module__.startswith("leyden.ops.cpu")
    found, expected = kernel(*arguments), op.reference(*arguments)
    return tuple([x] if isinstance(x, Tensor) else list(x) for x in (found, expected))  # type: ignore[return-value]


def close(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Within 1e-5 of the largest value in fp32; otherwise within a unit in the last place, and 0.1 % of the largest."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    size = max(expected.abs().max().item(), 1e-3) * scale
    step = {torch.float32: 0, torch.bfloat16: 2**-7, torch.float16: 2**-10}[expected.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=1e-5 * size + step * size / 8, rtol=step)


def agree(op: ops.Op, *arguments: Any, scale: float = 1.0) -> None:
    found, expected = both(op, *arguments)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        close(one, other, scale)


def rows(past: list[int], lens: list[int], slots: list[int] | None = None, page: int = 4, tokens: int = 64) -> Rows:
    """Slots 1, 2, ... unless given; every row's pages in mixed order."""
    per = -(-tokens // page)
    order = torch.randperm(len(past) * per, generator=torch.Generator().manual_seed(1)) + 1
    starts = torch.tensor([0, *lens]).cumsum(0)
    ints = (starts, torch.tensor(past), torch.tensor(slots or range(1, len(past) + 1)), order.view(len(past), per))
    return Rows(tuple(lens), *(t.int() for t in ints))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5, 16, 72, 256])
def test_norms(draw, width: int, dtype: torch.dtype) -> None:
    x, residual, w = solid(draw(5, width).to(dtype)), solid(draw(5, width).to(dtype)), solid(draw(width).to(dtype))
    agree(ops.rms_norm, x, w, 1e-5)
    agree(ops.rms_norm, x, w.float(), 1e-5)
    agree(ops.rms_norm, x.view(5, 1, width), w, 1e-5)
    agree(ops.add_rms_norm, x, residual, w, 1e-5)
    y, z, w = (
        among_nan(draw(5, 3 * width).to(dtype)),
        among_nan(draw(5, 3 * width).to(dtype)),
        draw(3 * width).to(dtype),
    )
    for groups in (1, 3):
        agree(ops.gated_norm, y, z, w, groups, 1e-5)


def test_the_sum_of_add_rms_norm_is_exact(draw) -> None:
    x, residual = draw(4, 40).bfloat16(), draw(4, 40).bfloat16()
    (_, total), (_, expected) = both(ops.add_rms_norm, x, residual, draw(40).bfloat16(), 1e-5)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", WEIGHTS, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(7, 5), (48, 32), (101, 88), (33, 300)])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9, 23])
def test_products(draw, count: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    matrix, back = weight(draw(outputs, inputs).to(dtype)), weight(draw(inputs, outputs, scale=0.1).to(dtype))
    x = among_nan(draw(count, inputs).to(dtype))
    if not count:
        assert ops.linear(x, matrix).shape == (0, outputs)
        return
    agree(ops.linear, x, matrix)
    agree(ops.mlp, x, matrix, back, scale=8)
    if count == 1:
        agree(ops.linear, x[0], matrix)


def test_more_rows_than_addresses_at_hand(draw) -> None:
    agree(ops.linear, draw(600, 24), weight(draw(50, 24)))
    ids = torch.zeros(300, 1, dtype=torch.int64)
    agree(ops.experts, draw(300, 24), ids, draw(300, 1), weight(draw(2, 20, 24)), weight(draw(2, 24, 20)))


@pytest.mark.parametrize("dtype", WEIGHTS, ids=str)
def test_a_token_does_not_depend_on_those_beside_it(draw, dtype: torch.dtype) -> None:
    x, matrix = draw(20, 200).to(dtype), weight(draw(70, 200).to(dtype))
    together = ops.linear(x, matrix)
    for count in (1, 2, 5, 8, 13):
        assert torch.equal(ops.linear(x[:count], matrix), together[:count])


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_any_number_of_threads_gives_the_same_bits(draw, threads: int, monkeypatch) -> None:
    from leyden.ops.cpu import program

    x, up, down = draw(4, 300), weight(draw(90, 300)), weight(draw(300, 90))
    expected = ops.mlp(x, up, down)
    monkeypatch.setattr(program, "_SMALL", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert torch.equal(ops.mlp(x, up, down), expected)
    q, cache = draw(3, 4, 40), draw(2, 49, 4, 2, 40)
    agree(ops.attention, q, cache, rows([60, 3, 0], [1, 1, 1]))
    found, expected = both(
        ops.sample, *sampling(draw(7, 100), torch.full((7,), 0.7), torch.zeros(7).long(), torch.ones(7))
    )
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embed(draw, dtype: torch.dtype) -> None:
    table = weight(draw(10, 24).to(dtype))
    for ids in (torch.tensor([9, 0, 3]), torch.tensor([1, 1], dtype=torch.int32)):
        (found,), (expected,) = both(ops.embed, ids, table)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("groups", "kept", "normalize"), [(1, 1, True), (4, 2, False), (12, 5, True), (2, 1, True)])
def test_route(draw, groups: int, kept: int, normalize: bool, dtype: torch.dtype) -> None:
    x, gate, bias = among_nan(draw(9, 72).to(dtype)), draw(12, 72, scale=0.1), draw(12, scale=0.3)
    gate[3], bias[3] = gate[7], bias[7]  # a tie: the lower index wins
    arguments = (x, solid(gate), solid(bias), 3, groups, kept, normalize, 2.5)
    (ids, weights), (expected_ids, expected) = both(ops.route, *arguments)
    assert torch.equal(ids, expected_ids)
    close(weights, expected)


def test_route_with_negative_keys_and_equal_groups(draw) -> None:
    arguments = (draw(5, 20), torch.zeros(8, 20), -torch.ones(8), 3, 4, 2)
    assert both(ops.route, *arguments)[0][0].tolist() == [[0, 1, 2]] * 5


@pytest.mark.parametrize("dtype", WEIGHTS, ids=str)
@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_experts(draw, count: int, dtype: torch.dtype) -> None:
    inputs, inner, total = 40, 24, 6
    up, down = draw(total, inner, inputs, scale=0.3).to(dtype), draw(total, inputs, inner, scale=0.3).to(dtype)
    up[5], down[5] = torch.nan, torch.nan  # nobody chooses the last one
    ids = torch.stack([torch.randperm(total - 1, generator=torch.Generator().manual_seed(i))[:3] for i in range(count)])
    x, weights = among_nan(draw(count, inputs).to(dtype)), draw(count, 3).abs()
    agree(ops.experts, x, ids, weights, weight(up), weight(down), scale=8)


def states(draw, slots: int, used: list[int], *shape: int, dtype: torch.dtype) -> Tensor:
    """[slots, *shape], NaN but for the used ones."""
    made = torch.full((slots, *shape), float("nan"), dtype=dtype)
    made[used] = draw(len(used), *shape).to(dtype)
    return made


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", DTYPES, ids=str)
@pytest.mark.parametrize("lens", [[1, 1, 1], [3, 1, 40]], ids=str)
@pytest.mark.parametrize(("channels", "taps", "bias"), [(10, 4, True), (64, 3, False)])
def test_causal_conv(draw, channels, taps, bias, lens, kept, dtype) -> None:
    x, batch = among_nan(draw(sum(lens), channels).to(dtype)), rows([0, 5, 2], lens, [2, 1, 4])
    state = states(draw, 6, [1, 4], taps - 1, channels, dtype=kept)
    w, b = draw(channels, taps).to(dtype), draw(channels).to(dtype) if bias else None
    copies = [state.clone(), state.clone()]
    found = ops.causal_conv(x, w, b, copies[0], batch)
    with ops.using("reference"):
        expected = ops.causal_conv(x, w, b, copies[1], batch)
    close(found, expected)
    torch.testing.assert_close(*copies, rtol=0, atol=0, equal_nan=True)
    agree(ops.causal_conv, x, w, b, None, Context.packed(lens).wide)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", [[1, 1, 1], [3, 1, 40]], ids=str)
@pytest.mark.parametrize(("heads", "groups", "dim", "n"), [(6, 2, 8, 12), (4, 1, 40, 16), (2, 2, 16, 128)])
@pytest.mark.parametrize("limit", [NO_LIMIT, (0.1, 0.7)], ids=str)
def test_ssd_scan(draw, heads, groups, dim, n, lens, limit, dtype) -> None:
    tokens, batch = sum(lens), rows([0, 5, 2], lens, [2, 1, 4])
    wide = among_nan(draw(tokens, heads * dim + 2 * groups * n + heads).to(dtype))
    x, B, C, dt = wide.split([heads * dim, groups * n, groups * n, heads], dim=-1)
    x, B, C = x.unflatten(-1, (heads, -1)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))
    taken = (x, dt * 5, B, C, draw(heads).abs(), draw(heads), draw(heads, scale=5.0), limit, 8)
    kept = torch.float32 if dtype == torch.float32 else dtype
    state = states(draw, 6, [1, 4], heads, dim, n, dtype=kept)
    copies = [state.clone(), state.clone()]
    found = ops.ssd_scan(*taken, copies[0], batch)
    with ops.using("reference"):
        expected = ops.ssd_scan(*taken, copies[1], batch)
    close(found, expected, scale=3)
    assert torch.equal(copies[0].isnan(), copies[1].isnan())
    close(copies[0].nan_to_num(), copies[1].nan_to_num(), scale=3)
    agree(ops.ssd_scan, *taken, None, Context.packed(lens).wide, scale=3)


@pytest.mark.parametrize("shift", [-30.0, 0.0, 19.0, 60.0])
def test_time_steps_of_all_sizes(draw, shift: float) -> None:
    """softplus from 1e-13 to the identity, each to fp32's precision."""
    tokens, heads = 20, 3
    taken = (torch.ones(tokens, heads, 4), draw(tokens, heads), torch.ones(tokens, 1, 4), torch.ones(tokens, 1, 4))
    agree(ops.ssd_scan, *taken, torch.zeros(heads) + 5, torch.zeros(heads), torch.full((heads,), shift), NO_LIMIT, 8,
          None, Context.packed([tokens]).wide)  # fmt: skip


@pytest.mark.parametrize("dtype", WEIGHTS, ids=str)
def test_mamba_step(draw, dtype: torch.dtype) -> None:
    heads, groups, dim, n = 6, 2, 8, 12
    inner, channels = heads * dim, heads * dim + 2 * groups * n
    arguments = (
        among_nan(draw(3, inner + channels + heads).to(dtype)), draw(channels, 4).to(dtype), draw(channels).to(dtype),
        draw(heads), draw(heads), draw(heads), NO_LIMIT, draw(inner).to(dtype), groups, 1e-5,
    )  # fmt: skip
    conv, ssm = (
        states(draw, 5, [1, 2, 3], 3, channels, dtype=dtype),
        states(draw, 5, [1, 2, 3], heads, dim, n, dtype=dtype),
    )
    copies = [(conv.clone(), ssm.clone()) for _ in range(2)]
    batch = rows([0, 5, 2], [1, 1, 1])
    for _ in range(2):  # the second step reads what the first one wrote
        found = ops.mamba_step(*arguments, *copies[0], batch)
        with ops.using("reference"):
            expected = ops.mamba_step(*arguments, *copies[1], batch)
        close(found, expected, scale=3)
        for one, other in zip(*copies, strict=True):
            assert torch.equal(one.isnan(), other.isnan())
            close(one.nan_to_num(), other.nan_to_num(), scale=3)
        batch.past += 1


@pytest.mark.parametrize("rounds", [0, 5, 10])
@pytest.mark.parametrize("unit", [1.0, 2.0**-30])
@pytest.mark.parametrize(("heads", "groups", "dim", "n"), [(6, 2, 8, 12), (4, 1, 40, 16), (2, 2, 17, 128)])
def test_states_are_rounded_with_the_bits_of_the_reference(draw, heads, groups, dim, n, unit, rounds) -> None:
    """Steps and replays of what fp32 holds exactly: whole numbers that SiLU leaves alone, no decay; in units that lead
    above what fp16 can hold, or below its normal numbers."""
    inner, channels = heads * dim, heads * dim + 2 * groups * n
    taps = torch.eye(4)[3].repeat(channels, 1)
    recurrence = (taps, None, torch.linspace(-150, -160, heads), draw(heads), draw(heads), (unit, unit))
    whole = lambda *shape: draw(*shape).mul(60).round().abs().add(20)  # noqa: E731
    conv, ssm = whole(5, 3, channels), ((draw(5, heads, dim, n) * 100).round() * 64 * unit).half()
    ring, past = whole(5, 4, channels + heads), torch.tensor([0, 5, 2_000_000], dtype=torch.int32)
    batch, projected = rows(past.tolist(), [1, 1, 1], [2, 1, 4]), whole(3, inner + channels + heads)
    steps = []

    def step() -> None:
        steps.append(ssm.clone())
        ops.mamba_step(projected, *recurrence, draw(inner), groups, 1e-5, conv.clone(), steps[-1], batch, rounds)
        steps.append(ssm.clone())
        counts = torch.tensor([2, 0, 3], dtype=torch.int32)
        ops.mamba_replay(*recurrence, groups, conv.clone(), steps[-1], ring, batch.slots, past, counts, rounds)

    step()
    with ops.using("reference"):
        step()
    for one, other in zip(steps[:2], steps[2:], strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
    assert steps[0].isfinite().all() or not rounds


@pytest.mark.parametrize("dtype", WEIGHTS, ids=str)
@pytest.mark.parametrize("kept", DTYPES, ids=str)
@pytest.mark.parametrize("lens", [[1, 1, 1], [8, 2, 5], [3, 13, 16]], ids=str)
@pytest.mark.parametrize(("heads", "groups", "dim", "n"), [(6, 2, 8, 12), (4, 1, 40, 16), (2, 2, 17, 128)])
@pytest.mark.parametrize("limit", [NO_LIMIT, (0.1, 0.7)], ids=str)
def test_rows_of_guesses(draw, heads, groups, dim, n, lens, kept, dtype, limit) -> None:
    """What they give, what is left of them in the ring, and the states after some of them were right."""
    inner, channels, tokens = heads * dim, heads * dim + 2 * groups * n, sum(lens)
    parameters = (
        draw(channels, 4).to(dtype), draw(channels).to(dtype), draw(heads), draw(heads), draw(heads), limit,
    )  # fmt: skip
    projected, norm = among_nan(draw(tokens, inner + channels + heads).to(dtype)), draw(inner).to(dtype)
    conv, ssm = (
        states(draw, 6, [1, 2, 4], 3, channels, dtype=dtype),
        states(draw, 6, [1, 2, 4], heads, dim, n, dtype=kept),
    )
    rings = [torch.full((6, 16, channels + heads), float("nan"), dtype=dtype) for _ in range(2)]
    batch, before = rows([0, 5, 2], lens, [2, 1, 4]), (conv.clone(), ssm.clone())
    shared = (projected, *parameters, norm, groups, 1e-5, conv, ssm)
    found = ops.mamba_verify._kernels["cpu", "dense"](*shared, rings[0], batch)
    with ops.using("reference"):
        expected = ops.mamba_verify(*shared, rings[1], batch)
    close(found, expected, scale=3)
    torch.testing.assert_close(*rings, rtol=0, atol=0, equal_nan=True)
    for state, same in zip((conv, ssm), before, strict=True):
        torch.testing.assert_close(state, same, rtol=0, atol=0, equal_nan=True)

    slots, past = batch.slots, batch.past
    for counts in ([0, 0, 0], [1, lens[1], 0], [lens[0], 1, lens[2]]):
        copies = [(conv.clone(), ssm.clone()) for _ in range(2)]
        taken = (slots, past, torch.tensor(counts).int())
        ops.mamba_replay._kernels["cpu", "dense"](*parameters, groups, *copies[0], rings[0], *taken)
        with ops.using("reference"):
            ops.mamba_replay(*parameters, groups, *copies[1], rings[0], *taken)
        for one, other in zip(*copies, strict=True):
            assert torch.equal(one.isnan(), other.isnan())
            close(one.nan_to_num(), other.nan_to_num(), scale=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", DTYPES, ids=str)
@pytest.mark.parametrize("lens", [[1, 1, 1, 1], [3, 1, 17, 40]], ids=str)
@pytest.mark.parametrize(("heads", "kv", "dim"), [(6, 2, 8), (4, 1, 20), (4, 4, 64), (40, 1, 16)])
def test_attention(draw, heads, kv, dim, lens, kept, dtype) -> None:
    batch = rows([0, 250, 30, 7], lens, tokens=280)
    tokens = sum(lens)
    wide = among_nan(draw(tokens, (heads + 2 * kv) * dim).to(dtype))
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in wide.split([heads * dim, kv * dim, kv * dim], dim=-1))
    cache = torch.full((2, 4 * 70 + 1, 4, kv, dim), float("nan"), dtype=kept)
    for pages, past in zip(batch.pages, batch.past, strict=True):  # only what stands before the rows
        for i in range(past):
            cache[:, pages[i // 4], i % 4] = draw(2, kv, dim).to(kept)
    copies = [cache.clone(), cache.clone()]
    ops.kv_write(k, v, copies[0], batch)
    with ops.using("reference"):
        ops.kv_write(k, v, copies[1], batch)
    torch.testing.assert_close(*copies, rtol=0, atol=0, equal_nan=True)
    found, expected = ops.attention(q, copies[0], batch), attention_of(q, copies[0], batch)
    close(found, expected.to(dtype))


def attention_of(q: Tensor, cache: Tensor, batch: Rows) -> Tensor:
    """The reference in fp32: in 16 bits it rounds the weights, which the kernel does not."""
    return ops.attention.reference(q.float(), cache.nan_to_num().float(), batch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_packed(draw, dtype: torch.dtype) -> None:
    q, k, v = (solid(draw(50, heads, 24).to(dtype)) for heads in (6, 2, 2))
    batch = Context.packed([9, 1, 40]).wide
    expected = ops.attention_packed.reference(q.float(), k.float(), v.float(), batch)
    close(ops.attention_packed(q, k, v, batch), expected.to(dtype))


def test_large_scores_do_not_overflow(draw) -> None:
    q, k, v = draw(40, 2, 16, scale=50), draw(40, 2, 16, scale=50), draw(40, 2, 16)
    agree(ops.attention_packed, q, k, v, Context.packed([40]).wide)


def sampling(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: int = 5) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**62), 2**62, (len(logits),), generator=made)
    positions = torch.randint(0, 2**20, (len(logits),), generator=made)
    return logits, temperature, top_k, top_p, torch.zeros(len(logits)), seeds, positions


@pytest.mark.parametrize("vocabulary", [1, 7, 100, 5000])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1, 30])
@pytest.mark.parametrize("k", [0, 1, 5, 40])
@pytest.mark.parametrize("p", [1.0, 0.93, 0.31, 1e-6])  # not on the border between two of 40 equal tokens
def test_sample_equals_the_reference(draw, vocabulary: int, scale: float, k: int, p: float) -> None:
    logits = draw(12, vocabulary, scale=scale)
    logits[6:] = logits[6:].mul(2).round() / 2  # equal ones
    logits[3, ::2] = float("-inf")
    temperature = torch.tensor([0, 1e-6, 0.3, 0.7, 1.0, 2.0] * 2)
    arguments = sampling(among_nan(logits), temperature, torch.full((12,), k), torch.full((12,), p))
    (found,), (expected,) = both(ops.sample, *arguments)
    assert found.tolist() == expected.tolist()


def test_sample_with_min_p_and_strided_parameters(draw) -> None:
    table = torch.tensor([[0.8, 0.9, 0.05]] * 6)
    temperature, top_p, min_p = table.unbind(-1)
    ints = torch.tensor([[3, i] for i in range(6)])
    arguments = (draw(6, 400), temperature, ints[:, 0], top_p, min_p, ints[:, 1], torch.arange(6))
    (found,), (expected,) = both(ops.sample, *arguments)
    assert found.tolist() == expected.tolist()


def test_sample_follows_the_softmax() -> None:
    n = 20_000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    parameters = sampling(logits.repeat(n, 1), torch.ones(n), torch.zeros(n).long(), torch.ones(n))
    found = torch.bincount(ops.sample(*parameters), minlength=5) / n
    assert (found - logits.softmax(0)).abs().max() < 0.018  # five standard deviations


def test_what_kernels_do_not_know_the_reference_does(draw) -> None:
    x, w = draw(3, 16).double(), draw(16).double()
    assert torch.equal(ops.rms_norm(x, w, 1e-5), ops.rms_norm.reference(x, w, 1e-5))
    assert ops.linear(x, weight(draw(4, 16).double())).dtype == torch.float64
    agree(ops.linear, draw(16, 3).T, weight(draw(4, 16)))
