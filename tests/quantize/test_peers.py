"""What `leyden quantize` writes, read by compressed-tensors: its view of config.json, and of every packed matrix."""

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.utils import match_name
from torch import Tensor

from leyden.model.checkpoint import each, matrices
from tests.quantize.test_convert import calibrated, folder, loaded, tensors

__all__ = ["folder"]


def scheme_of(config: QuantizationConfig, matrix: str) -> QuantizationScheme | None:
    if any(match_name(matrix, pattern) for pattern in config.ignore or []):
        return None
    found = [scheme for scheme in config.config_groups.values() if "Linear" in scheme.targets]
    return found[0] if found else None


def test_compressed_tensors_reads_w4a16(folder: Path) -> None:
    out = calibrated(folder, "w4a16", "out", "--group", "32", "--gptq")
    config = QuantizationConfig.model_validate(json.loads((out / "config.json").read_text())["quantization_config"])
    stored, model = tensors(out), loaded(out)
    compressor = BaseCompressor.get_value_from_registry(config.format)
    packed = 0
    for name, weight in matrices(model):
        for i, matrix in enumerate(each(name, weight)):
            parts: dict[str, Tensor] = {
                n.rpartition(".")[2]: t for n, t in stored.items() if n.rpartition(".")[0] == matrix
            }
            scheme = scheme_of(config, matrix)
            assert (scheme is not None) == ("weight_packed" in parts) or matrix == "backbone.embeddings", matrix
            if "weight_packed" in parts:
                packed += 1
                theirs = compressor.decompress(parts, scheme)["weight"]
                ours = weight.dense() if len(weight.shape) == 2 else weight.dense()[i]
                assert torch.equal(ours.to(theirs.dtype), theirs), matrix
    assert packed == 40  # 32 of experts, 4 of shared ones, 4 of Mamba layers that are not next to attention
