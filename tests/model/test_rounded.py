from pathlib import Path

import pytest
import torch

from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.formats import Dense
from leyden.formats.int8 import Int8
from leyden.model.checkpoint import build, load, matrices
from leyden.model.rounded import QUANTIZATIONS, narrow
from leyden.testing.checkpoints import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny(folder, "mtp", tokenizer=False)
    return folder


def loaded(folder: Path, quantization: str | None = None):
    model = build(ModelConfig.from_folder(folder), torch.float32, mtp=True)
    load(model, folder, progress=False, quantization=quantization)
    return dict(matrices(model))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_every_matrix_is_what_its_format_makes_of_it(folder: Path, quantization: str) -> None:
    exact, rounded = loaded(folder), loaded(folder, quantization)
    for name, weight in rounded.items():
        values = exact[name].dense()
        assert (weight.format == Dense()) == (name == "backbone.embeddings"), name
        expected = weight.format.quantize(values)
        assert expected.keys() == weight.parts.keys()
        for part, tensor in expected.items():
            assert torch.equal(
                weight.parts[part].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
            ), (name, part)


def test_four_bits_spare_what_is_small_and_delicate(folder: Path) -> None:
    formats = {name: weight.format.name for name, weight in loaded(folder, "int4").items()}
    assert formats["lm_head"] == formats["backbone.layers.1.mixer.q_proj"] == formats["mtp.layers.0.eh_proj"] == "int8"
    assert formats["backbone.layers.0.mixer.in_proj"] == formats["backbone.layers.3.mixer.experts.up_proj"] == "int4"


def test_rows_that_no_group_divides_have_one_scale(tmp_path: Path) -> None:
    tiny(tmp_path, tokenizer=False, moe_intermediate_size=40)
    formats = {name: weight.format for name, weight in loaded_without_mtp(tmp_path, "int4").items()}
    assert formats["backbone.layers.3.mixer.experts.down_proj"] == Int8(None)


def loaded_without_mtp(folder: Path, quantization: str):
    model = build(ModelConfig.from_folder(folder), torch.bfloat16)
    load(model, folder, progress=False, quantization=quantization)
    return dict(matrices(model))


def test_tied_embeddings_stay(tmp_path: Path) -> None:
    model = build(tiny(tmp_path, tokenizer=False, tie_word_embeddings=True), torch.float32)
    changed = narrow(model, "int8")
    assert "lm_head" not in changed and model.lm_head.format == Dense()


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    model = build(tiny(tmp_path, tokenizer=False), torch.float32)
    with pytest.raises(ConfigError, match="--quantization must be one of int8, .*, got 'awq'"):
        narrow(model, "awq")
