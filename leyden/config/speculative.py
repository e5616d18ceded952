"""--speculative-config: which drafter proposes tokens, how many, and how its drafts are drawn and judged.

Keys and defaults are those of `vllm serve`. Keys about things that are always so here are accepted, and `notes` says
why they change nothing. Refused are unknown keys, methods that there is no drafter for, and methods that change what
the model says (fly).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

from leyden.config.drafter import METHODS, DrafterConfig
from leyden.config.folder import read_json, resolve
from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.log import get

log = get(__name__)

DRAFTERS = ("mtp", "dflash", "dspark", "ngram", "auto")

_KERNELS = "kernels are chosen by device and weight format"
_ALWAYS = "that is how it is done anyway"
# key -> why it changes nothing
_IGNORED = {
    "draft_tensor_parallel_size": "a drafter is divided as its target is",
    "quantization": "every matrix has the format in which the drafter's files hold it",
    "moe_backend": _KERNELS,
    "attention_backend": _KERNELS,
    "kv_cache_dtype": "the keys of a drafter have the type of the target's",
    "max_model_len": "drafts are made as far as the target goes",
    "code_revision": "no code is fetched with a model",
    "draft_load_config": "drafters are read as the target is",
    "enforce_eager": "a drafter is recorded where its target is",
    "dspark_draft_topk": "the Markov head looks at the whole vocabulary",
    "use_local_argmax_reduction": "drafts are drawn where all logits are",
    "parallel_drafting": "dflash and dspark draft a block at once, the others cannot",
    "draft_lm_head_quantization": "the drafter reads the target's lm_head as it is",
    "disable_padded_drafter_batch": "nothing is padded",
    "disable_eagle_block_drop": _ALWAYS,
    "disable_lookahead_block_hashes": _ALWAYS,
    "index_share_for_mtp_iteration": "there is no sparse index to share",
}
# beginning of keys -> why they cannot be served, unless null or false
_REFUSED = {
    "tensor_parallel_size": "the key is draft_tensor_parallel_size",
    "use_heterogeneous_vocab": "drafter and target must have one vocabulary",
    "suffix_": "there is no suffix method; ngram is the nearest",
    "fly_": "fly changes what the model says",
    "xpress_": "there is no such method",
}
_ONE_OF = {
    "draft_sample_method": ("greedy", "probabilistic"),
    "rejection_sample_method": ("standard", "block", "synthetic"),
}
_DEFAULT_DRAFTS = {"mtp": 1, "auto": 3}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Fields are keys of the JSON object. What settle() returns has a method and a number of drafts."""

    method: str = ""  # one of DRAFTERS; "": what the drafter's config.json says, or the target's MTP module
    model: str = ""  # folder or Hugging Face id of the drafter; "": the target itself
    revision: str | None = None  # of the drafter
    num_speculative_tokens: int = 0  # most drafts per step; 0: as many as the drafter was made for
    draft_sample_method: str = "greedy"  # probabilistic: drafts are drawn with the noise of the tokens they stand for
    rejection_sample_method: str = "standard"  # block: the same here; synthetic: by the rates, for measurements only
    synthetic_acceptance_rates: tuple[float, ...] = ()  # of drafts 1, 1 and 2, ...: how often they are kept
    synthetic_acceptance_length: float = 0.0  # tokens per step that rates are made for; 0: rates are given
    prompt_lookup_min: int = 5  # n-grams that are looked up are at least so long
    prompt_lookup_max: int = 5
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()  # (first, last batch size, drafts)
    enable_adaptive_verification: bool = False  # drafts that are unlikely to be kept are not tried

    def __post_init__(self) -> None:
        _require(self.method in ("", *DRAFTERS), "method", self.method, f"one of {', '.join(DRAFTERS)}")
        for key, known in _ONE_OF.items():
            _require(getattr(self, key) in known, key, getattr(self, key), f"one of {', '.join(known)}")
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        _require(1 <= low <= high, "prompt_lookup_min", low, f"at least 1, and at most prompt_lookup_max ({high})")
        self._check_sizes()
        self._check_synthetic()

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "SpeculativeConfig":
        """Of the JSON object. Raises ConfigError: key, value, what is accepted."""
        types = {field.name: field.type for field in fields(cls)}
        values = {}
        for key, value in raw.items():
            if key in types:
                if value is not None:
                    values[key] = _read(key, value, types[key])
            elif why := next((why for begin, why in _REFUSED.items() if key.startswith(begin)), ""):
                if value not in (None, False):
                    raise ConfigError(f"--speculative-config.{key} is not possible: {why}")
            elif key not in _IGNORED:
                close = get_close_matches(key, [*types, *_IGNORED], n=1)
                hint = f", did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(types))}"
                raise ConfigError(f"--speculative-config has no key {key}{hint}")
        low, high = values.get("prompt_lookup_min"), values.get("prompt_lookup_max")
        if (low is None) != (high is None):  # one of them stands for both
            values["prompt_lookup_min"] = values["prompt_lookup_max"] = low or high
        if "method" in values:
            values["method"] = _method(values["method"])
        return cls(**values)

    def __str__(self) -> str:
        what = self.method + (f" ({self.model})" if self.model else "")
        most = "up to " if self.scheduled or self.num_speculative_tokens_per_batch_size else ""
        decree = "; SYNTHETIC: kept by decree, answers are nonsense" if self.rates else ""
        return f"{what}, {most}{self.num_speculative_tokens} per step{decree}"

    @property
    def scheduled(self) -> bool:
        """Whether the number of drafts follows what steps take and what is kept."""
        return self.method == "auto" or self.enable_adaptive_verification

    @property
    def folder(self) -> Path:
        """Of the drafter's own files; fetched if needed."""
        return resolve(self.model, self.revision)

    def settle(self, target: ModelConfig, model: str) -> "SpeculativeConfig":
        """The same with what it leaves open, for the target in `model`; reads the drafter's config.json.

        Raises ConfigError if there is no such drafter, or if it is none of this method.
        """
        own = self.model in ("", model) or self.folder.resolve() == Path(model).resolve()
        mtp, network = target.num_nextn_predict_layers > 0, None
        if not own and self.method in ("mtp", "ngram"):
            what = "is a part of the target's checkpoint" if self.method == "mtp" else "needs no model"
            raise ConfigError(f"--speculative-config.model {self.model}: {self.method} {what}; leave the key out")
        if not own:
            network = self.network()
        method = self.method or (network.method if network else "mtp")
        if method in ("dflash", "dspark") and network is None:
            raise ConfigError(f"--speculative-config.model: {method} drafters have files of their own; name the folder")
        if method == "mtp" and not mtp:
            found = "the target has no MTP module (num_nextn_predict_layers is 0)"
            raise ConfigError(f"--speculative-config: {found}; give the model of a drafter, or method ngram")

        drafts = self.num_speculative_tokens or (network and network.width) or _DEFAULT_DRAFTS.get(method, 0)
        if not drafts:
            raise ConfigError(f"--speculative-config.num_speculative_tokens: must be given for {method}")
        if network is not None and network.width is not None and drafts > network.width:
            text = "%d drafts per step are more than the %d that %s was trained for: expect few to be right"
            log.warning(text, drafts, network.width, self.model)
        name = "" if own else self.model
        return replace(self, method=method, model=name, num_speculative_tokens=drafts)

    @property
    def rates(self) -> tuple[float, ...]:
        """How often the first 1, 2, ... drafts are kept by decree; empty where the target decides."""
        length = self.synthetic_acceptance_length
        more = (min(1.0, max(0.0, length - 1 - i)) for i in range(self.num_speculative_tokens))
        return tuple(more) if length else self.synthetic_acceptance_rates

    def methods(self, target: ModelConfig) -> tuple[str, ...]:
        """What drafts in a settled configuration; auto is all that there is, or n-grams where there is nothing."""
        if self.method != "auto":
            return (self.method,)
        found = ["mtp"] if target.num_nextn_predict_layers else []
        return tuple(found + ([self.network().method] if self.model else [])) or ("ngram",)

    def network(self) -> DrafterConfig:
        """Of the drafter's own files. Raises ConfigError if they are no drafter's, or not one for `method`."""
        raw = read_json(self.folder / "config.json")
        name = (raw.get("architectures") or [""])[0]
        if name not in METHODS:
            raise ConfigError(
                f"--speculative-config.model {self.model}: {name or 'a model without architecture'} is no drafter;"
                f" known are {', '.join(METHODS)}, and the MTP module inside the target (leave the key out)"
            )
        network = DrafterConfig.from_dict(raw)
        plain = network.markov_rank == 0  # DeepSpec writes DFlash drafters as DSpark ones without the Markov head
        fits = self.method in ("", "auto", network.method) or (self.method == "dflash" and plain)
        _require(fits, "method", self.method, f"{network.method}, which is what {self.model} is made for")
        return network

    def _check_sizes(self) -> None:
        ranges, most = self.num_speculative_tokens_per_batch_size, self.num_speculative_tokens
        good = all(1 <= low <= high and n >= 0 and (not most or n <= most) for low, high, n in ranges)
        good = good and all(a[1] < b[0] for a, b in pairwise(ranges))
        accepted = "a list of [first, last, drafts], in order, with no more drafts than num_speculative_tokens"
        _require(good, "num_speculative_tokens_per_batch_size", ranges, accepted)

    def _check_synthetic(self) -> None:
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        most, wanted = self.num_speculative_tokens, self.rejection_sample_method == "synthetic"
        _require(bool(most) or not wanted, "num_speculative_tokens", most, "given where acceptance is synthetic")
        one = (bool(rates) != bool(length)) if wanted else not (rates or length)
        number = "exactly one of the two" if wanted else 'given only with rejection_sample_method "synthetic"'
        _require(one, "synthetic_acceptance_rates and _length", (rates, length), number)
        falling = all(a >= b for a, b in pairwise((1.0, *rates, 0.0))) and (not rates or len(rates) == most)
        _require(falling, "synthetic_acceptance_rates", rates, f"{most} numbers from 1 to 0, none above the one before")
        good = not length or 1 <= length <= most + 1
        _require(good, "synthetic_acceptance_length", length, f"between 1 and {most + 1}")


