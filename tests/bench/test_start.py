"""`leyden bench start`: a real server, once, and what is said if there is none."""

import json
from pathlib import Path

import pytest

from leyden.bench import start
from leyden.errors import ConfigError
from leyden.testing.checkpoints import tiny

ENGINE = ["--device", "cpu", "--max-model-len", "64", "--kv-cache-memory-bytes", "16m"]


def test_a_server_is_started_and_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tiny(tmp_path)
    file = tmp_path / "told.json"
    flags = ["--api-key", "secret", "--num-iters", "1", "--output-json", str(file)]
    assert start.main([str(tmp_path), *ENGINE, *flags]) == 0
    told = json.loads(file.read_text())
    (taken,) = told["turns"]
    assert told["median"] == taken and list(taken) == [*start.STAGES, "all"]
    assert all(taken[stage] > 0 for stage in start.STAGES)
    assert taken["all"] == pytest.approx(sum(taken[stage] for stage in start.STAGES), abs=0.01)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["seconds", "imports", "engine", "server", "first", "token", "all"]
    assert [line.split()[0] for line in lines[1:3]] == ["1", "median"] and lines[2].endswith(f"{taken['all']:.2f}")


def test_what_does_not_start_says_why(tmp_path: Path):
    with pytest.raises(ConfigError, match="did not come up: .*no such folder"):
        start.turn([str(tmp_path / "nothing")])
    with pytest.raises(ConfigError, match="--uds"):
        start.main([str(tmp_path), "--uds", "/tmp/socket"])
    with pytest.raises(ConfigError, match="unrecognised argument --bogus"):
        start.main([str(tmp_path), "--bogus"])


def test_the_time_of_the_engine_is_found_among_other_lines():
    ready = {"time": "1970-01-01T00:01:00.500+00:00", "logger": "leyden.engine.engine", "seconds": 1.25}
    other = {"time": "1970-01-01T00:00:01.000+00:00", "logger": "leyden.engine.engine", "message": "a warning"}
    lines = ["leyden 1.0", "[1, 2]", json.dumps(other), json.dumps(ready)]
    assert start._engine("\n".join(lines)) == (60.5, 1.25)
    with pytest.raises(ConfigError, match="did not say"):
        start._engine("leyden 1.0")
