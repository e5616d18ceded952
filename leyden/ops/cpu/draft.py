"""Rows of drafts."""

import torch
from torch import Tensor

from leyden.ops.cpu.program import Kernel, empty, run
from leyden.ops.cpu.sample import sample
from leyden.ops.reference import draft as reference

_BEGIN = Kernel("begin_drafts", "tttttttt" + "iii")
_ACCEPT = Kernel("accept", "ttttttttttt" + "iiiii")
_BEGIN_BLOCK = Kernel("begin_block", "ttttt" + "iii")
_AHEAD = Kernel("ahead", "tt" + "iii")
_COLUMNS = Kernel("columns", "tt" + "iiii")
_ZERO = torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.ones(1)


def begin_drafts(
    slots: Tensor, last: Tensor, drafts: Tensor, committed: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    known = slots.dtype == committed.dtype == torch.int32 and last.dtype == drafts.dtype == torch.int64
    if not (known and drafts.is_contiguous()):
        return reference.begin_drafts(slots, last, drafts, committed, count)
    rows, tokens = len(slots), len(slots) * (count + 1)
    fed, places = empty(tokens, dtype=torch.int64), empty(tokens, dtype=torch.int64)
    past, positions = empty(rows, dtype=torch.int32), empty(tokens, dtype=torch.int32)
    run(_BEGIN(slots, last, drafts, committed, fed, past, positions, places, rows, count, drafts.shape[1]), work=0)
    return fed, past, positions, places


def accept(
    drawn: Tensor, guesses: Tensor, before: Tensor, positions: Tensor, stops: Tensor, open_at: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    arrays = (drawn, before, stops, open_at)
    wide = all(t.dtype == torch.int64 for t in (*arrays, guesses, positions))
    if not (wide and all(t.is_contiguous() for t in arrays) and guesses.stride(1) == 1):
        return reference.accept(drawn, guesses, before, positions, stops, open_at)
    (rows, width), strides = drawn.shape, (guesses.stride(0), positions.stride(0))
    kept, newest = empty(rows, width, dtype=torch.int64), empty(rows, dtype=torch.int64)
    counts, ends, at = (empty(rows, dtype=torch.int32) for _ in range(3))
    given, made = (drawn, guesses, before, positions, stops, open_at), (kept, counts, newest, ends, at)
    run(_ACCEPT(*given, *made, rows, width - 1, stops.shape[1], *strides), work=0)
    return made


def begin_block(anchors: Tensor, places: Tensor, rows: int, mask: int) -> tuple[Tensor, Tensor, Tensor]:
    known = anchors.dtype == torch.int64 and places.dtype == torch.int32
    if not (known and anchors.is_contiguous() and places.is_contiguous()):
        return reference.begin_block(anchors, places, rows, mask)
    count, starts = len(anchors), empty(len(anchors) + 1, dtype=torch.int32)
    tokens, positions = (empty(count * rows, dtype=dtype) for dtype in (torch.int64, torch.int32))
    run(_BEGIN_BLOCK(anchors, places, tokens, positions, starts, count, rows, mask), work=0)
    return tokens, positions, starts


def ahead(places: Tensor, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    if not (places.dtype == torch.int32 and places.is_contiguous() and dtype in (torch.int32, torch.int64)):
        return reference.ahead(places, count, dtype)
    out = empty(count, len(places), dtype=dtype)
    run(_AHEAD(places, out, len(places), count, dtype == torch.int64), work=0)
    return out


def join(*parts: Tensor) -> Tensor:
    if not all(part.dim() == 2 and part.stride(1) == 1 and part.dtype == parts[0].dtype for part in parts):
        return reference.join(*parts)
    out = empty(len(parts[0]), sum(part.shape[1] for part in parts), dtype=parts[0].dtype)
    size, start, steps = out.element_size(), 0, []
    for part in parts:
        width = part.shape[1]
        strides = (part.stride(0) * size, out.stride(0) * size)
        steps.append(_COLUMNS(part, out[:, start : start + width], len(part), width * size, *strides))
        start += width
    run(*steps, work=0)
    return out


def likeliest(logits: Tensor) -> Tensor:
    zero, none, one = (t.expand(len(logits)) for t in _ZERO)
    return sample(logits, zero, none, one, zero, none, none)
