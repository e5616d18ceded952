"""The one owner of device memory that outlives a step: KV pages, recurrent states, and how far each sequence is.

Rule of state: conv[:, slot] and ssm[:, slot] always equal the state after exactly committed[slot] tokens. Rows whose
every token is certain (prompt tokens, single-token steps without drafts) let the mixer write the state that the scan
ends with; rows with guesses leave it alone and write their inputs to `ring`, from which Nemotron.commit moves it over
those that were right. commit() then moves `committed`, or reach() in recorded steps. Nothing else moves it.

With a `period` the rule for ssm has one exception: in single-token steps without drafts it is written at every
period-th position only, and the tokens since then wait in `recent`. waiting() says how many: it follows from positions
alone, so the device needs no counter and the host no answer. engine/waiting.py folds them into the states of slots
before anybody but such a step reads these.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from leyden import ops
from leyden.config.model import ModelConfig

_AT_ONCE = 2**28  # bytes that are copied in one launch, unless a layer has more


@dataclass(frozen=True)
class DraftShape:
    """What a drafter needs of the pool. The default is no drafter."""

    width: int = 0  # most drafts per step
    lookahead: int = 0  # positions behind the newest token whose keys it may write
    mtp_layers: int = 0  # attention layers of its own that are like the model's: they come after those
    layers: tuple[int, int, int] | None = None  # (layers, kv heads, head dim) of its own that are not


NO_DRAFTER = DraftShape()


@dataclass(frozen=True)
class PoolShape:
    """How many of each; page 0 and slot 0 are padding and never handed out."""

    slots: int  # sequences that can run at once, padding slot included
    pages: int  # KV pages, padding page included
    page: int  # tokens of one page
    max_model_len: int
    kv_dtype: torch.dtype
    conv_dtype: torch.dtype
    ssm_dtype: torch.dtype
    draft: DraftShape = NO_DRAFTER
    rounds: int = 0  # of the random bits by which decode steps round an fp16 state; 0: to nearest
    period: int = 1  # positions from one state that decode steps write to the next

    @property
    def pages_per_slot(self) -> int:
        return -(-(self.max_model_len + self.draft.lookahead) // self.page)


class Pool:
    """Arrays of the cache, one allocation each, layers outermost.

    kv         [attention layers, 2, pages, page, kv heads, head dim]; [:, 0] are keys, [:, 1] values
    draft      the same of a drafter whose keys and values have another shape; same pages. No layers: there is none
    conv       [mamba layers, slots, conv kernel - 1, conv dim]: last inputs of the convolution, oldest first
    ssm        [mamba layers, slots, heads, head dim, state size]
    ring       [mamba layers, slots, width + 1, conv dim + heads]: inputs of the tokens of a step with drafts
    recent     [mamba layers, slots, period - 1, inner + groups * state size + heads]: x and B as the convolution made
               them, and dt, of the tokens that wait
    began      int32 [slots]: tokens that ssm held when tokens of the slot began to wait
    tables     int32 [slots, pages per slot]: page table of every slot, 0 where nothing is mapped yet
    committed  int32 [slots]: tokens of the sequence that the state and the KV pages hold
    """

    def __init__(self, config: ModelConfig, shape: PoolShape, device: torch.device | str):
        self.shape = shape
        attention, mamba = config.pattern.count("*") + shape.draft.mtp_layers, config.pattern.count("M")

        def empty(*size: int, dtype: torch.dtype) -> Tensor:
            # Nothing is read before it was written, and a CPU maps memory only when it is touched.
            return torch.empty(size, dtype=dtype, device=device)

        heads, head_dim = config.num_key_value_heads, config.head_dim
        self.kv = empty(attention, 2, shape.pages, shape.page, heads, head_dim, dtype=shape.kv_dtype)
        layers, heads, head_dim = shape.draft.layers or (0, heads, head_dim)
        self.draft = empty(layers, 2, shape.pages, shape.page, heads, head_dim, dtype=shape.kv_dtype)
        self.conv = empty(mamba, shape.slots, config.conv_kernel - 1, config.conv_dim, dtype=shape.conv_dtype)
        state = (config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size)
        self.ssm = empty(mamba, shape.slots, *state, dtype=shape.ssm_dtype)
        ring = (shape.draft.width + 1 if shape.draft.width else 0, config.conv_dim + config.mamba_num_heads)
        self.ring = empty(mamba, shape.slots, *ring, dtype=shape.conv_dtype)
        recent = (shape.period - 1, recent_width(config))
        self.recent = empty(mamba, shape.slots, *recent, dtype=shape.conv_dtype)
        self.began = torch.zeros(shape.slots, dtype=torch.int32, device=device)
        self.tables = torch.zeros(shape.slots, shape.pages_per_slot, dtype=torch.int32, device=device)
        self.committed = torch.zeros(shape.slots, dtype=torch.int32, device=device)

    @property
    def paged(self) -> tuple[Tensor, ...]:
        """All that a page holds: arrays [layers, 2, pages, page, ...]."""
        return self.kv, self.draft

    @property
    def states(self) -> tuple[Tensor, ...]:
        """All that a snapshot holds: arrays [layers, slots, ...]."""
        return self.conv, self.ssm

    def admit(self, slots: Tensor, computed: Tensor) -> None:
        """Sequences start in `slots` (int64 [R]) with `computed` tokens (int32 [R]) cached.

        Where that is 0 the state needs no clearing: ops take past == 0 for zeros.
        """
        self.committed[slots] = computed

    def copy_states(self, sources: Tensor, targets: Tensor) -> None:
        """States of `sources` to `targets`, both int64 [N]; everything is read before anything is written."""
        for array in self.states:
            _copy(array, sources, targets)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Content of pages `sources` to pages `targets`, both int64 [N]; all is read before anything is written."""
        for array in self.paged:
            _copy(array.flatten(0, 1), sources, targets)

    def map(self, slots: Tensor, indices: Tensor, pages: Tensor) -> None:
        """Write `pages` into the page tables at (slot, index); all int64 [N]."""
        self.tables[slots, indices] = pages.to(torch.int32)

    def commit(self, slots: Tensor, tokens: Tensor) -> None:
        """The step is accepted: `tokens` (int32 [R]) more tokens of each slot (int64 [R]) are in state and pages."""
        self.committed.index_add_(0, slots, tokens)

    def reach(self, slots: Tensor, tokens: Tensor) -> None:
        """The same for a recorded step, which knows how many tokens (int32 [R]) each slot (int32 [R]) has now."""
        ops.put(tokens, self.committed, slots)

    def begin(self, slots: Tensor) -> None:
        """From now on tokens of `slots` (int64 [N]) wait; their states are those of all tokens so far."""
        self.began[slots] = self.committed[slots]

    def waiting(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens that the states of `slots` (int64 [N]) hold, tokens that wait), both int32 [N], after begin()."""
        committed, period = self.committed[slots], self.shape.period
        held = torch.maximum(self.began[slots], committed // period * period)
        return held, committed - held

    @staticmethod
    def page_bytes(config: ModelConfig, page: int, kv_dtype: torch.dtype, draft: DraftShape = NO_DRAFTER) -> int:
        heads = (config.pattern.count("*") + draft.mtp_layers) * config.num_key_value_heads * config.head_dim
        return 2 * page * (heads + prod(draft.layers or (0,))) * kv_dtype.itemsize

    @staticmethod
    def slot_bytes(
        config: ModelConfig,
        conv_dtype: torch.dtype,
        ssm_dtype: torch.dtype,
        draft: DraftShape = NO_DRAFTER,
        period: int = 1,
    ) -> int:
        conv = (config.conv_kernel - 1) * config.conv_dim * conv_dtype.itemsize
        if draft.width:
            conv += (draft.width + 1) * (config.conv_dim + config.mamba_num_heads) * conv_dtype.itemsize
        conv += (period - 1) * recent_width(config) * conv_dtype.itemsize
        ssm = config.mamba_num_heads * config.mamba_head_dim * config.ssm_state_size * ssm_dtype.itemsize
        return config.pattern.count("M") * (conv + ssm)


def _copy(array: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Columns `sources` of array [layers, N, ...] to columns `targets`: few launches, and little memory beside it."""
    each = len(sources) * prod(array.shape[2:]) * array.itemsize
    for layers in array.split(max(1, _AT_ONCE // max(1, each))):
        layers[:, targets] = layers[:, sources]


def recent_width(config: ModelConfig) -> int:
    """Numbers of a token that waits, in one layer."""
    return config.mamba_inner + config.n_groups * config.ssm_state_size + config.mamba_num_heads
