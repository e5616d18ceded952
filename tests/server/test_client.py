"""Streams, the loop around an engine, and what a client of a dead or full engine learns."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from leyden.errors import EngineDead, Overloaded, RequestError
from leyden.server.client import Command, EngineClient, InThread, Stream, Submit
from leyden.testing.scripted import Case, ScriptedEngine
from leyden.text.tokenizer import Tokenizer
from leyden.types import Delta, Grammar, Markers, Request, SamplingParams, Thinking, TokenLogprobs


def delta(id: str, *tokens: int, finish: str | None = None) -> Delta:
    logprobs = [TokenLogprobs(token, -1.0, 1, [], []) for token in tokens]
    return Delta(request_id=id, token_ids=list(tokens), logprobs=logprobs, finish_reason=finish)


def stream_of(*ids: str, interval: int = 1) -> tuple[Stream, list[str]]:
    aborted: list[str] = []
    return Stream(ids, aborted.extend, interval), aborted


def test_a_slow_reader_finds_one_delta_per_request():
    async def main() -> None:
        stream, aborted = stream_of("a", "b")
        for index in range(1000):
            stream.put(delta("a", index))
        stream.put(delta("b", 7))
        stream.put(delta("a", finish="stop"))
        stream.put(delta("b", 8, finish="length"))
        found = [item async for item in stream]
        assert [(item.request_id, item.finish_reason) for item in found] == [("a", "stop"), ("b", "length")]
        assert found[0].token_ids == list(range(1000)) and found[1].token_ids == [7, 8]
        assert [entry.token_id for entry in found[0].logprobs or ()] == list(range(1000))
        with stream:
            pass
        assert aborted == []

    asyncio.run(main())


def test_a_reader_waits_and_is_woken():
    async def main() -> None:
        stream, _ = stream_of("a")
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not reader.done()
        stream.put(delta("a", 1))
        assert (await reader).token_ids == [1]

    asyncio.run(main())


def test_leaving_early_aborts_what_still_runs():
    stream, aborted = stream_of("a", "b", "c")
    stream.put(delta("b", finish="stop"))
    stream.drop("c")
    assert aborted == ["c"]
    with stream:
        pass
    assert aborted == ["c", "a"]
    stream.put(delta("a", 1))  # too late: nobody reads it
    assert stream._waiting.keys() == {"b"}


def test_interval_holds_tokens_back_between_the_first_and_the_last():
    async def main() -> None:
        stream, _ = stream_of("a", interval=3)
        stream.put(delta("a", 1))
        assert (await anext(stream)).token_ids == [1]
        reader = asyncio.ensure_future(anext(stream))
        for token in (2, 3):
            stream.put(delta("a", token))
            await asyncio.sleep(0)
            assert not reader.done()
        stream.put(delta("a", 4))
        assert (await reader).token_ids == [2, 3, 4]
        stream.put(delta("a", 5, finish="stop"))
        assert (await anext(stream)).token_ids == [5]

    asyncio.run(main())


def test_a_failure_comes_after_what_was_before_it():
    async def main() -> None:
        stream, aborted = stream_of("a", "b")
        stream.put(delta("a", 1))
        stream.put(Delta(request_id="a", finish_reason="error", error="a secret"))
        assert aborted == ["b"]  # one answer: its other copies are of no use
        assert (await anext(stream)).token_ids == [1]
        with pytest.raises(RequestError) as caught:
            await anext(stream)
        assert caught.value.status == 500 and "secret" not in caught.value.message

    asyncio.run(main())


# With an engine.

Test = Callable[[EngineClient, ScriptedEngine], Awaitable[None]]


def with_engine(engine: ScriptedEngine, test: Test) -> None:
    async def main() -> None:
        client = EngineClient(InThread(engine))
        client.open()
        try:
            await test(client, engine)
        finally:
            await client.close()

    asyncio.run(main())


def request(tokenizer: Tokenizer, id: str, text: str = "hi", **params: Any) -> Request:
    return Request(id=id, prompt=tokenizer.encode(text), params=SamplingParams(**{"max_tokens": 1000, **params}))


async def text_of(client: EngineClient, tokenizer: Tokenizer, *requests: Request) -> str:
    ids: list[int] = []
    with await client.generate(*requests) as stream:
        async for item in stream:
            ids += item.token_ids
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_generate_and_stats(tokenizer: Tokenizer):
    async def test(client: EngineClient, engine: ScriptedEngine) -> None:
        assert client.facts["max_model_len"] == 2048
        assert await text_of(client, tokenizer, request(tokenizer, "a")) == "hi"
        stats = await client.stats()
        assert stats.finished == {"stop": 1} and stats.running == 0
        assert client._streams == {}

    with_engine(ScriptedEngine(tokenizer), test)


def test_refused_requests_raise_and_leave_nothing_behind(tokenizer: Tokenizer):
    class Full(ScriptedEngine):
        def submit(self, request: Request) -> None:
            if request.id == "full":
                raise Overloaded("too many", retry_after=3)
            super().submit(request)

    async def test(client: EngineClient, engine: ScriptedEngine) -> None:
        with pytest.raises(RequestError) as long:
            await client.generate(Request(id="long", prompt=[1] * 3000, params=SamplingParams()))
        assert long.value.status == 400
        with pytest.raises(Overloaded) as full:
            await client.generate(request(tokenizer, "first"), request(tokenizer, "full"))
        assert (full.value.status, full.value.retry_after) == (429, 3)
        assert engine.aborted == ["first"] and client._streams == {}
        assert await text_of(client, tokenizer, request(tokenizer, "b")) == "hi"

    with_engine(Full(tokenizer), test)


class Compiling(ScriptedEngine):
    """Requests with a grammar are ready when they are told to be; "bad" ones never will be."""

    go_on = False

    def ready(self, request: Request) -> bool:
        grammar = request.params.grammar
        if grammar is not None and self.go_on and grammar.text == "bad":
            raise RequestError("it cannot be compiled", "structured_outputs")
        return grammar is None or self.go_on


def test_what_is_not_ready_holds_up_nobody_and_gets_its_verdict_later(tokenizer: Tokenizer):
    def held(id: str, text: str = "good") -> Request:
        params = SamplingParams(grammar=Grammar("regex", text))
        return Request(id=id, prompt=tokenizer.encode("hi"), params=params)

    async def test(client: EngineClient, engine: ScriptedEngine) -> None:
        assert isinstance(engine, Compiling)
        waits = [asyncio.ensure_future(client.generate(held("a"), request(tokenizer, "a2")))]
        waits += [asyncio.ensure_future(client.generate(held(id, "bad"))) for id in ("b", "c")]
        assert await text_of(client, tokenizer, request(tokenizer, "free")) == "hi"
        waits[2].cancel()
        await asyncio.sleep(0.02)
        assert not waits[0].done() and not waits[1].done() and engine.received[-1].id == "free"
        engine.go_on = True
        with await waits[0] as stream:
            assert {delta.request_id async for delta in stream} == {"a", "a2"}
        with pytest.raises(RequestError, match="cannot be compiled") as refused:
            await waits[1]
        assert refused.value.param == "structured_outputs"
        assert [r.id for r in engine.received] == ["free", "a", "a2"] and client._streams == {}

    with_engine(Compiling(tokenizer), test)


def test_a_request_survives_the_way_to_another_process():
    markers = Markers(opens=1, ends=(2, 3), forced=(2,), line_ends=(7,))
    params = SamplingParams(
        grammar=Grammar("regex", "a", "response_format"),
        thinking_token_budget=5,
        thinking=Thinking(markers=markers, open=True, spent=3),
    )
    sent = Submit([Request(id="a", prompt=[1], params=params)])
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Command)
    assert arrived == sent and hash(arrived.requests[0].params.thinking.markers) == hash(markers)
    assert arrived.requests[0].params.grammar.param == "response_format"


def test_D29c_cancel_storm(tokenizer: Tokenizer):
    import random

    random.seed(0)

    async def cancelled(client: EngineClient, index: int) -> None:
        task = asyncio.ensure_future(text_of(client, tokenizer, request(tokenizer, f"r{index}", "word " * 200)))
        await asyncio.sleep(random.uniform(0, 0.05))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def test(client: EngineClient, engine: ScriptedEngine) -> None:
        await asyncio.gather(*(cancelled(client, index) for index in range(200)))
        stats = await client.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert client._streams == {} and client._verdicts == {}
        assert await text_of(client, tokenizer, request(tokenizer, "after", "same")) == "same"

    with_engine(ScriptedEngine(tokenizer, step_seconds=0.001), test)


def test_a_dead_engine_is_told_to_everyone(tokenizer: Tokenizer):
    async def test(client: EngineClient, engine: ScriptedEngine) -> None:
        waiting = asyncio.ensure_future(text_of(client, tokenizer, request(tokenizer, "a", "long " * 100)))
        await asyncio.sleep(0.02)
        with pytest.raises(EngineDead, match="scripted crash"):
            await text_of(client, tokenizer, request(tokenizer, "crash", "crash"))
        with pytest.raises(EngineDead):
            await waiting
        assert not client.alive and "scripted crash" in await client.died()
        for use in (client.generate(request(tokenizer, "b")), client.stats()):
            with pytest.raises(EngineDead):
                await use

    with_engine(ScriptedEngine(tokenizer, {"crash": Case("x", "crash")}, step_seconds=0.002), test)


def test_closing_ends_what_runs(tokenizer: Tokenizer):
    async def test(client: EngineClient, engine: ScriptedEngine) -> None:
        waiting = asyncio.ensure_future(text_of(client, tokenizer, request(tokenizer, "a", "long " * 100)))
        await asyncio.sleep(0.02)
        await client.close()
        with pytest.raises(EngineDead, match="shutting down"):
            await waiting

    with_engine(ScriptedEngine(tokenizer, step_seconds=0.002), test)
