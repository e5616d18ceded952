"""The help pages of a command: the flags people use first, then chapters, single flags, or everything.

--help           the first page            --help=Cache      one chapter, by our name or vLLM's (CacheConfig)
--help=all       everything                --help=kv-cache   the flags with that in their name
"""

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from leyden.config.flags import Flag, Group, because, listed
from leyden.errors import ConfigError

NAMES = 36  # columns for the names on the first page
VALUES = {
    "int": "N",
    "size": "SIZE",
    "length": "SIZE",
    "float": "X",
    "text": "TEXT",
    "ids": "IDS",
    "pairs": "NAME=PATH",
}


def wanted(argv: Sequence[str]) -> str | None:
    """What the command line asks help about: "" for the first page, None if it does not ask."""
    for word in argv:
        if word in ("--help", "-h"):
            return ""
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def page(title: str, about: str, topic: str, groups: Sequence[Group], flags: Sequence[Flag]) -> str:
    """The help text; raises ConfigError for a topic that nothing is known about."""
    if topic == "all":
        return "\n".join(_chapter(group, flags) for group in groups)
    if topic:
        return _about(topic, groups, flags)
    parts = [f"{title}\n\n{about}", "\n".join(_short(flag) for flag in flags if flag.common)]
    if groups:
        more = [f"--help=all lists all {len(flags)} flags, --help=WORD those with WORD in their name, or a chapter:"]
        parts.append("\n".join(more + [f"  --help={group.name:<{NAMES - 9}} {group.about}" for group in groups]))
    return "\n\n".join(parts)


def _about(topic: str, groups: Sequence[Group], flags: Sequence[Flag]) -> str:
    word = topic.lower().replace("_", "-")
    chapters = [group for group in groups if word in (name.lower() for name in (group.name, *group.also))]
    if chapters:
        return "\n".join(_chapter(group, flags) for group in chapters)
    found = [flag for flag in flags if any(word == name.lstrip("-") for name in flag.names)]
    found = found or [flag for flag in flags if any(word in name.lower() for name in flag.names)]
    if not found:
        raise ConfigError(f"--help={topic}: no flag and no chapter has that name; chapters are {_names(groups)}")
    return _entries(found)


def _names(groups: Sequence[Group]) -> str:
    return ", ".join(group.name for group in groups)


def _chapter(group: Group, flags: Sequence[Flag]) -> str:
    mine = [flag for flag in flags if flag.group == group.name]
    return f"{group.name}: {group.about}\n\n{_entries(mine)}\n"


def _entries(flags: Sequence[Flag]) -> str:
    return "\n".join(_entry(flag) for flag in flags)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 110)


def _short(flag: Flag) -> str:
    """Two columns: the flag, and its help without the fine print."""
    names, text = _spellings(replace(flag, names=flag.names[:1]))[0], f"{flag.help}{_default(flag)}"
    lines = textwrap.wrap(text, _width() - NAMES - 1, break_on_hyphens=False)
    return "\n".join(f"  {name:<{NAMES - 2}} {line}" for name, line in zip_longest([names], lines, fillvalue=""))


def _entry(flag: Flag) -> str:
    """The flag on a line of its own, everything about it below."""
    lines = textwrap.wrap(_text(flag), _width() - 6, break_on_hyphens=False)
    return "\n".join(["  " + ", ".join(_spellings(flag)), *("      " + line for line in lines)])


def _spellings(flag: Flag) -> list[str]:
    if flag.positional:
        return list(flag.names)
    if flag.type == "switch":
        return [*flag.names, flag.negations()[0]]
    value = VALUES.get(flag.type, "JSON") + {"+": " ...", "?": "?"}.get(flag.many, "")
    return [*flag.names[:-1], f"{flag.names[-1]} {value}"]


def _default(flag: Flag) -> str:
    if flag.default in (None, "", False, [], {}):
        return ""
    return f" (default {flag.default if isinstance(flag.default, str) else json.dumps(flag.default)})"


def _text(flag: Flag) -> str:
    parts = [flag.help + _default(flag)]
    if flag.choices:
        parts.append(f"one of {listed(flag.choices)}")
    if flag.keys:
        parts.append(f"keys: {listed(flag.keys)}")
    if flag.reason:
        harmless = listed(value for value in (flag.default, *flag.accepts) if value is not None)
        other = f"other values than {harmless}: " if flag.accepts else ""
        parts.append(other + because("not possible" if flag.treatment == "refuse" else "no effect", flag.reason))
    if flag.cpu:
        parts.append(f"no effect on a CPU: {flag.cpu}")
    return "; ".join(parts)
