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

from leyden import ops
from leyden.cache.pool import Pool
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.ops.rows import Rows
from leyden.spec.drafter import Draft, Heads, Pick, Seen


class MTP:
    """Applies the one module `width` times; its keys are in pool.kv, behind the backbone's layers."""

    taps: tuple[int, ...] = ()
    steady = True

    def __init__(self, model: Nemotron, width: int):
        assert model.mtp is not None
        self.width, self.lookahead = width, width - 1
        self._model, self._module = model, model.mtp

    def observe(self, seen: Seen) -> None:
        self._hidden = self._module(seen.hidden, self._model.embed(seen.following), seen.ctx)  # [T, H]
        self._pool = seen.ctx.pool

    def draft(self, heads: Heads, count: int, pick: Pick) -> Draft:
        hidden, past = ops.take(self._hidden, heads.ends), ops.ahead(heads.positions, count)
        drafts: list[Tensor] = []
        while True:
            drafts.append(pick(self._model.logits(hidden), len(drafts)))
            if len(drafts) == count:
                return Draft(ops.join(*(tokens[:, None] for tokens in drafts)))
            ctx = _single(heads, past[len(drafts) - 1], self._pool)
            hidden = self._module(hidden, self._model.embed(drafts[-1]), ctx)


def _single(heads: Heads, past: Tensor, pool: Pool | None) -> Context:
    """One token of each sequence, at the positions `past` (int32 [R])."""
    slots = heads.slots.to(torch.int32)
    narrow = Rows((1,) * len(slots), heads.starts, past, slots, heads.pages)
    wide = Rows((), heads.starts[:1], past[:0], slots[:0], heads.pages[:0])
    return Context(narrow, wide, past, pool)
