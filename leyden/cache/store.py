"""The bytes of the tier: pages and states in host memory, and their way to the device and back.

    pages    [places, bytes of a page]: one page of all attention layers, in one piece
    states   one array [places, bytes of a state] for each array of Pool.states

On CUDA the memory is pinned and the transfers run on a stream of their own, behind the steps: what goes out is gathered
on the device first, so the step may write at once to where it was; what comes in is waited for by the device alone. On
the CPU there is nothing to wait for: the tier is a second pool. Place 0 is never used, as in the pool.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leyden.cache.pool import Pool
from leyden.types import Moves

Pairs = Sequence[tuple[int, int]]


@dataclass(slots=True)
class Arriving:
    """What read() took and write() puts: bytes on the device, one tensor for each kind, and their targets."""

    moves: Moves
    outgoing: list[Tensor] = field(default_factory=list)
    incoming: list[Tensor] = field(default_factory=list)


class Store:
    """Host memory for `pages` pages and `slots` states of a pool."""

    def __init__(self, pool: Pool, slots: int, pages: int):
        self._pool = pool
        self._device = pool.committed.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

        def empty(places: int, width: int) -> Tensor:
            return torch.empty(places + 1, width, dtype=torch.uint8, pin_memory=self._stream is not None)

        self.pages = empty(pages, page_bytes(pool))
        self.states = tuple(empty(slots, width) for width in state_bytes(pool))

    def read(self, moves: Moves) -> Arriving:
        """Take what the moves speak of, before the step writes anything."""
        arriving = Arriving(moves)
        arriving.outgoing = [take_pages(self._pool, [page for page, _ in moves.pages_out])]
        arriving.outgoing += take_states(self._pool, [slot for slot, _ in moves.states_out])
        with self._aside():
            places = [far for far, _ in moves.pages_in]
            arriving.incoming = [self._fetch(self.pages, places)]
            places = [far for far, _ in moves.states_in]
            arriving.incoming += [self._fetch(states, places) for states in self.states]
        return arriving

    def write(self, arriving: Arriving) -> None:
        """Put everything in its place."""
        moves = arriving.moves
        if self._stream is not None:
            if moves.pages_in or moves.states_in:
                torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        pages, *states = arriving.incoming
        put_pages(self._pool, [page for _, page in moves.pages_in], pages)
        put_states(self._pool, [slot for _, slot in moves.states_in], states)
        with self._aside():
            pages, *states = arriving.outgoing
            self._send(pages, self.pages, [far for _, far in moves.pages_out])
            for taken, array in zip(states, self.states, strict=True):
                self._send(taken, array, [far for _, far in moves.states_out])

    def synchronize(self) -> None:
        """Wait until what was sent is here."""
        if self._stream is not None:
            self._stream.synchronize()

    def _aside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _fetch(self, array: Tensor, places: list[int]) -> Tensor:
        rows = torch.empty(len(places), array.shape[1], dtype=torch.uint8, device=self._device)
        for start, first, count in _runs(places):
            rows[start : start + count].copy_(array[first : first + count], non_blocking=True)
        if self._stream is not None:
            rows.record_stream(torch.cuda.current_stream(self._device))
        return rows

    def _send(self, rows: Tensor, array: Tensor, places: list[int]) -> None:
        for start, first, count in _runs(places):
            array[first : first + count].copy_(rows[start : start + count], non_blocking=True)
        if self._stream is not None:
            rows.record_stream(self._stream)


def page_bytes(pool: Pool) -> int:
    """Bytes of one page, all layers."""
    return pool.kv[:, :, 0].numel() * pool.kv.element_size()


def state_bytes(pool: Pool) -> tuple[int, ...]:
    """Bytes of one state in each array of Pool.states."""
    return tuple(array[:, 0].numel() * array.element_size() for array in pool.states)


def take_pages(pool: Pool, pages: list[int]) -> Tensor:
    """Content of pages as uint8 [N, bytes of a page], on the pool's device."""
    index = torch.tensor(pages, dtype=torch.int64, device=pool.kv.device)
    return pool.kv[:, :, index].movedim(2, 0).contiguous().view(torch.uint8).view(len(pages), page_bytes(pool))


def take_states(pool: Pool, slots: list[int]) -> list[Tensor]:
    """States as uint8 [N, bytes] for each array of Pool.states."""
    index = torch.tensor(slots, dtype=torch.int64, device=pool.kv.device)
    taken = [array[:, index].movedim(1, 0).contiguous().view(torch.uint8) for array in pool.states]
    return [rows.view(len(slots), width) for rows, width in zip(taken, state_bytes(pool), strict=True)]


def put_pages(pool: Pool, pages: list[int], rows: Tensor) -> None:
    """The other way: rows as from take_pages become the content of `pages`."""
    if pages:
        layers, two, _, *rest = pool.kv.shape
        index = torch.tensor(pages, dtype=torch.int64, device=pool.kv.device)
        content = rows.view(pool.kv.dtype).view(len(pages), layers, two, *rest)
        pool.kv[:, :, index] = content.movedim(0, 2)


def put_states(pool: Pool, slots: list[int], rows: list[Tensor]) -> None:
    """The other way: rows as from take_states become the states of `slots`."""
    if slots:
        index = torch.tensor(slots, dtype=torch.int64, device=pool.kv.device)
        for array, taken in zip(pool.states, rows, strict=True):
            layers, _, *rest = array.shape
            array[:, index] = taken.view(array.dtype).view(len(slots), layers, *rest).movedim(0, 1)


def _runs(places: list[int]) -> Iterator[tuple[int, int, int]]:
    """(index of the first, its place, how many) for every stretch of neighbours: one transfer each."""
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield start, places[start], end - start
            start = end
