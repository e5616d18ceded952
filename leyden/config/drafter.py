"""A drafter network's config.json: DFlash and DSpark, as NVIDIA, z-lab, DeepSpec and Model-Optimizer write it.

One thing has up to five names in these files. All are read; where two are present they must agree. Refused by name is
what would silently draft something else: other architectures, biases, another activation, a drafter's own lm_head or
vocabulary, scaled values or logits, partial or interleaved rotary embedding, Markov heads other than "vanilla".
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any, Literal

from leyden.config.folder import read_json
from leyden.errors import ConfigError

METHODS: dict[str, Literal["dflash", "dspark"]] = {
    "DFlashDraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
}

# key -> the only value that is computed here; absent or null is fine everywhere
_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "has_lm_head": False,
    "has_own_lm_head": False,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "partial_rotary_factor": 1.0,
    "logit_scale": 1.0,
    "markov_head_type": "vanilla",
    "dspark_fixup_head_type": "markov",
    "transformer_layer_config": None,
    "dflash_config.attention_value_scale": 1.0,
    "dflash_config.output_multiplier": 1.0,
    "dflash_config.final_logit_softcapping": None,
    "dflash_config.use_aux_hidden_state": True,
}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding over all of head_dim; factor 1 is the plain one, above it YaRN (Peng et al., 2023)."""

    theta: float = 10000.0
    factor: float = 1.0
    original: int = 8192  # positions before the stretching
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # of cos and sin; None: YaRN's own, 0.1 ln(factor) + 1

    @property
    def scale(self) -> float:
        """What cos and sin are multiplied with."""
        return self.attention_factor if self.attention_factor is not None else 0.1 * log(self.factor) + 1.0


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """What a drafter network is. Names are those of config.json where it has one name for the thing."""

    method: Literal["dflash", "dspark"]
    vocab_size: int
    hidden_size: int  # of the target too: its lm_head reads the drafter's output
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    target_layer_ids: tuple[int, ...]  # 0-based: the residual stream after these layers of the target
    mask_token_id: int
    causal: tuple[bool, ...]  # per layer: whether a row of the block sees only the rows before it
    windows: tuple[int | None, ...]  # per layer: keys that a row sees, itself included; None: all
    attention_sinks: bool = False
    block_size: int | None = None  # rows of a block in training
    sample_from_anchor: bool = False  # row i predicts position i + 1 of the block (True) or its own position i
    markov_rank: int = 0  # 0: no Markov head
    confidence: Literal[None, "hidden", "markov"] = None  # what the confidence head reads; "markov": hidden and W1
    rope: Rope = Rope()
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1048576

    def __post_init__(self) -> None:
        layers, taps = self.num_hidden_layers, self.target_layer_ids
        for name in _SIZES:
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        groups = self.num_attention_heads % self.num_key_value_heads == 0
        _require(groups, "num_attention_heads", self.num_attention_heads, "a multiple of num_key_value_heads")
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even: it is rotated in halves")
        # vLLM concatenates in the order of the layers, others in the order of the list: only then are both the same.
        rising = bool(taps) and taps[0] >= 0 and all(a < b for a, b in zip(taps, taps[1:], strict=False))
        _require(rising, "target_layer_ids", list(taps), "layers of the target (0 = the first), each after the last")
        _require(0 <= self.mask_token_id < self.vocab_size, "mask_token_id", self.mask_token_id, "below vocab_size")
        _require(len(self.causal) == len(self.windows) == layers, "layer_types", self.windows, f"{layers} entries")
        _require(self.markov_rank >= 0, "markov_rank", self.markov_rank, "0 or more")
        for window in self.windows:
            # inside the block nothing is windowed, which is the same as a window on both sides only if it is this long
            good = window is None or window >= (self.block_size or 1)
            _require(good, "sliding_window", window, f"at least the block of {self.block_size}")
        if self.method == "dflash":
            _require(not self.sample_from_anchor, "sample_from_anchor", True, "false in a DFlash drafter")
            _require(not self.markov_rank, "markov_rank", self.markov_rank, "0 in a DFlash drafter")

    @property
    def width(self) -> int | None:
        """Drafts per step that the training block covers; None where config.json does not tell."""
        return None if self.block_size is None else self.rows_to_drafts(self.block_size)

    def rows_to_drafts(self, rows: int) -> int:
        return rows if self.sample_from_anchor else rows - 1

    def drafts_to_rows(self, drafts: int) -> int:
        """Rows of the block that proposes so many: the anchor and, unless it predicts itself, one mask per draft."""
        return drafts if self.sample_from_anchor else drafts + 1

    @classmethod
    def from_folder(cls, folder: Path) -> "DrafterConfig":
        return cls.from_dict(read_json(folder / "config.json"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DrafterConfig":
        """Of the keys of a config.json. Raises ConfigError: key, value, what is accepted."""
        keys = {key: value for key, value in raw.items() if value is not None}
        nested = keys.get("dflash_config") or {}
        keys |= {f"dflash_config.{key}": value for key, value in nested.items() if value is not None}

        architectures = keys.get("architectures") or [None]
        _require(architectures[0] in METHODS, "architectures", architectures, " or ".join(METHODS))
        for key, accepted in _FIXED.items():
            _require(keys.get(key, accepted) == accepted, key, keys.get(key), f"{json.dumps(accepted)} only")
        own = keys.get("draft_vocab_size", keys.get("vocab_size"))
        _require(own == keys.get("vocab_size"), "draft_vocab_size", own, "null, or the same as vocab_size")

        target = keys.get("target_hidden_size", keys.get("hidden_size"))
        _require(target == keys.get("hidden_size"), "target_hidden_size", target, f"{keys.get('hidden_size')}")

        method = METHODS[architectures[0]]
        causal, windows = _attention(keys, _needed(keys, "num_hidden_layers"))
        return cls(
            **{name: _needed(keys, name) for name in _SIZES},
            method=method,
            target_layer_ids=_taps(keys),
            mask_token_id=_needed(keys, *_MASK_KEYS),
            causal=causal,
            windows=windows,
            attention_sinks=_one(keys, *_SINK_KEYS) or False,
            block_size=_one(keys, "block_size", "dspark_block_size", "dflash_config.block_size"),
            sample_from_anchor=_anchor_first(keys, method),
            markov_rank=_one(keys, "markov_rank", "dspark_markov_rank") or 0,
            confidence=_confidence(keys),
            rope=_rope(keys),
            rms_norm_eps=keys.get("rms_norm_eps", 1e-6),
            max_position_embeddings=keys.get("max_position_embeddings", 1048576),
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of the published drafters, which from_dict reads back as this config and vLLM reads too."""
        window = next((window for window in self.windows if window), None)
        taps, dspark = list(self.target_layer_ids), self.method == "dspark"
        nested = {
            "attention_sink_bias": self.attention_sinks,
            "causal": self.causal[0],
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": taps,
            "use_swa": window is not None,
            "sample_from_anchor": self.sample_from_anchor,
        }
        same = ("rms_norm_eps", "max_position_embeddings", "block_size", "sample_from_anchor", "mask_token_id")
        keys: dict[str, Any] = {name: getattr(self, name) for name in (*_SIZES, *same)}
        keys |= {
            "architectures": ["Qwen3DSparkModel" if dspark else "DFlashDraftModel"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_theta": self.rope.theta,
            "rope_parameters": self._rope_parameters(),
            "layer_types": ["sliding_attention" if w else "full_attention" for w in self.windows],
            "sliding_window": window,
            "target_layer_ids": taps,
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in taps],
            "num_aux_layers": len(taps),
            "attention_sink_bias": self.attention_sinks,
            "dflash_query_causal": self.causal[0],
            "has_embed_tokens": True,
            "has_lm_head": False,
            "dflash_config": nested | ({"swa_window_size": window} if window else {}),
        }
        if dspark:
            keys |= {
                "markov_rank": self.markov_rank,
                "markov_head_type": "vanilla",
                "dspark_bonus_anchor": not self.sample_from_anchor,
                "enable_confidence_head": self.confidence is not None,
                "confidence_head_with_markov": self.confidence == "markov",
            }
        return keys

    def _rope_parameters(self) -> dict[str, Any]:
        rope = self.rope
        keys: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
        if rope.factor != 1.0:
            keys |= {"rope_type": "yarn", "factor": rope.factor, "original_max_position_embeddings": rope.original}
            keys |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        return keys if rope.attention_factor is None else keys | {"attention_factor": rope.attention_factor}


# fields that are whole numbers of config.json under the same name
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
_MASK_KEYS = ("dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_SINK_KEYS = ("dflash_config.attention_sink_bias", "add_swa_attention_sink_bias", "attention_sink_bias")
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast"}
_ROPE_KEYS |= {"beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor"}


def _require(good: bool, key: str, found: Any, accepted: str) -> None:
    if not good:
        raise ConfigError(f"drafter's config.json: {key} must be {accepted}; found {json.dumps(found, default=repr)}")


def _one(keys: Mapping[str, Any], *names: str) -> Any:
    """The value under any of the names, None if there is none; two that differ are refused."""
    found = {name: keys[name] for name in names if name in keys}
    if len({json.dumps(value) for value in found.values()}) > 1:
        raise ConfigError(f"drafter's config.json: these must agree: {json.dumps(found)}")
    return next(iter(found.values()), None)


def _needed(keys: Mapping[str, Any], *names: str) -> int:
    value = _one(keys, *names)
    _require(type(value) is int, " or ".join(names), value, "a whole number")
    return int(value)


def _taps(keys: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers of the target; the eagle key counts the embedding as its layer 0, so it is one higher."""
    names = ["target_layer_ids", "dspark_target_layer_ids"]
    names += ["dflash_config.target_layer_ids", "dflash_config.layer_ids"]
    eagle = keys.get("eagle_aux_hidden_state_layer_ids")
    shifted = {} if eagle is None else {"eagle_aux_hidden_state_layer_ids - 1": [layer - 1 for layer in eagle]}
    taps = _one({**keys, **shifted}, *shifted, *names)
    # Never a default: the rule of thumb for absent lists gives other layers than the published drafters were trained on
    _require(isinstance(taps, list), "target_layer_ids", taps, "a list of layers of the target")
    return tuple(taps)


def _attention(keys: Mapping[str, Any], layers: int) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """(causal, window) of every layer, by the rules of vLLM's DFlash: an explicit flag wins over layer_types."""
    types = keys.get("layer_types", ["full_attention"] * layers)
    _require(len(types) == layers, "layer_types", types, f"a list of {layers}")
    for kind in types:
        _require(kind in ("full_attention", "sliding_attention"), "layer_types", kind, "full_ or sliding_attention")
    sliding = [kind == "sliding_attention" for kind in types]

    flag = keys["is_causal"] if "is_causal" in keys else _one(keys, "dflash_config.causal", "dflash_query_causal")
    causal = tuple(sliding if flag is None else [bool(flag)] * layers)

    if keys.get("dflash_config.use_swa") and not any(sliding):
        sliding = [True] * layers
    size = _one(keys, "dflash_config.swa_window_size", "sliding_window") if any(sliding) else None
    _require(size is not None or not any(sliding), "sliding_window", size, "given: there are sliding layers")
    return causal, tuple(size if s else None for s in sliding)


def _anchor_first(keys: Mapping[str, Any], method: str) -> bool:
    bonus = {"not dspark_bonus_anchor": not keys["dspark_bonus_anchor"]} if "dspark_bonus_anchor" in keys else {}
    names = ("sample_from_anchor", "dflash_config.sample_from_anchor", *bonus)
    value = _one({**keys, **bonus}, *names)
    return method == "dspark" if value is None else bool(value)  # DeepSpec's layout where nothing is said


def _confidence(keys: Mapping[str, Any]) -> Literal[None, "hidden", "markov"]:
    if not keys.get("enable_confidence_head", False):
        return None
    return "markov" if keys.get("confidence_head_with_markov", False) else "hidden"


def _rope(keys: Mapping[str, Any]) -> Rope:
    given = dict(keys.get("rope_parameters") or keys.get("rope_scaling") or {})
    strange = sorted(given.keys() - _ROPE_KEYS)
    _require(not strange, "rope_parameters", strange, f"made of {', '.join(sorted(_ROPE_KEYS))}")
    inner = {f"rope_parameters.{key}": value for key, value in given.items() if value is not None}
    theta = _one({**keys, **inner}, "rope_theta", "rope_parameters.rope_theta")
    _require(theta is not None, "rope_theta", theta, "given: readers differ in what they take where it is not")
    _require(given.get("partial_rotary_factor", 1.0) == 1.0, "partial_rotary_factor", given, "1.0")
    kind = given.get("rope_type", given.get("type", "default"))
    _require(kind in ("default", "yarn"), "rope_parameters.rope_type", kind, "default or yarn")
    if kind == "default":
        return Rope(float(theta))
    _require(given.get("truncate", True) is True, "rope_parameters.truncate", given.get("truncate"), "true")
    for key in ("factor", "original_max_position_embeddings"):
        _require(key in given, f"rope_parameters.{key}", None, "given for yarn")
    factor, scale = float(given["factor"]), given.get("attention_factor")
    if scale is None and given.get("mscale") and given.get("mscale_all_dim"):
        scale = (0.1 * given["mscale"] * log(factor) + 1) / (0.1 * given["mscale_all_dim"] * log(factor) + 1)
    original, fast = int(given["original_max_position_embeddings"]), float(given.get("beta_fast", 32))
    return Rope(float(theta), factor, original, fast, float(given.get("beta_slow", 1)), scale)
