"""Quantises pocket by every recipe, and says what that costs, from what run.py has left in OUT.

    python runs/pocket/quantised.py --out OUT                   about an hour on two cores, ten minutes on sixteen
    python runs/pocket/quantised.py --out OUT --model pocket    of the pocket that ships; OUT may be empty
    python runs/pocket/quantised.py --out OUT --tiny            a toy, for the toy of run.py --tiny

    OUT/calibration.jsonl, OUT/known.jsonl    training examples to measure activations on, held-out ones to compare on
    OUT/quantised/RECIPE/     what `leyden quantize` makes (its report and figure included), or RECIPE.gguf
    OUT/quantised/pocket-nvfp4/     what ships under this name: every matrix but the embeddings in NVFP4
    OUT/evals/RECIPE/         what `leyden bench evals` finds, and for bf16 the original
    OUT/quantised.json        bytes, divergence and accuracy of each; the table on stdout is made of it

What is there is not made again.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leyden.bench import evals
from leyden.config.folder import resolve
from leyden.config.model import ModelConfig
from leyden.formats import Dense, Format
from leyden.formats.nvfp4 import NVFP4
from leyden.model import checkpoint
from leyden.model.nemotron import Nemotron
from leyden.model.source import Source
from leyden.quantize.calibrate import Texts, read
from leyden.quantize.command import main as quantize
from leyden.quantize.convert import Conversion, Options
from leyden.quantize.recipe import Recipe
from leyden.quantize.report import draw
from leyden.synthetic.__main__ import main as synthetic

SHARD_BYTES = 15_000_000  # as run.py: files that a repository takes
RECIPES: dict[str, tuple[str, ...]] = {
    "fp8": (),
    "nvfp4": ("--gptq",),
    "lightning-nvfp4": ("--gptq",),
    "w4a16": ("--gptq",),
    "gguf-q8_0": (),
    "gguf-q4_0": (),
    "gguf-nvfp4": (),
}
SMALLEST = "pocket-nvfp4"
CACHED = ("bf16", SMALLEST)  # answered once more with keys and values in FP8: without scales, and with measured ones


def main() -> int:
    parser = argparse.ArgumentParser(description="Quantise pocket and measure what it costs.")
    parser.add_argument("--out", type=Path, required=True, help="the folder that run.py has filled")
    parser.add_argument("--model", help="another checkpoint than OUT/model, or pocket: the one that ships")
    parser.add_argument("--recipes", nargs="+", choices=(*RECIPES, SMALLEST), default=[*RECIPES, SMALLEST])
    parser.add_argument("--answers", type=int, default=1000, help="held-out prompts that are answered; 0: none")
    parser.add_argument("--tiny", action="store_true", help="a toy, to see that everything works")
    arguments = parser.parse_args()
    out, model = arguments.out, resolve(arguments.model or arguments.out / "model")
    count, answers = (8, min(4, arguments.answers)) if arguments.tiny else (256, arguments.answers)
    out.mkdir(parents=True, exist_ok=True)
    calibration, known = out / "calibration.jsonl", out / "known.jsonl"
    for path, split, size in ((calibration, "train", count), (known, "heldout", 8 if arguments.tiny else 200)):
        if not path.exists():
            synthetic(["--split", split, "--seed", "1", "--n", str(size), "--out", str(path)])
    texts = Texts(read(known, model, 1000, 2048), torch.device("cpu"))
    original = load(model)
    found: dict[str, dict[str, Any]] = {"bf16": {"bytes": size_of(model), "largest_file": largest_file(model)}}
    for recipe in arguments.recipes:
        made = convert(model, recipe, calibration, out / "quantised")
        found[recipe] = {"bytes": size_of(made), "largest_file": largest_file(made)}
        found[recipe] |= divergence(original, load(made), texts)
        print(recipe, found[recipe], flush=True)
    if answers:
        places = {"bf16": model} | {recipe: path_of(out / "quantised", recipe) for recipe in arguments.recipes}
        right = {name: accuracy(place, out / "evals" / name, answers) for name, place in places.items()}
        for name in [name for name in CACHED if name in places]:
            folder = out / "evals" / f"{name}-fp8-cache"
            right[f"{name}, fp8 cache"] = accuracy(places[name], folder, answers, "--kv-cache-dtype", "fp8")
            found[f"{name}, fp8 cache"] = {"bytes": found[name]["bytes"]}
        for name, entry in found.items():
            entry |= compared(right[name], right["bf16"])
    (out / "quantised.json").write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))
    return 0


def path_of(folder: Path, recipe: str) -> Path:
    return folder / (f"{recipe}.gguf" if recipe.startswith("gguf-") else recipe)


def convert(model: Path, recipe: str, calibration: Path, folder: Path) -> Path:
    made = path_of(folder, recipe)
    if recipe == SMALLEST:
        make_smallest(model, calibration, made)
        return made
    words = [str(model), "--recipe", recipe, "--out", str(made), "--no-progress", *RECIPES[recipe]]
    if made.suffix != ".gguf":
        words += ["--calibration", str(calibration), "--shard-bytes", str(SHARD_BYTES)]
    if not made.is_file():
        print("leyden quantize", *words, flush=True)
        quantize(words)
    return made


def make_smallest(model: Path, calibration: Path, made: Path) -> None:
    """Attention, Mamba, head and MTP module too: with what the recipes of `leyden quantize` leave in BF16, the package
    would be larger than it may be."""
    options = Options(SMALLEST, gptq=True, shard_bytes=SHARD_BYTES)
    with Source(model) as source:
        texts = read(calibration, source.folder, 256, 2048)
        chosen = Recipe(SMALLEST, all_but_embeddings, fp8_cache=True)
        report = Conversion(source, chosen, options, made, texts).run(progress=False)
        draw(report, source.config, made / "sensitivity.png")


def all_but_embeddings(part: str, shape: tuple[int, ...]) -> Format:
    return Dense() if part == "embeddings" else NVFP4(four_over_six=True)


def load(path: Path) -> Nemotron:
    folder = resolve(path)
    config = ModelConfig.from_folder(folder)
    model = checkpoint.build(config, getattr(torch, config.dtype), mtp=config.num_nextn_predict_layers > 0)
    checkpoint.load(model, folder, progress=False)
    return model.eval().requires_grad_(False)


def size_of(path: Path) -> int:
    """Bytes of a checkpoint, tokenizer included; not those of reports."""
    files = [path] if path.is_file() else [f for f in path.iterdir() if f.suffix not in (".png", ".md")]
    return sum(file.stat().st_size for file in files if file.name != "quantization.json")


def largest_file(path: Path) -> int:
    return path.stat().st_size if path.is_file() else max(file.stat().st_size for file in path.iterdir())


@torch.inference_mode()
def divergence(original: Nemotron, other: Nemotron, texts: Texts) -> dict[str, float]:
    """Of the next token's distribution, over all tokens of the texts: mean KL(original || other) in nats, and the share
    of tokens of which both find the same most likely."""
    total, same, tokens = 0.0, 0, 0
    for ids, ctx in zip(texts.ids, texts.contexts, strict=True):
        p, q = (log_probabilities(model, ids, ctx) for model in (original, other))
        total += (p.exp() * (p - q)).sum().item()
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        tokens += len(ids)
    return {"divergence": total / tokens, "same_top_token": same / tokens}


def log_probabilities(model: Nemotron, ids: Tensor, ctx: Any) -> Tensor:
    return model.logits(model(ids, ctx)[0]).log_softmax(-1)


def accuracy(model: Path, folder: Path, answers: int, *flags: str) -> list[bool]:
    """Which held-out prompts get the right answer, greedily and over HTTP."""
    if not (folder / "evals.json").exists():
        evals.main([str(model), "-n", str(answers), "--seed", "7", "--out", str(folder), *flags])
    return [json.loads(line)["right"] for line in (folder / "answers.jsonl").read_text().splitlines()]


def compared(right: list[bool], base: list[bool]) -> dict[str, int]:
    """Numbers of prompts: all, answered right, right only here, right only by the original."""
    return {
        "answers": len(right),
        "right": sum(right),
        "gained": sum(a and not b for a, b in zip(right, base, strict=True)),
        "lost": sum(b and not a for a, b in zip(right, base, strict=True)),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """As Markdown. The error of a difference is that of the prompts on which the two disagree."""
    lines = ["| | MB | KL, nats | same top token | right | against BF16, points |", "|---|---|---|---|---|---|"]
    for name, entry in found.items():
        cells = [name, f"{entry['bytes'] / 1e6:.1f}"]
        cells += [f"{entry['divergence']:.4f}", f"{entry['same_top_token']:.1%}"] if "divergence" in entry else ["", ""]
        if "answers" in entry:
            points, gained, lost = 100 / entry["answers"], entry["gained"], entry["lost"]
            difference = f"{points * (gained - lost):+.1f} ± {points * (gained + lost) ** 0.5:.1f}"
            cells += [f"{entry['right'] * points:.1f}%", "" if name == "bf16" else difference]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
