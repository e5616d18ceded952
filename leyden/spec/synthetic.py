"""Drafts that are kept by decree, at given rates: to measure what steps cost when no drafter is good yet.

What an engine says then is nonsense, and whatever reports a measurement must say that it was made like this.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from leyden.ops.reference.sample import uniform


class Synthetic:
    """rates: how often the first 1, 2, ... drafts are kept, none above the one before."""

    def __init__(self, rates: Sequence[float], seed: int, device: torch.device | str):
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        self._seed = seed

    def kept(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Drafts that are kept in each of R sequences, int64 [R]; slots and positions (of the anchors) int64 [R].

        One number decides over all drafts of a sequence, so that each rate is met by itself, and by those before it.
        """
        seed = torch.full_like(slots, self._seed)
        chance = uniform(seed, positions.long(), slots[:, None])
        return (chance < self._rates).sum(1)
