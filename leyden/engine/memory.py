"""Divides measured memory once, between state slots and KV pages, and says what that gives."""

import os
from dataclasses import dataclass

import torch

from leyden import log
from leyden.cache.pool import Pool, PoolShape
from leyden.config.engine import EngineConfig
from leyden.config.model import ModelConfig
from leyden.errors import ConfigError

logger = log.get(__name__)

_GIB = 2**30
_CPU_SHARE = 0.4  # of the memory that is free when the weights are loaded: a laptop has other things to do
_CPU_SEQS, _CUDA_SEQS = 64, 256
_CPU_STEP, _CUDA_STEP = 2048, 8192
_DTYPES = {"float32": torch.float32, "float": torch.float32, "float16": torch.float16, "half": torch.float16} | {
    "bfloat16": torch.bfloat16
}


@dataclass(frozen=True)
class Split:
    """The outcome: what the pool gets and what it is worth in tokens."""

    shape: PoolShape
    step_tokens: int
    slot_bytes: int  # of one sequence's states
    page_bytes: int

    @property
    def cache_tokens(self) -> int:
        return (self.shape.pages - 1) * self.shape.page

    def __str__(self) -> str:
        slots, pages = self.shape.slots - 1, self.shape.pages - 1
        return (
            f"{slots} state slots ({slots * self.slot_bytes / _GIB:.2f} GiB), "
            f"{pages} pages of {self.shape.page} tokens ({pages * self.page_bytes / _GIB:.2f} GiB): "
            f"{self.cache_tokens:,} tokens of context in all, "
            f"at most {self.shape.max_model_len:,} per sequence"
        )


def dtype_of(name: str, auto: torch.dtype, flag: str) -> torch.dtype:
    """The torch dtype that a flag names; "auto" gives `auto`."""
    if name == "auto":
        return auto
    if name not in _DTYPES:
        raise ConfigError(f"{flag} {name} is not available here; accepted are auto, {', '.join(sorted(_DTYPES))}")
    return _DTYPES[name]


def divide(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Split:
    """Slots for every sequence that may run, the rest for pages; called when the weights are in place.

    Raises ConfigError with the numbers if not even one sequence of max_model_len fits. Where --max-model-len was not
    given, the model's own limit is lowered to what fits instead.
    """
    kv_dtype = dtype_of(config.kv_cache_dtype, dtype, "--kv-cache-dtype")
    ssm_auto = dtype_of(model.mamba_ssm_cache_dtype, torch.float32, "mamba_ssm_cache_dtype")
    ssm_dtype = dtype_of(config.mamba_ssm_cache_dtype, ssm_auto, "--mamba-ssm-cache-dtype")
    page_bytes = Pool.page_bytes(model, config.block_size, kv_dtype)
    slot_bytes = Pool.slot_bytes(model, dtype, ssm_dtype)
    slots = config.max_num_seqs or (_CUDA_SEQS if device.type == "cuda" else _CPU_SEQS)
    budget = config.kv_cache_memory_bytes or _free(config, device)
    wanted_len = config.max_model_len or model.max_position_embeddings

    left = budget - (slots + 1) * slot_bytes
    if config.max_num_seqs is None and left < budget // 2:  # states must not starve the pages
        slots = max(1, budget // 2 // slot_bytes - 1)
        left = budget - (slots + 1) * slot_bytes
    pages = left // page_bytes - 1 if page_bytes else slots * -(-wanted_len // config.block_size)
    fits = pages * config.block_size
    if fits < 1 or (config.max_model_len is not None and fits < wanted_len):
        raise ConfigError(
            f"--max-model-len {wanted_len} with --max-num-seqs {slots} does not fit: {budget / _GIB:.2f} GiB are free "
            f"for the cache, {(slots + 1) * slot_bytes / _GIB:.2f} GiB of it for states, which leaves room for "
            f"{max(0, fits):,} tokens of context; lower one of the two"
        )
    if fits < wanted_len:
        logger.info("context limited to %s of %s tokens: no more fits into the cache", f"{fits:,}", f"{wanted_len:,}")
        wanted_len = fits
    pages = min(pages, slots * -(-wanted_len // config.block_size))
    shape = PoolShape(
        slots=slots + 1,
        pages=pages + 1,
        page=config.block_size,
        max_model_len=wanted_len,
        kv_dtype=kv_dtype,
        conv_dtype=dtype,
        ssm_dtype=ssm_dtype,
    )
    step = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    return Split(shape, step or (_CUDA_STEP if device.type == "cuda" else _CPU_STEP), slot_bytes, page_bytes)


def _free(config: EngineConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - config.gpu_memory_utilization) * total)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(available * _CPU_SHARE)
