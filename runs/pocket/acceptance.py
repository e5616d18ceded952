"""How many drafts of pocket's drafters are kept: counted on its own answers, and seen in the running engine.

    python runs/pocket/acceptance.py --out FILE.json       five minutes on two cores

The model answers held-out prompts greedily, in fp32. On these texts drafts after every token are compared with what
follows (leyden.train.acceptance), by drafter and number of drafts; then the engine answers the same prompts with each
drafter as it is meant to be used, eight at a time. Both are tokens per step, the target's own one included, and should
agree.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from leyden.bench.accept import answer, length, prompts, shares
from leyden.config.engine import EngineConfig
from leyden.config.folder import resolve
from leyden.config.model import ModelConfig
from leyden.engine.engine import Engine
from leyden.model import checkpoint
from leyden.train.acceptance import Acceptance, acceptance
from leyden.train.batches import Corpus
from leyden.train.drafter import judge

BATCH, STREAMS = 8192, 8
USED: dict[str, dict[str, Any]] = {
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "dflash": {"model": "pocket-dflash", "num_speculative_tokens": 5},
    "dspark": {"model": "pocket-dspark", "num_speculative_tokens": 7},
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Count the drafts that are kept.")
    parser.add_argument("--model", default="pocket", help="or what has been made of it: pocket-nvfp4")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    folder = resolve(given.model)
    asked = prompts(folder, given.prompts, 1, 1200)
    texts, _ = run(given.model, {}, asked, given.tokens)
    pairs = zip(asked, texts, strict=True)
    own = Corpus.collect((p + t, [False] * len(p) + [True] * len(t)) for p, t in pairs if t)
    model = checkpoint.build(ModelConfig.from_folder(folder), torch.float32, "cpu", mtp=True)
    checkpoint.load(model, folder, progress=False)
    counted: dict[str, dict[int, Acceptance]] = {"mtp": {n: acceptance(model, own, n, BATCH) for n in (1, 3)}}
    counted |= {name: judge(resolve(f"pocket-{name}"), model, own, BATCH) for name in ("dflash", "dspark")}
    told: dict[str, Any] = {"prompts": len(asked), "tokens": sum(map(len, texts))}
    told["counted"] = {name: {n: asdict(each) for n, each in found.items()} for name, found in counted.items()}
    told["engine"] = {}
    print(f"{told['tokens']:,} tokens of {len(asked)} answers")
    for name, settings in USED.items():
        for n, each in counted[name].items():
            kept = " ".join(f"{share:.3f}" for share in each.accepted)
            print(f"{name:7} {n} drafts: {each.tokens_per_step:.3f} tokens a step, kept {kept}")
        found, stats = run(given.model, settings, asked, given.tokens)
        n = settings["num_speculative_tokens"]
        wanted = counted[name][n].tokens_per_step
        same = sum(a == b for a, b in zip(texts, found, strict=True))
        told["engine"][name] = {"drafts": n, "tokens_per_step": length(stats), "kept": shares(stats), "same": same}
        print(
            f"{name:7} {n} in the engine: {length(stats):.3f}, {length(stats) / wanted - 1:+.1%}; {same} texts the same"
        )
    given.out.write_text(json.dumps(told, indent=1) + "\n")
    return 0


def run(model: str, drafting: dict[str, Any], asked: list[list[int]], tokens: int) -> tuple[list[list[int]], Any]:
    common: dict[str, Any] = {"model": model, "device": "cpu", "dtype": "float32", "max_num_seqs": STREAMS}
    common |= {"max_model_len": 1200 + tokens, "enable_prefix_caching": False}
    engine = Engine.load(EngineConfig(**common, speculative_config=drafting))
    texts: list[list[int]] = []
    for first in range(0, len(asked), STREAMS):
        texts += answer(engine, asked[first : first + STREAMS], tokens)[0]
    return texts, engine.stats()


if __name__ == "__main__":
    sys.exit(main())
