"""Blocks to train and to judge a drafter on: which tokens of a batch are anchors, and what their drafts should be.

An anchor is a token of an answer that is followed by another one. Its block may see what the target knew before it, and
proposes the tokens after it up to the end of the answer. (DeepSpec's rule: anchor and next token are both learned, and
nothing counts after the first token that is not.)
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from leyden.train.batches import Batch


@dataclass(frozen=True)
class Blocks:
    """At most M blocks for each of the S sequences of a batch; all int64 [S, M].

    anchors    position of each anchor in its sequence
    tokens     place of each anchor in the batch
    reach      tokens of the answer after the anchor; 0 where a sequence has fewer than M blocks
    """

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

        block: s * M + m; depth: 1 for the first of its `drafts` drafts; place: of the right token in the batch.
        """
        reach = self.reach.flatten()
        blocks, depths = np.nonzero(np.arange(drafts) < reach[:, None])
        return blocks, depths + 1, self.tokens.flatten()[blocks] + depths + 1

    def columns(self, width: int) -> Iterator["Blocks"]:
        """The same blocks, at most `width` of each sequence at a time."""
        for first in range(0, self.anchors.shape[1], width):
            part = np.s_[:, first : first + width]
            yield Blocks(self.anchors[part], self.tokens[part], self.reach[part])

    @classmethod
    def _lay(cls, batch: Batch, found: np.ndarray, sequence: np.ndarray, reach: np.ndarray) -> "Blocks":
        column = _ranks(sequence)
        lens = np.asarray(batch.lens)
        starts = np.cumsum(lens) - lens
        laid = np.zeros((3, len(lens), int(column.max(initial=0)) + 1), dtype=np.int64)
        laid[:, sequence, column] = found - starts[sequence], found, reach
        return cls(*laid)


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
