"""Divides measured memory once, between state slots and KV pages, and says what that gives."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from leyden import log
from leyden.cache.pool import NO_DRAFTER, DraftShape, Pool, PoolShape
from leyden.config.engine import EngineConfig
from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.formats.fp8 import E4M3
from leyden.formats.scheme import Scheme

logger = log.get(__name__)

_GIB = 2**30
_CPU_SHARE = 0.4  # of the memory that is free when the weights are loaded: a laptop has other things to do
_CPU_SEQS, _CUDA_SEQS = 64, 256
_CPU_STEP, _CUDA_STEP = 2048, 8192
_SNAPSHOTS = 8  # cached states for every running one, if there is room
_SNAPSHOT_LEAST = 8  # one part of so many is for cached states, where the context limit is ours to choose
_SNAPSHOT_SHARE = 0.5  # of what the running states leave: the rest is for pages
_DTYPES = {"float32": torch.float32, "float": torch.float32, "float16": torch.float16, "half": torch.float16} | {
    "bfloat16": torch.bfloat16
}
_CACHE_DTYPES = _DTYPES | {"fp8": E4M3, "fp8_e4m3": E4M3}  # of keys and values


@dataclass(frozen=True)
class Split:
    """The outcome: what the pool gets and what it is worth in tokens."""

    shape: PoolShape
    seqs: int  # sequences that run at once; the other slots hold snapshots
    step_tokens: int
    slot_bytes: int  # of one sequence's states
    page_bytes: int
    host_slots: int = 0  # places of the host-memory tier
    host_pages: int = 0

    @property
    def cache_tokens(self) -> int:
        return (self.shape.pages - 1) * self.shape.page

    def __str__(self) -> str:
        slots, pages = self.shape.slots - 1, self.shape.pages - 1
        return (
            f"{self.seqs} running and {slots - self.seqs} cached states ({slots * self.slot_bytes / _GIB:.2f} GiB), "
            f"{pages} pages of {self.shape.page} tokens ({pages * self.page_bytes / _GIB:.2f} GiB): "
            f"{self.cache_tokens:,} tokens of context in all, "
            f"at most {self.shape.max_model_len:,} per sequence" + self._host()
        )

    def _host(self) -> str:
        if not self.host_slots:
            return ""
        gib = (self.host_slots * self.slot_bytes + self.host_pages * self.page_bytes) / _GIB
        return f"; in {gib:.2f} GiB of host memory {self.host_slots} states and {self.host_pages} pages more"


def dtype_of(name: str, auto: torch.dtype, flag: str, known: Mapping[str, torch.dtype] = _DTYPES) -> torch.dtype:
    """The torch dtype that a flag names; "auto" gives `auto`."""
    if name == "auto":
        return auto
    if name not in known:
        raise ConfigError(f"{flag} {name} is not available here; accepted are auto, {', '.join(sorted(known))}")
    return known[name]


def divide(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: str,
    free: int,
    draft: DraftShape = NO_DRAFTER,
) -> Split:
    """Divide `free` bytes on a device of type `device`: slots for every sequence that may run, the rest for pages.

    A drafter takes a part of every slot and of every page, and a few positions behind the end of every sequence.

    Raises ConfigError with the numbers if not even one sequence of max_model_len fits. Where --max-model-len was not
    given, the model's own limit is lowered to what fits instead.
    """
    # auto on a CPU: an FP8 cache has no kernels there, and a CPU has the memory
    fp8 = device == "cuda" and Scheme(model.quantization).fp8_cache
    if fp8 and config.kv_cache_dtype == "auto":
        logger.info("keys and values are cached in FP8, as the checkpoint says; --kv-cache-dtype bfloat16 changes that")
    kv_dtype = dtype_of(config.kv_cache_dtype, E4M3 if fp8 else dtype, "--kv-cache-dtype", _CACHE_DTYPES)
    ssm_auto = dtype_of(model.mamba_ssm_cache_dtype, torch.float32, "mamba_ssm_cache_dtype")
    ssm_dtype = dtype_of(config.mamba_ssm_cache_dtype, ssm_auto, "--mamba-ssm-cache-dtype")
    page_bytes = Pool.page_bytes(model, config.block_size, kv_dtype, draft)
    period = config.state_period if device == "cuda" else 1
    slot_bytes = Pool.slot_bytes(model, dtype, ssm_dtype, draft, period)
    seqs = config.max_num_seqs or (_CUDA_SEQS if device == "cuda" else _CPU_SEQS)
    budget = config.kv_cache_memory_bytes or free
    wanted_len = config.max_model_len or model.max_position_embeddings
    per_sequence = -(-(wanted_len + draft.lookahead) // config.block_size)

    if config.max_num_seqs is None:  # states must not starve the pages
        seqs = max(1, min(seqs, budget // 4 // slot_bytes - 1)) if slot_bytes else seqs
    left = budget - (seqs + 1) * slot_bytes
    snapshots = 0
    if config.enable_prefix_caching is not False and slot_bytes:
        spare = left - (per_sequence + 1) * page_bytes  # one longest context goes before states to come back to
        if config.max_model_len is None:  # unless nobody asked for that length
            spare = max(spare, left // _SNAPSHOT_LEAST)
        snapshots = max(0, min(_SNAPSHOTS * seqs, int(left * _SNAPSHOT_SHARE) // slot_bytes, spare // slot_bytes))
    room = left - snapshots * slot_bytes
    pages = room // page_bytes - 1 if page_bytes else seqs * per_sequence
    fits = pages * config.block_size - draft.lookahead
    if fits < 1 or (config.max_model_len is not None and fits < wanted_len):
        most = (budget - (per_sequence + 1) * page_bytes) // slot_bytes - 1 if slot_bytes else 0
        would = [f"--max-model-len {fits} with --max-num-seqs {seqs}"] if fits >= config.block_size else []
        would += [f"--max-model-len {wanted_len} with --max-num-seqs {most}"] if most > 0 else []
        states, context = (seqs + 1) * slot_bytes, per_sequence * page_bytes
        raise ConfigError(
            f"--max-model-len {wanted_len} with --max-num-seqs {seqs} does not fit: {budget / _GIB:.2f} GiB are "
            f"free for the cache, the states of all sequences take {states / _GIB:.2f} GiB, one context of that length "
            f"{context / _GIB:.2f} GiB; "
            + (f"what would fit: {', or '.join(would)}" if would else "give it more memory, or a device with more")
        )
    if fits < wanted_len:
        logger.info("context limited to %s of %s tokens: no more fits into the cache", f"{fits:,}", f"{wanted_len:,}")
        wanted_len = fits
    # more pages than every running sequence and every snapshot could fill would never be used
    pages = min(pages, (seqs + snapshots) * -(-(wanted_len + draft.lookahead) // config.block_size))
    shape = PoolShape(
        slots=seqs + snapshots + 1,
        pages=pages + 1,
        page=config.block_size,
        max_model_len=wanted_len,
        kv_dtype=kv_dtype,
        conv_dtype=dtype,
        ssm_dtype=ssm_dtype,
        draft=draft,
        rounds=config.state_rounds,
        period=period,
    )
    host_slots, host_pages = _tier(config, snapshots * slot_bytes, pages * page_bytes, slot_bytes, page_bytes)
    step = config.max_num_scheduled_tokens or config.max_num_batched_tokens
    step = step or (_CUDA_STEP if device == "cuda" else _CPU_STEP)
    return Split(shape, seqs, step, slot_bytes, page_bytes, host_slots, host_pages)


def _tier(config: EngineConfig, states: int, pages: int, slot_bytes: int, page_bytes: int) -> tuple[int, int]:
    """(slots, pages) of --kv-offloading-size, divided as the device divides its bytes for cached states and pages."""
    budget = int((config.kv_offloading_size or 0) * _GIB)
    if not budget or config.enable_prefix_caching is False or not (slot_bytes and page_bytes):
        return 0, 0
    slots = max(1, budget * states // (states + pages) // slot_bytes) if states else 1
    if budget < slots * slot_bytes + page_bytes:
        raise ConfigError(
            f"--kv-offloading-size {config.kv_offloading_size:g} has no room for one state "
            f"({slot_bytes / _GIB:.2g} GiB) and a page; give more, or leave the flag out"
        )
    return slots, (budget - slots * slot_bytes) // page_bytes


def check_host_room(config: EngineConfig, device: torch.device) -> None:
    """Whether there can be room for --kv-offloading-size: better known now than after loading. Raises ConfigError."""
    if device.type == "cuda":
        room, where, advice = _available(), "main memory has", "ask for less"
    else:
        folder = tempfile.gettempdir()
        room, where = shutil.disk_usage(folder).free, f"{folder} has"
        advice = "ask for less, or set TMPDIR to a folder with more"
    if (config.kv_offloading_size or 0) * _GIB > room:
        asked = f"--kv-offloading-size: {config.kv_offloading_size:,g} GiB are asked for"
        raise ConfigError(f"{asked}, {where} {room / _GIB:,.1f} GiB; {advice}")


def free(config: EngineConfig, device: torch.device) -> int:
    """Bytes for the cache, measured once the weights are in place."""
    if device.type == "cuda":
        left, total = torch.cuda.mem_get_info(device)
        return int(left - (1 - config.gpu_memory_utilization) * total)
    return int(_available() * _CPU_SHARE)


def _available() -> int:
    """Bytes of main memory that programs can have: what is free, and what only caches files."""
    try:
        with open("/proc/meminfo") as lines:
            sizes = dict(line.split(":") for line in lines)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
