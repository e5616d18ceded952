"""From the rows of a plan to the tensors of a step."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leyden.cache.pool import Pool
from leyden.model.context import Context
from leyden.ops.rows import Rows
from leyden.types import Row


@dataclass(slots=True)
class Batch:
    """A ragged batch of T tokens in R rows, as the network takes it."""

    tokens: Tensor  # int64 [T]
    context: Context
    slots: Tensor  # int64 [R]
    lens: Tensor  # int32 [R]
    ends: Tensor  # int64 [R]: index of each row's last token in the batch


def build(rows: list[Row], pool: Pool, last: Tensor) -> Batch:
    """Batch of `rows`; ids that the host does not know are taken from `last` (int64 [slots]).

    One upload carries everything the host knows; positions come from pool.committed, which only the device knows for
    certain once drafts are in flight.
    """
    device = last.device
    lens = np.array([row.n for row in rows], dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    ids = np.full(starts[-1], -1, dtype=np.int32)
    for row, start in zip(rows, starts, strict=False):
        ids[start : start + len(row.tokens)] = row.tokens
    row_of = np.repeat(np.arange(len(rows), dtype=np.int32), lens)
    within = np.arange(starts[-1], dtype=np.int32) - starts[row_of]
    slots = np.array([row.slot for row in rows], dtype=np.int32)
    border = sum(row.n == 1 for row in rows)  # the plan puts short rows first

    parts = (slots, lens, starts, starts[border:] - starts[border], ids, row_of, within)
    packed = torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)
    slots_d, lens_d, starts_d, wide_starts, ids_d, row_of_d, within_d = packed.split([len(part) for part in parts])

    past = pool.committed[slots_d]
    positions = past[row_of_d] + within_d
    tokens = torch.where(ids_d < 0, last[slots_d[row_of_d]], ids_d.long())
    page = pool.shape.page
    pages = pool.tables[slots_d, : max(-(-(row.start + row.n) // page) for row in rows)]
    narrow = Rows(
        lens=tuple(lens[:border].tolist()),
        starts=starts_d[: border + 1],
        past=past[:border],
        slots=slots_d[:border],
        pages=pages[:border],
    )
    wide = Rows(
        lens=tuple(lens[border:].tolist()),
        starts=wide_starts,
        past=past[border:],
        slots=slots_d[border:],
        pages=pages[border:],
    )
    return Batch(
        tokens=tokens,
        context=Context(narrow=narrow, wide=wide, positions=positions, pool=pool),
        slots=slots_d.long(),
        lens=lens_d,
        ends=starts_d[1:].long() - 1,
    )
