from dataclasses import dataclass
from typing import Any

import pytest
import torch

from leyden.errors import ConfigError
from leyden.formats import Dense, Format
from leyden.formats.fp8 import FP8, MXFP8, FP8Block, FP8Channel
from leyden.formats.int4 import Int4
from leyden.formats.nvfp4 import NVFP4
from leyden.formats.scheme import Scheme, describe, held_as

EXPERT = "backbone.layers.1.mixer.experts.0.up_proj"
MAMBA = "backbone.layers.4.mixer.in_proj"
ATTENTION = "backbone.layers.5.mixer.q_proj"
NAMES = [EXPERT, MAMBA, ATTENTION, "backbone.embeddings", "lm_head", "mtp.layers.0.eh_proj"]

# As released: Nano has no quantization_config but this neighbour of config.json.
NANO = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", MAMBA, ATTENTION, "backbone.layers.4.mixer.conv1d"],
    },
}
LIGHTNING = {
    "producer": {"name": "modelopt", "version": "0.44.0rc5"},
    "quantization": {
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["backbone.embeddings", ATTENTION, "mtp*"],
        "quantized_layers": {
            EXPERT: {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            MAMBA: {"quant_algo": "FP8"},
        },
    },
}


def formats(quantization: dict[str, Any] | None) -> dict[str, Format]:
    scheme = Scheme(quantization)
    return {name: format for name in NAMES if (format := scheme.format_of(name)) != Dense()}


def group(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head", "re:mtp.*", r"re:model\.layers\.5\..*_proj", MAMBA],
    }


def test_nothing_is_quantised_unless_somebody_says_so() -> None:
    assert formats(None) == formats({}) == {}
    cache_only = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert formats(cache_only) == {} and Scheme(cache_only).fp8_cache


def test_releases() -> None:
    assert formats(NANO) == {EXPERT: NVFP4(True), "mtp.layers.0.eh_proj": NVFP4(True)}  # it has no mtp
    assert formats(LIGHTNING) == {EXPERT: NVFP4(), "lm_head": NVFP4(), MAMBA: FP8(True)}
    assert Scheme(NANO).fp8_cache and Scheme(LIGHTNING).fp8_cache and not Scheme(None).fp8_cache


@pytest.mark.parametrize(
    ("algorithm", "format"),
    [
        ("NVFP4", NVFP4(True)),
        ("W4A16_NVFP4", NVFP4()),
        ("FP8", FP8(True)),
        ("FP8_PB_WO", FP8Block()),
        ("FP8_BLOCK_SCALES", FP8Block()),
        ("FP8_PER_CHANNEL_PER_TOKEN", FP8Channel()),
        ("MXFP8", MXFP8()),
    ],
)
def test_modelopt_algorithms(algorithm: str, format: Format) -> None:
    for config in (
        {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]},
        {"quantization": {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}},
    ):
        assert formats(config) == dict.fromkeys([EXPERT, MAMBA, ATTENTION, "mtp.layers.0.eh_proj"], format)


def test_nvfp4_without_quantised_activations() -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}
    groups = {"group_0": {"weights": {"num_bits": 4}, "input_activations": None}}
    assert formats(config | {"config_groups": groups})[EXPERT] == NVFP4()
    groups["group_0"]["input_activations"] = {"num_bits": 4}
    assert formats(config | {"config_groups": groups})[EXPERT] == NVFP4(input_scale=True)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("mtp*", {"mtp.layers.0.eh_proj"}),
        ("*in_proj*", {MAMBA}),
        ("backbone.layers.5", {ATTENTION}),  # the module around it
        ("model.layers.5.mixer.q_proj", {ATTENTION}),  # by the other prefix
        ("language_model.lm_head", {"lm_head"}),
        ("backbone.layers.1.mixer.experts*", {EXPERT}),
        ("backbone.layers.1.mixer.exp", set()),
    ],
)
def test_excluded_modules(pattern: str, names: set[str]) -> None:
    linear = set(NAMES) - {"backbone.embeddings"}
    assert formats({"quant_algo": "FP8", "exclude_modules": [pattern]}).keys() == linear - names


