"""A drafter's config.json: the published files, every alias, disagreements and refusals."""

from typing import Any

import pytest

from leyden.config.drafter import DrafterConfig, Rope
from leyden.errors import ConfigError

TAPS = [1, 5, 19, 29, 41, 51]


def dflash(**changes: Any) -> dict[str, Any]:
    """config.json of the published DFlash drafter, as far as it is read."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 2688,
        "intermediate_size": 6144,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "vocab_size": 131072,
        "draft_vocab_size": None,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 10000,
        },
        "layer_types": ["full_attention"] * 6,
        "sliding_window": None,
        "mask_token_id": 990,
        "pard_token": 990,
        "target_layer_ids": TAPS,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in TAPS],
        "attention_sink_bias": False,
        "dflash_query_causal": False,
        "dspark_fixup_head_type": None,
        "dspark_markov_rank": None,
        "sample_from_anchor": False,
        "has_embed_tokens": True,
        "has_lm_head": False,
        "dflash_config": {
            "attention_sink_bias": False,
            "causal": False,
            "mask_token_id": 990,
            "target_layer_ids": TAPS,
            "use_swa": False,
            "sample_from_anchor": False,
        },
        **changes,
    }


def dspark(**changes: Any) -> dict[str, Any]:
    """config.json of the published DSpark drafter, as far as it is read."""
    return dflash(
        architectures=["Qwen3DSparkModel"],
        rope_parameters=None,
        layer_types=["sliding_attention"] * 6,
        sliding_window=1024,
        block_size=8,
        attention_sink_bias=True,
        dflash_query_causal=True,
        dspark_fixup_head_type="markov",
        dspark_markov_rank=512,
        markov_rank=512,
        markov_head_type="vanilla",
        dspark_bonus_anchor=True,
        dflash_config={
            "attention_sink_bias": True,
            "causal": True,
            "mask_token_id": 990,
            "swa_window_size": 1024,
            "target_layer_ids": TAPS,
            "use_swa": True,
            "sample_from_anchor": False,
        },
        **changes,
    )


def test_published_dflash():
    config = DrafterConfig.from_dict(dflash())
    assert config.method == "dflash" and config.target_layer_ids == tuple(TAPS) and config.mask_token_id == 990
    assert config.causal == (False,) * 6 and config.windows == (None,) * 6 and not config.attention_sinks
    assert config.rope == Rope(10000.0, 128.0, 8192) and config.markov_rank == 0 and config.confidence is None
    assert config.width is None and config.drafts_to_rows(5) == 6


def test_published_dspark():
    config = DrafterConfig.from_dict(dspark())
    assert config.method == "dspark" and config.causal == (True,) * 6 and config.windows == (1024,) * 6
    assert config.attention_sinks and config.rope == Rope(10000.0) and config.markov_rank == 512
    assert config.block_size == 8 and config.width == 7 and not config.sample_from_anchor


def test_number_of_parameters_is_the_published_one():
    """Elements of all tensors; the hub counts a 4-bit pair as one, so its numbers are turned into elements here."""
    torch = pytest.importorskip("torch")
    from leyden.model.drafters import DrafterNetwork

    def elements(raw: dict[str, Any]) -> tuple[int, int]:
        network = DrafterNetwork(DrafterConfig.from_dict(raw), torch.bfloat16, "meta")
        packed = ("fc.", "mlp.", "markov_w2.")
        sizes = {name: p.numel() for name, p in network.named_parameters()}
        four_bit = sum(n for name, n in sizes.items() if any(part in name for part in packed))
        return sum(sizes.values()) - four_bit + four_bit // 2, len(sizes)

    # 19 and 20 of the tensors are stored as NVFP4, which makes three of one
    assert elements(dflash()) == (663_050_496, 108 - 2 * 19)
    assert elements(dspark())[0] == 763_713_984


@pytest.mark.parametrize("raw", [dflash(), dspark(), dspark(enable_confidence_head=True)])
def test_what_is_written_is_read_back(raw: dict[str, Any]):
    config = DrafterConfig.from_dict(raw)
    assert DrafterConfig.from_dict(config.to_dict()) == config


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Without the keys at the top, and without those of the same name inside dflash_config."""
    inner = {key: value for key, value in raw["dflash_config"].items() if key not in keys}
    return {key: value for key, value in raw.items() if key not in keys} | {"dflash_config": inner}


