"""Drafts from the module inside the target's checkpoint: multi-token prediction (DeepSeek-V3, section 2.2).

The module reads pairs of a hidden state of the target and the token that follows it. At position p it has read the pair
(h_p, token p + 1), keeps its keys there, and predicts token p + 2. The first draft comes from the last pair of the
target's own; each further one from a pair of the module's output and the draft before. Those pairs leave their keys
behind the newest token, where the next step's true ones replace them.

The keys at the end of a cached prefix were made with the token that followed then. A sequence that goes on differently
reads one pair that is not its own: its drafts may be a little worse for it, which no answer shows.
"""

import torch
from torch import Tensor

from leyden.cache.pool import Pool
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.ops.rows import Rows
from leyden.spec.drafter import Draft, Heads, Pick, Seen


class MTP:
    """Applies the one module `width` times; its keys are in pool.kv, behind the backbone's layers."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: Nemotron, width: int):
        assert model.mtp is not None
        self.width, self.lookahead = width, width - 1
        self._model, self._module = model, model.mtp

    def observe(self, seen: Seen) -> None:
        following = self._model.embed(seen.following.clamp(min=0))  # where there is none, what comes out is not read
        self._hidden = self._module(seen.hidden, following, seen.ctx)  # [T, H]
        self._pool = seen.ctx.pool

    def draft(self, heads: Heads, count: int, pick: Pick) -> Draft:
        hidden = self._hidden[heads.ends]
        drafts: list[Tensor] = []
        while True:
            drafts.append(pick(self._model.logits(hidden), len(drafts)))
            if len(drafts) == count:
                return Draft(torch.stack(drafts, 1))
            ctx = _single(heads, len(drafts) - 1, self._pool)
            hidden = self._module(hidden, self._model.embed(drafts[-1]), ctx)


def _single(heads: Heads, ahead: int, pool: Pool | None) -> Context:
    """One token of each sequence, `ahead` positions behind its anchor's."""
    count, device = len(heads.slots), heads.slots.device
    past = heads.positions + ahead
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)
    slots = heads.slots.int()
    narrow = Rows((1,) * count, starts, past, slots, heads.pages)
    wide = Rows((), starts[:1], past[:0], slots[:0], heads.pages[:0])
    return Context(narrow, wide, past, pool)
