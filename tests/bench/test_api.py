"""The measurement of the HTTP server, with numbers too small to mean anything."""

import asyncio

import pytest

from leyden.bench import api
from leyden.cli import main


def test_both_parts_measure_what_they_say():
    with api.server(step_seconds=0.002) as (port, pid):
        nothing, _ = asyncio.run(api.one_by_one(port, pid, 20, "/version"))
        seconds, used = asyncio.run(api.one_by_one(port, pid, 20, api.CHAT, api._body(1, stream=False)))
        chunks, stream_used = asyncio.run(api.at_once(port, pid, 4, 25))
    assert len(nothing) == len(seconds) == 20 and used > 0 and stream_used > 0
    assert min(seconds) >= 0.002  # a token is a step
    assert 4 * 2 <= chunks <= 4 * (25 + 3)  # a role, tokens, and the end


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    made = api.Result(
        requests=1,
        nothing_p50=1,
        request_p50=2,
        request_p99=3,
        request_cpu=4,
        streams=5,
        tokens=6,
        chunks=7,
        token_cpu=8,
        load=0.25,
        processors=2,
    )
    monkeypatch.setattr(api, "measure", lambda *_: made)
    assert main(["bench", "api"]) == 0 and "8.0 µs of processor time per token" in capsys.readouterr().out
    assert main(["bench", "api", "--json"]) == 0 and '"token_cpu": 8' in capsys.readouterr().out
    assert main(["bench"]) == 0 and "leyden bench api" in capsys.readouterr().out
    assert main(["bench", "nothing"]) == 2
