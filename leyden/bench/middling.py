"""A random model between the tiny ones of the tests and the releases: 1.6 billion parameters, a quarter of them active.

Layers, widths and experts stand in the proportions of the 30B-A3B releases, so that a step spends its time where theirs
does; half the layers, and rows that divide into groups as badly as theirs. For measurements: it has learned nothing.
"""

import json
from pathlib import Path
from typing import Any

import torch

from leyden.config.model import ModelConfig
from leyden.model.checkpoint import build, dummy, save

CONFIG: dict[str, Any] = {
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 131072,
    "hidden_size": 1024,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM",
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "n_groups": 4,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 832,
    "moe_shared_expert_intermediate_size": 1664,
    "routed_scaling_factor": 2.5,
    "torch_dtype": "bfloat16",
}

# What is different in the releases of 30 billion parameters, 3.2 billion of them active.
RELEASE: dict[str, Any] = {
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "mamba_num_heads": 64,
    "n_groups": 8,
    "n_routed_experts": 128,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}


def describe(folder: Path, **overrides: Any) -> Path:
    """Write config.json alone: what a start with dummy weights needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | overrides, indent=2) + "\n", encoding="utf-8")
    return folder


def write(folder: Path, seed: int = 0, **overrides: Any) -> ModelConfig:
    """Write a whole checkpoint but for the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = ModelConfig.from_dict(CONFIG, overrides)
    model = build(config, torch.bfloat16)
    dummy(model, seed)
    save(model, folder)
    return config
