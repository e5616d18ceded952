"""The one owner of device memory that outlives a step: KV pages, recurrent states, and how far each sequence is.

Rule of state: conv[:, slot] and ssm[:, slot] always equal the state after exactly committed[slot] tokens. Rows whose
every token is certain (prompt tokens, single-token steps without drafts) let the mixer write the state that the scan
ends with; commit() then moves `committed`. Nothing else moves it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from leyden.config.model import ModelConfig


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

    @property
    def pages_per_slot(self) -> int:
        return -(-self.max_model_len // self.page)


class Pool:
    """Arrays of the cache, one allocation each, layers outermost.

    kv         [attention layers, 2, pages, page, kv heads, head dim]; [:, 0] are keys, [:, 1] values
    conv       [mamba layers, slots, conv kernel - 1, conv dim]: last inputs of the convolution, oldest first
    ssm        [mamba layers, slots, heads, head dim, state size]
    tables     int32 [slots, pages per slot]: page table of every slot, 0 where nothing is mapped yet
    committed  int32 [slots]: tokens of the sequence that the state and the KV pages hold
    """

    def __init__(self, config: ModelConfig, shape: PoolShape, device: torch.device | str):
        self.shape = shape
        attention, mamba = config.pattern.count("*"), config.pattern.count("M")

        def empty(*size: int, dtype: torch.dtype) -> Tensor:
            # Nothing is read before it was written, and a CPU maps memory only when it is touched.
            return torch.empty(size, dtype=dtype, device=device)

        heads, head_dim = config.num_key_value_heads, config.head_dim
        self.kv = empty(attention, 2, shape.pages, shape.page, heads, head_dim, dtype=shape.kv_dtype)
        self.conv = empty(mamba, shape.slots, config.conv_kernel - 1, config.conv_dim, dtype=shape.conv_dtype)
        state = (config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size)
        self.ssm = empty(mamba, shape.slots, *state, dtype=shape.ssm_dtype)
        self.tables = torch.zeros(shape.slots, shape.pages_per_slot, dtype=torch.int32, device=device)
        self.committed = torch.zeros(shape.slots, dtype=torch.int32, device=device)

    @property
    def paged(self) -> tuple[Tensor, ...]:
        """All that a page holds: arrays [layers, 2, pages, page, ...]."""
        return (self.kv,)

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
        for layer in (layer for array in self.states for layer in array):
            layer[targets] = layer[sources]

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Content of pages `sources` to pages `targets`, both int64 [N]; all is read before anything is written."""
        for layer in (layer for array in self.paged for layer in array):
            layer[:, targets] = layer[:, sources]

    def map(self, slots: Tensor, indices: Tensor, pages: Tensor) -> None:
        """Write `pages` into the page tables at (slot, index); all int64 [N]."""
        self.tables[slots, indices] = pages.to(torch.int32)

    def commit(self, slots: Tensor, tokens: Tensor) -> None:
        """The step is accepted: `tokens` (int32 [R]) more tokens of each slot (int64 [R]) are in state and pages."""
        self.committed.index_add_(0, slots, tokens)

    @staticmethod
    def page_bytes(config: ModelConfig, page: int, kv_dtype: torch.dtype) -> int:
        elements = 2 * page * config.num_key_value_heads * config.head_dim
        return config.pattern.count("*") * elements * kv_dtype.itemsize

    @staticmethod
    def slot_bytes(config: ModelConfig, conv_dtype: torch.dtype, ssm_dtype: torch.dtype) -> int:
        conv = (config.conv_kernel - 1) * config.conv_dim * conv_dtype.itemsize
        ssm = config.mamba_num_heads * config.mamba_head_dim * config.ssm_state_size * ssm_dtype.itemsize
        return config.pattern.count("M") * (conv + ssm)
