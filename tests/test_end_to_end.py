"""The real engine on a tiny checkpoint behind the real server, used by the official client."""

import asyncio
import contextlib
import random
import re
import time

import httpx
import openai
import pytest

from leyden.config.engine import EngineConfig
from leyden.config.server import ServerConfig
from leyden.engine.engine import Engine
from leyden.llm import LLM
from leyden.server.app import build
from leyden.server.client import EngineClient, InThread
from leyden.testing.checkpoints import tiny
from leyden.testing.scripted import running
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer
from leyden.types import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny(folder)
    return folder


@contextlib.contextmanager
def server(folder, **fields):
    engine = Engine.load(EngineConfig(model=str(folder), max_model_len=512, kv_cache_memory_bytes=4 << 20, **fields))
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)
    app = build(ServerConfig(), EngineClient(InThread(engine)), tokenizer, template, model="tiny")
    with running(app) as url:
        yield engine, url


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def served(request, folder):
    """(engine, URL) of a server with few slots and pages, so that requests queue and preempt each other."""
    with server(folder, max_num_seqs=12, async_scheduling=request.param) as started:
        yield started


def messages(i):
    return [{"role": "system", "content": "You count."}, {"role": "user", "content": f"Number {i}! " * (1 + i % 7)}]


def settled(engine):
    """Wait until nothing runs, at most a second; then every sum of the cache must hold."""
    deadline = time.monotonic() + 1
    while engine.busy and time.monotonic() < deadline:
        time.sleep(0.005)
    engine.check()
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.slots_free + stats.snapshots == stats.slots_total
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def test_32_streams_at_once_finish_right(served):
    engine, url = served

    async def one(client, i):
        stream = await client.chat.completions.create(
            model="tiny", messages=messages(i), temperature=0, max_tokens=24, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        text, reason, usage = "", None, None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += (getattr(choice.delta, "reasoning", None) or "") + (choice.delta.content or "")
                reason = choice.finish_reason or reason
        return text, reason, usage.completion_tokens

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="null", max_retries=0) as client:
            streams = await asyncio.gather(*(one(client, i) for i in range(32)))
            for i, (text, reason, tokens) in enumerate(streams):
                assert (reason, tokens) == ("length", 24)
                if i % 8 == 0:  # the same alone and in one piece
                    whole = await client.chat.completions.create(
                        model="tiny",
                        messages=messages(i),
                        temperature=0,
                        max_tokens=24,
                        extra_body={"ignore_eos": True},
                    )
                    message = whole.choices[0].message
                    assert text == (message.reasoning or "") + (message.content or "")

    asyncio.run(all_of_them())
    settled(engine)


def test_a_prompt_that_comes_back_is_counted_as_a_hit(served):
    engine, url = served
    with openai.OpenAI(base_url=f"{url}/v1", api_key="null") as client:
        found = []
        for _ in range(2):
            before = dict(engine.stats().hits)
            question = [{"role": "user", "content": "How many numbers are there? " * 12}]
            answer = client.chat.completions.create(model="tiny", messages=question, max_tokens=2)
            hits = {kind: n - before.get(kind, 0) for kind, n in engine.stats().hits.items()}
            found.append((hits.get("device", 0), answer.usage.prompt_tokens_details.cached_tokens > 0))
    assert found[1] == (1, True)
    settled(engine)


def test_D29b_20_requests_share_two_slots(folder):
    async def all_of_them(url):
        running, done = [], asyncio.Event()

        async def watch(client):
            while not done.is_set():
                text = (await client.get(f"{url}/metrics")).text
                running.append(float(re.search(r"^vllm:num_requests_running{.*} (\S+)$", text, re.MULTILINE)[1]))

        async with httpx.AsyncClient() as http, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="null") as client:
            watching = asyncio.create_task(watch(http))
            asked = (
                client.chat.completions.create(model="tiny", messages=messages(i), max_tokens=30) for i in range(20)
            )
            answers = await asyncio.gather(*asked)
            done.set()
            await watching
        return answers, running

    with server(folder, max_num_seqs=2) as (engine, url):
        answers, running = asyncio.run(all_of_them(url))
        assert sum(engine.stats().hits.values()) == 20  # what they share may be just too short to be kept
        assert 0 < engine.stats().recorded_steps <= engine.stats().steps
        assert len(answers) == 20 and all(answer.usage.completion_tokens for answer in answers)
        assert max(running) == 2
        settled(engine)


def test_200_disconnects_leave_nothing_behind(served):
    engine, url = served
    made = random.Random(0)

    async def leave(client, i):
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(made.random() * 0.05):
                stream = i % 2 == 0
                answer = await client.chat.completions.create(
                    model="tiny", messages=messages(i), max_tokens=400, stream=stream, extra_body={"ignore_eos": True}
                )
                if stream:
                    async for _ in answer:
                        pass

    async def storm():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="null", max_retries=0) as client:
            for start in range(0, 200, 40):
                await asyncio.gather(*(leave(client, i) for i in range(start, start + 40)))

    asyncio.run(storm())
    settled(engine)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="null", max_retries=0)
    answer = client.chat.completions.create(
        model="tiny", messages=messages(3), temperature=0, max_tokens=16, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 16
    client.close()


def test_the_published_client_program_works(served):
    _, url = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="null")
    response = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Briefly explain: what is vLLM?"},
        ],
        temperature=1.0,
        top_p=0.95,
        max_tokens=64,
    )
    choice = response.choices[0]
    assert choice.message.reasoning or choice.message.content
    assert choice.finish_reason in ("stop", "length")
    client.close()


def test_llm_gives_what_the_server_gives(folder, served):
    _, url = served
    llm = LLM(str(folder), max_num_seqs=4, max_model_len=512, kv_cache_memory_bytes=4 << 20)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="null", max_retries=0)
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=20, n=2, stop=["zzz"], ignore_eos=True)
    ours = llm.generate("Once upon", params)[0]
    theirs = client.completions.create(
        model="tiny", prompt="Once upon", temperature=0.8, seed=11, max_tokens=20, n=2, stop=["zzz"],
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert [answer.text for answer in ours.outputs] == [choice.text for choice in theirs.choices]
    chat = llm.chat(messages(1), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), enable_thinking=False)
    answer = client.chat.completions.create(
        model="tiny", messages=messages(1), temperature=0, max_tokens=12,
        extra_body={"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    assert chat.outputs[0].text == answer.choices[0].message.content
    client.close()
