"""The scripted server as a program, and the engine in it."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from leyden.errors import ConfigError, RequestError
from leyden.testing import tokenizer as testing_tokenizer
from leyden.testing.scripted import Case, ScriptedEngine, read
from leyden.text.tokenizer import Tokenizer
from leyden.types import Delta, Request, SamplingParams


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    testing_tokenizer.write(folder, 512)
    return Tokenizer.from_folder(folder)


def replay(tokenizer: Tokenizer, case: Case, **params: Any) -> list[Delta]:
    engine = ScriptedEngine(tokenizer, {"go": case})
    sampling = SamplingParams(**{"max_tokens": 100, **params})
    engine.submit(Request(id="a", prompt=tokenizer.encode("go"), params=sampling))
    deltas: list[Delta] = []
    while engine.busy:
        deltas += engine.step()
    return deltas


def test_chunks_are_steps(tokenizer: Tokenizer):
    deltas = replay(tokenizer, Case("The quick brown fox", chunks=[9, 3]))
    texts = [tokenizer.decode(delta.token_ids) for delta in deltas]
    assert texts[:2] == ["The quick", " br"] and "".join(texts) == "The quick brown fox<|im_end|>"
    assert all(len(delta.token_ids) == 1 for delta in deltas[2:])
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)


def test_ends(tokenizer: Tokenizer):
    assert replay(tokenizer, Case("Hi", "length"))[-1].finish_reason == "length"
    assert replay(tokenizer, Case("Hi", "error"))[-1].error == "scripted failure"
    with pytest.raises(RuntimeError, match="scripted crash"):
        replay(tokenizer, Case("Hi", "crash"))
    cut = replay(tokenizer, Case("a long text"), max_tokens=2)
    assert sum(len(delta.token_ids) for delta in cut) == 2 and cut[-1].finish_reason == "length"
    stopped = replay(tokenizer, Case(steps=[[50, 51, 52]]), stop_token_ids=[51])
    assert (stopped[0].token_ids, stopped[0].stop_reason) == ([50, 51], 51)
    late = replay(tokenizer, Case(steps=[[51], [51]]), stop_token_ids=[51], min_tokens=1)
    assert sum(len(delta.token_ids) for delta in late) == 2
    assert len(replay(tokenizer, Case("Hi"), ignore_eos=True, max_tokens=37)) == 37


def test_unknown_prompts_come_back_and_long_ones_are_refused(tokenizer: Tokenizer):
    engine = ScriptedEngine(tokenizer, max_model_len=8)
    with pytest.raises(RequestError, match="shorter than 8"):
        engine.submit(Request(id="a", prompt=[1] * 8, params=SamplingParams()))
    engine.submit(Request(id="b", prompt=tokenizer.encode("x?"), params=SamplingParams()))
    assert tokenizer.decode(engine.step()[0].token_ids + engine.step()[0].token_ids) == "x?"


def test_file(tmp_path: Path):
    file = tmp_path / "cases.json"
    file.write_text('{"cases": {"a": {"text": "b", "chunks": [1]}}}')
    assert read(file) == {"a": Case("b", chunks=[1])}
    for wrong in ("[]", "{", '{"cases": {"a": {"texts": "b"}}}', '{"cases": {"a": "b"}}'):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="must hold"):
            read(file)


def test_program(tmp_path: Path):
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({"cases": {"Hello?": {"text": "Think.</think>World", "finish_reason": "stop"}}}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "leyden.testing.scripted", str(file), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Hello?"}]}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
            deadline = time.monotonic() + 20
            while True:
                try:
                    message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
                    break
                except httpx.TransportError:
                    assert time.monotonic() < deadline and process.poll() is None
                    time.sleep(0.05)
        assert (message["reasoning"], message["content"]) == ("Think.", "World")
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_loop_of_calls_can_end(tokenizer: Tokenizer):
    engine = ScriptedEngine(tokenizer, {"go": Case("call"), "go #1": Case("done")})
    begin = "<|im_start|>user\ngo<|im_end|>\n"
    result = "<|im_start|>user\n<tool_response>\nx\n</tool_response><|im_end|>\n"
    for prompt, wanted in ((begin, "call"), (begin + result, "done"), (begin + result * 2, "call")):
        assert engine._find(tokenizer.encode(prompt)).text == wanted
