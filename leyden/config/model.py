"""The architecture, as config.json tells it: one frozen dataclass for every release of the family.

Read are the keys that change what is computed, under their old and new names; unknown keys are ignored, because real
files have dozens of them. Refused by name is what would silently compute something else: other layer kinds, biases of
projections, another activation, a sliding window, an fp32 residual stream, per-layer expert counts (nemotron_h_puzzle).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, get_args, get_origin

from leyden.config.folder import read_json
from leyden.config.generation import token_ids
from leyden.errors import ConfigError
from leyden.log import get

log = get(__name__)

_DTYPES = ("bfloat16", "float16", "float32")

_LETTERS = {
    "mamba": "M", "linear_attention": "M", "moe": "E", "attention": "*", "full_attention": "*", "mlp": "-",
}  # fmt: skip

# key -> the name under which it is read here; a file that has both must say the same in both
_ALIASES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_chunk_size": "chunk_size",
    "mamba_dt_limit": "time_step_limit",
    "num_local_experts": "n_routed_experts",
    "torch_dtype": "dtype",
    "quantization_config": "quantization",
}

# field -> keys that spell out the layers; the first one present counts, so a list wins over a string
_PATTERNS = {
    "pattern": ("layers_block_type", "layer_types", "hybrid_override_pattern"),
    "mtp_pattern": ("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
}

# keys of real files for which there is one value that we compute; null says the same
_FIXED: dict[str, Any] = {
    "model_type": "nemotron_h",
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "mamba_proj_bias": False,
    "residual_in_fp32": False,
    "sliding_window": None,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "block_configs": None,
    "mtp_block_configs": None,
    "mtp_n_routed_experts": None,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Names and defaults are those of config.json, unless a comment says otherwise.

    Making one checks it: ConfigError names the key, the value found and what is accepted.
    """

    pattern: str  # one letter per layer: M mamba, * attention, E mixture of experts, - dense MLP
    vocab_size: int = 131072
    hidden_size: int = 4096
    max_position_embeddings: int = 4096  # what the release advertises; nothing is computed from positions
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"

    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128

    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    n_groups: int = 8  # of B and C, and of the gated norm (n_group is the router's)
    ssm_state_size: int = 128
    conv_kernel: int = 4
    use_conv_bias: bool = True
    chunk_size: int = 128
    time_step_limit: tuple[float, float] = (0.0, inf)  # dt is clamped to it after softplus
    mamba_ssm_cache_dtype: str = "float32"

    intermediate_sizes: tuple[int, ...] = ()  # widths of the "-" layers, in order

    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 7688
    shared_expert_width: int = 7688  # n_shared_experts * moe_shared_expert_intermediate_size; 0: no shared expert
    moe_latent_size: int | None = None  # width in which routed experts work; None: hidden_size
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0

    num_nextn_predict_layers: int = 0  # 0: no multi-token prediction
    mtp_pattern: str = "*E"

    bos_token_id: int | None = 1
    pad_token_id: int | None = 0
    eos_token_ids: tuple[int, ...] = (2,)  # of config.json, generation_config.json and the tokenizer together
    tokenizer_eos_id: int | None = None  # the one that the tokenizer names, where known

    quantization: dict[str, Any] | None = field(default=None, hash=False)  # quantization_config or hf_quant_config.json

    def __post_init__(self) -> None:
        for name in ("pattern", "mtp_pattern"):
            _letters(name, getattr(self, name))
        for name in ("dtype", "mamba_ssm_cache_dtype"):
            _require(getattr(self, name) in _DTYPES, name, getattr(self, name), " or ".join(_DTYPES))
        for name, value in ((f.name, getattr(self, f.name)) for f in fields(self)):
            if type(value) is int:
                least = 0 if name.endswith("_id") or name in ("shared_expert_width", "num_nextn_predict_layers") else 1
                _require(value >= least, name, value, f"at least {least}")
            elif type(value) is float:
                _require(0 < value < inf, name, value, "a positive number")

        _multiple("num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads)
        _multiple("mamba_num_heads", self.mamba_num_heads, "n_groups", self.n_groups)
        _require(self.conv_kernel >= 2, "conv_kernel", self.conv_kernel, "at least 2")
        low, high = self.time_step_limit
        _require(0 <= low < high, "time_step_limit", [low, high], "[low, high] with 0 <= low < high")

        dense, widths = self.pattern.count("-"), self.intermediate_sizes
        good = len(widths) == dense and all(width >= 1 for width in widths)
        _require(good, "intermediate_size", list(widths), f"a positive width for each of the {dense} dense layers")

        _multiple("n_routed_experts", self.n_routed_experts, "n_group", self.n_group)
        size = self.n_routed_experts // self.n_group
        # a group is judged by its two best experts
        _require(self.n_group == 1 or size >= 2, "n_group", self.n_group, "groups of at least 2 experts")
        _require(self.topk_group <= self.n_group, "topk_group", self.topk_group, f"at most n_group, {self.n_group}")
        reach = size * self.topk_group
        _require(self.num_experts_per_tok <= reach, "num_experts_per_tok", self.num_experts_per_tok, f"at most {reach}")

        steps = self.num_nextn_predict_layers
        _require(steps <= 1, "num_nextn_predict_layers", steps, "0 or 1")
        _require(not steps or self.mtp_pattern == "*E", "mtp_hybrid_override_pattern", self.mtp_pattern, '"*E"')

    @property
    def num_hidden_layers(self) -> int:
        return len(self.pattern)

    @property
    def mamba_inner(self) -> int:
        """Width of x and of z; config.json's `expand` has no say in it."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.mamba_inner + 2 * self.n_groups * self.ssm_state_size

    @property
    def in_proj_rows(self) -> int:
        """Rows of the Mamba in_proj: z, then x, B and C, then dt."""
        return self.mamba_inner + self.conv_dim + self.mamba_num_heads

    @property
    def expert_width(self) -> int:
        """Width of what a routed expert reads and writes."""
        return self.moe_latent_size or self.hidden_size

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Of the keys of a config.json, with `overrides` (the same keys, under any of their names) laid over them."""
        keys = _canonical(raw) | _canonical(overrides or {})
        for key, accepted in _FIXED.items():
            _require(keys.get(key) in (None, accepted), key, keys.get(key), f"{json.dumps(accepted)} only")
        if "pattern" not in keys:
            raise ConfigError("config.json must have hybrid_override_pattern or layers_block_type; found neither")
        pattern, layers = keys["pattern"], keys.get("num_hidden_layers")
        if layers not in (None, len(pattern)):
            log.warning("config.json: num_hidden_layers is %s, but %d layers are spelled out", layers, len(pattern))

        if keys.get("num_key_value_heads", 0) is None:
            keys["num_key_value_heads"] = keys.get("num_attention_heads", cls.num_attention_heads)
        if "norm_eps" in keys:
            keys.setdefault("layer_norm_epsilon", keys["norm_eps"])
        values: dict[str, Any] = {
            "intermediate_sizes": _widths(keys.get("intermediate_size", 21504), pattern.count("-")),
            "shared_expert_width": _shared_width(keys),
        }
        if keys.get("time_step_limit") is not None:
            values["time_step_limit"] = _limits(keys["time_step_limit"])
        if "eos_token_id" in keys:
            values["eos_token_ids"] = token_ids("eos_token_id", keys["eos_token_id"])
        for f in fields(cls):
            kinds = tuple(get_origin(kind) or kind for kind in get_args(f.type) or (f.type,))
            if f.name in keys and f.name not in values and (keys[f.name] is not None or type(None) in kinds):
                values[f.name] = _typed(f.name, keys[f.name], kinds)
        return cls(**values)

    @classmethod
    def from_folder(cls, folder: Path, overrides: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Of a checkpoint folder: config.json, and what its neighbours say about end tokens and quantisation."""
        keys = read_json(folder / "config.json")
        if not keys.get("quantization_config"):
            keys["quantization_config"] = _beside(folder, "hf_quant_config.json") or None
        own = keys["tokenizer_eos_id"] = _tokenizer_eos(folder)
        sources = keys.get("eos_token_id", 2), _beside(folder, "generation_config.json").get("eos_token_id"), own
        keys["eos_token_id"] = [id for source in sources for id in token_ids("eos_token_id", source)]
        return cls.from_dict(keys, overrides)

    def to_dict(self) -> dict[str, Any]:
        """The keys of a config.json that from_dict reads back as this config; transformers reads them too."""
        keys = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _RESHAPED}
        keys |= {key: value for key, value in _FIXED.items() if value is not None}
        keys["architectures"] = ["NemotronHForCausalLM"]
        keys["torch_dtype"] = self.dtype
        keys["num_hidden_layers"] = self.num_hidden_layers
        keys["hybrid_override_pattern"] = self.pattern
        keys["n_shared_experts"] = min(self.shared_expert_width, 1)
        keys["moe_shared_expert_intermediate_size"] = self.shared_expert_width
        keys["eos_token_id"] = self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids)
        if self.intermediate_sizes:
            same = len(set(self.intermediate_sizes)) == 1
            keys["intermediate_size"] = self.intermediate_sizes[0] if same else list(self.intermediate_sizes)
        if self.num_nextn_predict_layers:
            keys["mtp_hybrid_override_pattern"] = self.mtp_pattern
        if self.time_step_limit != (0.0, inf):
            keys["time_step_limit"] = list(self.time_step_limit)
        if self.quantization:
            keys["quantization_config"] = self.quantization
        return keys


# fields that config.json says in another way
_RESHAPED = {
    "pattern", "mtp_pattern", "dtype", "intermediate_sizes", "shared_expert_width", "time_step_limit", "eos_token_ids",
    "tokenizer_eos_id", "quantization",
}  # fmt: skip


def _require(good: bool, key: str, found: Any, accepted: str) -> None:
    if not good:
        raise ConfigError(f"config.json: {key} must be {accepted}; found {json.dumps(found, default=repr)[:200]}")


def _multiple(key: str, value: int, of: str, divisor: int) -> None:
    _require(value % divisor == 0, key, value, f"a multiple of {of}, {divisor}")


def _typed(key: str, value: Any, kinds: tuple[type, ...]) -> Any:
    """`value`, if it is of one of the kinds; a whole number is as good as a float, nothing else is converted."""
    if float in kinds and type(value) is int:
        return float(value)
    _require(type(value) in kinds, key, value, " or ".join(_JSON_NAMES[kind] for kind in kinds))
    return value


_JSON_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", dict: "an object"}
_JSON_NAMES[type(None)] = "null"


def _canonical(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The same keys with one name for one thing, and the layers as letters."""
    keys: dict[str, Any] = {}
    for key, value in raw.items():
        name = _ALIASES.get(key, key)
        if keys.setdefault(name, value) != value:
            raise ConfigError(f"config.json: {key} and its other name must agree; found {keys[name]!r} and {value!r}")
    for name, sources in _PATTERNS.items():
        spelled = next((key for key in sources if raw.get(key) is not None), None)
        if spelled:
            keys[name] = _letters(spelled, raw[spelled])
    return keys


def _letters(key: str, layers: Any) -> str:
    """Layers as a string of M, E, * and -, from such a string or from a list of names."""
    known = ", ".join(_LETTERS)
    if isinstance(layers, list):
        for name in layers:
            _require(isinstance(name, str) and name in _LETTERS, key, name, f"a list of {known}")
        layers = "".join(_LETTERS[name] for name in layers)
    _require(isinstance(layers, str) and layers != "", key, layers, f"a string of M, E, * and -, or a list of {known}")
    strange = "".join(sorted(set(layers) - set("ME*-")))
    _require(not strange, key, strange, "made of M, E, * and - only")
    return str(layers)


def _widths(value: Any, layers: int) -> tuple[int, ...]:
    """intermediate_size, one for all dense layers or one for each, as one for each."""
    widths = value if isinstance(value, list) else [value]
    for width in widths if layers else []:
        _typed("intermediate_size", width, (int,))
    return tuple(widths) if len(widths) != 1 and layers else (widths[0],) * layers


def _shared_width(keys: Mapping[str, Any]) -> int:
    width = 1
    for key, default in (("n_shared_experts", 1), ("moe_shared_expert_intermediate_size", 7688)):
        width *= _typed(key, keys.get(key, default) or 0, (int,))
    return width


def _limits(value: Any) -> tuple[float, float]:
    """[low, high]; infinity may be a JSON token or {"__float__": "Infinity"}, as transformers 5 writes it."""
    _require(isinstance(value, list | tuple) and len(value) == 2, "time_step_limit", value, "a list of two numbers")
    low, high = (float(v["__float__"]) if isinstance(v, dict) and "__float__" in v else v for v in value)
    return _typed("time_step_limit", low, (float,)), _typed("time_step_limit", high, (float,))


def _beside(folder: Path, name: str) -> dict[str, Any]:
    """A neighbour of config.json; empty if the folder does not have it."""
    return read_json(folder / name) if (folder / name).exists() else {}


def _tokenizer_eos(folder: Path) -> int | None:
    """The id of the end token that the tokenizer's files name; None if they name none."""
    config = _beside(folder, "tokenizer_config.json")
    eos = config.get("eos_token") or _beside(folder, "special_tokens_map.json").get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    added = config.get("added_tokens_decoder")  # transformers 4 lists the ids here, 5 leaves them to tokenizer.json
    if not added:
        added = {token["id"]: token for token in _beside(folder, "tokenizer.json").get("added_tokens", [])}
    return next((int(id) for id, token in added.items() if eos and token.get("content") == eos), None)
