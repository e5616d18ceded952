"""Steps with drafts on CUDA: each is one graph, captured when its form first comes up. See draft_graphs.py."""

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from leyden import ops
from leyden.cache.pool import Pool
from leyden.engine.capture import Captured, padded, widest
from leyden.engine.draft_graphs import DraftGraphs
from leyden.engine.drafting import Drafting
from leyden.engine.sampler import Sampler
from leyden.engine.transfer import upload
from leyden.model.nemotron import Nemotron
from leyden.types import Plan


class CapturedDraftGraphs(DraftGraphs):
    """The same with CUDA graphs, which read the tables of pool and sampler where they are.

    A form is (rows, drafts of each, pages of each): rows are filled up with those of the padding slot, drafts with
    guesses of no token, and what either writes goes to the padding page.
    """

    any_op = True

    def __init__(self, model: Nemotron, pool: Pool, sampler: Sampler, drafting: Drafting, sizes: tuple[int, ...]):
        """`sizes`, ascending: rows of a graph."""
        super().__init__(model, pool, sampler, drafting)
        slots, device = pool.shape.slots, sampler.drafts.device
        self._sizes = [size for size in sizes if size < slots]
        self.records = bool(self._sizes)
        self._drafters_record = drafting.steady
        # of each row: slot, pages that it may use, drafts
        self._rows = torch.zeros(3, slots, dtype=torch.int32, device=device)
        self._slots = self._rows[0]
        self._columns = torch.arange(pool.shape.pages_per_slot, dtype=torch.int32, device=device)
        self._places = torch.arange(sampler.drafts.shape[1], dtype=torch.int32, device=device)
        self.memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def _load(self, plan: Plan) -> tuple[int, ...] | None:
        rows, sizes, page = plan.rows, self._sizes, self._pool.shape.page
        if not self.records or ops.forced() or not 0 < len(rows) <= sizes[-1]:
            return None
        if not all(row.sample and row.n == 1 + row.drafts for row in rows):
            return None
        most, longest = max(row.drafts for row in rows), max(row.start for row in rows)
        most = max(most, plan.drafts) if most else 0  # where the ends of answers cut drafts off, the form stays
        behind = most + self._pool.shape.draft.lookahead
        if longest + 1 + most > page * self._pool.shape.pages_per_slot:
            return None
        size, device = sizes[bisect_left(sizes, len(rows))], self._rows.device
        reach = [-(-(row.start + row.n + self._pool.shape.draft.lookahead) // page) for row in rows]
        given = [row.slot for row in rows], reach, [row.drafts for row in rows]
        none = [0] * (size - len(rows))
        self._rows[:, :size].copy_(upload([[*column, *none] for column in given], device, torch.int32))
        if known := [(row.slot, row.tokens[0]) for row in rows if row.tokens]:
            at, tokens = upload(known, device).unbind(-1)
            self._sampler.last[at] = tokens
        return size, most, widest(self._pool, (longest + behind) // page + 1)

    def _tokens_slots(self, form: tuple[int, ...]) -> Tensor:
        return self._slots[: form[0], None].expand(-1, form[1] + 1).contiguous().flatten()

    def _tables(self, form: tuple[int, ...]) -> Tensor:
        pages = ops.take(self._pool.tables[:, : form[2]], self._slots[: form[0]])
        return torch.where(self._columns[: form[2]] < self._rows[1, : form[0], None], pages, 0)

    def _guesses(self, form: tuple[int, ...]) -> Tensor:
        there = self._places[: form[1]] < self._rows[2, : form[0], None]
        return torch.where(there, super()._guesses(form), -1)

    def _record(self, key: tuple[object, ...], step: Callable[[], Tensor]) -> bool:
        done = super()._record(key, step)
        if key[0] == "whole" and key in self._drafts:
            self._passes.pop(key, None)  # the memory of its logits is free for the next graph
        return done

    def _program(self, step: Callable[[], Tensor]) -> Callable[[], object]:
        def closed() -> Tensor:
            out = step()
            self._pool.committed[:1].zero_()  # the padding slot has no length
            return out

        # what a trial draws after a forward pass is of another step: its keys are nobody's
        tables = [made.ctx.narrow.pages for made in self._passes.values() if made.ctx.narrow.pages is not None]
        with padded(self._rows, self._sampler.last[:1], *tables):
            return Captured(closed, self.memory)


def draft_graphs(
    model: Nemotron, pool: Pool, sampler: Sampler, drafting: Drafting, sizes: tuple[int, ...]
) -> DraftGraphs:
    """The recordings for the pool's device."""
    if pool.committed.device.type == "cpu":
        return DraftGraphs(model, pool, sampler, drafting)
    return CapturedDraftGraphs(model, pool, sampler, drafting, sizes)
