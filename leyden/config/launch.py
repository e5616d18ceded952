"""What one `leyden serve` command asks for: a command line becomes the configurations of engine and server.

Every flag that was given a value other than its default ends in one of four ways, which its row in flags.json tells:
it becomes a field of EngineConfig, ServerConfig or Launch; it asks for what is always done; it has no effect, and
`notes` has one line that says why; or it is refused with a ConfigError.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from leyden import log
from leyden.config import speculative
from leyden.config.arguments import parse
from leyden.config.engine import EngineConfig
from leyden.config.flags import Flag, because, shown, table
from leyden.config.server import ServerConfig
from leyden.errors import ConfigError

SHORT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
ENVIRONMENT = {"hf_token": "HF_TOKEN", "download_dir": "HF_HUB_CACHE", "device_ids": "CUDA_VISIBLE_DEVICES"}
# What objects can say with effect: flags of their own have the same names.
GRAPHS = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")  # of --compilation-config
BACKENDS = ("moe_backend", "linear_backend")  # of --kernel-config
RENAMED = {"sse_keep_alive_interval": "ping_interval"}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """`environment` is to be set before anything is loaded; `warnings` are about the command line itself."""

    engine: EngineConfig
    server: ServerConfig
    log_level: str
    log_format: str
    environment: dict[str, str]
    warnings: tuple[str, ...]
    given: dict[str, Any]  # by dest, flags that were not given left out

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> "Launch":
        """Raises ConfigError for anything that cannot be meant, by the name of the flag."""
        _, flags = table()
        arguments = parse(_model_first(argv), flags)
        given = arguments.values
        model = given.get("model_tag") or given.get("model") or "pocket"
        for flag in flags:
            if flag.dest in given and flag.treatment == "refuse" and not _accepted(flag, given[flag.dest]):
                raise ConfigError(because(f"{shown(flag, given[flag.dest])} is not possible", flag.reason))
        values = _effective(flags, given | _chosen(flags, given))
        values |= {key: value for key, value in (given.get("compilation_config") or {}).items() if key in GRAPHS}
        _check(values)
        drafting = _speculative(given)
        return cls(
            engine=EngineConfig(**_fields(EngineConfig, values | {"model": model, "speculative_config": drafting})),
            server=ServerConfig(**_fields(ServerConfig, values)),
            log_level=log.level(values.get("log_level")),
            log_format=values.get("log_format", "text"),
            environment={name: _word(values[dest]) for dest, name in ENVIRONMENT.items() if _says(values.get(dest))},
            warnings=tuple(arguments.notices),
            given=given,
        )

    def notes(self, device: str) -> list[str]:
        """One line for each flag that has no effect on `device` ("cpu", "cuda", "cuda:0")."""
        lines = []
        for flag in table()[1]:
            if flag.dest not in self.given:
                continue
            value = self.given[flag.dest]
            if flag.dest == "compilation_config" and device != "cpu":
                value = {key: word for key, word in value.items() if key not in GRAPHS}
            if flag.dest == "kernel_config" and device != "cpu":
                chosen = _chosen(table()[1], self.given)
                value = {key: word for key, word in value.items() if key not in chosen}
            if not _accepted(flag, value):
                lines.append(because(f"{shown(flag, value)} has no effect", flag.reason))
            elif flag.cpu and device == "cpu" and value not in (flag.default, False):
                lines.append(f"{shown(flag, value)} has no effect on a CPU: {flag.cpu}")
        return lines + speculative.notes(self.engine.speculative_config)


def _model_first(argv: Sequence[str]) -> list[str]:
    """--model NAME is the older way to give the first argument. Only the command line has it, config files do not."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    for index, word in enumerate(words[:end]):
        if word.startswith("--model="):
            return [word.removeprefix("--model="), *words[:index], *words[index + 1 :]]
        if word == "--model" and index + 1 < end:
            return [words[index + 1], *words[:index], *words[index + 2 :]]
    return words


def _accepted(flag: Flag, value: Any) -> bool:
    """Whether the flag does with this value what its name promises (or has nothing to do)."""
    if value == flag.default or value in flag.accepts or value == {}:
        return True
    return flag.treatment == "effect" and not flag.accepts


def _effective(flags: Sequence[Flag], given: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for flag in flags:
        value = given.get(flag.dest)
        if value is not None and value != "" and flag.treatment == "effect" and _accepted(flag, value):
            values[RENAMED.get(flag.dest, flag.dest)] = value
    if "api_key" not in values and (key := os.environ.get("VLLM_API_KEY")):
        values["api_key"] = [key]
    if values.get("max_model_len") == -1:  # auto: what fits, which is what the engine does without the flag
        del values["max_model_len"]
    if "disable_access_log_for_endpoints" in values:
        values["disable_access_log_for_endpoints"] = values["disable_access_log_for_endpoints"].split(",")
    return values


def _chosen(flags: Sequence[Flag], given: Mapping[str, Any]) -> dict[str, Any]:
    """Backends that --kernel-config names and that have an effect. A flag of its own counts for more."""
    config = given.get("kernel_config") or {}
    known = {flag.dest: flag for flag in flags if flag.dest in BACKENDS and flag.dest not in given}
    named = {dest: flag.read(config[dest]) for dest, flag in known.items() if isinstance(config.get(dest), str)}
    return {dest: value for dest, value in named.items() if _accepted(known[dest], value)}


def _fields(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are fields of a configuration, lists as the tuples it holds."""
    names = {field.name: str(field.type) for field in fields(config)}
    taken = {name: value for name, value in values.items() if name in names}
    for name, value in taken.items():
        for begin, kind, what in (("tuple", list, "a list"), ("dict", dict, "a JSON object")):
            if names[name].startswith(begin) and not isinstance(value, kind):
                raise ConfigError(f"--{name.replace('_', '-')}: expected {what}, got {value!r}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in taken.items()}


def _speculative(given: Mapping[str, Any]) -> dict[str, Any]:
    """--speculative-config with its short forms."""
    config = given.get("speculative_config")
    if config is not None and not isinstance(config, dict):
        raise ConfigError(f"--speculative-config: expected a JSON object, got {config!r}")
    merged = dict(config or {})
    for dest, key in SHORT.items():
        if given.get(dest) is None:
            continue
        if key in merged:
            raise ConfigError(f"--{dest.replace('_', '-')} and --speculative-config.{key}: give one of the two")
        merged[key] = given[dest]
    return merged


def _check(values: Mapping[str, Any]) -> None:
    template = values.get("chat_template")
    if template is not None and not any(mark in template for mark in "{}\n") and not Path(template).is_file():
        raise ConfigError(f"--chat-template: no such file, and no template text either: {template!r}")
    if values.get("enable_log_outputs") and not values.get("enable_log_requests"):
        raise ConfigError("--enable-log-outputs needs --enable-log-requests")


def _says(value: Any) -> bool:
    return value is not None and value is not True  # --hf-token without a value: the one that is stored


def _word(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
