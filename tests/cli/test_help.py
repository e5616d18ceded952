"""The help pages."""

from typing import Any

import pytest

from leyden.cli import help as pages
from leyden.config.flags import Flag, table
from leyden.errors import ConfigError

GROUPS, FLAGS = table()


def page(topic: str) -> str:
    return pages.page("leyden serve", "About.", topic, GROUPS, FLAGS)


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_wanted():
    assert pages.wanted(["m", "--port", "1"]) is None
    assert pages.wanted(["m", "--help"]) == "" and pages.wanted(["-h"]) == ""
    assert pages.wanted(["--help=all"]) == "all"


def test_first_page_fits_on_a_screen():
    text = page("")
    assert 30 < len(text.splitlines()) < 45
    assert all(f"--help={group.name} " in text for group in GROUPS) and "--help=all" in text
    assert sum(line.startswith("  --") for line in text.split("--help=all")[0].splitlines()) == 10
    assert "  --port N                           port to listen on; 0 takes a free one" in text


def test_everything_has_every_flag():
    text = page("all")
    assert all(name in text for flag in FLAGS for name in flag.names)
    assert max(map(len, text.splitlines())) < 130


@pytest.mark.parametrize("topic", ["Cache", "cache", "CacheConfig", "cacheconfig"])
def test_chapters_by_our_name_and_by_the_reference(topic: str):
    text = page(topic)
    assert text.startswith("Cache: ") and "--kv-cache-dtype" in text and "--port" not in text


def test_flags_by_name():
    assert page("port").startswith("  --port N\n") and page("port").count("--port") == 1
    assert page("--max_num_seqs".lstrip("-")).startswith("  --max-num-seqs N\n")
    assert "--moe-backend" in page("backend") and "--linear-backend" in page("backend")
    with pytest.raises(ConfigError, match="--help=nothing: no flag and no chapter"):
        page("nothing")


def test_what_an_entry_says():
    some: dict[str, Any] = {
        "choices": ("a", "b", "c"),
        "accepts": ("b",),
        "reason": "not yet: because",
        "cpu": "no GPU",
    }
    flag = Flag(names=("--x", "-x"), dest="x", type="text", group="", help="help", default="a", **some)
    text = pages.page("", "", "x", (), [flag])
    assert " ".join(text.split()) == (
        "--x, -x TEXT help (default a); one of a, b, c; other values than a, b: no effect yet: because; "
        "no effect on a CPU: no GPU"
    )
    switch = Flag(names=("--enable-x",), dest="x", type="switch", group="", help="h", treatment="refuse", reason="r")
    assert pages.page("", "", "x", (), [switch]) == "  --enable-x, --no-enable-x\n      h; not possible: r"
