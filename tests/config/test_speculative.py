"""--speculative-config: what is accepted, what stands for what, what is refused, and what the checkpoints decide."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leyden.config.engine import EngineConfig
from leyden.config.model import ModelConfig
from leyden.config.speculative import SpeculativeConfig, notes
from leyden.errors import ConfigError

TARGET = ModelConfig(pattern="M*E", vocab_size=64, hidden_size=32)
WITH_MTP = replace(TARGET, num_nextn_predict_layers=1)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 1e4,
    "mask_token_id": 63,
    "target_layer_ids": [1],
}


def read(**raw: Any) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict(raw)


def settle(target: ModelConfig = TARGET, **raw: Any) -> SpeculativeConfig:
    return read(**raw).settle(target, "target")


def drafter(folder: Path, architecture: str = "Qwen3DSparkModel", **keys: Any) -> str:
    config = SIZES | {"architectures": [architecture], "block_size": 8, "sample_from_anchor": False} | keys
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_defaults_are_those_of_vllm():
    made = read(method="ngram", num_speculative_tokens=3)
    assert (made.draft_sample_method, made.rejection_sample_method) == ("greedy", "standard")
    assert (made.prompt_lookup_min, made.prompt_lookup_max, made.rates) == (5, 5, ())
    assert read(method=None, model=None, moe_backend=None) == SpeculativeConfig()


@pytest.mark.parametrize(
    ("name", "method"),
    [("mtp", "mtp"), ("nemotron_h_mtp", "mtp"), ("deepseek_mtp", "mtp"), ("ngram_gpu", "ngram"), ("auto", "auto")],
)
def test_methods_and_their_older_names(name: str, method: str):
    assert read(method=name).method == method


@pytest.mark.parametrize(
    ("given", "both"), [({"prompt_lookup_max": 3}, (3, 3)), ({"prompt_lookup_min": 2}, (2, 2)), ({}, (5, 5))]
)
def test_one_end_of_the_lookup_stands_for_both(given: dict[str, int], both: tuple[int, int]):
    made = read(method="ngram", **given)
    assert (made.prompt_lookup_min, made.prompt_lookup_max) == both


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"num_speculative_token": 3}, "no key num_speculative_token, did you mean num_speculative_tokens?"),
        ({"zzz": 3}, "has no key zzz; known are draft_sample_method"),
        ({"tensor_parallel_size": 2}, "the key is draft_tensor_parallel_size"),
        ({"fly_window_size": 3}, "fly changes what the model says"),
        ({"use_heterogeneous_vocab": True}, "must have one vocabulary"),
        ({"suffix_decoding_max_tree_depth": 4}, "ngram is the nearest"),
        ({"method": "eagle3"}, "method eagle3 is not possible; known are mtp, dflash, dspark, ngram, auto"),
        ({"method": "suffix"}, "method suffix is not possible"),
        ({"method": 3}, "method must be a text; found 3"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be a whole number above 0; found 0"),
        ({"num_speculative_tokens": True}, "must be a whole number above 0; found True"),
        ({"draft_sample_method": "beam"}, "one of greedy, probabilistic"),
        ({"rejection_sample_method": "fly"}, "one of standard, block, synthetic"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_min must be at least 1, and at most"),
        ({"enable_adaptive_verification": 1}, "must be true or false"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4]]}, "a list of .first, last, drafts."),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 2], [4, 8, 1]]}, "in order"),
        ({"num_speculative_tokens": 1, "num_speculative_tokens_per_batch_size": [[1, 4, 2]]}, "no more drafts than"),
        ({"synthetic_acceptance_length": 2}, "given only with rejection_sample_method"),
        ({"rejection_sample_method": "synthetic"}, "num_speculative_tokens must be given"),
    ],
)
def test_refused(raw: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        SpeculativeConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "exactly one of the two"),
        ({"synthetic_acceptance_rates": [1, 1, 1], "synthetic_acceptance_length": 2}, "exactly one of the two"),
        ({"synthetic_acceptance_rates": [0.5, 0.4]}, "3 numbers from 1 to 0"),
        ({"synthetic_acceptance_rates": [0.5, 0.6, 0.1]}, "none above the one before"),
        ({"synthetic_acceptance_rates": [1.1, 0.6, 0.1]}, "from 1 to 0"),
        ({"synthetic_acceptance_rates": [1, 0.6, -0.1]}, "from 1 to 0"),
        ({"synthetic_acceptance_length": 0.9}, "between 1 and 4"),
        ({"synthetic_acceptance_length": 4.1}, "between 1 and 4"),
    ],
)
def test_refused_synthetic(keys: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        read(num_speculative_tokens=3, rejection_sample_method="synthetic", **keys)


@pytest.mark.parametrize(
    ("length", "rates"), [(1, (0, 0, 0)), (2.83, (1, 0.83, 0)), (4, (1, 1, 1)), (1.25, (0.25, 0, 0))]
)
def test_a_synthetic_length_is_made_of_rates(length: float, rates: tuple[float, ...]):
    made = read(num_speculative_tokens=3, rejection_sample_method="synthetic", synthetic_acceptance_length=length)
    assert made.rates == pytest.approx(rates) and 1 + sum(made.rates) == pytest.approx(length)


def test_what_changes_nothing_is_said():
    raw = {"method": "mtp", "moe_backend": "triton", "enforce_eager": False, "rejection_sample_method": "block"}
    assert [line.split(" has ")[0] for line in notes(raw)] == [
        "--speculative-config.moe_backend triton",
        "--speculative-config.rejection_sample_method block",
    ]
    assert read(**raw).rejection_sample_method == "block" and notes({"method": "mtp"}) == []


def test_the_checkpoints_tell_the_method(tmp_path: Path):
    dspark, dflash = drafter(tmp_path / "a"), drafter(tmp_path / "dspark", "DFlashDraftModel")
    assert settle(model=dspark).method == "dspark" and settle(model=dflash, num_speculative_tokens=3).method == "dflash"
    assert settle(WITH_MTP, num_speculative_tokens=3).method == "mtp"
    assert settle(WITH_MTP, model="target").model == ""
    assert read(model=str(tmp_path / "a" / ".." / "a")).settle(WITH_MTP, dspark).method == "mtp"  # the same folder


def test_the_number_of_drafts_where_none_is_given(tmp_path: Path):
    assert settle(model=drafter(tmp_path / "a")).num_speculative_tokens == 7  # one row of the block is the anchor's
    assert settle(WITH_MTP, method="mtp").num_speculative_tokens == 1
    with pytest.raises(ConfigError, match="num_speculative_tokens: must be given for dflash"):
        settle(model=drafter(tmp_path / "b", "DFlashDraftModel", block_size=None))
    with pytest.raises(ConfigError, match="must be given for ngram"):
        settle(method="ngram")


def test_pitfall_12_any_number_of_drafts_is_possible_and_too_many_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = drafter(tmp_path / "a")
    for n in (1, 3, 7):
        assert settle(model=folder, num_speculative_tokens=n).num_speculative_tokens == n
    assert not caplog.records
    assert settle(model=folder, num_speculative_tokens=8).num_speculative_tokens == 8
    assert "8 drafts per step are more than the 7" in caplog.text


@pytest.mark.parametrize(
    ("target", "raw", "text"),
    [
        (TARGET, {"num_speculative_tokens": 3}, "the target has no MTP module"),
        (TARGET, {"method": "mtp"}, "the target has no MTP module"),
        (WITH_MTP, {"method": "mtp", "model": "DRAFTER"}, "mtp is a part of the target's checkpoint"),
        (TARGET, {"method": "dspark", "num_speculative_tokens": 3}, "dspark drafters have files of their own"),
        (TARGET, {"method": "dflash", "model": "DRAFTER"}, "method must be dspark, which is what"),
        (TARGET, {"model": "OTHER"}, "LlamaForCausalLM is no drafter; known are DFlashDraftModel"),
    ],
)
def test_refused_once_the_checkpoints_are_known(target: ModelConfig, raw: dict[str, Any], text: str, tmp_path: Path):
    folders = {
        "DRAFTER": drafter(tmp_path / "a", markov_rank=4),
        "OTHER": drafter(tmp_path / "b", "LlamaForCausalLM"),
    }
    raw = raw | ({"model": folders[raw["model"]]} if "model" in raw else {})
    with pytest.raises(ConfigError, match=text):
        settle(target, **raw)


def test_a_dspark_file_without_markov_head_is_a_dflash_drafter_too(tmp_path: Path):
    assert settle(method="dflash", model=drafter(tmp_path / "a", markov_rank=0)).method == "dflash"


def test_an_engine_is_told_and_checks_at_once():
    assert EngineConfig(model="m").speculative is None
    made = EngineConfig(model="m", speculative_config={"method": "mtp", "num_speculative_tokens": 3})
    assert made.speculative == SpeculativeConfig(method="mtp", num_speculative_tokens=3)
    with pytest.raises(ConfigError, match="has no key zzz"):
        EngineConfig(model="m", speculative_config={"zzz": 1})
