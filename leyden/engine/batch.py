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
    sampling: Tensor  # int64 [S]: the rows that sample
    ends: Tensor  # int64 [S]: index in the batch of their last token before the drafts
    drafts: Tensor  # int64 [S]: how many drafts they have
    places: Tensor  # int64 [P]: indices of those tokens and drafts, row by row


def build(rows: list[Row], pool: Pool, last: Tensor, drafts: Tensor) -> Batch:
    """Batch of `rows`; ids that the host does not know are those of `last` (int64 [slots]) and `drafts` (int64 [slots,
    width], -1 where there is none, for which token 0 is fed).

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
    width = drafts.shape[1]
    short = 1 + width if any(row.drafts for row in rows) else 1
    border = sum(row.n <= short for row in rows)  # the plan puts short rows first
    sampling = np.array([i for i, row in enumerate(rows) if row.sample], dtype=np.int32)
    guessed = np.array([rows[i].drafts for i in sampling], dtype=np.int32)
    ends = starts[1:][sampling] - 1 - guessed
    places = np.repeat(ends - np.cumsum(guessed + 1) + guessed + 1, guessed + 1)
    places = (places + np.arange(len(places))).astype(np.int32)

    after = starts[border:] - starts[border]
    parts = (slots, lens, starts, after, ids, row_of, within, sampling, ends, guessed, places)
    packed = torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)
    slots_d, lens_d, starts_d, wide_starts, ids_d, row_of_d, within_d, *sampled = packed.split([len(p) for p in parts])

    past = pool.committed[slots_d]
    positions = past[row_of_d] + within_d
    slot_of = slots_d[row_of_d]
    unknown = last[slot_of]
    if width:
        drafted = drafts[slot_of, (within_d - 1).clamp(0, width - 1).long()].clamp(min=0)
        unknown = torch.where(within_d > 0, drafted, unknown)
    tokens = torch.where(ids_d < 0, unknown, ids_d.long())
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
        sampling=sampled[0].long(),
        ends=sampled[1].long(),
        drafts=sampled[2].long(),
        places=sampled[3].long(),
    )
