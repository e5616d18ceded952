"""Makes pocket's drafters, DFlash and DSpark, from what run.py has left in OUT.

    python runs/pocket/drafters.py --out OUT          on one GPU, about a minute each on an H200
    python runs/pocket/drafters.py --out OUT --tiny   a toy, for the toy of run.py --tiny

    OUT/dflash/, OUT/dspark/    folders of `leyden train drafter`: model/, log.jsonl, curves.png, acceptance.json
    OUT/drafters.json           tokens per step by number of drafts, on the model's own answers to held-out prompts
                                (on the reference answers if run.py has not got so far)

An interrupted run goes on with the same command; a finished one is only judged again.
"""

import argparse
import json
import sys
from pathlib import Path

from leyden.train.command import main as train

METHODS = ("dflash", "dspark")
FULL = ["--steps", "700", "--warmup", "60", "--batch-tokens", "32768", "--anchors", "32"]
FULL += ["--optimizer", "muon", "--lr", "4e-3"]
TINY = ["--steps", "2", "--warmup", "1", "--batch-tokens", "4096", "--anchors", "4", "--taps", "2"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the drafters of pocket.")
    parser.add_argument("--out", type=Path, required=True, help="the folder that run.py has filled")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--tiny", action="store_true", help="a toy, to see that everything works")
    parser.add_argument("--steps", type=int, help="of training, instead of the recipe's")
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), help="seconds of training of each; go on later"
    )
    arguments = parser.parse_args()
    out = arguments.out
    answers = next(file for name in ("own", "heldout") if (file := out / f"{name}.safetensors").exists())
    for method in arguments.methods:
        words = ["drafter", "--method", method, "--target", out / "model", "--out", out / method]
        words += ["--data", out / "calls.safetensors", "--heldout", answers]
        words += [*(TINY if arguments.tiny else FULL), "--time-limit", arguments.time_limit]
        words += ["--steps", arguments.steps] if arguments.steps else []
        words += ["--resume"] if (out / method / "state.safetensors").exists() else []
        print("leyden train", *words, flush=True)
        if train([str(word) for word in words]) != 0:
            print("not all steps are done; the same command goes on")
            return 130
    found = {m: json.loads(file.read_text()) for m in METHODS if (file := out / m / "acceptance.json").exists()}
    rates = {m: {n: round(each["tokens"] / each["steps"], 3) for n, each in of.items()} for m, of in found.items()}
    print(json.dumps(rates, indent=2))
    (out / "drafters.json").write_text(json.dumps(rates, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
