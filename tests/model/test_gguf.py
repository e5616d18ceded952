"""GGUF files: ours are read by the gguf package and by us, and one made as llama.cpp's converter makes them is read."""

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from torch import Tensor

from leyden.config import gguf as headers
from leyden.config.folder import resolve
from leyden.config.model import ModelConfig
from leyden.errors import CheckpointError, ConfigError
from leyden.formats import Dense
from leyden.formats.gguf import Blocks
from leyden.formats.nvfp4 import NVFP4
from leyden.llm import LLM
from leyden.model.checkpoint import build, load, matrices, save
from leyden.model.context import Context
from leyden.model.gguf import metadata, write
from leyden.model.nemotron import Nemotron
from leyden.model.source import Source
from leyden.testing.checkpoints import PRESETS, tiny
from leyden.testing.tokenizer import write as write_tokenizer
from leyden.types import SamplingParams

WIDE = {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64}  # for blocks of 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "leyden" / "gguf"


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Nemotron:
    folder = resolve(path)
    config = ModelConfig.from_folder(folder)
    model = build(config, dtype, mtp=config.num_nextn_predict_layers > 0)
    load(model, folder, progress=False)
    return model


def convert(folder: Path, path: Path, kind: str) -> Path:
    with Source(folder) as source:
        write(source, path, kind, progress=False)
    return path


def logits(model: Nemotron) -> Tensor:
    tokens = torch.arange(40) * 7 % model.config.vocab_size
    with torch.no_grad():
        return model.logits(model(tokens, Context.packed([40]))[0])


def values(model: Nemotron) -> dict[str, Tensor]:
    """Everything as numbers, whatever it is stored in."""
    found = {name: weight.dense().detach() for name, weight in matrices(model)}
    return found | {
        name: parameter.detach() for name, parameter in model.named_parameters() if name.rpartition(".")[0] not in found
    }


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_floats(preset: str, kind: str, tmp_path: Path) -> None:
    config = tiny(tmp_path / "model", preset)
    model = loaded(convert(tmp_path / "model", tmp_path / "model.gguf", kind))
    expected = values(loaded(tmp_path / "model"))
    for name, value in values(model).items():
        if kind == "BF16" and name.endswith(("_proj", "embeddings", "lm_head")):
            expected[name] = expected[name].bfloat16().float()
        if name.endswith("A_log"):
            assert torch.allclose(value, expected[name], rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(value, expected[name]), name
    mine = model.config
    assert mine.dtype == {"F32": "float32", "BF16": "bfloat16"}[kind]
    unsaid = {"dtype", "chunk_size", "quantization", "eos_token_ids"}
    if preset == "dense":
        unsaid |= {"n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_width"}
        unsaid |= {"routed_scaling_factor"}
    for key in ModelConfig.__dataclass_fields__.keys() - unsaid:
        assert getattr(mine, key) == getattr(config, key), key
    assert set(mine.eos_token_ids) == set(config.eos_token_ids)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "NVFP4"])
def test_ours_are_read_by_the_gguf_package(kind: str, tmp_path: Path) -> None:
    tiny(tmp_path / "model", "mtp", **WIDE)
    path = convert(tmp_path / "model", tmp_path / "model.gguf", kind)
    model = loaded(path)
    expected, config = values(model), model.config
    table = headers.names(config.pattern, mtp=True)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for there, tensor in tensors.items():
        if there.endswith(".scale"):
            continue
        here = table[there]
        found = dequantize(tensor.data, tensor.tensor_type)
        if side := tensors.get(there.removesuffix("weight") + "scale"):
            found = found * side.data.reshape(-1, *[1] * (found.ndim - 1))
        for rows, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if here.endswith(f"{rows}.weight"):
                found = found.reshape(heads, -1, 2, found.shape[-1]).swapaxes(1, 2).reshape(found.shape)
        if here.endswith("A_log"):
            found = np.log(-found)
        name = here if here in expected else here.removesuffix(".weight")
        # NVFP4: they multiply the code by the block's scale first
        exact = side is None and not here.endswith("A_log")
        found, value = found.reshape(expected[name].shape), expected[name].numpy()
        assert np.array_equal(found, value) if exact else np.allclose(found, value, rtol=1e-6, atol=0), here
    assert {table[there] for there in tensors if not there.endswith(".scale")} == {
        name if name in dict(model.named_parameters()) else f"{name}.weight" for name in expected
    }


