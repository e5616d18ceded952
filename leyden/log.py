"""Logging: one format for every process of the server."""

import logging
import sys

_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


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
