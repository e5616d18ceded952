"""Small random drafter networks in the real format, to go with a small random target."""

from pathlib import Path
from typing import Any

import torch

from leyden.bench import middling
from leyden.config.drafter import DrafterConfig
from leyden.config.model import ModelConfig
from leyden.model.checkpoint import matrices
from leyden.model.draft_checkpoint import save
from leyden.model.drafters import DrafterNetwork

# As the releases: DFlash sees its whole block and all of the context, through YaRN; DSpark has a causal block, windows,
# sinks and the Markov head.
_DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "layer_types": ["full_attention"] * 2,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4},
    "dflash_config": {"causal": False},
}
_DSPARK: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 24,
    "rope_theta": 1e4,
    "block_size": 8,
    "attention_sink_bias": True,
    "dflash_config": {"causal": True},
    "markov_rank": 16,
    "sample_from_anchor": False,
}


def tiny(
    folder: Path, target: ModelConfig, method: str = "dspark", seed: int = 0, layout: str = "bf16", **overrides: Any
) -> DrafterConfig:
    """Write a random drafter for `target` into `folder`: two layers, two taps; `overrides` are keys of its config.json.

    Matrices normal with variance 1 / inputs, embeddings and sinks normal, norms near 1: drafts differ from token to
    token and are almost never right. layout: one of middling.LAYOUTS.
    """
    raw = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 2 * target.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": [1, target.num_hidden_layers - 1],
        **{"dflash": _DFLASH, "dspark": _DSPARK}[method],
        **overrides,
    }
    network = DrafterNetwork(DrafterConfig.from_dict(raw), torch.float32)
    random = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        mean, std = (1, 0.1) if name.endswith("norm.weight") else (0, 1) if parameter.dim() == 1 else (0, None)
        std = std or (1 if "embed" in name or "markov_w1" in name else parameter.shape[-1] ** -0.5)
        parameter.data.copy_(torch.randn(parameter.shape, generator=random) * std + mean)
    if layout == "nvfp4":
        _round(network)
    save(network, folder)
    return network.config


def _round(network: DrafterNetwork) -> None:
    """Bring the matrices into the formats of the NVFP4 releases."""
    values = {name: weight.dense().detach() for name, weight in matrices(network)}
    middling.allot(network)
    for name, weight in matrices(network):
        for part, rounded in weight.format.quantize(values[name]).items():
            weight.parts[part].data.copy_(rounded)
