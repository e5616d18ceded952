"""An engine whose cache has the size that a measurement asks for, whatever memory there is."""

from pathlib import Path
from typing import Any

import torch

from leyden.cache.pool import PoolShape
from leyden.config.folder import resolve
from leyden.config.model import ModelConfig
from leyden.engine.engine import Engine
from leyden.engine.memory import Split, dtype_of
from leyden.model import checkpoint


def engine(
    model: str,
    *,
    seqs: int,
    snapshots: int,
    pages: int,
    max_model_len: int,
    step_tokens: int,
    page: int = 16,
    host: tuple[int, int] = (0, 0),
    device: str = "cpu",
    **options: Any,
) -> Engine:
    """`model` is a folder or a Hugging Face id; `host` is (states, pages) of the tier; `options` are the Engine's."""
    folder: Path = resolve(model)
    config = ModelConfig.from_folder(folder)
    dtype: torch.dtype = getattr(torch, config.dtype)
    network = checkpoint.build(config, dtype, torch.device(device))
    checkpoint.load(network, folder)
    shape = PoolShape(
        slots=seqs + snapshots + 1,
        pages=pages + 1,
        page=page,
        max_model_len=max_model_len,
        kv_dtype=dtype,
        conv_dtype=dtype,
        ssm_dtype=dtype_of(config.mamba_ssm_cache_dtype, torch.float32, "mamba_ssm_cache_dtype"),
    )
    split = Split(shape, seqs, step_tokens, 0, 0, host_slots=host[0], host_pages=host[1])
    return Engine(network.eval().requires_grad_(False), split, **options)
