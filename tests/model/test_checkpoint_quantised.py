"""Quantised checkpoints: every format read and written again, releases at full size, and what is refused."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from leyden import ops
from leyden.config.model import ModelConfig
from leyden.errors import CheckpointError, ConfigError
from leyden.formats import Dense, Format, Weight
from leyden.formats.fp8 import FP8, MXFP8, FP8Block, FP8Channel
from leyden.formats.int4 import Int4
from leyden.formats.nvfp4 import NVFP4, arrange
from leyden.formats.scheme import describe
from leyden.model.checkpoint import adopt, build, dummy, fill, load, matrices, misfits, save, stored_tensors, tensors_of
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.testing.checkpoints import tiny

Tensors = dict[str, Tensor]
FORMATS = {
    "nvfp4": NVFP4(),
    "nvfp4 w4a4": NVFP4(input_scale=True),
    "fp8": FP8(),
    "fp8 static": FP8(input_scale=True),
    "fp8_channel": FP8Channel(),
    "fp8_block": FP8Block(),
    "mxfp8": MXFP8(),
    "int4 g32": Int4(32),
    "int4 asymmetric": Int4(32, symmetric=False, scale_dtype=torch.float16),
    "int4 rows": Int4(None),
}
LINEAR = ("_proj", "lm_head")
WIDE = {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64}  # for formats in runs of 32


def quantise(folder: Path, choose: Callable[[str], Format]) -> Tensors:
    """Rewrite a checkpoint with the matrices in the formats that `choose` gives; returns their values."""
    path = folder / "model.safetensors"
    tensors, values, formats = load_file(path), {}, {}
    for name in list(tensors):
        matrix = name.removesuffix(".weight")
        if matrix.endswith("embeddings"):
            formats[matrix] = Dense()
        elif matrix.endswith(LINEAR):
            formats[matrix] = choose(matrix)
            stored = formats[matrix].quantize(tensors.pop(name))
            tensors |= {f"{matrix}.{leaf}": part for leaf, part in stored.items()}
            values[name] = formats[matrix].dequantize(stored, torch.float32)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": describe(formats)}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def edit(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def loaded(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Nemotron:
    config = ModelConfig.from_folder(folder)
    model = build(config, dtype, device, config.num_nextn_predict_layers > 0)
    load(model, folder, progress=False)
    return model


def logits(model: Nemotron) -> Tensor:
    tokens = torch.arange(40) * 7 % model.config.vocab_size
    with torch.no_grad(), ops.using("reference"):  # kernels round in another order than dequantised references
        return model.logits(model(tokens, Context.packed([40]))[0])


def same_bits(a: Nemotron, b: Nemotron) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(
        t.dtype == second[n].dtype and torch.equal(t.view(-1).view(torch.uint8), second[n].view(-1).view(torch.uint8))
        for n, t in first.items()
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny(tmp_path, tokenizer=False, vocab_size=40, **WIDE)
    return tmp_path


def mixed(matrix: str) -> Format:
    """As Lightning: experts, shared experts and head NVFP4, Mamba FP8, attention as it was."""
    if (
        matrix.startswith("mtp.")
        or "q_proj" in matrix
        or "k_proj" in matrix
        or "v_proj" in matrix
        or "o_proj" in matrix
    ):
        return Dense()
    return FP8(input_scale=True) if matrix.endswith(("in_proj", "out_proj")) else NVFP4()


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_every_format(format: Format, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = loaded(folder)
    values = quantise(folder, lambda _: format)
    model = loaded(folder)
    assert not caplog.records  # the files hold what config.json says
    assert {w.format for w in (model.lm_head, model.backbone.layers[3].mixer.experts.up_proj)} == {format}
    assert model.backbone.embeddings.format == Dense()
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if name in values:
                parameter.copy_(values[name])
            elif ".experts." in name:
                each = [values[name.replace("experts.", f"experts.{i}.")] for i in range(8)]
                parameter.copy_(torch.stack(each))
    assert torch.equal(logits(model), logits(expected))

    save(model, tmp_path / "again")
    assert same_bits(loaded(tmp_path / "again"), model)
    config = ModelConfig.from_folder(tmp_path / "again")
    assert config.quantization == ModelConfig.from_folder(folder).quantization
    assert same_bits(loaded(folder, device="meta"), model)


def test_tiles_are_saved_as_the_release_has_them(folder: Path, tmp_path: Path) -> None:
    tiny(folder, "mtp", **WIDE)
    quantise(folder, lambda _: NVFP4())
    model, before = loaded(folder), loaded(folder)
    arranged = [weight for _, weight in matrices(model) if weight.format == NVFP4() and arrange(weight)]
    assert len(arranged) > 5 and torch.equal(logits(model), logits(before))
    save(model, tmp_path / "again")
    assert same_bits(loaded(tmp_path / "again"), before)


def test_formats_side_by_side(folder: Path, tmp_path: Path) -> None:
    tiny(folder, "mtp", **WIDE)
    quantise(folder, mixed)
    scales = {f"backbone.layers.{i}.mixer.{w}_proj.{w}_scale": torch.tensor([i / 10]) for i in (1, 5) for w in "kv"}
    edit(folder, lambda tensors: tensors | scales)
    model = loaded(folder, torch.bfloat16)
    layers = model.backbone.layers
    assert [layers[0].mixer.in_proj.format, layers[0].mixer.out_proj.format] == [FP8(input_scale=True)] * 2
    assert [layers[3].mixer.experts.down_proj.format, model.lm_head.format] == [NVFP4(), NVFP4()]
    assert {model.mtp.layers[1].mixer.experts.up_proj.format, layers[1].mixer.q_proj.format} == {Dense()}
    assert [getattr(layers[i].mixer, f"{w}_scale") for i in (1, 5) for w in "kv"] == pytest.approx([0.1, 0.1, 0.5, 0.5])
    assert model.mtp.layers[0].mixer.k_scale == 1.0
    assert logits(model).isfinite().all()

    save(model, tmp_path / "again")
    again = loaded(tmp_path / "again", torch.bfloat16)
    assert same_bits(again, model) and again.backbone.layers[5].mixer.v_scale == layers[5].mixer.v_scale
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()


def test_only_dense_weights_learn(folder: Path) -> None:
    quantise(folder, mixed)
    for name, parameter in loaded(folder).named_parameters():
        learns = parameter.dtype == torch.float32 and "scale" not in name
        assert parameter.requires_grad == learns, name


@pytest.mark.parametrize(
    ("spelling", "which"),
    [
        ("k_proj.k_scale", "k"),
        ("v_proj.v_scale", "v"),
        ("k_scale", "k"),
        ("attn.v_scale", "v"),
        ("attn.kv_scale", "kv"),
    ],
)
def test_scales_of_an_fp8_cache(spelling: str, which: str, folder: Path) -> None:
    edit(folder, lambda tensors: tensors | {f"backbone.layers.1.mixer.{spelling}": torch.tensor(0.25)})
    mixer = loaded(folder).backbone.layers[1].mixer
    assert (mixer.k_scale, mixer.v_scale) == (0.25 if "k" in which else 1, 0.25 if "v" in which else 1)
    edit(folder, lambda tensors: tensors | {"backbone.layers.0.mixer.k_scale": torch.tensor(0.25)})
    with pytest.raises(CheckpointError, match=r"unexpected \(1\): backbone.layers.0.mixer.k_scale"):
        loaded(folder)


def test_d30_extra_input_scale(folder: Path) -> None:
    quantise(folder, mixed)
    expected = loaded(folder)
    edit(folder, lambda tensors: tensors | {"backbone.layers.5.mixer.o_proj.input_scale": torch.tensor(1.0)})
    assert same_bits(loaded(folder), expected)
    expert = "backbone.layers.3.mixer.experts.{}.up_proj.input_scale"
    edit(folder, lambda tensors: tensors | {expert.format(0): torch.tensor(1.0)})
    assert same_bits(loaded(folder), expected)  # of one expert only: dropped
    edit(folder, lambda tensors: tensors | {expert.format(i): torch.tensor(1.0) for i in range(8)})
    assert loaded(folder).backbone.layers[3].mixer.experts.up_proj.format == NVFP4(input_scale=True)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight_scale_2",
        "backbone.layers.3.mixer.experts.7.up_proj.weight_scale_2",
        "backbone.layers.3.mixer.experts.7.up_proj.weight_scale",
        "backbone.layers.3.mixer.experts.0.down_proj.weight",
        "backbone.layers.0.mixer.in_proj.weight_scale",
    ],
)
def test_d30_a_missing_part_is_named(name: str, folder: Path) -> None:
    quantise(folder, mixed)
    edit(folder, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(CheckpointError, match=rf"missing \(\d+\): (.*, )?{name}"):
        loaded(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("experts.2.up_proj.weight", torch.zeros(64, 64), r"experts.2.up_proj.weight F32, expected U8"),
        ("experts.2.up_proj.weight_scale", torch.zeros(64, 4), r"weight_scale F32, expected F8_E4M3"),
        ("experts.2.up_proj.weight_scale_2", torch.ones(3), r"weight_scale_2 \[3\], expected \[\]"),
        ("experts.2.up_proj.weight_zero_point", torch.ones(3), r"unexpected \(1\): .*weight_zero_point"),
        ("experts.2.up_proj.pre_quant_scale", torch.ones(3), r"unexpected \(1\): .*pre_quant_scale"),
    ],
)
def test_parts_that_do_not_fit(name: str, tensor: Tensor, message: str, folder: Path) -> None:
    quantise(folder, mixed)
    edit(folder, lambda tensors: tensors | {f"backbone.layers.3.mixer.{name}": tensor})
    with pytest.raises(CheckpointError, match=message):
        loaded(folder)


def test_spellings_of_compressed_tensors(folder: Path) -> None:
    quantise(folder, mixed)
    expected = loaded(folder)
    spelled = {"weight": "weight_packed", "weight_scale": "weight_scale", "weight_scale_2": "weight_global_scale"}

    def change(tensors: Tensors) -> Tensors:
        changed = {}
        for name, tensor in tensors.items():
            matrix, _, leaf = name.rpartition(".")
            if f"{matrix}.weight_scale_2" in tensors:  # NVFP4; a power of two has an exact reciprocal
                tensor = 1 / torch.full((1,), 2.0**-12) if leaf == "weight_scale_2" else tensor
                name = f"{matrix}.{spelled[leaf]}"
            elif f"{matrix}.input_scale" in tensors:  # FP8
                tensor = tensor.reshape(1) if leaf.endswith("scale") else tensor
            changed[name] = tensor
        return changed

    edit(folder, change)
    model = loaded(folder)
    for name, parameter in expected.named_parameters():
        if name.endswith("weight_scale_2"):
            parameter.fill_(2.0**-12)
    assert same_bits(model, expected)


def test_scales_in_other_shapes_and_dtypes(folder: Path) -> None:
    quantise(folder, lambda matrix: FP8Channel() if "in_proj" in matrix else FP8Block() if "up" in matrix else MXFP8())
    expected = loaded(folder)

    def change(tensors: Tensors) -> Tensors:
        for name, tensor in tensors.items():
            if "in_proj.weight_scale" in name:
                tensors[name] = tensor[:, 0]
            elif "up_proj.weight_scale" in name:
                tensors[name] = tensor[:, None, :, None]  # as ModelOpt writes blocks
            elif name.endswith("weight_scale"):
                tensors[name] = tensor.view(torch.float8_e8m0fnu)
        return tensors

    edit(folder, change)
    assert same_bits(loaded(folder), expected)


def test_files_count_where_config_json_says_something_else(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantise(folder, mixed)
    expected = loaded(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*o_proj"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert same_bits(loaded(folder), expected)
    assert "matrices are not stored as config.json says: backbone.layers." in caplog.records[-1].message
    assert caplog.records[-1].levelno == logging.WARNING


# Of the releases: real shapes and recipes, on meta.
SHAPE: dict[str, Any] = {
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
}
PATTERN = SHAPE["hybrid_override_pattern"]
ATTENTION = [f"backbone.layers.{i}.mixer.{w}_proj" for i, letter in enumerate(PATTERN) if letter == "*" for w in "qkvo"]


def on_disk(model: Nemotron) -> tuple[int, int]:
    """(tensors, bytes) of the files; A_log, D and dt_bias are F32 in memory and BF16 in the releases."""
    tensors = dict(tensors_of(model))
    widened = sum(t.nbytes // 2 for name, t in tensors.items() if name.endswith((".A_log", ".D", ".dt_bias")))
    return len(tensors), sum(t.nbytes for t in tensors.values()) - widened


def test_nano_nvfp4_at_full_size() -> None:
    before = [i for i, letter in enumerate(PATTERN) if letter == "M" and PATTERN[i + 1] == "*"]
    excluded = ["lm_head", *ATTENTION, *(f"backbone.layers.{i}.mixer.{w}_proj" for i in before for w in ("in", "out"))]
    recipe = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": excluded}
    config = ModelConfig.from_dict(SHAPE | {"quantization_config": {"quantization": recipe}})
    assert on_disk(build(config, torch.bfloat16, "meta")) == (24_147, 19_339_781_632)
    assert on_disk(build(ModelConfig.from_dict(SHAPE), torch.bfloat16, "meta"))[0] == 6_243


def test_lightning_nvfp4_at_full_size() -> None:
    layers = {"lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16}}
    for i, letter in enumerate(PATTERN):
        mixer = f"backbone.layers.{i}.mixer"
        if letter == "M":
            layers |= {f"{mixer}.{w}_proj": {"quant_algo": "FP8"} for w in ("in", "out")}
        elif letter == "E":
            owners = [f"experts.{e}" for e in range(128)] + ["shared_experts"]
            layers |= {f"{mixer}.{o}.{w}_proj": layers["lm_head"] for o in owners for w in ("up", "down")}
    assert len(layers) == 5_981
    recipe = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers}
    shape = SHAPE | {"num_nextn_predict_layers": 1, "quantization_config": {"quantization": recipe}}
    model = build(ModelConfig.from_dict(shape), torch.bfloat16, "meta", mtp=True)
    tensors, size = on_disk(model)
    cache_scales = 2 * PATTERN.count("*")
    assert tensors + cache_scales == 18_487
    assert size == pytest.approx(21.58e9, rel=2e-3)


def test_dummy(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    held: dict[str, Format] = {"lm_head": Int4(32)}
    dense = build(config, torch.float32)
    dummy(dense)
    for format in [NVFP4(), NVFP4(input_scale=True), FP8(), MXFP8()]:
        held = {"lm_head": format, "backbone.layers.3.mixer.experts.0.down_proj": format}
        config = ModelConfig.from_folder(folder, {"quantization_config": describe(held)})
        first, second = build(config, torch.float32), build(config, torch.float32)
        dummy(first, seed=3)
        dummy(second, seed=3)
        assert same_bits(first, second)
        assert torch.equal(first.backbone.embeddings.weight, second.backbone.embeddings.weight)
        experts = first.backbone.layers[3].mixer.experts
        assert not torch.equal(experts.down_proj.dense()[0], experts.down_proj.dense()[1])
        assert first.lm_head.dense().std().item() == pytest.approx(dense.lm_head.weight.std().item(), rel=0.2)
        ratio = first.lm_head.dense().std() / experts.down_proj.dense().std()
        assert ratio.item() == pytest.approx(10, rel=0.1)
        assert logits(first).isfinite().all()


def test_a_scheme_that_cannot_be_read_is_refused_before_memory_is_taken(folder: Path) -> None:
    config = ModelConfig.from_folder(folder, {"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(ConfigError, match="quant_method must be modelopt or compressed-tensors; found 'gptq'"):
        build(config, torch.float32)


class Head(nn.Module):
    """A network of another kind, as drafters are."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = Weight(64, 32, dtype=torch.float32), Weight(32, 64, dtype=torch.float32)
        self.norm = nn.Parameter(torch.empty(32))


def test_other_networks_adopt_the_formats_of_their_files(tmp_path: Path) -> None:
    values = torch.randn(64, 32)
    stored = {f"up_proj.{leaf}": tensor for leaf, tensor in NVFP4().quantize(values).items()}
    stored |= {"down_proj.weight": torch.randn(32, 64).bfloat16(), "norm": torch.randn(32)}
    stored["up_proj.weight_scale_2"] = stored["up_proj.weight_scale_2"].reshape(1)
    save_file(stored, tmp_path / "model.safetensors")
    files = {stored.name: stored for stored in stored_tensors(tmp_path)}
    head = Head()
    adopt(head, files)
    targets = {name: parameter.detach() for name, parameter in head.named_parameters()}
    assert files.keys() == targets.keys()
    assert not [problem for name, target in targets.items() for problem in misfits(name, files[name], target)]
    fill(targets, files, progress=False)
    assert (head.up_proj.format, head.down_proj.format) == (NVFP4(), Dense())
    assert torch.equal(head.up_proj.dense(), NVFP4().dequantize(NVFP4().quantize(values), torch.float32))
    assert torch.equal(head.down_proj.weight, stored["down_proj.weight"].float())