@pytest.mark.parametrize(
    ("weights", "format"),
    [
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}, Int4(32)),
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": False}, Int4(64, False)),
        ({"num_bits": 4, "strategy": "channel"}, Int4(None)),
        ({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, NVFP4()),
        ({"num_bits": 8, "type": "float", "strategy": "tensor"}, FP8()),
        ({"num_bits": 8, "type": "float", "strategy": "channel"}, FP8Channel()),
        ({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, FP8Block()),
        ({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}, MXFP8()),
    ],
)
def test_compressed_tensors_groups(weights: dict[str, Any], format: Format) -> None:
    assert formats(group(**weights)) == {EXPERT: format}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq"}, "quant_method must be modelopt or compressed-tensors; found 'awq'"),
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo must be NVFP4, .*; found 'W4A8_AWQ'"),
        ({"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {MAMBA: {}}}}, "found None"),
        (group(num_bits=8, type="int", symmetric=False), "found {'type': 'int', 'num_bits': 8"),
    ],
)
def test_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scheme(config)


@dataclass
class Header:
    shape: tuple[int, ...]
    dtype: str


@pytest.mark.parametrize("n, k", [(64, 128), (1856, 2688)])
def test_tensors_tell_their_format(n: int, k: int) -> None:
    spelled = {torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3"}
    spelled |= {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    every = [Dense(), NVFP4(), NVFP4(True), FP8(), FP8(True), FP8Channel(), FP8Block(), MXFP8(), Int4(32), Int4(None)]
    for format in [*every, Int4(64, False, torch.float16), Int4(32, True, torch.float32)]:
        specs = format.tensors((n, k), torch.bfloat16)
        headers = {name: Header(shape, spelled[dtype]) for name, (shape, dtype) in specs.items()}
        assert held_as(headers, (n, k)) == format


def test_spellings_of_shapes() -> None:
    weight = Header((256, 384), "F8_E4M3")
    for shape, format in {
        (): FP8(), (1,): FP8(), (256,): FP8Channel(), (256, 1): FP8Channel(), (2, 3): FP8Block(),
        (2, 1, 3, 1): FP8Block(),
    }.items():  # fmt: skip
        assert held_as({"weight": weight, "weight_scale": Header(shape, "F32")}, (256, 384)) == format


def test_a_missing_tensor_does_not_change_the_answer() -> None:
    assert held_as({"weight": Header((64, 32), "U8")}, (64, 64)) == NVFP4()
    assert held_as({"weight": Header((64, 64), "F8_E4M3")}, (64, 64)) == FP8()
    assert held_as({}, (64, 64)) == Dense()


@pytest.mark.parametrize(
    "held",
    [
        {EXPERT: NVFP4(), MAMBA: FP8(True), ATTENTION: Dense(), "lm_head": FP8Block()},
        {EXPERT: NVFP4(True), MAMBA: NVFP4(True), ATTENTION: Dense()},
        {EXPERT: FP8Channel(), ATTENTION: Dense()},
        {EXPERT: Int4(32), MAMBA: Int4(32), ATTENTION: Dense()},
        {EXPERT: Int4(64), MAMBA: Int4(None, False), ATTENTION: Dense()},
    ],
)
@pytest.mark.parametrize("fp8_cache", [True, False])
def test_what_is_described_is_read_back(held: dict[str, Format], fp8_cache: bool) -> None:
    scheme = Scheme(describe(held, fp8_cache))
    assert {name: scheme.format_of(name) for name in held} == held
    assert scheme.fp8_cache == fp8_cache


def test_descriptions_that_nobody_could_read_are_refused() -> None:
    assert describe({EXPERT: Dense()}) is None
    with pytest.raises(ConfigError, match=f"both integers and nvfp4; {EXPERT} is nvfp4"):
        describe({EXPERT: NVFP4(), MAMBA: Int4()})
