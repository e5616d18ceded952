"""Logging: one format for every process of the server. Nobody logs a prompt or an answer unless a flag asks for it.

While a request is handled, `request_id` holds its id, which every line then carries.
"""

import json
import logging
import os
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

from leyden.errors import ConfigError

FORMATS = ("text", "json")
LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")
request_id: ContextVar[str] = ContextVar("request_id", default="")


def level(given: str | None = None) -> str:
    """The level to log at: `given`, else VLLM_LOGGING_LEVEL, else INFO."""
    name = given or os.environ.get("VLLM_LOGGING_LEVEL") or "INFO"
    if name.upper() not in LEVELS:
        raise ConfigError(f"VLLM_LOGGING_LEVEL: expected one of {', '.join(LEVELS)}, got {name!r}")
    return name.upper()


class _Text(logging.Formatter):
    """A line for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return f"{line} [{id}]" if (id := request_id.get()) else line


class _Json(logging.Formatter):
    """A line for programs: a JSON object with what a logger gave as extra={"fields": {...}}."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if id := request_id.get():
            line["request_id"] = id
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def setup(level: str = "INFO", style: str = "text") -> None:
    """Log to stderr, this package at `level`, everything else from WARNING on. `style` is one of FORMATS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("leyden").setLevel(level.upper())


def get(name: str) -> logging.Logger:
    return logging.getLogger(name)
