import hashlib
from pathlib import Path

import pytest
import torch

from leyden.config.generation import GenerationDefaults
from leyden.config.model import ModelConfig
from leyden.model.checkpoint import load
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.testing.checkpoints import PRESETS, main, tiny
from leyden.text.tokenizer import Tokenizer


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_loads_and_its_logits_tell_tokens_apart(preset: str, tmp_path: Path) -> None:
    config = tiny(tmp_path, preset)
    assert ModelConfig.from_folder(tmp_path) == config
    model = Nemotron(config, torch.float32)
    load(model, tmp_path, progress=False)
    tokens = torch.randint(config.vocab_size, (200,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        hidden, taps = model(tokens, Context.packed([200]), taps=range(config.num_hidden_layers))
        logits = model.logits(hidden)
    assert 0.5 < logits.std() < 3
    assert logits.argmax(-1).unique().numel() > 100
    for before, after in zip([model.embed(tokens), *taps], taps, strict=False):
        moved = (after - before).norm() / before.norm()
        assert 0.05 < moved < 3  # no layer is idle, none drowns the others


def test_same_arguments_same_files(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        tiny(tmp_path / name, seed=seed)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert digests(tmp_path / "a")["model.safetensors"] != digests(tmp_path / "c")["model.safetensors"]


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    config = tiny(tmp_path, vocab_size=600, torch_dtype="bfloat16", n_shared_experts=0)
    assert (config.vocab_size, config.dtype, config.shared_expert_width) == (600, "bfloat16", 0)
    assert (config.eos_token_ids, config.tokenizer_eos_id) == ((2, 11), 11)
    assert GenerationDefaults.from_folder(tmp_path).eos_token_ids == (2, 11)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (600, 11)
    load(Nemotron(config, torch.bfloat16), tmp_path, progress=False)


def test_command(tmp_path: Path) -> None:
    main([str(tmp_path / "a"), "--preset", "latent", "--seed", "3"])
    tiny(tmp_path / "b", "latent", 3)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_without_tokenizer_the_vocabulary_may_be_small(tmp_path: Path) -> None:
    assert tiny(tmp_path, tokenizer=False, vocab_size=40).vocab_size == 40
    assert not (tmp_path / "tokenizer.json").exists()
