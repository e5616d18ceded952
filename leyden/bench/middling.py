"""A random model between the tiny ones of the tests and the releases: 1.6 billion parameters, a quarter of them active.

Layers, widths and experts stand in the proportions of the 30B-A3B releases, so that a step spends its time where theirs
does; half the layers, and rows that divide into groups as badly as theirs. For measurements: it has learned nothing.
"""

import json
from pathlib import Path
from typing import Any

import torch

from leyden.config.drafter import DrafterConfig
from leyden.config.model import ModelConfig
from leyden.formats import Dense, Format, scheme
from leyden.formats.fp8 import FP8
from leyden.formats.nvfp4 import NVFP4
from leyden.model import draft_checkpoint
from leyden.model.checkpoint import build, dummy, each, matrices, save
from leyden.model.drafters import DrafterNetwork

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


LAYOUTS = ("bf16", "nvfp4")  # of the releases

# The quantization_config of the NVFP4 drafters: fc, the MLPs and W2 of the Markov head in 4 bits.
DRAFTER_NVFP4: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "W4A16_NVFP4",
    "group_size": 16,
    "exclude_modules": ["*embed_tokens*", "*markov_w1*", "*self_attn*"],
}


def describe(folder: Path, layout: str = "bf16", **overrides: Any) -> Path:
    """Write config.json alone: what a start with dummy weights needs. layout: bf16, or nvfp4 as mixed() has it."""
    keys = CONFIG | overrides
    if layout == "nvfp4":
        keys["quantization_config"] = mixed(ModelConfig.from_dict(keys, {}))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")
    return folder


def mixed(config: ModelConfig) -> dict[str, Any] | None:
    """The quantization_config of the NVFP4 releases: experts, shared experts and head NVFP4, Mamba projections FP8."""
    formats: dict[str, Format] = {}
    for name, weight in matrices(build(config, torch.bfloat16, "meta")):
        format: Format = FP8() if name.endswith(("in_proj", "out_proj")) else Dense()
        if "experts." in name or name == "lm_head":
            format = NVFP4()
        formats |= dict.fromkeys(each(name, weight), format)
    return scheme.describe(formats)


def write(folder: Path, seed: int = 0, **overrides: Any) -> ModelConfig:
    """Write a whole checkpoint but for the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = ModelConfig.from_dict(CONFIG, overrides)
    model = build(config, torch.bfloat16)
    dummy(model, seed)
    save(model, folder)
    return config


def drafter(
    folder: Path, target: ModelConfig, method: str, layout: str = "bf16", seed: int = 0, device: str = "cpu"
) -> Path:
    """Write a random drafter, dflash or dspark, in `layout`, one of LAYOUTS, with the target's embeddings. ConfigError
    if its matrices do not fit the formats."""
    network = DrafterNetwork(DrafterConfig.from_dict(drafter_keys(target, method)), torch.bfloat16, device)
    del network.embed_tokens
    if layout == "nvfp4":
        allot(network)
    dummy(network, seed)
    draft_checkpoint.save(network, folder)
    return folder


def allot(network: DrafterNetwork) -> None:
    """Give the matrices of a drafter the formats of the NVFP4 releases, their values uninitialised."""
    formats = scheme.Scheme(DRAFTER_NVFP4)
    for name, weight in matrices(network):
        weight.allot(formats.format_of(name), next(weight.parameters()).device)


def drafter_keys(target: ModelConfig, method: str) -> dict[str, Any]:
    """The config.json of a drafter, dflash or dspark, in the proportions of the releases: six layers that see six of
    the target's, attention as wide as the target's, MLPs 16/7 of its hidden size in whole tiles of 64."""
    layers, hidden = target.num_hidden_layers, target.hidden_size
    dspark = method == "dspark"
    return {
        "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
        "vocab_size": target.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": hidden * 16 // 7 // 64 * 64,
        "num_hidden_layers": 6,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": sorted({layers * i // 6 + layers // 12 for i in range(6)}),
        "layer_types": ["sliding_attention" if dspark else "full_attention"] * 6,
        "sliding_window": 1024 if dspark else None,
        "rope_theta": 1e4,
        "block_size": 8,
        "attention_sink_bias": dspark,
        "dflash_config": {"causal": dspark},
        "markov_rank": 512 if dspark else 0,
    }
