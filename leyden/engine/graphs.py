"""Decode steps as one launch: what a step does with R single tokens is recorded once, then done again.

On the CPU the recording is a program of the kernels. It reads its inputs, the slots of the rows and their page tables,
from tensors that stay where they are; it refers to the model's weights, the pool and the sampler's tables by their
addresses. All of these must stay, too. capture.py says what is different on CUDA.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from leyden import log, ops
from leyden.cache.pool import Pool
from leyden.engine.sampler import Sampler
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.ops.registry import NotRecordable
from leyden.ops.rows import Rows
from leyden.types import Row

logger = log.get(__name__)


def recorder(device: torch.device) -> Any:
    """What makes a program of a function, in a memory that its programs share; None where there are no such programs.
    The CPU's kernels are compiled when they are imported: who has a GPU does without."""
    if device.type != "cpu":
        return None
    from leyden.ops.cpu.program import Arena, Program, available

    arena = Arena()
    return (lambda step: Program(step, arena)) if available else None


class Graphs:
    """The recordings of one model with its pool and its sampler, made when a number of rows first comes up.

    Two for each number: up to the logits, and up to the next tokens for rows whose sampling is plain.
    """

    memory: Any = None  # of CUDA graphs

    def __init__(self, model: Nemotron, pool: Pool, sampler: Sampler):
        slots, device = pool.shape.slots, pool.committed.device
        self._model, self._pool, self._sampler = model, pool, sampler
        self._program = recorder(device)
        self._records = self._program is not None
        self._programs: dict[tuple[str, int], Callable[[], Tensor]] = {}
        self._slots = torch.zeros(slots, dtype=torch.int32, device=device)
        self._starts = torch.arange(slots + 1, dtype=torch.int32, device=device)
        self._pages = torch.zeros(slots, pool.shape.pages_per_slot, dtype=torch.int32, device=device)
        self._positions: dict[int, Tensor] = {}  # of the recordings up to the logits

    def load(self, rows: list[Row]) -> Tensor | None:
        """Take `rows` as the input of what runs next -> their slots int32 [R]; None: run the model yourself."""
        if not self._records or ops.forced() or any(row.n != 1 or not row.sample for row in rows):
            return None
        # On the CPU tensors are arrays, too, whose indexing costs a fraction.
        count, slots = len(rows), [row.slot for row in rows]
        self._slots.numpy()[:count] = slots
        last = self._sampler.last.numpy()
        for row in rows:
            if row.tokens:
                last[row.slot] = row.tokens[0]
        used = max(row.start for row in rows) // self._pool.shape.page + 1
        self._pages.numpy()[:count, :used] = self._pool.tables.numpy()[slots, :used]
        return self._slots[:count]

    def logits(self, count: int) -> tuple[Tensor, Tensor] | None:
        """(fp32 [R, V], positions int64 [R] of the tokens to sample), valid until something else runs here."""

        def step() -> Tensor:
            logits, self._positions[count] = self._logits(count)
            return logits

        logits = self._run("logits", count, step)
        return None if logits is None else (logits, self._positions[count])

    def tokens(self, count: int) -> Tensor | None:
        """The next token of each row, int64 [R], which is also what its slot has sampled last then."""

        def step() -> Tensor:
            logits, positions = self._logits(count)
            slots = self._slots[:count]
            tokens = self._sampler.draw(slots, positions, logits)
            ops.put(tokens, self._sampler.last, slots)
            return tokens

        tokens = self._run("tokens", count, step)
        return None if tokens is None else tokens.clone()

    def _tables(self, slots: Tensor) -> Tensor:
        """Page tables of the rows that were loaded."""
        return self._pages[: len(slots)]

    def _run(self, what: str, count: int, step: Callable[[], Tensor]) -> Tensor | None:
        if (what, count) not in self._programs:
            try:
                self._programs[what, count] = self._program(step)
            except NotRecordable as reason:
                logger.info("decode steps are not recorded: %s", reason)
                self._records = False
                return None
        return self._programs[what, count]()

    def _logits(self, count: int) -> tuple[Tensor, Tensor]:
        pool, slots = self._pool, self._slots[:count]
        pages = self._tables(slots)
        tokens, past, positions = ops.begin(slots, self._sampler.last, pool.committed)
        narrow = Rows((1,) * count, self._starts[: count + 1], past, slots, pages)
        wide = Rows((), self._starts[:1], past[:0], slots[:0], pages[:0])
        hidden, _ = self._model(tokens, Context(narrow, wide, positions=past, pool=pool))
        return self._model.logits(hidden), positions
