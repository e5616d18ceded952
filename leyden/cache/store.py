"""The bytes of the tier: pages and states behind the device's memory, and their way there and back.

    pages    [places, bytes of a page]: one page of all attention layers, in one piece
    states   [places, bytes of a state]: one state of all Mamba layers, likewise

On CUDA the memory is pinned and the transfers run on a stream of their own, behind the steps: what goes out is gathered
on the device first, so the step may write at once to where it was; what comes in is waited for by the device alone. On
the CPU, whose memory the pool itself is in, the tier is a file without a name in the folder for temporary files: the
system keeps in memory what fits and writes out the rest, and the file is gone with the process. Place 0 is never used,
as in the pool.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from leyden.cache.pool import Pool
from leyden.errors import ConfigError
from leyden.types import Moves

Pairs = Sequence[tuple[int, int]]


@dataclass(slots=True)
class Arriving:
    """What read() took and write() puts: bytes on the device, a row each."""

    moves: Moves
    pages_out: Tensor
    states_out: Tensor
    pages_in: Tensor
    states_in: Tensor


class Store:
    """Host memory for `pages` pages and `slots` states of a pool."""

    def __init__(self, pool: Pool, slots: int, pages: int):
        self._pool = pool
        self._device = pool.committed.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

        def empty(places: int, width: int) -> Tensor:
            if self._stream is None:
                return _in_a_file(places + 1, width)
            return torch.empty(places + 1, width, dtype=torch.uint8, pin_memory=True)

        self.pages = empty(pages, sum(page_bytes(pool)))
        self.states = empty(slots, sum(state_bytes(pool)))

    def read(self, moves: Moves) -> Arriving:
        """Take what the moves speak of, before the step writes anything."""
        pages = take_pages(self._pool, [page for page, _ in moves.pages_out])
        states = take_states(self._pool, [slot for slot, _ in moves.states_out])
        with self._aside():
            pages_in = self._fetch(self.pages, [far for far, _ in moves.pages_in])
            states_in = self._fetch(self.states, [far for far, _ in moves.states_in])
        return Arriving(moves, pages, states, pages_in, states_in)

    def write(self, arriving: Arriving) -> None:
        """Put everything in its place."""
        moves = arriving.moves
        if self._stream is not None:
            step = torch.cuda.current_stream(self._device)
            if moves.pages_in or moves.states_in:
                step.wait_stream(self._stream)
            for rows in (arriving.pages_in, arriving.states_in):
                rows.record_stream(step)  # allocated on the other stream: not to be reused before this one is through
            self._stream.wait_stream(step)
        put_pages(self._pool, [page for _, page in moves.pages_in], arriving.pages_in)
        put_states(self._pool, [slot for _, slot in moves.states_in], arriving.states_in)
        with self._aside():
            self._send(arriving.pages_out, self.pages, [far for _, far in moves.pages_out])
            self._send(arriving.states_out, self.states, [far for _, far in moves.states_out])

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
        return rows

    def _send(self, rows: Tensor, array: Tensor, places: list[int]) -> None:
        for start, first, count in _runs(places):
            array[first : first + count].copy_(rows[start : start + count], non_blocking=True)
        if self._stream is not None:
            rows.record_stream(self._stream)


def _in_a_file(places: int, width: int) -> Tensor:
    """uint8 [places, width]. Raises ConfigError where there is no room: now, not when the last page is written."""
    size = max(1, places * width)
    with tempfile.TemporaryFile() as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            where = f"no room for a file of {size / 2**30:.1f} GiB in {tempfile.gettempdir()}"
            raise ConfigError(
                f"--kv-offloading-size: {where} ({error.strerror}); ask for less, or set TMPDIR to a folder with more"
            ) from None
        mapped = mmap.mmap(file.fileno(), 0)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=places * width).view(places, width)


def page_bytes(pool: Pool) -> tuple[int, ...]:
    """Bytes of one page in each array of Pool.paged."""
    return tuple(array[:, :, 0].numel() * array.element_size() for array in pool.paged)


def state_bytes(pool: Pool) -> tuple[int, ...]:
    """Bytes of one state in each array of Pool.states."""
    return tuple(array[:, 0].numel() * array.element_size() for array in pool.states)


def take_pages(pool: Pool, pages: list[int]) -> Tensor:
    """Content of pages as uint8 [N, bytes of a page], on the pool's device."""
    return _take(pool.paged, page_bytes(pool), pages, 2)


def take_states(pool: Pool, slots: list[int]) -> Tensor:
    """States as uint8 [N, bytes of a state], on the pool's device."""
    return _take(pool.states, state_bytes(pool), slots, 1)


def put_pages(pool: Pool, pages: list[int], rows: Tensor) -> None:
    """The other way: rows as from take_pages become the content of `pages`."""
    _put(pool.paged, page_bytes(pool), pages, 2, rows)


def put_states(pool: Pool, slots: list[int], rows: Tensor) -> None:
    """The other way: rows as from take_states become the states of `slots`."""
    _put(pool.states, state_bytes(pool), slots, 1, rows)


def _take(arrays: tuple[Tensor, ...], widths: tuple[int, ...], numbers: list[int], dim: int) -> Tensor:
    index = torch.tensor(numbers, dtype=torch.int64, device=arrays[0].device)
    taken = [array.index_select(dim, index).movedim(dim, 0).contiguous().view(torch.uint8) for array in arrays]
    return torch.cat([rows.view(len(numbers), width) for rows, width in zip(taken, widths, strict=True)], 1)


def _put(arrays: tuple[Tensor, ...], widths: tuple[int, ...], numbers: list[int], dim: int, rows: Tensor) -> None:
    if not numbers:
        return
    index = torch.tensor(numbers, dtype=torch.int64, device=arrays[0].device)
    for array, part in zip(arrays, rows.split(widths, 1), strict=True):
        if part.numel():
            kept = array.view(torch.uint8)  # not every dtype has this copy
            kept.index_copy_(dim, index, part.view(-1, *kept.movedim(dim, 0).shape[1:]).movedim(0, dim))


def _runs(places: list[int]) -> Iterator[tuple[int, int, int]]:
    """(index of the first, its place, how many) for every stretch of neighbours: one transfer each."""
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield start, places[start], end - start
            start = end
