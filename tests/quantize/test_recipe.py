import pytest

from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.formats import Dense, Format
from leyden.formats.fp8 import FP8
from leyden.formats.int4 import Int4
from leyden.formats.nvfp4 import NVFP4
from leyden.quantize.recipe import GGUF, RECIPES, part_of, recipe

CONFIG = ModelConfig(pattern="MEM*E-", intermediate_sizes=(64,), moe_latent_size=1024)
MATRICES = {
    "backbone.layers.0.mixer.in_proj": "mamba",
    "backbone.layers.2.mixer.out_proj": "mamba before attention",
    "backbone.layers.3.mixer.q_proj": "attention",
    "backbone.layers.1.mixer.experts.17.up_proj": "experts",
    "backbone.layers.4.mixer.shared_experts.down_proj": "shared",
    "backbone.layers.4.mixer.fc1_latent_proj": "latent",
    "backbone.layers.5.mixer.up_proj": "dense",
    "lm_head": "head",
    "backbone.embeddings": "embeddings",
    "mtp.layers.1.mixer.experts.0.up_proj": "mtp",
}


def test_parts() -> None:
    assert {matrix: part_of(matrix, CONFIG) for matrix in MATRICES} == MATRICES


COMMON = {"mamba", "experts", "shared", "latent", "dense"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvfp4", dict.fromkeys(COMMON, NVFP4())),
        ("fp8", dict.fromkeys(COMMON, FP8())),
        ("w4a16", dict.fromkeys(COMMON, Int4(64))),
        (
            "lightning-nvfp4",
            dict.fromkeys(COMMON | {"head"}, NVFP4()) | {"mamba": FP8(), "mamba before attention": FP8()},
        ),
    ],
)
def test_recipes(name: str, expected: dict[str, Format]) -> None:
    chosen = {part: recipe(name).choose(matrix, (2688, 2688), CONFIG) for matrix, part in MATRICES.items()}
    assert {part: format for part, format in chosen.items() if format != Dense()} == expected


def test_shapes_that_a_format_cannot_hold() -> None:
    head = "backbone.layers.0.mixer.in_proj"
    assert recipe("w4a16", group=128).choose(head, (64, 1856), CONFIG) == Int4(32)
    assert recipe("w4a16").choose(head, (64, 1856), CONFIG) == Int4(64)
    assert recipe("w4a16").choose(head, (64, 40), CONFIG) == Int4(None)
    assert recipe("w4a16").choose(head, (64, 36), CONFIG) == Dense()
    assert recipe("nvfp4").choose(head, (64, 40), CONFIG) == Dense()


def test_static_inputs_and_names() -> None:
    matrix = "backbone.layers.0.mixer.in_proj"
    assert recipe("fp8", static=True).choose(matrix, (64, 64), CONFIG) == FP8(input_scale=True)
    assert {"nvfp4", "lightning-nvfp4", "fp8", "w4a16", *GGUF} == set(RECIPES)
    with pytest.raises(ConfigError, match="--recipe must be one of nvfp4, .*; found int3"):
        recipe("int3")
