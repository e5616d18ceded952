"""Reading config.json: the key sets of the real releases, every spelling, and refusals by name."""

import json
from math import inf

import pytest

from leyden.config.model import ModelConfig
from leyden.errors import CheckpointError, ConfigError

NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
SUPER_PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
OLD_NAMES = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
NEW_NAMES = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}

COMMON = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_group": 1,
    "n_groups": 8,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
NANO = COMMON | {
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "hidden_size": 2688,
    "hybrid_override_pattern": NANO_PATTERN,
    "intermediate_size": 1856,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "routed_scaling_factor": 2.5,
    "transformers_version": "4.53.2",
}
LIGHTNING = {
    k: v for k, v in NANO.items() if k not in ("hybrid_override_pattern", "num_hidden_layers", "torch_dtype")
} | {
    "dtype": "bfloat16",
    "layers_block_type": [OLD_NAMES[letter] for letter in NANO_PATTERN],
    "max_position_embeddings": 1048576,
    "moe_latent_size": None,
    "moe_shared_expert_overlap": False,
    "mtp_layers_block_type": ["attention", "moe"],
    "num_nextn_predict_layers": 1,
    "transformers_version": "5.8.1",
}
SUPER = COMMON | {
    "hidden_size": 4096,
    "hybrid_override_pattern": SUPER_PATTERN,
    "intermediate_size": 2688,
    "mamba_num_heads": 128,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "mtp_hybrid_override_pattern": "*E",
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "num_hidden_layers": 88,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 5.0,
    "time_step_limit": [0.0, inf],
}
ULTRA = SUPER | {
    "hidden_size": 8192,
    "hybrid_override_pattern": "ME*" * 36,
    "mamba_num_heads": 256,
    "moe_intermediate_size": 5120,
    "moe_latent_size": 2048,
    "moe_shared_expert_intermediate_size": 10240,
    "num_attention_heads": 64,
    "num_hidden_layers": 108,
    "time_step_limit": [0.0, 1e308],
}


def test_nano() -> None:
    config = ModelConfig.from_dict(NANO)
    assert config.pattern == NANO_PATTERN and config.num_hidden_layers == 52
    assert [i for i, letter in enumerate(config.pattern) if letter == "*"] == [5, 12, 19, 26, 33, 42]
    assert (config.mamba_inner, config.conv_dim, config.in_proj_rows) == (4096, 6144, 10304)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (128, 6, 1856)
    assert config.shared_expert_width == 3712
    assert config.moe_latent_size is None and config.expert_width == 2688
    assert config.routed_scaling_factor == 2.5
    assert config.num_nextn_predict_layers == 0
    assert config.time_step_limit == (0.0, inf)
    assert config.intermediate_sizes == ()
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 0)
    assert config.quantization is None
    assert config.dtype == "bfloat16" and config.mamba_ssm_cache_dtype == "float32"


def test_lightning() -> None:
    config = ModelConfig.from_dict(LIGHTNING)
    assert config.pattern == NANO_PATTERN
    assert config.max_position_embeddings == 1048576
    assert (config.num_nextn_predict_layers, config.mtp_pattern) == (1, "*E")
    assert config.dtype == "bfloat16"


def test_super() -> None:
    config = ModelConfig.from_dict(SUPER)
    assert [config.pattern.count(letter) for letter in "ME*"] == [40, 40, 8]
    assert (config.mamba_inner, config.conv_dim, config.in_proj_rows) == (8192, 10240, 18560)
    assert config.expert_width == config.moe_latent_size == 1024
    assert config.time_step_limit == (0.0, inf)


def test_ultra() -> None:
    config = ModelConfig.from_dict(ULTRA)
    assert (config.mamba_inner, config.conv_dim, config.in_proj_rows) == (16384, 18432, 35072)
    assert config.time_step_limit == (0.0, 1e308)


@pytest.mark.parametrize("raw", [NANO, LIGHTNING, SUPER, ULTRA], ids=["nano", "lightning", "super", "ultra"])
def test_to_dict_reads_back(raw: dict) -> None:
    config = ModelConfig.from_dict(raw)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("names", [OLD_NAMES, NEW_NAMES])
@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
def test_list_of_layers_wins_over_pattern(key: str, names: dict[str, str]) -> None:
    raw = {"hybrid_override_pattern": "MMMM", key: [names[letter] for letter in "M*E-"]}
    assert ModelConfig.from_dict(raw).pattern == "M*E-"


def test_pattern_counts_where_num_hidden_layers_differs(caplog: pytest.LogCaptureFixture) -> None:
    assert ModelConfig.from_dict({"hybrid_override_pattern": "M*E", "num_hidden_layers": 7}).num_hidden_layers == 3
    assert "num_hidden_layers is 7, but 3 layers" in caplog.text