def notes(raw: Mapping[str, Any]) -> list[str]:
    """One line for each key that changes nothing here."""
    found = [f"{key} {value} has no effect: {_IGNORED[key]}" for key, value in raw.items() if key in _IGNORED and value]
    if raw.get("rejection_sample_method") == "block":
        found.append("rejection_sample_method block has no effect: drafts are kept while they are what the target says")
    return [f"--speculative-config.{line}" for line in found]


def _method(name: str) -> str:
    """The method behind the older names of it."""
    if name in DRAFTERS:
        return name
    if name.endswith("_mtp"):
        return "mtp"
    if name == "ngram_gpu":
        return "ngram"
    raise ConfigError(f"--speculative-config.method {name} is not possible; known are {', '.join(DRAFTERS)}")


def _read(key: str, value: Any, kind: Any) -> Any:
    """The value as the field holds it."""
    if kind in (str, str | None):
        _require(isinstance(value, str), key, value, "a text")
    elif kind is bool:
        _require(isinstance(value, bool), key, value, "true or false")
    elif kind is int:
        _require(type(value) is int and value >= 1, key, value, "a whole number above 0")
    elif kind is float:
        _require(type(value) in (int, float), key, value, "a number")
    elif kind == tuple[float, ...]:
        good = isinstance(value, list | tuple) and all(type(v) in (int, float) for v in value)
        _require(good, key, value, "a list of numbers")
        return tuple(float(v) for v in value)
    else:
        good = isinstance(value, list | tuple) and all(isinstance(v, list | tuple) and len(v) == 3 for v in value)
        _require(good and all(type(n) is int for v in value for n in v), key, value, "a list of [first, last, drafts]")
        return tuple(tuple(v) for v in value)
    return value


def _require(good: bool, key: str, found: Any, accepted: str) -> None:
    if not good:
        raise ConfigError(f"--speculative-config.{key} must be {accepted}; found {found!r}")
