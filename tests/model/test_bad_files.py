"""Damaged checkpoints stop with the name of the tensor, whatever is wrong with it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from leyden.errors import CheckpointError, ConfigError
from leyden.formats import Format
from leyden.formats.fp8 import FP8, MXFP8, FP8Block
from leyden.formats.int4 import Int4
from leyden.formats.nvfp4 import NVFP4
from leyden.model import gguf
from leyden.model.source import Source
from leyden.testing.checkpoints import tiny
from tests.model.test_checkpoint_quantised import WIDE, edit, loaded, quantise

MATRIX = "backbone.layers.3.mixer.experts.2.up_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny(tmp_path, vocab_size=512, **WIDE)
    return tmp_path


@pytest.mark.parametrize("cut", [1, 30_000, 200_000])
def test_a_safetensors_file_that_is_cut_off(folder: Path, cut: int) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with pytest.raises(
        CheckpointError, match=rf"model.safetensors: damaged, ends within (\S+): {cut:,} bytes and"
    ) as e:
        loaded(folder)
    first = str(e.value).split("ends within ")[1].split(":")[0]
    path.write_bytes(whole)
    assert first in load_file(path)


def test_a_gguf_file_that_is_cut_off(folder: Path, tmp_path: Path) -> None:
    with Source(folder) as source:
        gguf.write(source, tmp_path / "files" / "a.gguf", "Q8_0", progress=False)
    (folder / "model.safetensors").unlink()
    path = tmp_path / "files" / "a.gguf"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=r"a\.gguf: .*(blk\.\d+\.\S+|output\S*)"), Source(path):
        pass


@pytest.mark.parametrize(
    ("format", "leaf", "broken"),
    [
        (NVFP4(), "weight_scale", torch.tensor(0x7F, dtype=torch.uint8)),
        (NVFP4(), "weight_scale_2", torch.tensor(torch.nan)),
        (NVFP4(input_scale=True), "input_scale", torch.tensor(torch.inf)),
        (FP8(), "weight_scale", torch.tensor(-torch.inf)),
        (FP8Block(), "weight_scale", torch.tensor(torch.nan)),
        (MXFP8(), "weight_scale", torch.tensor(255, dtype=torch.uint8)),
        (Int4(32), "weight_scale", torch.tensor(torch.nan, dtype=torch.bfloat16)),
    ],
    ids=str,
)
def test_scales_that_are_not_finite(format: Format, leaf: str, broken: Tensor, folder: Path) -> None:
    quantise(folder, lambda _: format)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        scales = tensors[f"{MATRIX}.{leaf}"].clone()
        scales.view(broken.dtype).view(-1)[-1] = broken
        return tensors | {f"{MATRIX}.{leaf}": scales}

    edit(folder, change)
    with pytest.raises(CheckpointError, match=rf"{MATRIX}.{leaf} has 1 scales of [\d,]+ that are not finite"):
        loaded(folder)


def test_a_reciprocal_scale_of_zero_is_none(folder: Path) -> None:
    """compressed-tensors divides by the scale of the matrix."""
    quantise(folder, lambda _: NVFP4())
    spelled = {"weight": "weight_packed", "weight_scale": "weight_scale", "weight_scale_2": "weight_global_scale"}

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = {}
        for name, tensor in tensors.items():
            matrix, _, leaf = name.rpartition(".")
            if f"{matrix}.weight_scale_2" in tensors:
                tensor = tensor.reciprocal().reshape(1) if leaf == "weight_scale_2" else tensor
                name = f"{matrix}.{spelled[leaf]}"
            changed[name] = torch.zeros(1) if name == f"{MATRIX}.weight_global_scale" else tensor
        return changed

    edit(folder, change)
    with pytest.raises(CheckpointError, match=rf"{MATRIX}.weight_global_scale has 1 scales of 1 that are not finite"):
        loaded(folder)


@pytest.mark.parametrize("value", [0.0, -0.5, torch.nan, torch.inf])
def test_scales_of_the_cache_must_be_positive(value: float, folder: Path) -> None:
    name = "backbone.layers.1.mixer.k_proj.k_scale"
    edit(folder, lambda tensors: tensors | {name: torch.tensor(value)})
    with pytest.raises(CheckpointError, match=rf"not positive and finite \(1\): {name}"):
        loaded(folder)


@pytest.mark.parametrize("format", [NVFP4(), Int4(32), MXFP8()], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 5])
def test_groups_that_do_not_divide_the_rows(format: Format, columns: int, folder: Path) -> None:
    """64 columns: scales for three groups, five, or one more than fits the format."""
    quantise(folder, lambda _: format)
    scale = f"{MATRIX}.weight_scale"

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        rows, kept = len(tensors[scale]), tensors[scale]
        return tensors | {scale: torch.zeros(rows, columns).to(kept.dtype)}

    edit(folder, change)
    with pytest.raises(CheckpointError, match=rf"{scale} \[64, {columns}\]"):
        loaded(folder)


@pytest.mark.parametrize("group", [128, 48])
def test_a_config_with_a_group_size_that_no_matrix_can_have(group: int, folder: Path) -> None:
    quantise(folder, lambda _: Int4(32))
    config = json.loads((folder / "config.json").read_text())
    for found in config["quantization_config"]["config_groups"].values():
        found["weights"]["group_size"] = group
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"backbone\.layers\.\S+_proj: format int4 stores {group} columns at a time"):
        loaded(folder)