def test_defaults_of_absent_keys() -> None:
    config = ModelConfig.from_dict({"hybrid_override_pattern": "M*E-"})
    assert config == ModelConfig(pattern="M*E-", intermediate_sizes=(21504,))
    assert (config.shared_expert_width, config.num_key_value_heads, config.max_position_embeddings) == (7688, 8, 4096)


@pytest.mark.parametrize(
    ("alias", "field", "value"),
    [
        ("mamba_n_groups", "n_groups", 4),
        ("mamba_d_conv", "conv_kernel", 3),
        ("mamba_conv_bias", "use_conv_bias", False),
        ("mamba_chunk_size", "chunk_size", 64),
        ("num_local_experts", "n_routed_experts", 16),
        ("torch_dtype", "dtype", "float32"),
    ],
)
def test_legacy_names(alias: str, field: str, value: object) -> None:
    raw = {"hybrid_override_pattern": "M", alias: value}
    assert getattr(ModelConfig.from_dict(raw), field) == value
    assert getattr(ModelConfig.from_dict(raw | {field: value}), field) == value


def test_two_names_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_groups.*must agree; found 8 and 4"):
        ModelConfig.from_dict(NANO | {"mamba_n_groups": 4})


@pytest.mark.parametrize("key", ["time_step_limit", "mamba_dt_limit"])
@pytest.mark.parametrize("text", ["[0.0, Infinity]", '[0.0, {"__float__": "Infinity"}]', '[0, {"__float__": "inf"}]'])
def test_infinity_in_time_step_limit(key: str, text: str) -> None:
    raw = json.loads(f'{{"hybrid_override_pattern": "M", "{key}": {text}}}')
    assert ModelConfig.from_dict(raw).time_step_limit == (0.0, inf)


def test_finite_time_step_limit() -> None:
    config = ModelConfig.from_dict({"hybrid_override_pattern": "M", "time_step_limit": [0.001, 0.1]})
    assert config.time_step_limit == (0.001, 0.1)
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_null_counts_as_absent() -> None:
    nulls = dict.fromkeys(("conv_kernel", "time_step_limit", "torch_dtype", "moe_latent_size", "sliding_window"))
    assert ModelConfig.from_dict({"hybrid_override_pattern": "M"} | nulls) == ModelConfig(pattern="M")


def test_null_with_a_meaning() -> None:
    raw = {"hybrid_override_pattern": "*E", "num_attention_heads": 6, "num_key_value_heads": None}
    assert ModelConfig.from_dict(raw).num_key_value_heads == 6
    assert ModelConfig.from_dict(raw | {"n_shared_experts": None}).shared_expert_width == 0
    assert ModelConfig.from_dict(raw | {"moe_shared_expert_intermediate_size": 0}).shared_expert_width == 0
    assert ModelConfig.from_dict(raw | {"bos_token_id": None, "eos_token_id": None}).bos_token_id is None


def test_layer_norm_epsilon_counts_before_norm_eps() -> None:
    assert ModelConfig.from_dict(NANO | {"norm_eps": 1e-3}).layer_norm_epsilon == 1e-5
    assert ModelConfig.from_dict({"hybrid_override_pattern": "M", "norm_eps": 1e-3}).layer_norm_epsilon == 1e-3


