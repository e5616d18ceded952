"""Attention over pages, and what goes into them, against the references."""

import pytest
import torch

from leyden.ops.reference import attention as reference_attention
from leyden.ops.reference import draft as reference_draft
from leyden.ops.reference import linear as reference_linear
from tests.ops.triton.inputs import close, rows, weight

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import (
    attention,  # noqa: E402
    qkv,  # noqa: E402
)


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
