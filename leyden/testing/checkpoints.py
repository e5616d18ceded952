"""Small random checkpoints in the real format: the same files, names and dtypes as a release, a thousandth of its size.

Every preset keeps what real configs have and sloppy code trips over: the attention width differs from the hidden size,
the Mamba width from `expand` times it, and expert widths are multiples of 16. The values are not for measurements (see
leyden.model.checkpoint.dummy) but for tests: logits are a few units wide, states decay at many speeds, and every layer
moves the residual stream, so that a wrong formula anywhere shows in the output.

    python -m leyden.testing.checkpoints FOLDER [--preset NAME] [--seed N]
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leyden.config.model import ModelConfig
from leyden.model.checkpoint import build, save
from leyden.model.nemotron import Nemotron
from leyden.testing.tokenizer import write as write_tokenizer

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "hybrid_override_pattern": "M*MEM*ME",
    "max_position_embeddings": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    "torch_dtype": "float32",
}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "latent": TINY | {"moe_latent_size": 32, "routed_scaling_factor": 5.0},  # as Super and Ultra
    "dense": TINY | {"hybrid_override_pattern": "M*-M-*", "intermediate_size": [96, 80]},
    "groups": TINY | {"n_groups": 4, "n_group": 4, "topk_group": 2},  # of B and C, and of the router
    "mtp": TINY | {"num_nextn_predict_layers": 1},  # as Lightning
}


def tiny(folder: Path, preset: str = "tiny", seed: int = 0, tokenizer: bool = True, **overrides: Any) -> ModelConfig:
    """Write a whole checkpoint into `folder`; its config.json is a preset with `overrides` of its keys.

    The same arguments give the same files. Without `tokenizer` the vocabulary may be as small as you like. Returns what
    the folder's config says.
    """
    config = ModelConfig.from_dict(PRESETS[preset], overrides)
    model = build(config, getattr(torch, config.dtype), mtp=config.num_nextn_predict_layers > 0)
    randomise(model, seed)
    save(model, folder)
    defaults = {"bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 11], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(defaults, indent=2) + "\n", encoding="utf-8")
    if tokenizer:
        write_tokenizer(folder, config.vocab_size)
    return ModelConfig.from_folder(folder)


@torch.no_grad()
def randomise(model: Nemotron, seed: int = 0) -> None:
    """Fill a small model on the CPU with random values that keep every part of it busy.

    Matrices normal with variance 1 / inputs, embeddings normal; norms and D near 1; biases small; A and dt log-uniform
    over the ranges in which Mamba-2 starts its training, (1, 16) and (0.001, 0.1).
    """
    random = torch.Generator().manual_seed(seed)

    def normal(tensor: Tensor, mean: float, std: float) -> Tensor:
        return tensor.copy_(torch.randn(tensor.shape, generator=random) * std + mean)

    def log_uniform(tensor: Tensor, low: float, high: float) -> Tensor:
        exponents = torch.rand(tensor.shape, generator=random) * math.log(high / low) + math.log(low)
        return tensor.copy_(exponents.exp())

    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        if leaf == "A_log":
            log_uniform(parameter, 1, 16).log_()
        elif leaf == "dt_bias":
            dt = log_uniform(parameter, 0.001, 0.1)
            parameter.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        elif leaf == "D" or module.endswith(("norm", "norm_f")):
            normal(parameter, 1, 0.1)
        elif leaf in ("bias", "e_score_correction_bias"):
            normal(parameter, 0, 0.05)
        elif module.endswith("embeddings"):
            normal(parameter, 0, 1)
        else:
            normal(parameter, 0, parameter.shape[-1] ** -0.5)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a small random checkpoint for tests.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    tiny(options.folder, options.preset, options.seed)


if __name__ == "__main__":
    main()
