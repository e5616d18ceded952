"""What drafts bring in the running engine, on held-out prompts: tokens per step, and the same text in less time.

Every prompt is answered greedily by an engine with the drafter and by one without, in turns, alone and several at a
time. Texts must be equal. Where they are not, the two most likely tokens at the first difference are compared: rounded
numbers may tie, and steps of other shapes round differently. That is counted and told, not hidden.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from leyden import ops
from leyden.config.engine import EngineConfig
from leyden.config.folder import resolve
from leyden.config.launch import Launch
from leyden.engine.engine import Engine
from leyden.errors import ConfigError
from leyden.synthetic import generate
from leyden.text.template import ChatTemplate, normalise
from leyden.text.tokenizer import Tokenizer
from leyden.types import EngineStats, Request, SamplingParams


@dataclass
class Turns:
    """Both engines' answers to the same prompts, `streams` at a time."""

    streams: int
    texts: list[list[int]] = field(default_factory=list)
    drafted: list[list[int]] = field(default_factory=list)
    speeds: list[tuple[float, float]] = field(default_factory=list)  # tokens/s without and with drafts, group by group

    @property
    def ratio(self) -> float:
        return median(fast / slow for slow, fast in self.speeds)

    @property
    def different(self) -> list[int]:
        return [i for i, (one, other) in enumerate(zip(self.texts, self.drafted, strict=True)) if one != other]


def prompts(folder: Path, count: int, seed: int, most: int) -> list[list[int]]:
    """Held-out conversations up to their last answer, as token ids; those of more than `most` tokens are left out."""
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)
    found: list[list[int]] = []
    for example in generate(seed, 4 * count, "heldout"):
        messages: Any = example["messages"]
        thinking = {"enable_thinking": bool(example.get("thinking"))}
        ids = template.encode(normalise(messages[:-1]), example.get("tools"), kwargs=thinking)
        if len(ids) <= most and len(found) < count:
            found.append(ids)
    if len(found) < count:
        raise ConfigError(f"only {len(found)} of {count} prompts have at most {most} tokens: raise --max-model-len")
    return found


def answer(engine: Engine, group: Sequence[list[int]], tokens: int, **params: Any) -> tuple[list[list[int]], float]:
    """(the answers to a group of prompts at once, tokens per second once all have begun)."""
    texts: dict[str, list[int]] = {str(i): [] for i in range(len(group))}
    for name, prompt in zip(texts, group, strict=True):
        settings = SamplingParams(temperature=0, max_tokens=tokens, **params)
        engine.submit(Request(id=name, prompt=prompt, params=settings))
    begun, before = 0.0, 0
    while engine.busy:
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
        if not begun and all(texts.values()):
            begun, before = time.perf_counter(), sum(map(len, texts.values()))
    return list(texts.values()), (sum(map(len, texts.values())) - before) / max(time.perf_counter() - begun, 1e-9)


def gap(engine: Engine, prompt: list[int], text: list[int], other: list[int]) -> float:
    """Log-probability between the two most likely tokens where two answers part, by the engine without drafts."""
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    engine.submit(
        Request(id="gap", prompt=prompt + text[:same], params=SamplingParams(temperature=0, max_tokens=1, logprobs=2))
    )
    while engine.busy:
        for delta in engine.step():
            for entry in delta.logprobs or []:
                first, second = entry.top_logprobs[:2]
    return first - second


def measure(plain: Engine, drafting: Engine, asked: list[list[int]], streams: int, tokens: int) -> Turns:
    """`streams` prompts at a time, first one engine, then the other; the first group once more, to begin with."""
    found = Turns(streams)
    groups = [asked[i : i + streams] for i in range(0, len(asked), streams)]
    for number, group in enumerate([groups[0], *groups]):
        (texts, slow), (drafted, fast) = (answer(engine, group, tokens) for engine in (plain, drafting))
        if number:
            found.texts += texts
            found.drafted += drafted
            found.speeds.append((slow, fast))
    return found