@pytest.mark.parametrize("name", ["mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"])
def test_names_of_the_mask_token(name: str):
    raw = without(dflash(), "mask_token_id", "pard_token") | {name: 17}
    assert DrafterConfig.from_dict(raw).mask_token_id == 17


@pytest.mark.parametrize(
    ("name", "value"),
    [("target_layer_ids", TAPS), ("dspark_target_layer_ids", TAPS), ("eagle_aux_hidden_state_layer_ids", [2, 6])],
)
def test_names_of_the_taps(name: str, value: list[int]):
    raw = without(dflash(), "target_layer_ids", "eagle_aux_hidden_state_layer_ids") | {name: value}
    shift = int(name.startswith("eagle"))
    assert DrafterConfig.from_dict(raw).target_layer_ids == tuple(layer - shift for layer in value)


def test_layout_with_the_anchor_first_is_what_silence_means_in_dspark_only():
    quiet = ("sample_from_anchor", "dspark_bonus_anchor")
    config = DrafterConfig.from_dict(without(dspark(), *quiet))
    assert config.sample_from_anchor and config.width == 8 and config.drafts_to_rows(8) == 8
    assert not DrafterConfig.from_dict(without(dflash(), *quiet)).sample_from_anchor


def test_causal_follows_layer_types_where_no_flag_is_given():
    raw = without(dspark(), "causal", "dflash_query_causal")
    raw["layer_types"] = ["sliding_attention"] * 4 + ["full_attention"] * 2
    config = DrafterConfig.from_dict(raw)
    assert config.causal == (True,) * 4 + (False,) * 2 and config.windows == (1024,) * 4 + (None,) * 2
    assert DrafterConfig.from_dict(raw | {"is_causal": False}).causal == (False,) * 6


def test_use_swa_counts_where_no_layer_is_said_to_slide():
    raw = without(dspark(), "layer_types")
    assert DrafterConfig.from_dict(raw).windows == (1024,) * 6


def test_yarn_factor_of_cos_and_sin():
    yarn = {**dflash()["rope_parameters"], "attention_factor": 1.25}
    assert DrafterConfig.from_dict(dflash(rope_parameters=yarn)).rope.scale == 1.25
    yarn = {**dflash()["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0}
    assert DrafterConfig.from_dict(dflash(rope_parameters=yarn)).rope.scale == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlashSpeculator"]}, "architectures must be DFlashDraftModel or"),
        ({"hidden_act": "gelu"}, 'hidden_act must be "silu" only'),
        ({"attention_bias": True}, "attention_bias must be false only"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size must be null"),
        ({"has_lm_head": True}, "has_lm_head must be false only"),
        ({"markov_head_type": "gated"}, 'markov_head_type must be "vanilla" only'),
        ({"target_hidden_size": 4096}, "target_hidden_size must be 2688"),
        ({"pard_token": 991}, "these must agree.*mask_token_id.*pard_token"),
        ({"target_layer_ids": [1, 5]}, "these must agree"),
        ({"eagle_aux_hidden_state_layer_ids": TAPS}, "these must agree.*eagle_aux_hidden_state_layer_ids - 1"),
        ({"sample_from_anchor": True}, "these must agree"),
        ({"add_swa_attention_sink_bias": True}, "these must agree"),
        ({"rope_theta": 5000}, "these must agree.*rope_theta"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type must be default or yarn"),
        ({"rope_parameters": {"rope_type": "yarn", "short_factor": [1]}}, "rope_parameters must be made of"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types must be a list of 6"),
        ({"layer_types": ["sliding_attention"] * 6}, "sliding_window must be given"),
        ({"block_size": 9, "layer_types": ["sliding_attention"] * 6, "sliding_window": 8}, "at least the block of 9"),
        ({"mask_token_id": 131072, "pard_token": 131072, "dflash_config": {}}, "mask_token_id must be below"),
        ({"num_key_value_heads": 5}, "multiple of num_key_value_heads"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a whole number"),
        ({"markov_rank": 4}, "markov_rank must be 0 in a DFlash drafter"),
    ],
)
def test_refusals_name_key_and_value(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        DrafterConfig.from_dict(dflash(**changes))


@pytest.mark.parametrize("taps", [[], [5, 1], [3, 3], [-1, 4]])
def test_taps_must_be_layers_in_order(taps: list[int]):
    raw = without(dflash(), "target_layer_ids", "eagle_aux_hidden_state_layer_ids") | {"target_layer_ids": taps}
    with pytest.raises(ConfigError, match="target_layer_ids must be layers of the target"):
        DrafterConfig.from_dict(raw)
