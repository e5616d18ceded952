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
from leyden.model.checkpoint import matrices
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


def test_without_memory_it_has_formats_and_no_values(tmp_path: Path):
    tiny(tmp_path, TARGET, "dspark")
    network, there = load(tmp_path, Nemotron(TARGET, torch.bfloat16, "meta")), load(tmp_path, target())
    assert all(parameter.is_meta for parameter in network.parameters())
    assert [(name, weight.format) for name, weight in matrices(network)] == [
        (name, weight.format) for name, weight in matrices(there)
    ]


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


def test_quantised_drafters(tmp_path: Path):
    """NVFP4 where the releases have it: fc, the MLPs and W2 of the Markov head."""
    tiny(tmp_path / "plain", TARGET)
    network = load(tmp_path / "plain", target())
    plain = {name: weight.dense() for name, weight in matrices(network)}
    for name, weight in matrices(network):
        if name == "fc" or ".mlp." in name or name.endswith("markov_w2"):
            tensors = NVFP4().quantize(weight.dense())
            weight.allot(NVFP4())
            weight.load_state_dict(tensors)
    save(network, tmp_path / "small")
    stored = load_file(tmp_path / "small" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.uint8 and stored["fc.weight"].shape == (32, 32)
    assert stored["layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]["quant_method"]
    again = dict(matrices(load(tmp_path / "small", target())))
    assert sum(weight.format == NVFP4() for weight in again.values()) == 1 + 2 * 3 + 1
    for name, weight in matrices(network):
        assert torch.equal(weight.dense(), again[name].dense())
        assert (weight.dense() - plain[name]).float().norm() < 0.12 * plain[name].float().norm()


def test_the_published_tensors_fit(tmp_path: Path):
    """Names, shapes and dtypes of the DSpark release, written as empty data: all of them are found a place for."""
    layer = {"input_layernorm": (64,), "post_attention_layernorm": (64,), "self_attn.q_norm": (16,)}
    layer |= {"self_attn.k_norm": (16,), "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64)}
    layer |= {"self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64)}
    shapes = {"embed_tokens": (96, 64), "hidden_norm": (64,), "norm": (64,), "markov_head.markov_w1": (96, 32)}
    four_bit = {"fc": (64, 128), "markov_head.markov_w2": (96, 32)}
    for i in range(2):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        four_bit |= {f"layers.{i}.mlp.{name}": (128, 64) for name in ("gate_proj", "up_proj")}
        four_bit |= {f"layers.{i}.mlp.down_proj": (64, 128)}
    tensors = {f"{name}.weight": torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    tensors |= {f"layers.{i}.self_attn.attention_sink_bias": torch.ones(4, dtype=torch.bfloat16) for i in range(2)}
    for name, (n, k) in four_bit.items():
        tensors[f"{name}.weight"] = torch.full((n, k // 2), 0x22, dtype=torch.uint8)  # two times 1.0
        tensors[f"{name}.weight_scale"] = torch.full((n, k // 16), 0.5).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_2"] = torch.tensor(3.0)
    config = replace(TARGET, hidden_size=64)
    tiny(tmp_path, config, markov_rank=32)
    save_file(tensors, tmp_path / "model.safetensors")
    network = load(tmp_path, target(config=config))
    assert (network.fc.dense() == 1.5).all() and network.markov_head is not None
    assert (network.markov_head.markov_w2.dense() == 1.5).all()


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
