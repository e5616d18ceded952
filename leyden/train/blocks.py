"""Blocks to train and to judge a drafter on: which tokens of a batch are anchors, and what their drafts should be.

An anchor is a token of an answer that is followed by another one. Its block may see what the target knew before it, and
proposes the tokens after it up to the end of the answer. (DeepSpec's rule: anchor and next token are both learned, and
nothing counts after the first token that is not.)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from leyden.train.batches import Batch

ROW = 16  # blocks of one sequence that are computed over the same piece of context


@dataclass(frozen=True)
class Blocks:
    """Blocks in rows of up to ROW from one sequence of a batch, rows that end early in their sequence first.

    There is at least one row, even if a batch has no anchor.

    sequences  int64 [R]: the sequence of each row
    anchors    int64 [R, ROW]: position of each anchor in its sequence
    tokens     int64 [R, ROW]: place of each anchor in the batch
    reach      int64 [R, ROW]: tokens of the answer after the anchor; 0 where a row has fewer blocks
    """

    sequences: np.ndarray
    anchors: np.ndarray
    tokens: np.ndarray
    reach: np.ndarray

    @classmethod
    def draw(cls, batch: Batch, limit: int, random: np.random.Generator) -> "Blocks":
        """Blocks at up to `limit` random anchors of each sequence."""
        found, sequence, reach = _anchors(batch)
        shuffled = np.lexsort((random.random(len(found)), sequence))
        kept = np.sort(shuffled[_ranks(sequence) < limit])
        return cls._lay(batch, found[kept], sequence[kept], reach[kept])

    @classmethod
    def all(cls, batch: Batch) -> "Blocks":
        """A block at every anchor."""
        return cls._lay(batch, *_anchors(batch))

    def answers(self, drafts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the blocks should draft: (block, depth, place), int64 [n] each.

        block: row * ROW + column; depth: 1 for its first draft; place: of the right token in the batch.
        """
        reach = self.reach.flatten()
        blocks, depths = np.nonzero(np.arange(drafts) < reach[:, None])
        return blocks, depths + 1, self.tokens.flatten()[blocks] + depths + 1

    def spans(self) -> list[tuple[slice, int]]:
        """(rows, context that these rows need at most), in order; less than half of each context is not needed."""
        needed = self.anchors.max(1)
        borders = np.flatnonzero(np.diff(_bits(needed))) + 1
        edges = [0, *borders.tolist(), len(needed)]
        return [(slice(a, b), int(needed[b - 1])) for a, b in pairwise(edges) if b > a]

    def parts(self, rows: int) -> Iterator["Blocks"]:
        """The same blocks, at most so many rows at a time."""
        for first in range(0, len(self.sequences), rows):
            part = slice(first, first + rows)
            yield Blocks(self.sequences[part], self.anchors[part], self.tokens[part], self.reach[part])

    @classmethod
    def _lay(cls, batch: Batch, found: np.ndarray, sequence: np.ndarray, reach: np.ndarray) -> "Blocks":
        column = _ranks(sequence) % ROW
        row = np.cumsum(column == 0) - 1
        lens = np.asarray(batch.lens)
        laid = np.zeros((3, max(1, int((column == 0).sum())), ROW), dtype=np.int64)
        laid[:, row, column] = found - (np.cumsum(lens) - lens)[sequence], found, reach
        sequences = np.zeros(laid.shape[1], dtype=np.int64)
        sequences[row] = sequence
        order = np.argsort(laid[0].max(1), kind="stable")
        return cls(sequences[order], *laid[:, order])


def _anchors(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(place in the batch, sequence, reach) of every anchor."""
    lens, places = np.asarray(batch.lens), np.arange(len(batch.tokens))
    starts = np.cumsum(lens) - lens
    learned = batch.weights > 0
    learned[starts] = False  # nothing precedes it, so it is nobody's draft
    # For every place the first one from there on that is not learned; then how many learned tokens follow it.
    wall = np.minimum.accumulate(np.where(learned, len(places), places)[::-1])[::-1]
    reach = np.append(wall[1:], len(places)) - places - 1
    found = np.flatnonzero(learned & (reach > 0))
    return found, np.searchsorted(starts, found, side="right") - 1, reach[found]


def _ranks(groups: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... within each run of equal values of a sorted array."""
    return np.arange(len(groups)) - np.searchsorted(groups, groups)


def _bits(numbers: np.ndarray) -> np.ndarray:
    """How many binary digits each number has."""
    return np.frexp(numbers)[1]
