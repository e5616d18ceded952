"""The batch as the network sees it."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from leyden.cache.pool import Pool
from leyden.ops.rows import Rows


@dataclass(slots=True)
class Context:
    """Rows of one token come first (`narrow`), longer ones after (`wide`); either part may be empty. Where rows have
    drafts, all rows of at most width + 1 tokens are narrow.

    All tokens of wide rows are certain. Of narrow ones the first is, and more of them may turn out to be.

    A mixer handles each part with one op call on its slice of the [T, ...] batch: `narrow` covers the first
    narrow.tokens tokens, `wide` the rest.
    """

    narrow: Rows
    wide: Rows
    positions: Tensor  # int32 [T]: absolute position of every token
    pool: Pool | None = None  # None: no cache, nothing is read or written

    @classmethod
    def packed(cls, lens: list[int], device: torch.device | str = "cpu") -> "Context":
        """Whole sequences side by side, without a cache: training and oracles."""
        none = _rows([], device)
        rows = _rows(lens, device)
        first = rows.starts[:-1].repeat_interleave(rows.starts.diff(), output_size=rows.tokens)
        positions = torch.arange(rows.tokens, dtype=torch.int32, device=device) - first
        return cls(narrow=none, wide=rows, positions=positions)

    @property
    def guesses(self) -> bool:
        """Whether narrow rows leave their states where they are until it is known how far they are right."""
        return len(self.narrow.lens) < self.narrow.tokens

    def parts(self) -> list[tuple[slice, Rows, bool]]:
        """(tokens of the part, its rows, narrow?) of the parts that are not empty."""
        border = self.narrow.tokens
        both = [(slice(0, border), self.narrow, True), (slice(border, border + self.wide.tokens), self.wide, False)]
        return [part for part in both if part[1].lens]


def joined(parts: list[Tensor]) -> Tensor:
    """The results of the parts as one [T, ...] tensor; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows(lens: list[int], device: torch.device | str) -> Rows:
    starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32).to(device, non_blocking=True)
    return Rows(lens=tuple(lens), starts=starts, past=torch.zeros(len(lens), dtype=torch.int32, device=device))
