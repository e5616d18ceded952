"""pocket on the GPU against the CPU's references: greedy answers, and log-probabilities of given text.

    python runs/h200/pocket.py --make FILE       on any machine: what the references say, in fp32 and in BF16
    python runs/h200/pocket.py --check FILE      on the GPU, in BF16

BF16 alone moves log-probabilities. The kernels are right if they are about as far from the references in fp32 as the
references in BF16 are; where an answer parts, its two most likely tokens must be close to each other there.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from leyden import ops
from leyden.config.engine import EngineConfig
from leyden.config.folder import resolve
from leyden.engine.engine import Engine
from leyden.types import Request, SamplingParams

PROMPTS, TOKENS, GIVEN = 44, 48, 50  # answers; tokens of each; tokens of given text whose log-probabilities count


def engine(dtype: str, device: str) -> Engine:
    config: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "enable_prefix_caching": False}
    return Engine.load(EngineConfig(model=str(resolve("pocket")), dtype=dtype, device=device, **config))


def answers(one: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
    """(greedy answers, how far the two most likely tokens are apart at each of their tokens)."""
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=2)
        one.submit(Request(id=str(i), prompt=prompt, params=params))
    texts: list[list[int]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    while one.busy:
        for delta in one.step():
            texts[int(delta.request_id)] += delta.token_ids
            best = (entry.top_logprobs for entry in delta.logprobs or [])
            gaps[int(delta.request_id)] += [first - second for first, second in best]
    return texts, gaps


def known(one: Engine, texts: list[list[int]]) -> list[float]:
    """Log-probabilities of the last GIVEN tokens of each text, as a prompt."""
    for i, text in enumerate(texts):
        one.submit(Request(id=str(i), prompt=text, params=SamplingParams(max_tokens=1, prompt_logprobs=0)))
    found: dict[str, list[float]] = {}
    while one.busy:
        for delta in one.step():
            entries = [entry for entry in delta.prompt_logprobs or [] if entry is not None]
            found.setdefault(delta.request_id, []).extend(entry.logprob for entry in entries)
    return [value for i in range(len(texts)) for value in found[str(i)][-GIVEN:]]


def make(file: Path) -> None:
    from leyden.bench.accept import prompts

    asked = prompts(resolve("pocket"), PROMPTS, 5, 512 - TOKENS - GIVEN)
    told: dict[str, Any] = {"prompts": asked}
    with ops.using("reference"):
        exact, rounded = engine("float32", "cpu"), engine("bfloat16", "cpu")
        told["answers"], told["gaps"] = answers(exact, asked)
        texts = [prompt + text for prompt, text in zip(asked, told["answers"], strict=True)]
        told["exact"], told["rounded"] = known(exact, texts), known(rounded, texts)
    file.write_text(json.dumps(told))


def check(file: Path, device: str) -> None:
    told = json.loads(file.read_text())
    one = engine("bfloat16", device)
    found, _ = answers(one, told["prompts"])
    parted = []
    for i, (text, other) in enumerate(zip(told["answers"], found, strict=True)):
        if text != other:
            at = next(
                (n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(map(len, (text, other)))
            )
            parted.append(told["gaps"][i][min(at, len(text) - 1)])
    print(
        f"greedy answers: {len(found) - len(parted)} of {len(found)} the same as the references' in fp32"
        + (f"; the others part where two tokens are {max(parted):.3f} apart at most" if parted else "")
    )
    texts = [prompt + text for prompt, text in zip(told["prompts"], told["answers"], strict=True)]
    values = known(one, texts)
    for name, some in (("here", values), ("references in BF16", told["rounded"])):
        apart = [abs(a - b) for a, b in zip(some, told["exact"], strict=True)]
        print(
            f"{len(apart)} log-probabilities, {name} against fp32: "
            f"{mean(apart):.5f} apart on average, {max(apart):.3f} at most"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.make:
        make(given.make)
    if given.check:
        torch.manual_seed(0)
        check(given.check, given.device)
