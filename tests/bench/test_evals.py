"""The held-out accuracy of a server: of a scripted one that is right exactly where it is told to be."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from leyden.bench import evals
from leyden.cli import main
from leyden.testing.checkpoints import tiny


def example(question: str, expected: object, kind: str = "answer", thinking: bool = True, tools: object = None) -> dict:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": ""}]
    check = {"kind": kind, "expected": expected}
    return {"messages": messages, "tools": tools, "thinking": thinking, "family": "made", "check": check}


WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = "</think><tool_call>\n<function=weather>\n</function>\n</tool_call>"
EXAMPLES = [
    example("two", "2"),
    example("three", "3", thinking=False),
    example("sky", [{"name": "weather", "arguments": {}}], "tool_calls", tools=WEATHER),
    example("sea", [{"name": "tide", "arguments": {}}], "tool_calls", tools=WEATHER),
]
TEXTS = {"two": "one and one</think>2", "three": "4", "sky": CALL, "sea": CALL}


@contextlib.contextmanager
def scripted(folder: Path) -> Iterator[str]:
    file = folder / "cases.json"
    file.write_text(json.dumps({"cases": {name: {"text": text} for name, text in TEXTS.items()}}))
    command = [sys.executable, "-m", "leyden.testing.scripted", str(file), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = next(line for line in process.stderr if "running on http" in line.lower())
    try:
        yield line.split("running on ")[-1].split()[0].rstrip("/") + "/v1"
    finally:
        process.terminate()
        process.communicate()


def test_answers_are_judged(tmp_path: Path):
    with scripted(tmp_path) as url:
        answers = asyncio.run(evals.ask(url, EXAMPLES, at_once=2, max_tokens=50, key=""))
    assert [answer.right for answer in answers] == [True, False, True, False]
    found = evals.table(answers)
    assert found["all"]["right"] == 0.5 and found["all"]["answers"] == 4
    assert found["answers, with thinking"]["right"] == 1 and found["answers, without thinking"]["right"] == 0
    assert found["tool calls"]["right"] == 0.5
    assert all(answer.seconds > 0 and answer.tokens > 0 for answer in answers)
    evals.draw(found, tmp_path / "evals.png")
    assert (tmp_path / "evals.png").read_bytes().startswith(b"\x89PNG")


def test_command_serves_a_model_and_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tiny(tmp_path / "model")
    argv = [str(tmp_path / "model"), "-n", "3", "--max-tokens", "4", "--out", str(tmp_path), "--both"]
    assert main(["bench", "evals", *argv, "--max-model-len", "4096"]) == 0
    printed = capsys.readouterr().out
    assert "6 answers" in printed and "right" in printed
    written = json.loads((tmp_path / "evals.json").read_text())
    assert written["groups"]["all"]["answers"] == 6 and written["setting"]["split"] == "heldout"
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 6


def test_errors_say_what_to_do(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "evals"]) == 2
    assert "--base-url" in capsys.readouterr().err
    assert main(["bench", "evals", "--base-url", "http://127.0.0.1:9/v1", "-n", "1"]) == 1
    assert "no answers from http://127.0.0.1:9/v1: " in capsys.readouterr().err
