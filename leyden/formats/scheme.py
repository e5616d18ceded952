"""Which matrix of a checkpoint is stored in which format.

    Scheme     what config.json (quantization_config) or hf_quant_config.json promises
    held_as    what the tensors of one matrix say themselves: they decide, the promise is compared
    describe   formats -> quantization_config

Read are ModelOpt's two spellings, compressed-tensors' groups, and what leyden.config.gguf makes of a GGUF file; other
methods (AWQ, GPTQ, bitsandbytes ...) and other widths are refused by name.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch

from leyden.config.gguf import BLOCKS
from leyden.errors import ConfigError
from leyden.formats import Dense, Format
from leyden.formats.fp8 import FP8, MXFP8, FP8Block, FP8Channel
from leyden.formats.gguf import Blocks
from leyden.formats.int4 import Int4
from leyden.formats.int8 import Int8
from leyden.formats.nvfp4 import NVFP4

_ALGORITHMS: dict[str, Format] = {
    "NVFP4": NVFP4(input_scale=True),
    "W4A16_NVFP4": NVFP4(),
    "FP8": FP8(input_scale=True),
    "FP8_PER_CHANNEL_PER_TOKEN": FP8Channel(),
    "FP8_PB_WO": FP8Block(),
    "FP8_BLOCK_SCALES": FP8Block(),  # its older name
    "MXFP8": MXFP8(),
}
_SCALES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class Stored(Protocol):
    """What a file's header says about one tensor; `dtype` as safetensors spells it, or GGUF if it has blocks."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


class Scheme:
    """A format for every matrix, by its name in the checkpoint (`backbone.layers.3.mixer.experts.0.up_proj`).

    fp8_cache   keys and values are meant to be kept in E4M3

    Raises ConfigError for what cannot be read.
    """

    def __init__(self, quantization: Mapping[str, Any] | None):
        config = dict(quantization or {})
        method = config.get("quant_method", "modelopt")
        self.fp8_cache = False
        self._exact: dict[str, Format] = {}
        self._groups: list[tuple[list[str], Format]] = []  # patterns of names, the first that matches counts
        self._ignored: list[str] = []
        if method == "modelopt":
            self._modelopt(config.get("quantization", config))
        elif method == "compressed-tensors":
            self._compressed_tensors(config)
        elif method == "gguf":
            kinds = config.get("kinds") or {}
            self._exact = {name: NVFP4() if kind == "NVFP4" else Blocks(kind) for name, kind in kinds.items()}
        else:
            raise _refusal("quant_method", method, "modelopt or compressed-tensors")

    def format_of(self, name: str) -> Format:
        if name in self._exact:
            return self._exact[name]
        if any(_matches(pattern, name) for pattern in self._ignored):
            return Dense()
        return next((format for patterns, format in self._groups if any(_matches(p, name) for p in patterns)), Dense())

    def _modelopt(self, config: Mapping[str, Any]) -> None:
        cache = config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
        self.fp8_cache = cache == "FP8" or (isinstance(cache, dict) and cache.get("num_bits") == 8)
        self._ignored = [*(config.get("exclude_modules") or ()), *(config.get("ignore") or ())]
        algorithm = config.get("quant_algo")
        for name, layer in (config.get("quantized_layers") or {}).items():
            self._exact[_plain(name)] = _algorithm(layer.get("quant_algo"))
        if algorithm not in (None, "MIXED_PRECISION"):
            format = _algorithm(algorithm)
            groups = (config.get("config_groups") or {}).values()
            if format == NVFP4(input_scale=True) and groups and not any(g.get("input_activations") for g in groups):
                format = NVFP4()
            self._groups = [(["Linear"], format)]

    def _compressed_tensors(self, config: Mapping[str, Any]) -> None:
        self.fp8_cache = (config.get("kv_cache_scheme") or {}).get("num_bits") == 8
        self._ignored = list(config.get("ignore") or ())
        for group in (config.get("config_groups") or {}).values():
            self._groups.append((list(group.get("targets") or ()), _group_format(group)))


