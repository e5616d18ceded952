"""Ops of drafter networks against formulas written out."""

import pytest
import torch

from leyden import ops
from leyden.formats import Weight
from leyden.ops.rows import Rows


def weight(matrix: torch.Tensor) -> Weight:
    made = Weight(*matrix.shape, dtype=matrix.dtype)
    made.load_state_dict({"weight": matrix})
    return made


def test_rotation_is_a_product_of_complex_numbers() -> None:
    torch.manual_seed(0)
    x, angle = torch.randn(5, 3, 8), torch.rand(5, 4) * 10
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(5, 4), angle)[:, None]
    out = ops.rotate(x, angle.cos(), angle.sin())
    torch.testing.assert_close(out, torch.cat([turned.real, turned.imag], dim=-1))


def test_scores_of_rotated_vectors_depend_on_the_distance_only() -> None:
    torch.manual_seed(0)
    q, k, frequency = torch.randn(1, 1, 8), torch.randn(1, 1, 8), torch.tensor([1.0, 0.1, 0.01, 0.001])

    def score(i: int, j: int) -> torch.Tensor:
        a, b = (ops.rotate(x, (at * frequency).cos()[None], (at * frequency).sin()[None]) for x, at in ((q, i), (k, j)))
        return (a * b).sum()

    torch.testing.assert_close(score(3, 1), score(1003, 1001), atol=1e-4, rtol=1e-4)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


def test_swiglu() -> None:
    torch.manual_seed(0)
    x, gate, up, down = torch.randn(2, 3, 6), torch.randn(10, 6), torch.randn(10, 6), torch.randn(4, 10)
    g = x @ gate.T
    expected = (g * g.sigmoid() * (x @ up.T)) @ down.T
    torch.testing.assert_close(ops.swiglu(x, weight(gate), weight(up), weight(down)), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_block_attention_key_by_key(causal: bool, window: int | None, sinks: torch.Tensor | None) -> None:
    """Two sequences, three blocks each, the first of them without any context."""
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 3, 4, 4, 8), torch.randn(2, 3, 4, 2, 8), torch.randn(2, 3, 4, 2, 8)
    keys, values, anchors = torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8), torch.tensor([[0, 2, 9], [1, 5, 7]])
    out = ops.block_attention_packed(q, k, v, keys, values, anchors, causal, window, sinks)
    for s in range(2):
        for m in range(3):
            anchor = int(anchors[s, m])
            for row in range(4):
                seen = [j for j in range(anchor) if window is None or j > anchor + row - window]
                own = row + 1 if causal else 4
                for head in range(4):
                    all_k = torch.cat([keys[s, seen, head // 2], k[s, m, :own, head // 2]])
                    all_v = torch.cat([values[s, seen, head // 2], v[s, m, :own, head // 2]])
                    odds = (all_k @ q[s, m, row, head] / 8**0.5).exp()
                    total = odds.sum() + (0 if sinks is None else sinks[head].exp())
                    torch.testing.assert_close(out[s, m, row, head], odds @ all_v / total, atol=1e-5, rtol=1e-5)


def test_gradients_are_finite_where_a_block_has_no_context() -> None:
    torch.manual_seed(2)
    given = [torch.randn(1, 2, 3, 2, 4, requires_grad=True) for _ in range(3)]
    given += [torch.randn(1, 5, 2, 4, requires_grad=True) for _ in range(2)]
    ops.block_attention_packed(*given, torch.tensor([[0, 4]]), True, 3, torch.zeros(2)).square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() and tensor.grad.any() for tensor in given)


def test_bf16_is_fp32_rounded() -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 2, 3, heads, 8).bfloat16() for heads in (4, 2, 2))
    keys, values, anchors = (
        torch.randn(1, 6, 2, 8).bfloat16(),
        torch.randn(1, 6, 2, 8).bfloat16(),
        torch.tensor([[2, 6]]),
    )
    out = ops.block_attention_packed(q, k, v, keys, values, anchors, False, None, None)
    wide = (t.float() for t in (q, k, v, keys, values))
    assert torch.equal(out, ops.block_attention_packed(*wide, anchors, False, None, None).bfloat16())


def test_pages_hold_what_packed_context_holds() -> None:
    """Three rows of different lengths and widths, pages in no order, a context that ends at a page's border."""
    torch.manual_seed(4)
    page, lens, past = 4, (3, 1, 4), torch.tensor([8, 0, 5], dtype=torch.int32)
    tables = torch.tensor([[3, 1], [0, 0], [5, 2]], dtype=torch.int32)
    cache, rows = (
        torch.randn(2, 6, page, 2, 8),
        Rows(lens, torch.tensor([0, 3, 4, 8], dtype=torch.int32), past, pages=tables),
    )
    q, k, v, sinks = torch.randn(8, 4, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8), torch.randn(4)
    out = ops.block_attention(q, k, v, cache, rows, True, 6, sinks)
    for r, (first, last) in enumerate([(0, 3), (3, 4), (4, 8)]):
        keys, values = cache[:, tables[r].long()].flatten(1, 2)[:, None]
        part = [t[first:last][None, None] for t in (q, k, v)]
        expected = ops.block_attention_packed(*part, keys, values, past[r].view(1, 1), True, 6, sinks)
        torch.testing.assert_close(out[first:last], expected[0, 0])


def test_a_context_of_8_bit_floats_is_read_as_it_is() -> None:
    torch.manual_seed(5)
    stored = torch.randn(2, 3, 4, 2, 8).to(torch.float8_e4m3fn)
    rows = Rows((3,), torch.tensor([0, 3], dtype=torch.int32), torch.tensor([6], dtype=torch.int32))
    rows.pages = torch.tensor([[2, 1]], dtype=torch.int32)
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    with ops.using("reference"):  # of the backends, one may do only one of the two
        found, expected = (ops.block_attention(q, k, v, c, rows, False, None, None) for c in (stored, stored.float()))
    assert torch.equal(found, expected)