def test_blocks_stay_blocks_in_memory(tmp_path: Path) -> None:
    tiny(tmp_path / "model", "mtp", **WIDE)
    q4, nv = (loaded(convert(tmp_path / "model", tmp_path / f"{kind}.gguf", kind)) for kind in ("Q4_0", "NVFP4"))
    experts = [model.backbone.layers[3].mixer.experts.up_proj.format for model in (q4, nv)]
    assert experts == [Blocks("Q4_0"), NVFP4()]
    assert [model.lm_head.format for model in (q4, nv)] == [Blocks("Q8_0"), NVFP4()]
    assert {model.backbone.embeddings.format for model in (q4, nv)} == {Dense()}
    assert [model.backbone.layers[1].mixer.q_proj.format for model in (q4, nv)] == [Blocks("Q4_0"), Dense()]
    assert nv.mtp.layers[1].mixer.experts.up_proj.format == Dense()
    with pytest.raises(ConfigError, match="cannot hold the format q4_0, q8_0; write a GGUF file"):
        save(q4, tmp_path / "again")


def test_nvfp4_leaves_latent_projections_alone(tmp_path: Path) -> None:
    tiny(tmp_path / "model", "latent", **WIDE, moe_latent_size=64)
    mixer = loaded(convert(tmp_path / "model", tmp_path / "model.gguf", "NVFP4")).backbone.layers[3].mixer
    assert [mixer.fc1_latent_proj.format, mixer.fc2_latent_proj.format] == [Dense(), Dense()]
    assert mixer.experts.down_proj.format == NVFP4()


def test_nvfp4_keeps_its_bits(tmp_path: Path) -> None:
    tiny(tmp_path / "model", **WIDE)
    model = loaded(tmp_path / "model")
    held = {name for name, _ in matrices(model) if "experts" in name or name == "lm_head"}
    for name, weight in matrices(model):
        if name in held:
            stored = NVFP4().quantize(weight.dense())
            weight.allot(NVFP4())
            weight.load_state_dict(stored)
    save(model, tmp_path / "nvfp4")
    write_tokenizer(tmp_path / "nvfp4")
    again = loaded(convert(tmp_path / "nvfp4", tmp_path / "nvfp4.gguf", "NVFP4"))
    for name, weight in matrices(again):
        assert (weight.format == NVFP4()) == (name in held)
        for leaf, tensor in weight.named_parameters():
            other = dict(model.named_parameters())[f"{name}.{leaf}"]
            if name in held:
                assert torch.equal(tensor.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)), (
                    f"{name}.{leaf}"
                )
            elif not name.endswith("embeddings"):
                assert torch.equal(tensor, other.bfloat16().float())


