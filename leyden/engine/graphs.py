"""Decode steps as one launch: what the network does for R single tokens is recorded once, then done again.

On the CPU the recording is a program of the kernels. It reads its inputs from tensors that stay where they are, and
refers to the model's weights and the pool by their addresses: both must stay, too.
"""

import torch
from torch import Tensor

from leyden import log, ops
from leyden.cache.pool import Pool
from leyden.engine.batch import Batch
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.ops.cpu.program import Arena, NotRecordable, Program, available
from leyden.ops.rows import Rows

logger = log.get(__name__)


class Graphs:
    """The recordings of one model and its pool, made when a number of rows first comes up."""

    def __init__(self, model: Nemotron, pool: Pool):
        slots, device = pool.shape.slots, pool.committed.device
        self._model, self._pool = model, pool
        self._records = device.type == "cpu" and available
        self._programs: dict[int, Program] = {}
        self._arena = Arena()
        self._tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self._past, self._slots = (torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(2))
        self._starts = torch.arange(slots + 1, dtype=torch.int32, device=device)
        self._pages = torch.zeros(slots, pool.shape.pages_per_slot, dtype=torch.int32, device=device)

    def logits(self, batch: Batch) -> Tensor | None:
        """fp32 [R, V] of a batch of R single tokens, valid until the next call; None: run the model yourself."""
        rows = batch.context.narrow
        if not self._records or batch.context.wide.lens or ops.forced():
            return None
        count = len(rows.lens)
        assert rows.slots is not None and rows.pages is not None
        self._tokens[:count] = batch.tokens
        self._past[:count] = rows.past
        self._slots[:count] = rows.slots
        self._pages[:count, : rows.pages.shape[1]] = rows.pages
        if count not in self._programs:
            try:
                self._programs[count] = Program(lambda: self._run(count), self._arena)
            except NotRecordable as reason:
                logger.info("decode steps are not recorded: %s", reason)
                self._records = False
                return None
        return self._programs[count]()

    def _run(self, count: int) -> Tensor:
        def rows(first: int, last: int) -> Rows:
            return Rows(
                lens=(1,) * (last - first),
                starts=self._starts[: last - first + 1],
                past=self._past[first:last],
                slots=self._slots[first:last],
                pages=self._pages[first:last],
            )

        context = Context(rows(0, count), rows(count, count), positions=self._past[:count], pool=self._pool)
        hidden, _ = self._model(self._tokens[:count], context)
        return self._model.logits(hidden)
