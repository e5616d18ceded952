"""Loading and saving: every spelling of the names, strictness, bits, and the dummy recipe."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from leyden.config.model import ModelConfig
from leyden.errors import CheckpointError
from leyden.model import checkpoint
from leyden.model.checkpoint import build, dummy, load, save
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.testing.checkpoints import PRESETS, tiny

Tensors = dict[str, Tensor]


def loaded(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", mtp: bool | None = None) -> Nemotron:
    config = ModelConfig.from_folder(folder)
    model = build(config, dtype, device, config.num_nextn_predict_layers > 0 if mtp is None else mtp)
    load(model, folder, progress=False)
    return model


def same_bits(a: Nemotron, b: Nemotron) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny(tmp_path)
    return tmp_path


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load_keep_the_bits(preset: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tiny(tmp_path / "first", preset)
    model = loaded(tmp_path / "first", dtype)
    save(model, tmp_path / "second")
    again = loaded(tmp_path / "second", dtype)
    assert same_bits(model, again)
    assert again.config.dtype == str(dtype).removeprefix("torch.")


def test_parameters_equal_the_file_and_a_second_load(folder: Path) -> None:
    model, stored = loaded(folder), load_file(folder / "model.safetensors")
    assert same_bits(model, loaded(folder))
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    experts = model.backbone.layers[3].mixer.experts
    for e in range(8):
        name = f"backbone.layers.3.mixer.experts.{e}.down_proj.weight"
        assert torch.equal(experts.down_proj.weight[e], stored.pop(name))
    assert len(stored) == 2 + 1 + 8 + 4 * 8 + 2 * 4 + 2 * (4 + 16) - 8


def test_names_of_a_release(folder: Path) -> None:
    names = load_file(folder / "model.safetensors").keys()
    assert {
        "backbone.embeddings.weight",
        "backbone.norm_f.weight",
        "lm_head.weight",
        "backbone.layers.0.mixer.conv1d.bias",
        "backbone.layers.0.mixer.A_log",
        "backbone.layers.1.mixer.q_proj.weight",
        "backbone.layers.3.mixer.gate.e_score_correction_bias",
        "backbone.layers.3.mixer.experts.7.up_proj.weight",
        "backbone.layers.3.mixer.shared_experts.down_proj.weight",
    } <= names


@pytest.mark.parametrize("tie", [False, True])
def test_meta_model_is_given_memory(tie: bool, tmp_path: Path) -> None:
    tiny(tmp_path, tie_word_embeddings=tie)
    model = loaded(tmp_path, device="meta")
    assert same_bits(model, loaded(tmp_path))
    assert (model.lm_head.weight is model.backbone.embeddings.weight) == tie


def test_mtp_module_is_optional(tmp_path: Path) -> None:
    tiny(tmp_path, "mtp")
    whole, bare = loaded(tmp_path), loaded(tmp_path, mtp=False)
    assert {n: t.tolist() for n, t in bare.state_dict().items()} == {
        n: t.tolist() for n, t in whole.state_dict().items() if not n.startswith("mtp.")
    }
    save(bare, tmp_path / "bare")
    assert same_bits(loaded(tmp_path / "bare"), bare)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.hnorm.weight",
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.mixer.q_proj.weight",
        "mtp.layers.1.mixer.experts.7.down_proj.weight",
        "mtp.layers.1.mixer.gate.e_score_correction_bias",
        "mtp.layers.1.final_layernorm.weight",
    } <= names
    rewrite(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if "hnorm" not in n})
    with pytest.raises(CheckpointError, match=r"missing \(1\): mtp.layers.0.hnorm.weight$"):
        loaded(tmp_path)


def test_shards_and_index(tmp_path: Path) -> None:
    tiny(tmp_path / "one")
    model = loaded(tmp_path / "one")
    save(model, tmp_path / "many", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 5
    assert set(index["weight_map"].values()) == set(files)
    stored = {name: tensor for file in files for name, tensor in load_file(tmp_path / "many" / file).items()}
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    biggest = max(tensor.nbytes for tensor in stored.values())
    assert all((tmp_path / "many" / file).stat().st_size < max(100_000, biggest) + 20_000 for file in files)
    assert same_bits(loaded(tmp_path / "many"), model)

    save(model, tmp_path / "many")  # nothing of the earlier save is left to be read
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == ["config.json", "model.safetensors"]
    assert same_bits(loaded(tmp_path / "many"), model)


@pytest.mark.parametrize("outer", ["", "language_model."])
@pytest.mark.parametrize("inner", ["backbone.", "model."])
def test_prefixes(outer: str, inner: str, folder: Path) -> None:
    expected = loaded(folder)

    def change(tensors: Tensors) -> Tensors:
        return {outer + name.replace("backbone.", inner): tensor for name, tensor in tensors.items()}

    rewrite(folder, change)
    assert same_bits(loaded(folder), expected)


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacked_experts(suffix: str, folder: Path) -> None:
    expected = loaded(folder)

    def change(tensors: Tensors) -> Tensors:
        for side in ("up_proj", "down_proj"):
            before = "backbone.layers.3.mixer.experts."
            stack = [tensors.pop(f"{before}{e}.{side}.weight") for e in range(8)]
            tensors[f"{before}{side}{suffix}"] = torch.stack(stack)
        return tensors

    rewrite(folder, change)
    assert same_bits(loaded(folder), expected)


def test_tied_embeddings(tmp_path: Path) -> None:
    tiny(tmp_path, tie_word_embeddings=True)
    expected, stored = loaded(tmp_path), load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], stored["backbone.embeddings.weight"])
    rewrite(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if n != "lm_head.weight"})
    assert same_bits(loaded(tmp_path), expected)
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": -tensors["backbone.embeddings.weight"]})
    with pytest.raises(CheckpointError, match="tie_word_embeddings is true, but lm_head.weight is not equal"):
        loaded(tmp_path)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_router_and_state_vectors_may_be_bf16_or_f32(stored: torch.dtype, tmp_path: Path) -> None:
    tiny(tmp_path, torch_dtype="bfloat16")
    parts = ("gate.weight", "A_log", ".D", "dt_bias")
    rewrite(tmp_path, lambda tensors: {n: t.to(stored) if n.endswith(parts) else t for n, t in tensors.items()})
    model, file = loaded(tmp_path, torch.bfloat16), load_file(tmp_path / "model.safetensors")
    mixer = model.backbone.layers[0].mixer
    assert mixer.A_log.dtype == mixer.D.dtype == mixer.dt_bias.dtype == torch.float32
    assert torch.equal(mixer.A_log, file["backbone.layers.0.mixer.A_log"].float())
    assert torch.equal(model.backbone.layers[3].mixer.gate.weight, file["backbone.layers.3.mixer.gate.weight"].float())


def test_d30_renamed_tensor_is_missing_and_unexpected(folder: Path) -> None:
    old, new = "backbone.layers.1.mixer.q_proj.weight", "backbone.layers.1.mixer.query.weight"
    rewrite(folder, lambda tensors: {new if name == old else name: tensor for name, tensor in tensors.items()})
    with pytest.raises(CheckpointError) as error:
        loaded(folder)
    assert f"missing (1): {old}" in str(error.value)
    assert f"unexpected (1): {new}" in str(error.value)


@pytest.mark.parametrize(
    "extra",
    [
        "backbone.layers.0.mixer.in_proj.input_scale",
        "backbone.layers.1.mixer.k_proj.k_scale",
        "backbone.layers.1.mixer.v_proj.v_scale",
        "backbone.layers.1.mixer.rotary_emb.inv_freq",
        "backbone.layers.3.mixer.experts.2.up_proj.input_scale",
        "mtp.layers.0.eh_proj.weight",
    ],
)
def test_d30_known_extras_load(extra: str, folder: Path) -> None:
    expected = loaded(folder)
    rewrite(folder, lambda tensors: tensors | {extra: torch.ones(1)})
    assert same_bits(loaded(folder), expected)


@pytest.mark.parametrize(
    "name",
    ["backbone.layers.0.mixer.dt_bias", "backbone.layers.3.mixer.experts.5.down_proj.weight", "lm_head.weight"],
)
def test_d30_deleted_tensor_is_named(name: str, folder: Path) -> None:
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(CheckpointError, match=rf"missing \(1\): {name}$"):
        loaded(folder)


def test_wrong_shape_and_dtype(folder: Path) -> None:
    name = "backbone.layers.0.mixer.in_proj.weight"
    rewrite(folder, lambda tensors: tensors | {name: tensors[name][:-1]})
    with pytest.raises(CheckpointError, match=rf"wrong shape \(1\): {name} \[195, 64\], expected \[196, 64\]"):
        loaded(folder)
    rewrite(folder, lambda tensors: tensors | {name: torch.zeros(196, 64, dtype=torch.int64)})
    with pytest.raises(CheckpointError, match=rf"wrong dtype \(1\): {name} I64, expected BF16, F16, F32"):
        loaded(folder)


def test_long_lists_are_cut(folder: Path) -> None:
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if ".experts." not in n})
    with pytest.raises(CheckpointError, match=r"missing \(32\): .*experts.0.up_proj.weight, .*, and 22 more$"):
        loaded(folder)


def test_same_tensor_in_two_files(folder: Path) -> None:
    save_file({"model.norm_f.weight": torch.ones(64)}, folder / "stray.safetensors")
    with pytest.raises(CheckpointError, match=r"twice \(1\): model.norm_f.weight in model.safetensors and stray"):
        loaded(folder)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    tiny(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1000])
    with pytest.raises(CheckpointError, match="model.safetensors: damaged"):
        loaded(tmp_path)
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors: no such file"):
        loaded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no model.safetensors.index.json, no .*safetensors and no .*gguf files"):
        loaded(tmp_path)


def test_progress_bar_counts_bytes_on_stderr(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Nemotron(ModelConfig.from_folder(folder), torch.float32)
    load(model, folder)
    out, err = capsys.readouterr()
    assert out == "" and "Loading weights: 100%" in err and "B/s" in err


DUMMY = ModelConfig(
    pattern="M*EME-E",
    vocab_size=512,
    hidden_size=128,
    intermediate_sizes=(64,),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    mamba_num_heads=8,
    mamba_head_dim=16,
    n_groups=2,
    ssm_state_size=16,
    n_routed_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_width=64,
)


def made_up(seed: int = 0, dtype: torch.dtype = torch.float32) -> Nemotron:
    model = Nemotron(DUMMY, dtype)
    dummy(model, seed)
    return model


def test_dummy_follows_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_CHUNK", 1000)  # several chunks a tensor
    tensors = dict(made_up().named_parameters())

    def spread(name: str, low: float, high: float) -> None:
        values = tensors[name].detach()
        assert low <= values.min() and values.max() <= high
        assert values.std() == pytest.approx((high - low) / 12**0.5, rel=0.05)

    spread("backbone.embeddings.weight", -1.73, 1.73)
    spread("lm_head.weight", -0.035, 0.035)
    spread("backbone.layers.0.mixer.in_proj.weight", -0.035, 0.035)
    spread("backbone.layers.0.mixer.conv1d.weight", -0.035, 0.035)
    spread("backbone.layers.0.mixer.out_proj.weight", -0.0035, 0.0035)
    spread("backbone.layers.1.mixer.q_proj.weight", -0.035, 0.035)
    spread("backbone.layers.1.mixer.o_proj.weight", -0.0035, 0.0035)
    spread("backbone.layers.2.mixer.gate.weight", -0.035, 0.035)
    spread("backbone.layers.2.mixer.experts.up_proj.weight", -0.035, 0.035)
    spread("backbone.layers.2.mixer.experts.down_proj.weight", -0.0035, 0.0035)
    spread("backbone.layers.2.mixer.shared_experts.down_proj.weight", -0.0035, 0.0035)
    spread("backbone.layers.5.mixer.down_proj.weight", -0.0035, 0.0035)
    decay = -tensors["backbone.layers.0.mixer.A_log"].detach().exp()
    assert decay.min() >= -16 and decay.max() <= -1
    dt_bias = tensors["backbone.layers.0.mixer.dt_bias"].detach()
    assert dt_bias.min() >= -6 and dt_bias.max() <= -2
    ones = ("layers.0.norm.weight", "layers.0.mixer.norm.weight", "layers.0.mixer.D", "norm_f.weight")
    assert all((tensors[f"backbone.{name}"] == 1).all() for name in ones)
    assert (tensors["backbone.layers.2.mixer.gate.e_score_correction_bias"] == 0).all()


def test_dummy_is_distinct_and_reproducible() -> None:
    model = made_up()
    assert same_bits(model, made_up())
    assert not same_bits(model, made_up(seed=1))
    layers = model.backbone.layers
    assert not torch.equal(layers[2].mixer.gate.weight, layers[4].mixer.gate.weight)
    assert not torch.equal(layers[0].mixer.in_proj.weight, layers[3].mixer.in_proj.weight)
    stack = layers[2].mixer.experts.up_proj.weight
    assert not torch.equal(stack[0], stack[1])
    coarse = made_up(dtype=torch.bfloat16)
    assert torch.equal(coarse.lm_head.weight, model.lm_head.weight.bfloat16())


def test_dummy_routes_near_uniformly_and_independently() -> None:
    model = made_up(dtype=torch.bfloat16)
    tokens = torch.randint(512, (1024,), generator=torch.Generator().manual_seed(0))
    chosen: list[Tensor] = []
    for layer in model.backbone.layers:
        if hasattr(layer.mixer, "route"):
            layer.mixer.register_forward_pre_hook(lambda mixer, args: chosen.append(mixer.route(args[0])[0]))
    with torch.no_grad():
        hidden, _ = model(tokens, Context.packed([512, 512]))
        logits = model.logits(hidden)
    assert logits.isfinite().all()
    assert len(chosen) == 3
    for ids in chosen:
        share = torch.bincount(ids.flatten(), minlength=16) / ids.numel()
        assert share.min() > 0.5 / 16 and share.max() < 2 / 16
    sets = [ids.sort(-1).values for ids in chosen]
    assert (sets[0] == sets[1]).all(-1).float().mean() < 0.05  # layers choose differently
