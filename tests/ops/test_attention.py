import numpy as np
import pytest
import torch
from torch import Tensor

from leyden import ops
from leyden.formats.fp8 import E4M3, E4M3_MAX, to_e4m3
from leyden.model.context import Context
from tests.batches import CLOSE, SMALL, pool, rows

HEADS, KV, DIM = SMALL.num_attention_heads, SMALL.num_key_value_heads, SMALL.head_dim
draw = torch.Generator().manual_seed(5)


def randn(n: int, heads: int) -> Tensor:
    return torch.randn(n, heads, DIM, generator=draw)


Q, K, V = randn(23, HEADS), randn(23, KV), randn(23, KV)


def numpy_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence from its start, position by position and head by head, in fp64."""
    q, k, v = (t.double().numpy() for t in (q, k, v))
    out = np.zeros_like(q)
    for t in range(len(q)):
        for h in range(HEADS):
            kv = h // (HEADS // KV)
            weights = np.exp(k[: t + 1, kv] @ q[t, h] / np.sqrt(DIM))
            out[t, h] = weights / weights.sum() @ v[: t + 1, kv]
    return torch.from_numpy(out).float()


def test_packed_rows_attend_within_themselves() -> None:
    spans = [slice(0, 9), slice(9, 10), slice(10, 23)]
    expected = torch.cat([numpy_attention(Q[s], K[s], V[s]) for s in spans])
    found = ops.attention_packed(Q, K, V, Context.packed([9, 1, 13]).wide)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_pages_hold_what_was_written_in_any_cuts() -> None:
    expected = numpy_attention(Q, K, V)
    for cuts in ([23], [1] * 23, [3, 4, 5, 11], [16, 1, 6]):
        cache, past = pool(SMALL, slots=3), 0
        for n in cuts:
            span, row = slice(past, past + n), rows(cache, [(2, past, n)])
            ops.kv_write(K[span], V[span], cache.kv[0], row)
            found = ops.attention(Q[span], cache.kv[0], row)
            torch.testing.assert_close(found, expected[span], **CLOSE)
            past += n
        kept = cache.kv[0][:, cache.tables[2].long()].flatten(1, 2)[:, :past]
        assert torch.equal(kept, torch.stack([K, V]))


def test_rows_of_one_call_do_not_meet_and_padding_is_harmless() -> None:
    cache = pool(SMALL, slots=4)
    cache.kv[:, :, 0] = float("nan")
    first = rows(cache, [(0, 0, 1), (3, 0, 9), (1, 0, 12), (0, 0, 1)])
    ops.kv_write(K, V, cache.kv[0], first)
    found = ops.attention(Q, cache.kv[0], first)
    for span in (slice(1, 10), slice(10, 22)):
        torch.testing.assert_close(found[span], numpy_attention(Q[span], K[span], V[span]), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k_scale, v_scale", [(1.0, 1.0), (0.0078, 0.013)])
def test_an_fp8_cache_is_attention_over_its_values_times_their_scales(
    dtype: torch.dtype, k_scale: float, v_scale: float
) -> None:
    q, k, v = (t.to(dtype) for t in (Q, K, V))
    stored = to_e4m3(k.float() / k_scale), to_e4m3(v.float() / v_scale)
    used = stored[0].float() * k_scale, stored[1].float() * v_scale
    expected = numpy_attention(q.float(), *used)
    close = CLOSE if dtype == torch.float32 else {"atol": 2**-7 * expected.abs().max().item(), "rtol": 0}
    for cuts in ([23], [1] * 23, [3, 4, 5, 11]):
        cache, past = pool(SMALL, slots=3, kv_dtype=E4M3), 0
        for n in cuts:
            span, row = slice(past, past + n), rows(cache, [(2, past, n)])
            ops.kv_write(k[span], v[span], cache.kv[0], row, k_scale, v_scale)
            found = ops.attention(q[span], cache.kv[0], row, k_scale, v_scale)
            assert found.dtype == dtype
            torch.testing.assert_close(found.float(), expected[span], **close)
            past += n
        kept = cache.kv[0][:, cache.tables[2].long()].flatten(1, 2)[:, :past]
        assert torch.equal(kept.view(torch.uint8), torch.stack(stored).view(torch.uint8))


def test_an_fp8_cache_errs_by_a_sixteenth_of_a_value_at_most() -> None:
    """Half a step of 3 bits: what a value loses if the scale puts it among the normal numbers, from 2^-6 up."""
    scale = K.abs().max().item() / E4M3_MAX
    cache, row = pool(SMALL, kv_dtype=E4M3), [(1, 0, 23)]
    ops.kv_write(K, V, cache.kv[0], rows(cache, row), scale, scale)
    kept = cache.kv[0][0, cache.tables[1].long()].flatten(0, 1)[:23].float() * scale
    normal = K.abs() >= 2**-6 * scale
    assert normal.float().mean() > 0.99
    assert ((kept - K).abs() <= K.abs() / 16)[normal].all() and ((kept - K).abs() <= 2**-10 * scale)[~normal].all()
    exact = ops.attention_packed(Q, K, V, Context.packed([23]).wide)
    found = ops.attention(Q, cache.kv[0], rows(cache, row), scale, scale)
    assert 0 < (found - exact).norm() < exact.norm() / 16


def test_what_an_fp8_cache_cannot_hold_becomes_the_largest_that_it_can() -> None:
    cache, row = pool(SMALL, kv_dtype=E4M3), [(1, 0, 1)]
    k = torch.tensor([448.0, 449, 500, 1e6, -470, -1e6, torch.inf, 447]).expand(1, KV, DIM)
    ops.kv_write(k, k * 2, cache.kv[0], rows(cache, row), 1.0, 2.0)
    largest = torch.tensor([448.0, 448, 448, 448, -448, -448, 448, 448])
    assert (cache.kv[0][:, cache.tables[1, 0], 0].float() == largest).all()


def test_scales_count_for_nothing_in_other_caches() -> None:
    results = []
    for scales in ((1.0, 1.0), (0.5, 3.0)):
        cache, row = pool(SMALL), [(1, 0, 23)]
        ops.kv_write(K, V, cache.kv[0], rows(cache, row), *scales)
        results.append(ops.attention(Q, cache.kv[0], rows(cache, row), *scales))
        results.append(cache.kv[0].clone())
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def test_bf16_is_fp32_rounded() -> None:
    packed = Context.packed([23]).wide
    q, k, v = (t.bfloat16() for t in (Q, K, V))
    exact = ops.attention_packed(q.float(), k.float(), v.float(), packed)
    found = ops.attention_packed(q, k, v, packed).float()
    # the probabilities may be rounded to bf16 before they meet v, which adds up to half a bit of the largest value
    assert (found - exact).abs().max() <= 2**-7 * exact.abs().max()


def test_gradients() -> None:
    q, k, v = (t.clone().requires_grad_() for t in (Q, K, V))
    ops.attention_packed(q, k, v, Context.packed([9, 1, 13]).wide)[:9].sum().backward()
    for t in (q, k, v):
        assert t.grad.isfinite().all()
        assert t.grad[9:].abs().max() == 0, "a row's output does not depend on another row"
    assert v.grad[:9].abs().sum() > 0
