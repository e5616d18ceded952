"""Sampling defaults, as the checkpoint's generation_config.json recommends them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyden.config.folder import read_json
from leyden.errors import ConfigError, RequestError
from leyden.types import SamplingParams

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """None: the file says nothing about it. Keys that are not listed here are ignored, as vLLM ignores them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "GenerationDefaults":
        """Raises ConfigError for a value that no request could use."""
        values = {key: raw[key] for key in (*_SAMPLING, "max_new_tokens") if raw.get(key) is not None}
        limits = {"max_tokens" if key == "max_new_tokens" else key: value for key, value in values.items()}
        try:
            SamplingParams(**limits)  # the same ranges as for a request
        except RequestError as error:
            message = error.message.replace("max_tokens", "max_new_tokens")
            raise ConfigError(f"generation_config.json or --override-generation-config: {message}") from None
        return cls(**values, eos_token_ids=token_ids("eos_token_id", raw.get("eos_token_id")))

    @classmethod
    def from_folder(cls, folder: Path, overrides: dict[str, Any] | None = None) -> "GenerationDefaults":
        """Of a checkpoint folder, with `overrides` laid over the file; a folder without the file recommends nothing."""
        path = folder / "generation_config.json"
        return cls.from_dict((read_json(path) if path.exists() else {}) | (overrides or {}))


def token_ids(key: str, value: Any) -> tuple[int, ...]:
    """A token id, a list of them or null, as a tuple without repeats."""
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise ConfigError(f"{key} must be a token id or a list of them, found {value!r}")
    return tuple(dict.fromkeys(ids))
