"""Logging: the level, and where lines go."""

import logging

import pytest

from leyden import log
from leyden.errors import ConfigError


@pytest.fixture(autouse=True)
def _restore():
    root, ours = logging.getLogger(), logging.getLogger("leyden")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def test_level(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert log.level() == "INFO" and log.level("debug") == "DEBUG"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "warning")
    assert log.level() == "WARNING" and log.level("ERROR") == "ERROR"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "x")
    with pytest.raises(ConfigError, match="VLLM_LOGGING_LEVEL"):
        log.level()


def test_ours_at_the_level_others_from_warning(capsys: pytest.CaptureFixture[str]):
    log.setup("INFO")
    log.get("leyden.x").info("one")
    log.get("leyden.x").debug("two")
    logging.getLogger("other").info("three")
    logging.getLogger("other").warning("four")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["I leyden.x: one", "W other: four"]