def report(plain: Engine, drafting: Engine, asked: list[list[int]], found: Sequence[Turns]) -> Iterator[str]:
    stats = drafting.stats()
    yield f"drafts: {drafting.describe()['drafting']}"
    places = ", ".join(f"{share:.1%}" for share in shares(stats))
    yield f"tokens per step: {length(stats):.3f}; kept by place: {places}"
    yield f"steps without drafts because the drafter failed: {stats.failed_drafts}"
    for turns in found:
        slow, fast = (median(speeds) for speeds in zip(*turns.speeds, strict=True))
        yield f"{turns.streams} at a time: {slow:,.0f} tokens/s without, {fast:,.0f} with, {turns.ratio:.2f} times"
        gaps = [gap(plain, asked[i], turns.texts[i], turns.drafted[i]) for i in turns.different]
        equal = f"{len(turns.texts) - len(gaps)} of {len(turns.texts)} texts are the same"
        yield equal + (f"; the others part where two tokens are {max(gaps):.2g} apart at most" if gaps else "")


def length(stats: EngineStats) -> float:
    """Tokens per step with drafts, the target's own one included."""
    return 1 + sum(stats.accepted_tokens) / max(stats.drafts, 1)


def shares(stats: EngineStats) -> list[float]:
    """How often the first 1, 2, ... drafts were kept."""
    return [kept / max(stats.drafts, 1) for kept in stats.accepted_tokens]


def engines(config: EngineConfig) -> tuple[Engine, Engine]:
    """Without drafts and with them. Nothing is cached from prompt to prompt, so that both read all of each."""
    if not config.speculative_config:
        example = '{"method": "mtp", "num_speculative_tokens": 3}'
        raise ConfigError(f"a drafter is expected: --speculative-config '{example}'")
    config = replace(config, enable_prefix_caching=False)
    return Engine.load(replace(config, speculative_config={})), Engine.load(config)


def main(argv: Sequence[str]) -> int:
    """`leyden bench accept`: 0 if all texts are the same, or part at ties; 1 otherwise."""
    parser = argparse.ArgumentParser(
        "leyden bench accept",
        usage="leyden bench accept MODEL --speculative-config … [--prompts N] [--streams 1 8] [FLAGS of leyden serve]",
        description=__doc__,
    )
    parser.add_argument("--prompts", type=int, default=40, help="how many (default 40)")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer, at most (default 160)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="prompts at a time (default 1 8)")
    parser.add_argument("--prompt-seed", type=int, default=1, help="of the prompts (default 1)")
    parser.add_argument("--tie", type=float, default=0.05, help="log-probability that may be rounding (default 0.05)")
    parser.add_argument("--reference", action="store_true", help="reference kernels: slow, and beyond doubt")
    parser.add_argument("--out", help="JSON file for the numbers")
    given, rest = parser.parse_known_args(argv)
    config = Launch.from_argv(rest).engine
    plain, drafting = engines(config)
    most = min(plain.max_model_len, drafting.max_model_len) - given.tokens
    asked = prompts(resolve(config.tokenizer or config.model), given.prompts, given.prompt_seed, most)
    found = []
    for streams in given.streams:
        if given.reference:
            with ops.using("reference"):
                found.append(measure(plain, drafting, asked, streams, given.tokens))
        else:
            found.append(measure(plain, drafting, asked, streams, given.tokens))
    for line in report(plain, drafting, asked, found):
        print(line)
    gaps = [gap(plain, asked[i], turns.texts[i], turns.drafted[i]) for turns in found for i in turns.different]
    if given.out:
        told = {
            "drafts": drafting.describe()["drafting"],
            "synthetic": drafting.stats().synthetic,
            "tokens_per_step": length(drafting.stats()),
            "by_place": shares(drafting.stats()),
            "texts": sum(len(turns.texts) for turns in found),
            "different": gaps,
            "speeds": {turns.streams: turns.speeds for turns in found},
            "ratio": {turns.streams: turns.ratio for turns in found},
        }
        Path(given.out).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return int(any(size > given.tie for size in gaps))
