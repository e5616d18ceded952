"""Is the text the same with every drafter, whatever else goes on? Answers held-out prompts greedily with pocket.

    python runs/pocket/identity.py --prompts 200           an hour on two cores, with the reference kernels in fp32
    python runs/pocket/identity.py --prompts 8 --native    a glance, with the kernels of the machine

The answers of an engine without drafts, one at a time and without a cache, are what all others are compared with: one
engine for each drafter and circumstance. Where texts part, the engine without drafts says how far the two most likely
tokens are from each other there: sums in another order may turn a tie. Exit code 0 if every text is the same or parts
at a tie.
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from leyden import ops
from leyden.bench.accept import answer, gap, prompts
from leyden.config.engine import EngineConfig
from leyden.config.folder import resolve
from leyden.engine.engine import Engine

DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "mtp 3": {"method": "mtp", "num_speculative_tokens": 3},
    "dflash 5": {"model": "pocket-dflash", "num_speculative_tokens": 5},
    "dspark 7": {"model": "pocket-dspark", "num_speculative_tokens": 7},
    "ngram 4": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}
PAGE = 16
# Circumstance -> prompts at a time, and the settings that bring it about.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "eight": (8, {}),
    "hits at page borders": (8, {"enable_prefix_caching": True}),
    "chunked": (8, {"max_num_batched_tokens": 64}),
    "preempted": (8, {}),  # and too little memory, see `tight`
    "async": (8, {"async_scheduling": True}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare texts with and without drafts.")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--most", type=int, default=500, help="tokens of a prompt, at most")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--native", action="store_true", help="the kernels of this machine instead of the references")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tie", type=float, default=1e-3, help="log-probability that may be rounding")
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    given = parser.parse_args()
    asked = prompts(resolve("pocket"), given.prompts, 3, given.most)
    length = given.most + given.tokens
    common = {"model": "pocket", "dtype": given.dtype, "device": "cpu", "max_num_seqs": 8, "max_model_len": length}
    common |= {"enable_prefix_caching": False, "block_size": PAGE}
    told: list[dict[str, Any]] = []
    with nullcontext() if given.native else ops.using("reference"):
        plain = Engine.load(EngineConfig(**common))
        texts = answers(plain, asked, 1, given.tokens, False)[0]
        for drafter in given.drafters:
            for case in given.cases:
                if (drafter, case) == ("none", "alone"):
                    continue
                streams, settings = CASES[case]
                config = EngineConfig(**common | settings | {"speculative_config": DRAFTERS[drafter]})
                if case == "preempted":
                    config = tight(config)
                began = time.monotonic()
                engine = Engine.load(config)
                found, hits = answers(engine, asked, streams, given.tokens, case.startswith("hits"))
                parted = [i for i, (one, other) in enumerate(zip(texts, found, strict=True)) if one != other]
                gaps = [gap(plain, asked[i], texts[i], found[i]) for i in parted]
                stats = engine.stats()
                told.append({"drafter": drafter, "case": case, "texts": len(found), "same": len(found) - len(parted)})
                told[-1] |= {"gaps": gaps, "hits": hits, "preemptions": stats.preemptions, "drafts": stats.drafts}
                told[-1] |= {"tokens_per_step": 1 + sum(stats.accepted_tokens) / max(1, stats.drafts)}
                print(
                    f"{drafter:9} {case:21} {len(found) - len(parted)} of {len(found)} the same"
                    + (f", the others part where two tokens are {max(gaps):.1e} apart at most" if gaps else "")
                    + f"; {told[-1]['tokens_per_step']:.2f} tokens a step, {stats.preemptions} preemptions, "
                    f"{hits} tokens from the cache, {time.monotonic() - began:.0f} s",
                    flush=True,
                )
                engine.close()
    if given.out:
        given.out.write_text(json.dumps(told, indent=1) + "\n")
    return int(any(size > given.tie for one in told for size in one["gaps"]))


def answers(
    engine: Engine, asked: list[list[int]], streams: int, tokens: int, cached: bool
) -> tuple[list[list[int]], int]:
    """(the texts, prompt tokens that came from the cache). With `cached` each prompt's beginning has been there before,
    cut where its last whole page ends, or a page earlier where that would be all of it."""
    found: list[list[int]] = []
    for first in range(0, len(asked), streams):
        group = asked[first : first + streams]
        if cached:
            answer(engine, [prompt[: (len(prompt) - 1) // PAGE * PAGE] for prompt in group], 1)
        found += answer(engine, group, tokens)[0]
    return found, engine.stats().cached_tokens


def tight(config: EngineConfig) -> EngineConfig:
    """With so few pages that eight answers do not fit at once: enough for one of the longest."""
    split = Engine.load(config).split
    pages = -(-(split.shape.max_model_len + split.shape.draft.lookahead) // PAGE) + 2
    return replace(config, kv_cache_memory_bytes=(split.seqs + 1) * split.slot_bytes + pages * split.page_bytes)


if __name__ == "__main__":
    sys.exit(main())
