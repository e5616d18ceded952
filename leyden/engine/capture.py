"""Decode steps on CUDA: each is one graph, captured when a number of rows first comes up."""

from bisect import bisect_left
from collections.abc import Callable

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

_PAGES = (64, 256, 1024, 4096, 16384, 65536)  # longest page tables of a graph


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
        self._captured: dict[tuple[str, int, int], tuple[torch.cuda.CUDAGraph, Tensor, Tensor | None]] = {}
        self._memory = torch.cuda.graph_pool_handle()
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
        self._width = min(self._pool.shape.pages_per_slot, _PAGES[bisect_left(_PAGES, used)])
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
            self._captured[key] = *self._capture(count, step), self._positions.get(count)
            logger.debug("captured %s of %d rows with %d pages", *key)
        graph, out, positions = self._captured[key]
        if positions is not None:
            self._positions[count] = positions
        graph.replay()
        return out

    def _capture(self, count: int, step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        slots, last = self._slots[:count].clone(), self._sampler.last[0].clone()
        self._slots[:count] = 0
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            step()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            out = step()
        self._slots[:count], self._sampler.last[0] = slots, last
        return graph, out


def graphs(model: Nemotron, pool: Pool, sampler: Sampler, sizes: tuple[int, ...]) -> Graphs:
    """The recordings for the pool's device."""
    on_cuda = pool.committed.device.type == "cuda"
    return CapturedGraphs(model, pool, sampler, sizes) if on_cuda else Graphs(model, pool, sampler)