def held_as(tensors: Mapping[str, Stored], shape: tuple[int, ...]) -> Format:
    """The format of one matrix [N, K] from the names, dtypes and shapes of its tensors.

    A tensor that is missing does not change the answer, as far as that can be: the caller then misses it by name.
    """
    n, k = shape[-2:]
    weight, packed, scale = tensors.get("weight"), tensors.get("weight_packed"), tensors.get("weight_scale")
    inputs = "input_scale" in tensors
    if packed is not None:
        groups = scale.shape[-1] if scale else 1
        return Int4(
            None if groups == 1 else k // groups,
            "weight_zero_point" not in tensors,
            _SCALES.get(scale.dtype if scale else "", torch.bfloat16),
        )
    if weight is None:
        return Dense()
    if weight.dtype in BLOCKS:
        return Blocks(weight.dtype)
    if weight.dtype == "U8":
        return NVFP4(inputs)
    if weight.dtype == "I8":
        groups = scale.shape[-1] if scale else 1
        return Int8(None if groups == 1 else k // groups, _SCALES.get(scale.dtype if scale else "", torch.bfloat16))
    if weight.dtype == "F8_E4M3":
        if scale is None or scale.shape in ((), (1,)):
            return FP8(inputs)
        if scale.dtype in ("U8", "F8_E8M0"):
            return MXFP8()
        return FP8Channel() if scale.shape in ((n,), (n, 1)) else FP8Block()
    return Dense()


def describe(formats: Mapping[str, Format], fp8_cache: bool = False) -> dict[str, Any] | None:
    """The quantization_config of a checkpoint that holds each named matrix in its format; None if nothing is quantised.

    Integers are described as compressed-tensors does, everything else as ModelOpt. ConfigError for formats that no
    safetensors checkpoint can name, and for integers together with others.
    """
    stored = {name: format for name, format in formats.items() if format != Dense()}
    plain = sorted(formats.keys() - stored.keys())
    if not stored:
        return None
    if any(isinstance(format, Int4 | Int8) for format in stored.values()):
        return _describe_integers(stored, plain, fp8_cache)
    names = {format: algorithm for algorithm, format in reversed(_ALGORITHMS.items())} | {FP8(): "FP8"}
    strange = sorted({format.name for format in stored.values()} - {format.name for format in names})
    if strange:
        raise ConfigError(f"a safetensors checkpoint cannot hold the format {', '.join(strange)}; write a GGUF file")
    layers = {
        name: {"quant_algo": names[format]} | ({"group_size": 16} if isinstance(format, NVFP4) else {})
        for name, format in sorted(stored.items())
    }
    counts = Counter(names[format] for format in stored.values())
    config: dict[str, Any] = {"quant_method": "modelopt", "producer": {"name": "leyden"}}
    config["quant_algo"] = "MIXED_PRECISION" if len(counts) > 1 else next(iter(counts))
    if fp8_cache:
        config["kv_cache_quant_algo"] = "FP8"
        config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
    config |= {"exclude_modules": plain, "ignore": plain}
    if len(counts) > 1:
        return config | {"quantized_layers": layers}
    return config | ({"group_size": 16} if "NVFP4" in config["quant_algo"] else {})


def _describe_integers(stored: Mapping[str, Format], plain: list[str], fp8_cache: bool) -> dict[str, Any]:
    groups: dict[Int4 | Int8, list[str]] = {}
    for name, format in sorted(stored.items()):
        if not isinstance(format, Int4 | Int8):
            raise ConfigError(f"a checkpoint cannot hold both integers and {format.name}; {name} is {format.name}")
        groups.setdefault(format, []).append(name)
    described = {}
    for i, (format, names) in enumerate(groups.items()):
        bits, symmetric = (4, format.symmetric) if isinstance(format, Int4) else (8, True)
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False}
        kind = {"strategy": "group", "group_size": format.group} if format.group else {"strategy": "channel"}
        targets = ["Linear"] if len(groups) == 1 else names
        packing = "pack-quantized" if bits == 4 else "int-quantized"
        group = {"targets": targets, "weights": weights | kind, "input_activations": None, "format": packing}
        described[f"group_{i}"] = group
    kinds = {str(group["format"]) for group in described.values()}
    layout = kinds.pop() if len(kinds) == 1 else "mixed-precision"
    config = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"}
    cache = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True} if fp8_cache else None
    return config | {"config_groups": described, "ignore": plain, "kv_cache_scheme": cache}


def _algorithm(name: Any) -> Format:
    if name not in _ALGORITHMS:
        raise _refusal("quant_algo", name, ", ".join([*_ALGORITHMS, "MIXED_PRECISION"]))
    return _ALGORITHMS[name]


def _group_format(group: Mapping[str, Any]) -> Format:
    """Of one of compressed-tensors' config_groups."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    static = inputs is not None and inputs.get("dynamic") is not True
    size = weights.get("group_size")
    match weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy"):
        case "int", 4, "group":
            return Int4(size, weights.get("symmetric", True))
        case "int", 4, "channel":
            return Int4(None, weights.get("symmetric", True))
        case "int", 8, ("group" | "channel") if weights.get("symmetric", True):
            return Int8(size)
        case "float", 4, _ if size == 16:
            return NVFP4(input_scale=static)
        case "float", 8, "tensor":
            return FP8(input_scale=static)
        case "float", 8, "channel":
            return FP8Channel()
        case "float", 8, "block" if weights.get("block_structure") == [128, 128]:
            return FP8Block()
        case "float", 8, "group" if size == 32:
            return MXFP8()
    keys = ("type", "num_bits", "strategy", "group_size", "block_structure")
    found = {key: weights[key] for key in keys if weights.get(key) is not None}
    raise _refusal("config_groups", found, "int4 in groups or channels, symmetric int8, NVFP4, FP8 or MXFP8")


def _refusal(key: str, found: Any, accepted: str) -> ConfigError:
    return ConfigError(f"quantization_config: {key} must be {accepted}; found {found!r}")


def _plain(name: str) -> str:
    """A name without the prefixes that files may put before it."""
    name = name.removeprefix("language_model.")
    return "backbone." + name.removeprefix("model.") if name.startswith("model.") else name


def _matches(pattern: str, name: str) -> bool:
    """`pattern` may be a name, the name of a module around it, have wildcards, be `re:` and a regular expression, or be
    the class "Linear": every matrix but the embeddings."""
    if pattern == "Linear":
        return not name.endswith("embeddings")
    if pattern.startswith("re:"):
        spellings = name, name.replace("backbone.", "model.", 1)
        return any(re.match(pattern[3:], spelling) for spelling in spellings)
    return any(fnmatchcase(part, _plain(pattern)) for part in _around(name))


def _around(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))
