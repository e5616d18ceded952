"""Hand-made batches, pools and weights for the tests of ops and model."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from itertools import accumulate
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leyden.cache.pool import Pool, PoolShape
from leyden.config.model import ModelConfig
from leyden.formats import Weight
from leyden.model.context import Context
from leyden.ops.rows import Rows

VECTORS = Path(__file__).parent / "data" / "forward"
CLOSE = {"atol": 2e-5, "rtol": 1e-5}  # fp32, two implementations of one formula

SMALL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    pattern="ME*M-",
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_sizes=(56,),
    mamba_num_heads=6,
    mamba_head_dim=8,
    n_groups=2,
    ssm_state_size=12,
    conv_kernel=4,
    chunk_size=8,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    shared_expert_width=40,
    routed_scaling_factor=2.5,
)


def vectors(name: str, pattern: str) -> tuple[ModelConfig, dict[str, Tensor], dict[str, Tensor]]:
    """(config with that pattern, weights, everything else) of one file of tests/data/forward."""
    data = np.load(VECTORS / f"{name}.npz")
    raw: dict[str, Any] = json.loads(str(data["config"]))
    known = {f.name for f in fields(ModelConfig)}
    values = {key: value for key, value in raw.items() if key in known}
    values["shared_expert_width"] = raw["n_shared_experts"] * raw["moe_shared_expert_intermediate_size"]
    widths = (raw["intermediate_size"],) * pattern.count("-")
    config = ModelConfig(pattern=pattern, intermediate_sizes=widths, **values)
    tensors = {key: torch.from_numpy(data[key]) for key in data if key != "config"}
    weights = {key[2:]: value for key, value in tensors.items() if key.startswith("w.")}
    return config, weights, {key: value for key, value in tensors.items() if not key.startswith("w.")}


def load(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy tensors with a checkpoint's names into the module, every name exactly once; experts are stacked."""
    merged: dict[str, Any] = {}
    for name, tensor in weights.items():
        expert = re.fullmatch(r"(.*experts)\.(\d+)\.(.*)", name)
        if expert:
            merged.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = tensor
        else:
            merged[name] = tensor
    for name, value in merged.items():
        if isinstance(value, dict):
            merged[name] = torch.stack([value[e] for e in range(len(value))])
    module.load_state_dict(merged)


def fill(module: nn.Module, seed: int = 0) -> None:
    """Random weights of sensible size: what a mixer does with them is neither constant nor chaotic."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=draw)
        if name.endswith("A_log"):
            values = torch.rand(parameter.shape, generator=draw).mul(15).add(1).log()
        elif name.endswith("dt_bias"):
            dt = torch.empty(parameter.shape).uniform_(log(1e-3), log(1e-1), generator=draw).exp()
            values = dt.expm1().log()  # inverse of softplus
        elif name.endswith(("norm.weight", "norm_f.weight", "layernorm.weight", ".D")):
            values = 1 + 0.1 * values
        elif name.endswith(("e_score_correction_bias", "conv1d.bias")):
            values = 0.05 * values
        elif not name.endswith("embeddings.weight"):
            values = values / parameter[..., 0, :].numel() ** 0.5 if parameter.dim() < 3 else values * 0.2
        parameter.data.copy_(values)


def weight(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Weight:
    """A random matrix or stack that needs no gradient."""
    made = Weight(*shape, dtype=dtype).requires_grad_(False)
    fill(made, seed)
    return made


def pool(config: ModelConfig, slots: int = 4, tokens: int = 64, page: int = 4, **dtypes: torch.dtype) -> Pool:
    """A pool whose slots 1 .. slots - 1 have all their pages mapped, in mixed order. States start as garbage."""
    dtypes = {"kv_dtype": torch.float32, "conv_dtype": torch.float32, "ssm_dtype": torch.float32, **dtypes}
    per_slot = -(-tokens // page)
    shape = PoolShape(slots=slots, pages=1 + (slots - 1) * per_slot, page=page, max_model_len=tokens, **dtypes)
    made = Pool(config, shape, "cpu")
    mixed = torch.randperm(shape.pages - 1, generator=torch.Generator().manual_seed(1)) + 1
    made.tables[1:] = mixed.view(slots - 1, per_slot)
    for array in (made.kv, made.conv, made.ssm):
        array.fill_(384)
    return made


def rows(pool: Pool | None, rows: list[tuple[int, int, int]]) -> Rows:
    """Rows of (slot, tokens past, tokens now)."""
    slots = torch.tensor([slot for slot, _, _ in rows], dtype=torch.int32)
    return Rows(
        lens=tuple(n for _, _, n in rows),
        starts=torch.tensor([0, *accumulate(n for _, _, n in rows)], dtype=torch.int32),
        past=torch.tensor([past for _, past, _ in rows], dtype=torch.int32),
        slots=slots if pool else None,
        pages=pool.tables[slots] if pool else None,
    )


def context(pool: Pool, batch: list[tuple[int, int, int]], narrow: bool = True) -> Context:
    """Context of rows (slot, past, n); rows of one token must come first and are narrow unless told otherwise."""
    border = sum(n == 1 for _, _, n in batch) if narrow else 0
    assert all(n == 1 for _, _, n in batch[:border])
    positions = torch.cat([torch.arange(past, past + n, dtype=torch.int32) for _, past, n in batch])
    return Context(rows(pool, batch[:border]), rows(pool, batch[border:]), positions, pool)
