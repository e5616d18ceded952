"""Drafts from a network of their own, a block at once: DFlash and DSpark (leyden.model.drafters).

What the target's residual stream says at a position becomes keys and values there, for every position that the target
passes. A block, the newest token and masks behind it, then sees all of them before the newest token. Keys of the block
itself are not kept, and those of rejected tokens are replaced when their positions come again.

DSpark's Markov head makes each draft depend on the one before it; without it, drafts that are drawn at random do not
belong together, so DFlash is best left greedy.
"""

from torch import Tensor

from leyden import ops
from leyden.model.drafters import DraftAttention, DrafterNetwork
from leyden.model.nemotron import Nemotron
from leyden.ops.rows import Rows
from leyden.spec.confidence import Confidence
from leyden.spec.drafter import Draft, Heads, Pick, Seen


class DFlash:
    """Keys and values of `network` are in pool.draft. With `confident`, drafts say how likely they are to be kept:
    what the network's head for it says, or what is learned by and by where it has none.
    """

    lookahead = 0

    def __init__(self, network: DrafterNetwork, model: Nemotron, width: int, confident: bool = False):
        self.width, self.taps = width, network.config.target_layer_ids
        self.network, self._model, self._confident = network, model, confident
        self._learned: Confidence | None = None
        self.steady = not confident or network.confidence_head is not None  # what is learned, the host learns

    def observe(self, seen: Seen) -> None:
        ctx = seen.ctx
        assert ctx.pool is not None
        for cache, (k, v) in zip(ctx.pool.draft, self.network.context(seen.taps, ctx.positions), strict=True):
            for span, rows, _ in ctx.parts():
                ops.kv_write(k[span], v[span], cache, rows)
        self._caches = ctx.pool.draft
        if self._confident and self.network.confidence_head is None:
            if self._learned is None:
                self._learned = Confidence(ctx.pool.shape.slots, self.width, seen.tokens.device)
            self._learned.learn(seen)

    def draft(self, heads: Heads, count: int, pick: Pick) -> Draft:
        network, sequences = self.network, len(heads.slots)
        width = network.config.drafts_to_rows(count)
        begin = heads.anchors, heads.positions, width, network.config.mask_token_id
        tokens, positions, starts = ops.begin_block(*begin)
        rows = Rows((width,) * sequences, starts, heads.positions, heads.slots.int(), heads.pages)

        def attend(layer: DraftAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options = layer.causal, layer.window, layer.attention_sink_bias
            return ops.block_attention(q, k, v, self._caches[layer.index], rows, *options)

        hidden = network(tokens, positions, attend).unflatten(0, (sequences, width))
        hidden = network.predicting(hidden)  # [R, count, H]
        depth = iter(range(count))
        drafts, logits = network.chain(self._model.logits(hidden), heads.anchors, lambda z: pick(z, next(depth)))
        if not self._confident:
            return Draft(drafts)
        if self._learned is not None:
            return Draft(drafts, self._learned.estimate(heads, logits), self._learned.settle)
        previous = ops.join(heads.anchors[:, None], drafts[:, :-1])
        return Draft(drafts, network.confidence(hidden, previous))
