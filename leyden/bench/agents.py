"""How much of what agents send again is computed again: a synthetic trace against the scheduler and its cache.

No model runs: the answers are scripted, and what counts is which prompt tokens the scheduler takes from the cache. The
yardstick is the token streams themselves: of each prompt, the longest prefix that any earlier request (prompt and
answer) began with could have been reused, whatever a cache has to do for it.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden.config.folder import resolve
from leyden.engine.scheduler import Limits, Scheduler
from leyden.text.template import ChatTemplate, normalise
from leyden.text.tokenizer import Tokenizer
from leyden.types import Plan, Request, Sampled, SamplingParams

WORDS = """
open close read write list find move copy file folder line path test build run log user order price city route
train hotel date time value error result table column query index cache token state page model server client
""".split()  # noqa: SIM905, a list of fifty strings is harder to read


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The shape of the work: sessions of turns, each a loop of tool calls that ends with an answer."""

    sessions: int = 20
    turns: int = 10
    system_tokens: int = 3000  # of the system prompt with its tools, the same for all sessions
    most_calls: int = 4  # tool calls in one turn
    seed: int = 0


@dataclass(slots=True)
class Figures:
    """Sums over the requests of a trace; `reusable` is what the token streams would allow."""

    requests: int = 0
    prompt: int = 0
    reusable: int = 0
    cached: int = 0
    steps: int = 0
    by_turn: dict[int, list[int]] = field(default_factory=dict)  # turn -> [reusable, cached]

    @property
    def share(self) -> float:
        return self.cached / self.reusable if self.reusable else 1.0


class Session:
    """One agent: the messages so far, and the next request to be sent."""

    def __init__(self, trace: Trace, number: int, system: str):
        self._made = random.Random(trace.seed * 1_000_003 + number)
        self._trace = trace
        self.turn = 0
        self._calls = 0
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self._ask()

    def text(self, low: int, high: int) -> str:
        return " ".join(self._made.choice(WORDS) for _ in range(self._made.randint(low, high)))

    def _ask(self) -> None:
        self._calls = self._made.randint(0, self._trace.most_calls)
        self.messages.append({"role": "user", "content": self.text(10, 120)})

    def answer(self) -> str:
        """The text that the model is scripted to generate now, in the format of its template."""
        thought = self.text(20, 200)
        if self._calls:
            path = self.text(1, 3)
            call = f"<tool_call>\n<function=read>\n<parameter=path>\n{path}\n</parameter>\n</function>\n</tool_call>\n"
            self.messages.append(
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": thought,
                    "tool_calls": [{"function": {"name": "read", "arguments": {"path": path}}}],
                }
            )
            return f"{thought}\n</think>\n{call}"
        content = self.text(20, 150)
        self.messages.append({"role": "assistant", "content": content, "reasoning_content": thought})
        return f"{thought}\n</think>\n{content}"

    def go_on(self) -> bool:
        """What the client does with the answer: a tool's result, or the next question. False: it is done."""
        if self._calls:
            self._calls -= 1
            self.messages.append({"role": "tool", "content": self.text(20, 400)})
            return True
        self.turn += 1
        if self.turn < self._trace.turns:
            self._ask()
        return self.turn < self._trace.turns


class Streams:
    """All token streams so far as a tree: how long a prefix of a prompt is known."""

    def __init__(self) -> None:
        self._root: dict[int, Any] = {}

    def common(self, tokens: Sequence[int]) -> int:
        node, length = self._root, 0
        for token in tokens:
            if token not in node:
                break
            node, length = node[token], length + 1
        return length

    def add(self, tokens: Sequence[int]) -> None:
        node = self._root
        for token in tokens:
            node = node.setdefault(token, {})