def converters(folder: Path, path: Path, mtp: bool, kind: str = "F32") -> None:
    """What llama.cpp's converter makes of a checkpoint of this family: its names, transforms and metadata, written by
    its own package. With a `kind`, matrices are quantised, and so is the router of the MTP block, but no other."""
    config = json.loads((folder / "config.json").read_text())
    pattern, blocks = config["hybrid_override_pattern"], len(config["hybrid_override_pattern"]) + mtp
    arch = gguf.MODEL_ARCH.NEMOTRON_H_MOE if "E" in pattern else gguf.MODEL_ARCH.NEMOTRON_H
    table = gguf.get_tensor_name_map(arch, blocks)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(blocks)
    writer.add_context_length(1048576)
    writer.add_embedding_length(config["hidden_size"])
    letters = pattern + "+" * mtp
    width = config["moe_intermediate_size"] if "E" in pattern else config["intermediate_size"]
    writer.add_feed_forward_length([width if letter in "E-+" else 0 for letter in letters])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([config["num_key_value_heads"] if letter in "*+" else 0 for letter in letters])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    if "E" in pattern:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        if config.get("moe_latent_size"):
            writer.add_moe_latent_size(config["moe_latent_size"])
    if mtp:
        writer.add_nextn_predict_layers(1)

    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("pixtral")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in added else normal for token in tokens])
    gguf.SpecialVocab(folder, load_merges=True).add_to_gguf(writer)

    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    block = f"blk.{len(pattern)}"
    folded = {  # younger than the released package's table
        "mtp.layers.0.enorm.weight": f"{block}.nextn.enorm.weight",
        "mtp.layers.0.hnorm.weight": f"{block}.nextn.hnorm.weight",
        "mtp.layers.0.eh_proj.weight": f"{block}.nextn.eh_proj.weight",
        "mtp.layers.1.norm.weight": f"{block}.post_attention_norm.weight",
        "mtp.layers.1.final_layernorm.weight": f"{block}.nextn.shared_head_norm.weight",
    }
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        value, last = tensor.float().numpy(), name.split(".")[-2]
        there = folded.get(name)
        if name.startswith("mtp."):
            name = f"backbone.layers.{len(pattern)}." + name.split(".", 3)[3]
        if ".experts." in name:
            before, after = name.split(".mixer.experts.")
            merged = before.replace("backbone", "model") + ".mlp.experts." + after.split(".", 1)[1]
            experts.setdefault(merged, []).append(value)
            if len(experts[merged]) < config["n_routed_experts"]:
                continue
            name, value = merged, np.stack(experts[merged])
        if last in heads:
            value = value.reshape(heads[last], 2, -1, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        elif name.endswith("A_log"):
            value = -np.exp(value)[:, None]
        elif name.endswith("mixer.D"):
            value = value[:, None]
        elif name.endswith("conv1d.weight"):
            value = value[:, 0]
        elif name.endswith("mixer.norm.weight"):
            value = value.reshape(config["n_groups"], -1)
        name = name.replace("dt_bias", "dt.bias").replace("e_score_correction_bias", "e_score_correction.bias")
        there = there or table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert there is not None, name
        floats = there.endswith(("ssm_a", "ssm_d", "ssm_conv1d.weight", "ssm_norm.weight")) or value.ndim == 1
        router = "ffn_gate_inp" in there and not there.startswith(f"{block}.")
        if kind != "F32" and not floats and not router:
            held = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(there, quantize(value.astype(np.float32), held), raw_dtype=held)
        else:
            writer.add_tensor(there, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1"])
def test_quantised_files_of_the_converter(kind: str, tmp_path: Path) -> None:
    tiny(tmp_path / "model", "mtp", **WIDE)
    converters(tmp_path / "model", tmp_path / "model.gguf", mtp=True, kind=kind)
    model, expected = loaded(tmp_path / "model.gguf"), values(loaded(tmp_path / "model"))
    assert model.backbone.layers[3].mixer.experts.up_proj.format == Blocks(kind)
    assert model.mtp.layers[1].mixer.gate.weight.dtype == torch.float32
    for name, value in values(model).items():
        assert (value - expected[name]).norm() <= 0.06 * expected[name].norm(), name


@pytest.mark.parametrize("preset", PRESETS)
def test_files_of_the_converter(preset: str, tmp_path: Path) -> None:
    config = tiny(tmp_path / "model", preset, intermediate_size=96)
    converters(tmp_path / "model", tmp_path / "model.gguf", mtp=config.num_nextn_predict_layers > 0)
    model, expected = loaded(tmp_path / "model.gguf"), loaded(tmp_path / "model")
    assert torch.allclose(logits(model), logits(expected), atol=5e-5)
    for name, value in values(expected).items():
        assert torch.allclose(values(model)[name], value, rtol=1e-6, atol=1e-6), name
    theirs = gguf.GGUFReader(tmp_path / "model.gguf")
    ours = gguf.GGUFReader(convert(tmp_path / "model", tmp_path / "ours.gguf", "F32"))
    assert {t.name: t.shape.tolist() for t in theirs.tensors} == {t.name: t.shape.tolist() for t in ours.tensors}
    for tensor, other in zip(*(sorted(f.tensors, key=lambda t: t.name) for f in (theirs, ours)), strict=True):
        assert np.allclose(tensor.data, other.data, rtol=1e-6), tensor.name
    skip = ("general.", "GGUF.", "tokenizer.", "rope.", ".context_length")
    for key, field in theirs.fields.items():
        if not any(part in key for part in skip):
            assert ours.fields[key].contents() == field.contents() and ours.fields[key].types == field.types, key
    for key in ("tokens", "merges", "token_type", "bos_token_id", "eos_token_id", "unknown_token_id"):
        name = f"tokenizer.ggml.{key}"
        assert ours.fields[name].contents() == theirs.fields[name].contents(), key


def test_llm_answers_from_a_file(tmp_path: Path) -> None:
    tiny(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "model.gguf", "F32")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = []
    for name in ("model", "model.gguf"):
        llm = LLM(str(tmp_path / name), max_model_len=128)
        texts.append([llm.generate("The jar of Leyden", params)[0].outputs[0].token_ids])
        texts[-1].append(llm.chat([{"role": "user", "content": "Hi"}], params).prompt_token_ids)
    assert texts[0] == texts[1]


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    tiny(tmp_path / "model", **WIDE)
    whole = convert(tmp_path / "model", tmp_path / "whole.gguf", "Q8_0").read_bytes()
    part = tmp_path / "cut.gguf.part"
    for size in (0, 100, len(whole) // 2, len(whole) - 1, len(whole)):
        part.write_bytes(whole[:size].replace(b"whole", b"cut"))
        assert convert(tmp_path / "model", tmp_path / "cut.gguf", "Q8_0").read_bytes() == whole
        assert not part.exists()
    part.write_bytes(b"something else" * 10_000)
    assert convert(tmp_path / "model", tmp_path / "cut.gguf", "Q8_0").read_bytes() == whole


def test_files_in_pieces(tmp_path: Path) -> None:
    tiny(tmp_path / "model")
    with Source(tmp_path / "model") as source:
        write(source, tmp_path / "whole.gguf", "F32", progress=False)
    reader = gguf.GGUFReader(tmp_path / "whole.gguf")
    tensors = reader.tensors
    for i, part in enumerate((tensors[:20], tensors[20:]), 1):
        writer = gguf.GGUFWriter(tmp_path / f"model-{i:05}-of-00002.gguf", "nemotron_h_moe")
        for key, field in reader.fields.items() if i == 1 else ():
            if not key.startswith(("GGUF.", "general.architecture")):
                kinds = field.types
                writer.add_key_value(key, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
        for tensor in part:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert torch.equal(logits(loaded(tmp_path / "model-00001-of-00002.gguf")), logits(loaded(tmp_path / "whole.gguf")))
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    (tmp_path / "model-00001-of-00002.gguf").touch()  # another time: the folder is made anew
    with pytest.raises(CheckpointError, match="model-00002-of-00002.gguf: no such file"):
        resolve(tmp_path / "model-00001-of-00002.gguf")


def test_kinds_that_cannot_be_written(tmp_path: Path) -> None:
    tiny(tmp_path / "model")
    with pytest.raises(ConfigError, match="can be written in F32, F16, Q4_0, Q8_0, BF16, NVFP4; found Q4_K"):
        convert(tmp_path / "model", tmp_path / "model.gguf", "Q4_K")


def test_a_gguf_file_beside_safetensors_files_is_not_read(tmp_path: Path) -> None:
    tiny(tmp_path / "model")
    expected = logits(loaded(tmp_path / "model"))
    convert(tmp_path / "model", tmp_path / "model" / "model.gguf", "Q4_0")
    assert torch.equal(logits(loaded(tmp_path / "model")), expected)


def test_the_mtp_module_of_the_releases_is_block_52() -> None:
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    config = ModelConfig.from_dict(PRESETS["mtp"] | {"hybrid_override_pattern": pattern})
    table = headers.names(pattern, True)
    folded = {there: here for there, here in table.items() if here.startswith("mtp.")}
    assert all(there.startswith("blk.52.") for there in folded) and len(folded) == 18
    assert folded["blk.52.nextn.eh_proj.weight"] == "mtp.layers.0.eh_proj.weight"
    assert folded["blk.52.attn_norm.weight"] == "mtp.layers.0.norm.weight"
    assert folded["blk.52.post_attention_norm.weight"] == "mtp.layers.1.norm.weight"
    assert folded["blk.52.nextn.shared_head_norm.weight"] == "mtp.layers.1.final_layernorm.weight"
    assert folded["blk.52.ffn_up_exps.weight"] == "mtp.layers.1.mixer.experts.up_proj.weight"
    keys = metadata(config, "name", "BF16")
    assert keys["nemotron_h_moe.block_count"] == 53 and keys["nemotron_h_moe.nextn_predict_layers"] == 1
    assert [keys[f"nemotron_h_moe.{key}"][52] for key in ("attention.head_count_kv", "feed_forward_length")] == [2, 32]
    assert metadata(replace(config, num_nextn_predict_layers=0), "name", "BF16")["nemotron_h_moe.block_count"] == 52
