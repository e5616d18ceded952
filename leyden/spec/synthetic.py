"""Drafts that are kept by decree, at given rates: to measure what steps cost when no drafter is good yet.

What an engine says then is nonsense, and whatever reports a measurement must say that it was made like this.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_NUMBERS = 2**16
_APART = 4099  # how far the numbers of two slots are apart


class Synthetic:
    """rates: how often the first 1, 2, ... drafts are kept, none above the one before."""

    def __init__(self, rates: Sequence[float], seed: int, device: torch.device | str):
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        # a table, since drawing a number where it is needed would take longer than what is measured
        self._chances = torch.rand(_NUMBERS, generator=torch.Generator().manual_seed(seed)).to(device)

    def kept(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Drafts that are kept in each of R sequences, int64 [R]; slots and positions (of the anchors) int64 [R].

        One number decides over all drafts of a sequence, so that each rate is met by itself, and by those before it.
        """
        chance = self._chances[(slots * _APART + positions) % _NUMBERS]
        return (chance[:, None] < self._rates).sum(1)