def test_several_shared_experts_are_one_wide_one() -> None:
    raw = {"hybrid_override_pattern": "E", "n_shared_experts": 2, "moe_shared_expert_intermediate_size": 48}
    config = ModelConfig.from_dict(raw)
    assert config.shared_expert_width == 96
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(("value", "sizes"), [(32, (32, 32)), ([32], (32, 32)), ([32, 48], (32, 48))])
def test_dense_widths(value: object, sizes: tuple[int, ...]) -> None:
    config = ModelConfig.from_dict({"hybrid_override_pattern": "M-*-", "intermediate_size": value})
    assert config.intermediate_sizes == sizes
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_overrides_count_under_any_name() -> None:
    config = ModelConfig.from_dict(
        LIGHTNING, {"hybrid_override_pattern": "M*E", "mamba_n_groups": 4, "dtype": "float32"}
    )
    assert (config.pattern, config.n_groups, config.dtype) == ("M*E", 4, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "nemotron_h_puzzle"}, 'model_type must be "nemotron_h" only; found "nemotron_h_puzzle"'),
        ({"model_type": "llama"}, 'found "llama"'),
        ({"block_configs": [{}]}, "block_configs must be null only"),
        ({"attention_bias": True}, "attention_bias must be false only; found true"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_bias": True}, "use_bias"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias"),
        ({"residual_in_fp32": True}, "residual_in_fp32"),
        ({"sliding_window": 4096}, "sliding_window must be null only; found 4096"),
        ({"mlp_hidden_act": "silu"}, 'mlp_hidden_act must be "relu2" only; found "silu"'),
        ({"mamba_hidden_act": "gelu"}, 'mamba_hidden_act must be "silu" only; found "gelu"'),
        ({"hybrid_override_pattern": "MAX*E"}, 'hybrid_override_pattern must be made of .*found "AX"'),
        ({"hybrid_override_pattern": ""}, "hybrid_override_pattern"),
        ({"layers_block_type": ["mamba", "hyena"]}, 'layers_block_type must be a list of mamba, .*found "hyena"'),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers must be 0 or 1; found 2"),
        ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "ME"}, 'mtp_hybrid_override_pattern.*"ME"'),
        ({"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads, 3; found 32"),
        ({"n_groups": 7}, "mamba_num_heads must be a multiple of n_groups, 7; found 64"),
        ({"n_group": 3}, "n_routed_experts must be a multiple of n_group, 3; found 128"),
        ({"n_group": 128}, "n_group must be groups of at least 2"),
        ({"topk_group": 2}, "topk_group must be at most n_group, 1; found 2"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok must be at most 128; found 129"),
        ({"n_group": 64, "topk_group": 2}, "num_experts_per_tok must be at most 4; found 6"),
        ({"hidden_size": "2688"}, 'hidden_size must be a whole number; found "2688"'),
        ({"hidden_size": True}, "hidden_size must be a whole number; found true"),
        ({"hidden_size": 0}, "hidden_size must be at least 1; found 0"),
        ({"conv_kernel": 1}, "conv_kernel must be at least 2; found 1"),
        ({"layer_norm_epsilon": -1.0}, "layer_norm_epsilon must be a positive number"),
        ({"routed_scaling_factor": inf}, "routed_scaling_factor must be a positive number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false; found 1"),
        ({"time_step_limit": [0.1]}, "time_step_limit must be a list of two numbers"),
        ({"time_step_limit": [0.1, 0.1]}, "time_step_limit must be .*low < high"),
        ({"time_step_limit": [0.0, "inf"]}, 'time_step_limit must be a number; found "inf"'),
        ({"torch_dtype": "float8"}, 'dtype must be bfloat16 or float16 or float32; found "float8"'),
        ({"mamba_ssm_cache_dtype": "int8"}, "mamba_ssm_cache_dtype"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or a list of them, found '</s>'"),
        ({"hybrid_override_pattern": "M--", "intermediate_size": [8, 8, 8]}, "intermediate_size must be .*2 dense"),
        ({"hybrid_override_pattern": "M-", "intermediate_size": 0}, "intermediate_size"),
        ({"hybrid_override_pattern": "M-", "intermediate_size": "8"}, "intermediate_size must be a whole number"),
    ],
)
def test_refusals_name_key_value_and_what_is_accepted(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(NANO | change)


def test_no_layers_at_all() -> None:
    with pytest.raises(ConfigError, match="hybrid_override_pattern or layers_block_type"):
        ModelConfig.from_dict({"model_type": "nemotron_h"})


def write(folder, **files: dict) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_folder_unites_end_tokens(tmp_path) -> None:
    tokenizer = {"eos_token": "<|im_end|>", "added_tokens_decoder": {"11": {"content": "<|im_end|>", "special": True}}}
    write(tmp_path, config=NANO, generation_config={"eos_token_id": [2, 11]}, tokenizer_config=tokenizer)
    config = ModelConfig.from_folder(tmp_path)
    assert config.eos_token_ids == (2, 11)
    assert config.tokenizer_eos_id == 11
    assert ModelConfig.from_folder(tmp_path, {"hidden_size": 64}).hidden_size == 64


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>"}])
def test_tokenizer_end_token_without_ids_in_its_config(tmp_path, eos: object) -> None:
    added = [{"id": 2, "content": "</s>"}, {"id": 11, "content": "<|im_end|>"}]
    write(tmp_path, config=NANO, special_tokens_map={"eos_token": eos}, tokenizer={"added_tokens": added, "model": {}})
    config = ModelConfig.from_folder(tmp_path)
    assert (config.tokenizer_eos_id, config.eos_token_ids) == (11, (2, 11))


def test_folder_with_config_alone(tmp_path) -> None:
    write(tmp_path, config=NANO)
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_dict(NANO)


def test_folder_quantization(tmp_path) -> None:
    recipe = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    write(tmp_path, config=NANO, hf_quant_config=recipe)
    assert ModelConfig.from_folder(tmp_path).quantization == recipe
    write(tmp_path, config=NANO | {"quantization_config": {"quant_method": "compressed-tensors"}})
    assert ModelConfig.from_folder(tmp_path).quantization == {"quant_method": "compressed-tensors"}


def test_folder_without_config(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="config.json: no such file"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_broken_config(tmp_path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match="config.json: "):
        ModelConfig.from_folder(tmp_path)
