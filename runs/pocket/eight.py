"""What activations in 8 bits cost pocket (`--prefill-dtype fp8`), by their arithmetic in plain PyTorch, on any machine.

    python runs/pocket/eight.py --out OUT          some minutes on one core

All rows are rounded here, where the engine rounds those of long prompts. OUT/heldout.jsonl are the conversations; for
each format three lines are printed: the weights alone against BF16, with activations, activations against weights
alone.
"""

import argparse
from pathlib import Path

import torch
from quantised import divergence

from leyden import ops
from leyden.config.folder import resolve
from leyden.config.model import ModelConfig
from leyden.model import checkpoint
from leyden.model.eight import round_above
from leyden.model.nemotron import Nemotron
from leyden.ops.eight import above
from leyden.ops.reference import eight as reference
from leyden.quantize.calibrate import Texts, read
from leyden.synthetic.__main__ import main as synthetic


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what activations in 8 bits cost pocket.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=60)
    arguments = parser.parse_args()
    known, folder = arguments.out / "heldout.jsonl", resolve("pocket")
    if not known.exists():
        synthetic(["--split", "heldout", "--seed", "1", "--n", str(arguments.texts), "--out", str(known)])
    texts = Texts(read(known, folder, 1000, 2048), torch.device("cpu"))
    original = load(folder)
    divergence(original, original, texts)  # the ops' own kernels are registered now
    for op in (ops.linear, ops.mlp, ops.experts, ops.moe):
        for format in ("fp8_channel", "nvfp4"):
            op.register("cpu", above(op.kernel("cpu", format), getattr(reference, op.name)), format)
    for quantization in ("fp8", "nvfp4"):
        plain, rounded = load(folder, quantization), load(folder, quantization)
        count = round_above(rounded, 0)
        for what, one, other in (
            ("weights alone", original, plain),
            (f"and activations of {count} matrices", original, rounded),
            ("activations alone", plain, rounded),
        ):
            print(quantization, what, divergence(one, other, texts), flush=True)


def load(folder: Path, quantization: str | None = None) -> Nemotron:
    config = ModelConfig.from_folder(folder)
    model = checkpoint.build(config, torch.bfloat16)
    checkpoint.load(model, folder, progress=False, quantization=quantization)
    return model.eval().requires_grad_(False)


if __name__ == "__main__":
    main()
