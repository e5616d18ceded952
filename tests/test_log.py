"""Logging: the level, and where lines go."""

import json
import logging

import pytest

from leyden import log
from leyden.errors import ConfigError


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


def test_lines_carry_the_id_of_their_request(capsys: pytest.CaptureFixture[str]):
    log.setup("INFO")
    token = log.request_id.set("r-1")
    log.get("leyden.x").info("one")
    log.request_id.reset(token)
    log.get("leyden.x").info("two")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("one [r-1]") and lines[1].endswith("two")


def test_json_lines(capsys: pytest.CaptureFixture[str]):
    log.setup("INFO", "json")
    token = log.request_id.set("r-1")
    log.get("leyden.x").info("a\n%d", 1, extra={"fields": {"status": 200}})
    log.request_id.reset(token)
    try:
        raise ValueError("no")
    except ValueError:
        log.get("leyden.x").exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("+00:00")
    wanted = {"level": "INFO", "logger": "leyden.x", "message": "a\n1", "status": 200, "request_id": "r-1"}
    assert first == wanted
    assert second["exception"].endswith("ValueError: no") and "request_id" not in second
