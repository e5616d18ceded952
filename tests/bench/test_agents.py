import pytest

from leyden.bench.agents import Session, Streams, Trace, simulate
from leyden.cli import main as cli
from leyden.engine.scheduler import Limits
from leyden.testing.tokenizer import write
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer

SMALL = Trace(sessions=6, turns=4, system_tokens=600)


def limits(**changes):
    given = {"seqs": 4, "snapshots": 40, "pages": 6000, "page": 16, "max_model_len": 20_000, "step_tokens": 2048}
    return Limits(**(given | changes))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write(folder)
    tokenizer = Tokenizer.from_folder(folder)
    return tokenizer, ChatTemplate.from_folder(folder, tokenizer)


@pytest.mark.parametrize("page", [16, 64])
def test_agents_that_come_back_compute_almost_nothing_twice(texts, page):
    figures = simulate(SMALL, limits(page=page, pages=100_000 // page), *texts)
    assert figures.share >= 0.95
    assert figures.reusable > 0.8 * figures.prompt  # the trace is one in which a cache matters


def test_without_a_cache_nothing_is_taken_from_it(texts):
    figures = simulate(SMALL, limits(prefix_caching=False), *texts)
    assert figures.cached == 0 and figures.reusable > 0


def test_the_yardstick_is_the_longest_prefix_of_any_earlier_stream():
    streams = Streams()
    streams.add([1, 2, 3, 4])
    streams.add([1, 2, 9])
    assert [streams.common(tokens) for tokens in ([1, 2, 3, 5], [1, 2, 9, 9], [2], [])] == [3, 3, 0, 0]


def test_a_session_has_as_many_turns_as_the_trace_says():
    session = Session(SMALL, 3, "system")
    answers = 1
    session.answer()
    while session.go_on():
        session.answer()
        answers += 1
    roles = [message["role"] for message in session.messages]
    assert roles.count("user") == SMALL.turns
    assert roles.count("assistant") == answers == SMALL.turns + roles.count("tool")


def test_the_command_prints_shares_by_turn(tmp_path, capsys):
    write(tmp_path)
    options = ["--sessions", "3", "--turns", "2", "--system-tokens", "200"]
    assert cli(["bench", "agents", str(tmp_path), *options]) == 0
    out = capsys.readouterr().out
    assert "of what was known (synthetic trace)" in out
    assert "\n  turn  2 " in out
