"""What a drafter is. Two verbs: observe() what the target just did, draft() what may come next.

A drafter can only make a step longer or shorter, never an answer different: the engine draws the target's own token at
every place, with the noise of that place, and keeps drafts as long as they equal it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from leyden.model.context import Context


@dataclass(slots=True)
class Seen:
    """A step of the target, T tokens in the rows of `ctx`."""

    tokens: Tensor  # int64 [T], as fed; in a recorded step -1 may stand for what a row has less than others
    following: Tensor  # int64 [T]: the token after each; just some token behind a rejected draft
    hidden: Tensor  # [T, H], after norm_f
    taps: list[Tensor]  # [T, H] each: the residual stream after the layers that the drafter asked for
    ctx: Context


@dataclass(slots=True)
class Heads:
    """Where R sequences stand: each has an anchor, its newest token, which the target has not been fed yet."""

    slots: Tensor  # int [R]
    anchors: Tensor  # int64 [R]
    positions: Tensor  # int32 [R], of the anchors: that many tokens are in states and pages
    ends: Tensor  # int [R]: where, in the step that was seen, the token before the anchor is
    pages: Tensor  # int32 [R, P]: page tables, mapped for `lookahead` positions from the anchor on
    starts: Tensor  # int32 [R + 1]: 0, 1 .. R, where rows of one token begin


# (logits fp32 [R, V], i) -> tokens int64 [R]: how draft i is drawn, 0 being the first one after the anchor
Pick = Callable[[Tensor, int], Tensor]


@dataclass(slots=True)
class Draft:
    tokens: Tensor  # int64 [R, count]; -1 where there is nothing to propose
    confidence: Tensor | None = None  # fp32 [R, count]: log-odds that a draft is kept if those before it are
    settle: Callable[[], None] | None = None  # to be called on the host when the draft is made: it is in no recording


class Drafter(Protocol):
    width: int  # most drafts per step
    taps: tuple[int, ...]  # target layers whose residual stream it reads
    lookahead: int  # positions from the anchor on whose keys it may write
    steady: bool  # both verbs are the same work each time, all of it on the device: a CUDA graph can do it again

    def observe(self, seen: Seen) -> None:
        """Take in a step, those of its tokens included that turn out to be rejected: their places come again."""

    def draft(self, heads: Heads, count: int, pick: Pick) -> Draft:
        """Propose `count` tokens (1 to `width`) for each of R sequences that the last observe() has seen."""