def simulate(trace: Trace, limits: Limits, tokenizer: Tokenizer, template: ChatTemplate) -> Figures:
    """Run the trace, its sessions side by side: each sends its next request when it has its answer."""
    words = random.Random(trace.seed)
    system = ""
    while len(tokenizer.encode(system)) < trace.system_tokens:
        system += " ".join(words.choice(WORDS) for _ in range(50)) + "\n"
    sessions = {f"s{i}": Session(trace, i, system) for i in range(trace.sessions)}
    scheduler = Scheduler(limits)
    figures, streams = Figures(), Streams()
    scripts: dict[str, Iterator[int]] = {}
    prompts: dict[str, list[int]] = {}
    answers: dict[str, list[int]] = {}
    order = random.Random(trace.seed + 1)
    ready = list(sessions)
    while ready or scheduler.unfinished:
        if ready and (order.random() < 0.3 or not scheduler.unfinished):
            name = ready.pop(order.randrange(len(ready)))
            session = sessions[name]
            prompt = template.encode(normalise(session.messages))
            ids = tokenizer.encode(session.answer())
            prompts[name], answers[name], scripts[name] = prompt, [], iter(ids)
            figures.requests += 1
            figures.prompt += len(prompt)
            params = SamplingParams(max_tokens=len(ids))
            scheduler.add(Request(id=name, prompt=prompt, params=params, marks=template.marks(prompt)))
        plan = scheduler.plan()
        if plan is None:
            continue
        names = {s.slot: s.request.id for s in scheduler.running}
        for delta in scheduler.commit(plan, _scripted(plan, names, scripts)):
            name = delta.request_id
            session = sessions[name]
            if not answers[name]:  # its first token: by now the yardstick knows at least what the scheduler knew
                prompt = prompts[name]
                reusable = min(streams.common(prompt), len(prompt) - 1)
                streams.add(prompt)
                sums = figures.by_turn.setdefault(session.turn, [0, 0])
                sums[0], sums[1] = sums[0] + reusable, sums[1] + delta.cached_tokens
                figures.reusable += reusable
                figures.cached += delta.cached_tokens
            answers[name] += delta.token_ids
            if delta.finish_reason:
                streams.add(prompts[name] + answers[name])
                if session.go_on():
                    ready.append(name)
    figures.steps = scheduler.stats().steps
    scheduler.check()
    return figures


def _scripted(plan: Plan, names: dict[int, str], scripts: dict[str, Iterator[int]]) -> list[Sampled]:
    return [Sampled([next(scripts[names[row.slot]])] if row.sample else []) for row in plan.rows]


def main(argv: Sequence[str]) -> int:
    """`leyden bench agents`: print the share of what could be reused that was."""
    parser = argparse.ArgumentParser("leyden bench agents", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="folder of a checkpoint: its tokenizer and chat template are used")
    for name, default, about in (
        ("sessions", 20, "agents at work side by side"),
        ("turns", 10, "questions to each; every one takes up to four tool calls"),
        ("system-tokens", 3000, "tokens of the system prompt that all share"),
        ("seed", 0, "of the trace"),
        ("seqs", 16, "requests that run at once"),
        ("snapshots", 128, "states that the cache can keep"),
        ("tokens", 600_000, "tokens that the pages can keep"),
        ("host-snapshots", 0, "states that the tier of host memory can keep"),
        ("host-tokens", 0, "tokens that its pages can keep"),
        ("page", 16, "tokens of a page"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{about} (default {default})")
    given = parser.parse_args(argv)
    folder = resolve(given.model)
    tokenizer = Tokenizer.from_folder(folder)
    trace = Trace(sessions=given.sessions, turns=given.turns, system_tokens=given.system_tokens, seed=given.seed)
    limits = Limits(
        seqs=given.seqs,
        snapshots=given.snapshots,
        pages=given.tokens // given.page,
        page=given.page,
        max_model_len=given.tokens,
        step_tokens=2048,
        host_slots=given.host_snapshots,
        host_pages=given.host_tokens // given.page,
    )
    figures = simulate(trace, limits, tokenizer, ChatTemplate.from_folder(folder, tokenizer))
    print(f"{figures.requests} requests, {figures.prompt:,} prompt tokens, {figures.reusable:,} of them known before")
    print(f"{figures.cached:,} taken from the cache: {figures.share:.1%} of what was known (synthetic trace)")
    for turn, (reusable, cached) in sorted(figures.by_turn.items()):
        print(f"  turn {turn + 1:2}  {cached / max(1, reusable):6.1%}")
    return 0
