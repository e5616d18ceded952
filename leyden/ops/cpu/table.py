"""Tables with a row per slot."""

import torch
from torch import Tensor

from leyden.ops.cpu.program import Kernel, empty, run
from leyden.ops.reference import table as reference

_BEGIN = Kernel("begin", "tttttti")
_MOVE = Kernel("move", "tttiii")


def begin(slots: Tensor, last: Tensor, committed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not (slots.dtype == committed.dtype == torch.int32 and last.dtype == torch.int64):
        return reference.begin(slots, last, committed)
    rows = len(slots)
    tokens, past, positions = (empty(rows, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.int64))
    run(_BEGIN(slots, last, committed, tokens, past, positions, rows), work=0)
    return tokens, past, positions


def take(table: Tensor, slots: Tensor) -> Tensor:
    if not (slots.dtype == torch.int32 and table.is_contiguous()):
        return reference.take(table, slots)
    out = empty(len(slots), *table.shape[1:], dtype=table.dtype)
    run(_MOVE(table, out, slots, len(slots), table.stride(0) * table.element_size(), 0), work=0)
    return out


def put(values: Tensor, table: Tensor, slots: Tensor) -> None:
    alike = values.dtype == table.dtype and values.is_contiguous() and table.is_contiguous()
    if not (slots.dtype == torch.int32 and alike):
        return reference.put(values, table, slots)
    run(_MOVE(values, table, slots, len(slots), table.stride(0) * table.element_size(), 1), work=0)
    return None
