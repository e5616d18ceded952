"""How likely a draft is to be kept, learned from what became of earlier ones.

For drafters without a confidence head. A logistic regression over the log-odds of the draft distribution's most likely
token (never of the token drawn: how likely that is says something about the draw), with one slope for all drafts and
one bias for each place in the block. Everything stays on the device.
"""

import torch
from torch import Tensor

from leyden.spec.drafter import Heads, Seen

_SLOPE, _BIAS = 0.5, -0.2  # before anything is known
_PRIOR = 4.0  # how many outcomes that counts for
_MEMORY = 1024  # blocks that are fitted to
_INTERVAL = 16  # steps from fit to fit
_ROUNDS = 4  # of Newton's method; it starts where the last fit ended
_LARGEST = 40.0


class Confidence:
    """For sequences in `slots` slots, `width` drafts each."""

    def __init__(self, slots: int, width: int, device: torch.device):
        self._start = torch.tensor([_SLOPE, *[_BIAS] * width], dtype=torch.float64, device=device)
        self.weights = self._start.clone()  # [1 + width]: slope, biases
        self._scores = torch.full((slots, width), float("nan"), device=device)  # of drafts whose fate is open
        self._anchors = torch.zeros(slots, dtype=torch.int32, device=device)  # where they were made
        # What is remembered: scores, whether the draft was kept, whether that is known.
        self._memory = torch.zeros(3, _MEMORY, width, dtype=torch.float64, device=device)
        self._next = self._steps = 0

    def estimate(self, heads: Heads, logits: Tensor) -> Tensor:
        """Log-odds fp32 [R, count] of drafts that come from logits fp32 [R, count, V]."""
        scores = certainty(logits)
        count = scores.shape[1]
        self._scores[heads.slots] = float("nan")
        self._scores[heads.slots, :count] = scores
        self._anchors[heads.slots] = heads.positions
        return (scores.double() * self.weights[0] + self.weights[1 : 1 + count]).float()

    def learn(self, seen: Seen) -> None:
        """Take in a step: which drafts were right, as far as those before them were."""
        rows, width = seen.ctx.narrow, self._scores.shape[1]
        if not rows.lens or rows.slots is None:
            return
        device = seen.tokens.device
        first = rows.starts[:-1].long()
        places = first[:, None] + torch.arange(width, device=device)
        after = (places + 1).clamp(max=rows.tokens - 1)
        there = places + 1 < rows.starts[1:, None]
        right = there & (seen.tokens[after] == seen.following[places.clamp(max=rows.tokens - 1)])
        reached = there & torch.cat([torch.ones_like(right[:, :1]), right[:, :-1].cumprod(1).bool()], 1)
        slots = rows.slots.long()
        scores = self._scores[slots]
        # a slot may have a new sequence, whose first tokens are no drafts of ours
        same = seen.ctx.positions[first] == self._anchors[slots]
        known = reached & same[:, None] & scores.isfinite()
        self._scores[slots] = float("nan")
        self._remember(torch.stack([scores.nan_to_num(), right.float(), known.float()]).double())
        self._steps += 1
        if self._steps % _INTERVAL == 0:
            self._fit()

    def _remember(self, blocks: Tensor) -> None:
        """blocks [3, n, width]"""
        blocks = blocks[:, -_MEMORY:]
        at = (torch.arange(blocks.shape[1], device=blocks.device) + self._next) % _MEMORY
        self._memory[:, at] = blocks
        self._next = (self._next + blocks.shape[1]) % _MEMORY

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
            self.weights = self.weights - torch.linalg.solve_ex(curve, slope)[0]


def certainty(logits: Tensor) -> Tensor:
    """Log-odds of the most likely of logits fp32 [..., V]: log p - log(1 - p), fp32 [...]."""
    most, which = logits.max(-1, keepdim=True)
    others = logits.scatter(-1, which, float("-inf")).logsumexp(-1)
    return (most[..., 0] - others).clamp(-_LARGEST, _LARGEST)
