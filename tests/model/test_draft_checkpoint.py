"""Drafter networks on disk: round trip, the names of other exporters, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from leyden.config.drafter import DrafterConfig
from leyden.config.model import ModelConfig
from leyden.errors import CheckpointError
from leyden.formats.nvfp4 import NVFP4
from leyden.model.draft_checkpoint import load, save
from leyden.model.drafters import DrafterNetwork
from leyden.model.nemotron import Nemotron
from leyden.testing.drafters import tiny

TARGET = ModelConfig(vocab_size=96, hidden_size=32, pattern="M*E-", intermediate_sizes=(32,))


def target(dtype: torch.dtype = torch.bfloat16, config: ModelConfig = TARGET) -> Nemotron:
    return Nemotron(config, dtype)


def edit(folder: Path, change) -> None:
    """`change` gets the tensors by name and returns those to be written."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def read(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load(folder, target()).named_parameters())


@pytest.mark.parametrize(("method", "head"), [("dflash", False), ("dspark", False), ("dspark", True)])
def test_round_trip(method: str, head: bool, tmp_path: Path):
    config = tiny(tmp_path / "a", TARGET, method, enable_confidence_head=head)
    network = load(tmp_path / "a", target())
    assert network.config == config == DrafterConfig.from_folder(tmp_path / "a")
    save(network, tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_names_are_the_published_ones(tmp_path: Path):
    tiny(tmp_path, TARGET, "dspark")
    layer = ["input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.attention_sink_bias"]
    layer += [f"self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer += [f"mlp.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")]
    names = {"embed_tokens.weight", "fc.weight", "hidden_norm.weight", "norm.weight"}
    names |= {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    assert load_file(tmp_path / "model.safetensors").keys() == names | {
        f"layers.{i}.{n}" for i in (0, 1) for n in layer
    }


def test_flat_names_and_the_prefix_model(tmp_path: Path):
    tiny(tmp_path, TARGET, "dspark", enable_confidence_head=True, confidence_head_with_markov=True)
    before = read(tmp_path)
    edit(tmp_path, lambda t: {"model." + name: tensor for name, tensor in t.items()})
    flat = {"markov_head.": "", "confidence_head.proj": "confidence_proj"}
    after = [read(tmp_path)]
    for old, new in flat.items():
        edit(tmp_path, lambda t, old=old, new=new: {n.replace("model.", "").replace(old, new): v for n, v in t.items()})
        after.append(read(tmp_path))
    assert "markov_w1.weight" in load_file(tmp_path / "model.safetensors")
    for tensors in after:
        assert all(torch.equal(before[name], tensors[name]) for name in before)


def test_flat_name_wins_over_nested_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tiny(tmp_path, TARGET, "dspark")
    edit(tmp_path, lambda t: t | {"markov_w1.weight": torch.full_like(t["markov_head.markov_w1.weight"], 2)})
    assert (read(tmp_path)["markov_head.markov_w1.weight"] == 2).all()
    assert "two names" in caplog.text


@pytest.mark.parametrize(("width", "reads"), [(32, "hidden"), (48, "markov")])
def test_confidence_head_is_known_by_its_tensors(width: int, reads: str, tmp_path: Path):
    """Whatever config.json says: exporters differ in the default of confidence_head_with_markov."""
    tiny(tmp_path, TARGET, "dspark")
    head = {"confidence_head.proj.weight": torch.ones(1, width), "confidence_head.proj.bias": torch.zeros(1)}
    edit(tmp_path, lambda t: t | head)
    assert load(tmp_path, target()).config.confidence == reads


def test_own_embedding_is_kept_and_a_missing_one_is_the_targets(tmp_path: Path):
    tiny(tmp_path, TARGET)
    model = target()
    assert load(tmp_path, model).embed_tokens is not model.backbone.embeddings
    edit(tmp_path, lambda t: {name: tensor for name, tensor in t.items() if name != "embed_tokens.weight"})
    assert load(tmp_path, model).embed_tokens is model.backbone.embeddings


def test_it_computes_in_the_targets_dtype(tmp_path: Path):
    tiny(tmp_path, TARGET)
    assert {p.dtype for p in load(tmp_path, target(torch.float32)).parameters()} == {torch.float32}


def test_misfits_are_named(tmp_path: Path):
    tiny(tmp_path, TARGET)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["layers.0.self_attn.sinks"] = tensors.pop("layers.0.self_attn.attention_sink_bias")
        tensors["fc.weight"] = tensors["fc.weight"][:, :32].contiguous()
        return tensors

    edit(tmp_path, change)
    with pytest.raises(CheckpointError) as error:
        read(tmp_path)
    assert "missing (1): layers.0.self_attn.attention_sink_bias" in str(error.value)
    assert "unexpected (1): layers.0.self_attn.sinks" in str(error.value)
    assert "wrong shape (1): fc.weight [32, 32], expected [32, 64]" in str(error.value)


def test_sinks_in_the_file_need_the_flag_in_the_config(tmp_path: Path):
    tiny(tmp_path, TARGET)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attention_sink_bias"] = config["dflash_config"]["attention_sink_bias"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="unexpected.*attention_sink_bias"):
        read(tmp_path)


@pytest.mark.parametrize(
    "change", [{"vocab_size": 97}, {"hidden_size": 64}, {"pattern": "M*E", "intermediate_sizes": ()}]
)
def test_another_target_is_refused(change: dict, tmp_path: Path):
    tiny(tmp_path, TARGET)
    with pytest.raises(CheckpointError, match="a drafter for another target: it needs .* the layers \\(1, 3\\)"):
        load(tmp_path, target(config=replace(TARGET, **change)))


def test_a_file_of_zeros_is_refused(tmp_path: Path):
    tiny(tmp_path, TARGET)
    edit(tmp_path, lambda t: {name: torch.zeros_like(tensor) for name, tensor in t.items()})
    with pytest.raises(CheckpointError, match="all zeros"):
        read(tmp_path)


def test_matrices_come_in_the_format_of_the_file(tmp_path: Path):
    tiny(tmp_path, TARGET)
    dense = load(tmp_path, target()).fc.dense().float()
    parts = NVFP4().quantize(dense)
    edit(tmp_path, lambda t: t | {f"fc.{name}": tensor for name, tensor in parts.items()})
    fc = load(tmp_path, target()).fc
    assert fc.format == NVFP4()
    torch.testing.assert_close(fc.dense().float(), NVFP4().dequantize(parts, fc.dtype).float())
    assert (fc.dense().float() - dense).abs().max() < 0.2 * dense.abs().max()  # four bits
    edit(tmp_path, lambda t: t | {"fc.weight_scale_2": parts["weight_scale_2"].reshape(1)})  # as some write it
    assert torch.equal(load(tmp_path, target()).fc.dense(), fc.dense())
    edit(tmp_path, lambda t: t | {"fc.weight_scale": t["fc.weight_scale"].float()})
    with pytest.raises(CheckpointError, match=r"wrong dtype \(1\): fc.weight_scale F32, expected F8_E4M3"):
        load(tmp_path, target())


def test_network_builds_without_memory():
    config = DrafterConfig.from_dict({**_LARGE, "vocab_size": 131072})
    assert all(p.is_meta for p in DrafterNetwork(config, torch.bfloat16, "meta").parameters())


_LARGE = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 2688,
    "intermediate_size": 6144,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mask_token_id": 990,
    "target_layer_ids": [1, 51],
    "rope_theta": 10000,
}
