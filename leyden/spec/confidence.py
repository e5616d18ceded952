"""How likely a draft is to be kept, learned from what became of earlier ones.

For drafters without a confidence head. A logistic regression over the log-odds of the draft distribution's most likely
token (never of the token drawn: how likely that is says something about the draw), with one slope for all drafts and
one bias for each place in the block. Everything stays on the device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from leyden import ops
from leyden.spec.drafter import Heads, Seen

_SLOPE, _BIAS = 0.5, -0.2  # before anything is known
_PRIOR = 4.0  # how many outcomes that counts for
_MEMORY = 1024  # blocks that are fitted to
_INTERVAL = 16  # steps from fit to fit
_ROUNDS = 4  # of Newton's method; it starts where the last fit ended


class Confidence:
    """For sequences in `slots` slots, `width` drafts each."""

    def __init__(self, slots: int, width: int, device: torch.device):
        self._start = torch.tensor([_SLOPE, *[_BIAS] * width], dtype=torch.float64, device=device)
        self.weights = self._start.clone()  # [1 + width]: slope, biases
        self._open = torch.full((slots, width), float("nan"), device=device)  # scores of drafts whose fate is open
        self._made_at = torch.zeros(slots, dtype=torch.int32, device=device)
        # What is remembered: scores, whether the draft was kept, whether that is known.
        self._memory = torch.zeros(3, _MEMORY, width, dtype=torch.float64, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._steps = 0

    def estimate(self, heads: Heads, logits: Sequence[Tensor]) -> Tensor:
        """Log-odds fp32 [R, count] of drafts that come from logits fp32 [R, V], one after the other."""
        scores = ops.join(*(ops.certainty(each)[:, None] for each in logits))
        return ops.expect(scores, self.weights, self._open, self._made_at, heads.slots, heads.positions)

    def learn(self, seen: Seen) -> None:
        """Take in a step: which drafts were right, as far as those before them were."""
        rows = seen.ctx.narrow
        if rows.lens and rows.slots is not None:
            ops.learn(seen.tokens, seen.following, rows, self._open, self._made_at, self._memory, self._at)

    def settle(self) -> None:
        """Between steps: every now and then, fit to what is remembered."""
        self._steps += 1
        if self._steps % _INTERVAL == 0:
            self._fit()

    def _fit(self) -> None:
        """Newton's method for logistic regression, held near the start by a normal prior."""
        scores, kept, known = self._memory
        for _ in range(_ROUNDS):
            odds = (scores * self.weights[0] + self.weights[1:]).sigmoid()
            error, bend = known * (odds - kept), known * odds * (1 - odds)
            slope = torch.cat([(error * scores).sum()[None], error.sum(0)]) + _PRIOR * (self.weights - self._start)
            mixed = (bend * scores).sum(0)
            curve = torch.diag(torch.cat([(bend * scores**2).sum()[None], bend.sum(0)]) + _PRIOR)
            curve[0, 1:], curve[1:, 0] = mixed, mixed
            self.weights -= torch.linalg.solve_ex(curve, slope)[0]
