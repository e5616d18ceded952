"""Prompt chunks on CUDA as graphs: a few hundred tokens run for less time than it takes to launch their kernels.

Recorded is the forward pass of a step with a few chunks, and perhaps single tokens beside them. What follows (logits,
sampling, commit, drafts) is little and runs as ever. A graph is for so many tokens: those that the chunks lack are one
more row, on the padding slot. So how long a row is stands in device memory; the host knows only what all have together.
Not recorded are steps with guesses, and log-probabilities of prompts.
"""

from bisect import bisect_left
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from leyden import log, ops
from leyden.cache.pool import Pool
from leyden.engine.batch import Batch
from leyden.engine.capture import Captured, padded
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.ops.rows import Rows
from leyden.types import Row

logger = log.get(__name__)

# Tokens of all chunks. Prompts often end with a few behind the place where a state is kept, always as many: up to 8
# nothing is filled up. From about 100 on all experts are read anyway, from 1,000 on steps take longer than launches.
_TOKENS = (*range(2, 9), 12, 16, 24, 32, 48, 64, 96, *range(128, 1025, 128))
_CHUNKS = 4  # at most; a row of no tokens costs next to nothing
_BESIDE = (0, 8, 32)  # single tokens


class CapturedChunks:
    """The graphs of one model with its pool: each is made when its form of step comes up for the second time."""

    def __init__(self, model: Nemotron, pool: Pool, taps: Collection[int], memory: Any):
        """`taps`: layers whose residual streams somebody wants; `memory`: the pool that all graphs share."""
        shape, device = pool.shape, pool.committed.device
        self._model, self._pool, self._taps, self._memory = model, pool, taps, memory
        self._sizes = [size for size in _TOKENS if size <= shape.page * shape.pages_per_slot]
        # Chunks begin at one place, whatever is beside them: single tokens end there. What is behind them is left from
        # chunks before: as good as any other, and better than one token again and again, which few experts would get.
        self._tokens = torch.arange(_BESIDE[-1] + _TOKENS[-1], device=device) % model.config.vocab_size
        self._slots = torch.zeros(_BESIDE[-1] + _CHUNKS + 1, dtype=torch.int32, device=device)
        self._singles = torch.arange(_BESIDE[-1] + 1, dtype=torch.int32, device=device)
        starts = torch.zeros(len(self._sizes), 8, dtype=torch.int32, device=device)  # aligned, whatever the size
        self._starts = dict(zip(self._sizes, starts[:, : _CHUNKS + 2], strict=True))
        self._met: set[tuple[int, int]] = set()  # forms that came before
        self._graphs: dict[tuple[int, int], Captured] = {}
        self._made: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}  # what they fill

    def run(self, rows: list[Row], batch: Batch) -> tuple[Tensor, list[Tensor]] | None:
        """What the model makes of the batch, (hidden [T, H], taps), valid until something else runs here; None: run the
        model yourself."""
        form = self._form(rows, batch.context)
        if form is None:
            return None
        if form not in self._met:
            self._met.add(form)
            return None
        (beside, size), narrow, wide, place = form, batch.context.narrow, batch.context.wide, _BESIDE[-1]
        self._tokens[place - narrow.tokens : place + wide.tokens].copy_(batch.tokens)
        self._slots.zero_()
        self._slots[place - narrow.tokens : place + len(wide.lens)].copy_(batch.slots)
        self._starts[size].fill_(size)
        self._starts[size][: len(wide.starts)].copy_(wide.starts)
        if form not in self._graphs and not self._capture(form):
            return None
        self._graphs[form]()
        hidden, taps = self._made[form]
        own = slice(beside - narrow.tokens, beside + wide.tokens)
        return hidden[own], [tap[own] for tap in taps]

    def _form(self, rows: list[Row], ctx: Context) -> tuple[int, int] | None:
        """(single tokens, tokens of all chunks) of the graph for this step, if there can be one."""
        beside, chunks, tokens = len(ctx.narrow.lens), len(ctx.wide.lens), ctx.wide.tokens
        if ctx.guesses or beside > _BESIDE[-1] or not 0 < chunks <= _CHUNKS or tokens > max(self._sizes, default=0):
            return None
        if ops.forced() or any(row.targets for row in rows):
            return None
        return _BESIDE[bisect_left(_BESIDE, beside)], self._sizes[bisect_left(self._sizes, tokens)]

    def _capture(self, form: tuple[int, int]) -> bool:
        """Whether there is a graph now. Lengths are those of this step, slots the padding slot."""
        try:
            with padded(self._slots):
                self._graphs[form] = Captured(lambda: self._forward(form), self._memory)
        except torch.OutOfMemoryError:
            logger.warning("no memory for graphs of prompts: from now on their kernels are launched one by one")
            self._sizes = []
            return False
        logger.debug("captured a step with %d tokens of prompts beside %d rows", form[1], form[0])
        return True

    def _forward(self, form: tuple[int, int]) -> Tensor:
        beside, size = form
        pool, slots, tokens = self._pool, self._slots[_BESIDE[-1] - beside :], self._tokens[_BESIDE[-1] - beside :]
        past, pages = pool.committed[slots], pool.tables[slots]
        narrow = Rows((1,) * beside, self._singles[: beside + 1], past[:beside], slots[:beside], pages[:beside])
        most = (size,) * (_CHUNKS + 1)
        wide = Rows(most, self._starts[size], past[beside:], slots[beside:], pages[beside:], total=size)
        ctx = Context(narrow, wide, positions=past, pool=pool)  # those of tokens nobody in the backbone asks for
        self._made[form] = self._model(tokens[: beside + size], ctx, self._taps)
        return self._made[form][0]
