"""Logging: one format for every process of the server. Nobody logs a prompt or an answer unless a flag asks for it."""

import logging
import os
import sys

from leyden.errors import ConfigError

LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")
_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def level(given: str | None = None) -> str:
    """The level to log at: `given`, else VLLM_LOGGING_LEVEL, else INFO."""
    name = given or os.environ.get("VLLM_LOGGING_LEVEL") or "INFO"
    if name.upper() not in LEVELS:
        raise ConfigError(f"VLLM_LOGGING_LEVEL: expected one of {', '.join(LEVELS)}, got {name!r}")
    return name.upper()


def setup(level: str = "INFO") -> None:
    """Log to stderr, this package at `level`, everything else from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("leyden").setLevel(level.upper())


def get(name: str) -> logging.Logger:
    return logging.getLogger(name)
