"""Decode steps on CUDA: each is one graph, captured when a number of rows first comes up."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from leyden import log, ops
from leyden.cache.pool import Pool
from leyden.engine.graphs import Graphs
from leyden.engine.sampler import Sampler
from leyden.engine.transfer import upload
from leyden.model.nemotron import Nemotron
from leyden.types import Row

logger = log.get(__name__)

PAGES = (64, 256, 1024, 4096, 16384, 65536)  # longest page tables of a graph


class CapturedGraphs(Graphs):
    """The same with CUDA graphs. All of them share one memory, as only one runs at a time.

    A capture is preceded by a run on the padding slot, which compiles the kernels and moves no sequence's state.
    """

    def __init__(self, model: Nemotron, pool: Pool, sampler: Sampler, sizes: tuple[int, ...]):
        """`sizes`, ascending: rows of a graph; numbers in between are filled up with rows of the padding slot."""
        super().__init__(model, pool, sampler)
        self._sizes = [size for size in sizes if size <= len(self._slots)]
        self._records = bool(self._sizes)
        del self._pages  # these graphs read the pool's own tables
        self._captured: dict[tuple[str, int, int], tuple[Captured, Tensor | None]] = {}
        self.memory = torch.cuda.graph_pool_handle() if pool.committed.is_cuda else None
        self._size = self._width = 0  # rows and pages of the next graph

    def load(self, rows: list[Row]) -> Tensor | None:
        """See Graphs.load."""
        count, sizes = len(rows), self._sizes
        if not self._records or ops.forced() or not 0 < count <= sizes[-1]:
            return None
        if any(row.n != 1 or not row.sample for row in rows):
            return None
        device = self._slots.device
        self._size = sizes[bisect_left(sizes, count)]
        slots = [row.slot for row in rows] + [0] * (self._size - count)
        self._slots[: self._size].copy_(upload(slots, device, torch.int32))
        if known := [(row.slot, row.tokens[0]) for row in rows if row.tokens]:
            at, tokens = upload(known, device).unbind(-1)
            self._sampler.last[at] = tokens
        used = max(row.start for row in rows) // self._pool.shape.page + 1
        self._width = widest(self._pool, used)
        return self._slots[:count]

    def logits(self, count: int) -> tuple[Tensor, Tensor] | None:
        """See Graphs.logits."""
        found = super().logits(self._size)
        return None if found is None else (found[0][:count], found[1][:count])

    def tokens(self, count: int) -> Tensor | None:
        """See Graphs.tokens."""
        tokens = super().tokens(self._size)
        return None if tokens is None else tokens[:count]

    def _tables(self, slots: Tensor) -> Tensor:
        return ops.take(self._pool.tables[:, : self._width], slots)

    def _run(self, what: str, count: int, step: Callable[[], Tensor]) -> Tensor:
        key = what, count, self._width
        if key not in self._captured:
            with padded(self._slots[:count], self._sampler.last[:1]):
                made = Captured(step, self.memory)
            self._captured[key] = made, self._positions.get(count)
            logger.debug("captured %s of %d rows with %d pages", *key)
        made, positions = self._captured[key]
        if positions is not None:
            self._positions[count] = positions
        made()
        return made.out


class Captured:
    """A step as a CUDA graph, in the memory of others; `out` is what it returned, filled by every call.

    No memory: tensors have none (engine/compiling.py). Then the step is run once, and that is all.
    """

    def __init__(self, step: Callable[[], Tensor], memory: Any):
        self._graph: torch.cuda.CUDAGraph | None = None
        if memory is None:
            self.out = step()
            return
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            step()
        main.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=memory):
            self.out = step()

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()


@contextmanager
def padded(*tensors: Tensor) -> Iterator[None]:
    """Zeros in the tensors within the block: slots are the padding slot, so that a trial moves no sequence's state."""
    kept = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    try:
        yield
    finally:
        for tensor, before in zip(tensors, kept, strict=True):
            tensor.copy_(before)


def widest(pool: Pool, used: int) -> int:
    """Length of the page tables of a graph for rows of up to `used` pages: one of a few."""
    return min(pool.shape.pages_per_slot, next((pages for pages in PAGES if pages >= used), used))


def graphs(model: Nemotron, pool: Pool, sampler: Sampler, sizes: tuple[int, ...]) -> Graphs:
    """The recordings for the pool's device."""
    on_cpu = pool.committed.device.type == "cpu"
    return Graphs(model, pool, sampler) if on_cpu else CapturedGraphs(model, pool, sampler, sizes)
