"""Which processors an engine may use: `--cpu-affinity 0-3,8`.

Refuses, with a ConfigError, what is no list of processors, and processors that are not there or not this process's.
"""

import os
import re
from collections.abc import Iterable

from leyden.errors import ConfigError


def parse(text: str) -> tuple[int, ...]:
    """The numbers of a list such as 0-3,8, ascending."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match or int(match[1]) > int(match[2] or match[1]):
            raise ConfigError(f"--cpu-affinity: expected numbers and ranges of processors such as 0-3,8, got {text!r}")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


def confine(cores: Iterable[int]) -> None:
    """Let this thread, and those that it starts from now on, run on these processors only."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--cpu-affinity: this system cannot bind a process to processors; leave the flag out")
    wanted, there = set(cores), os.sched_getaffinity(0)
    if missing := sorted(wanted - there):
        raise ConfigError(
            f"--cpu-affinity: there is no processor {_listed(missing)} for this process, which may use {_listed(there)}"
        )
    os.sched_setaffinity(0, wanted)


def _listed(cores: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cores)))
