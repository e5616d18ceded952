"""Checkpoint files against transformers: it reads what we write, we read what it writes, and the logits agree.

time_step_min must be next to nothing there: its chunked scan clamps dt to it.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, NemotronHConfig, NemotronHForCausalLM

from leyden.config.model import ModelConfig
from leyden.model.checkpoint import load, save
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.testing.checkpoints import PRESETS, tiny

SAME_WIDTHS = {"intermediate_size": 96}  # transformers knows one width for all dense layers
TOKENS = torch.randint(512, (100,), generator=torch.Generator().manual_seed(3))


def ours(folder: Path) -> Nemotron:
    config = ModelConfig.from_folder(folder)
    model = Nemotron(config, torch.float32, mtp=config.num_nextn_predict_layers > 0)
    load(model, folder, progress=False)
    return model


@torch.no_grad()
def logits(model: Nemotron) -> Tensor:
    return model.logits(model(TOKENS, Context.packed([len(TOKENS)]))[0])


@torch.no_grad()
def their_logits(model: NemotronHForCausalLM) -> Tensor:
    return model(TOKENS[None]).logits[0]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("shard", [10**9, 100_000])
def test_transformers_reads_what_we_write(preset: str, shard: int, tmp_path: Path) -> None:
    tiny(tmp_path / "first", preset, tokenizer=False, **SAME_WIDTHS)
    model = ours(tmp_path / "first")
    save(model, tmp_path / "second", shard)
    theirs, info = NemotronHForCausalLM.from_pretrained(
        tmp_path / "second", time_step_min=1e-30, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert not {key for key in info["unexpected_keys"] if not key.startswith("mtp.")}
    assert theirs.dtype == torch.float32
    torch.testing.assert_close(logits(model), their_logits(theirs.eval()), atol=1e-4, rtol=0)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "mtp"])  # transformers has no MTP module
@pytest.mark.parametrize("shard", ["1GB", "100KB"])
def test_we_read_what_transformers_writes(preset: str, shard: str, tmp_path: Path) -> None:
    tiny(tmp_path / "first", preset, tokenizer=False, **SAME_WIDTHS)
    theirs = NemotronHForCausalLM.from_pretrained(tmp_path / "first", time_step_min=1e-30).eval()
    theirs.save_pretrained(tmp_path / "second", max_shard_size=shard)
    assert (tmp_path / "second" / "model.safetensors.index.json").exists() == (shard == "100KB")
    model = ours(tmp_path / "second")
    torch.testing.assert_close(logits(model), their_logits(theirs), atol=1e-4, rtol=0)
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in ours(tmp_path / "first").state_dict().items())


def test_tied_embeddings_in_transformers(tmp_path: Path) -> None:
    tiny(tmp_path, tokenizer=False, tie_word_embeddings=True)
    theirs = NemotronHForCausalLM.from_pretrained(tmp_path, time_step_min=1e-30).eval()
    torch.testing.assert_close(logits(ours(tmp_path)), their_logits(theirs), atol=1e-4, rtol=0)


def test_a_model_born_in_transformers(tmp_path: Path) -> None:
    raw = {
        key: value for key, value in PRESETS["tiny"].items() if key not in ("hybrid_override_pattern", "torch_dtype")
    }
    theirs = NemotronHForCausalLM(NemotronHConfig(**raw, layers_block_type=["mamba", "moe", "attention", "moe"])).eval()
    theirs.config.time_step_min = 1e-30
    theirs.generation_config = GenerationConfig(eos_token_id=[2, 11], temperature=0.6, do_sample=True)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    assert "backbone.layers.1.mixer.experts.7.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    config = ModelConfig.from_folder(tmp_path)
    assert (config.pattern, config.dtype, config.eos_token_ids) == ("ME*E", "bfloat16", (2, 11))
    torch.testing.assert_close(logits(ours(tmp_path)), their_logits(theirs.float()), atol=1e-4, rtol=0)
