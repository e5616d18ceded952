"""`leyden quantize`: a checkpoint in fewer bits.

    leyden quantize MODEL --recipe nvfp4 --out DIR [--calibration FILE.jsonl] [--gptq]
    leyden quantize MODEL --recipe gguf-q8_0 --out FILE.gguf

DIR is a checkpoint like MODEL, for `leyden serve`; README.md, quantization.json and sensitivity.png in it say what was
done and what was lost. The same command again takes up a run that was cut off.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from leyden import log
from leyden.errors import ConfigError
from leyden.model import gguf
from leyden.model.source import Source
from leyden.quantize.calibrate import read
from leyden.quantize.convert import Conversion, Options
from leyden.quantize.recipe import GGUF, RECIPES, recipe
from leyden.quantize.report import card, draw, quality, table

logger = log.get(__name__)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(argv: Sequence[str]) -> int:
    log.setup()
    flags = _parser().parse_args(argv)
    out = Path(flags.out)
    with Source(flags.model) as source:
        if flags.recipe in GGUF:
            if flags.calibration or flags.gptq:
                raise ConfigError(f"--calibration and --gptq have no use with --recipe {flags.recipe}")
            kind = flags.recipe.removeprefix("gguf-").upper()
            path = out if out.suffix == ".gguf" else out / f"{source.folder.name}-{kind}.gguf"
            gguf.write(source, path, kind, flags.progress)
            print(path)
            return 0
        _checkpoint(source, flags, out, argv)
    return 0


def _checkpoint(source: Source, flags: argparse.Namespace, out: Path, argv: Sequence[str]) -> None:
    texts = None
    if flags.calibration:
        texts = read(flags.calibration, source.folder, flags.samples, flags.length)
    elif flags.gptq:
        raise ConfigError("--gptq needs --calibration FILE.jsonl: it weighs errors by the inputs of the matrices")
    elif "fp8" in flags.recipe or flags.recipe == "lightning-nvfp4":
        logger.warning("no --calibration: FP8 matrices get no scale for their inputs, which other servers may ask for")
    options = Options(flags.recipe, flags.four_over_six, flags.group, flags.gptq, flags.shard_bytes)
    chosen = recipe(flags.recipe, flags.four_over_six, flags.group, static=texts is not None)
    conversion = Conversion(source, chosen, options, out, texts, _device(flags.device))
    report = conversion.run(flags.progress)
    draw(report, source.config, out / "sensitivity.png")
    command = f"leyden quantize {shlex.join(argv)}"
    (out / "README.md").write_text(card(report, source.config, command), encoding="utf-8")
    print(table(report, source.config), quality(report), f"{report['bytes'] / 1e9:.3g} GB in {out}", sep="\n\n")


def _device(name: str) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else torch.device(name)


def _parser() -> _Parser:
    parser = _Parser(prog="leyden quantize", description="Store a model in fewer bits.", allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="folder of a checkpoint, a .gguf file, or a Hugging Face id")
    parser.add_argument("--recipe", required=True, choices=RECIPES, help="which matrix gets which format")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the result; for gguf also a file name")
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="JSON lines of messages, text or token_ids to measure on"
    )
    parser.add_argument("--samples", type=int, default=256, help="most texts that are read (default: 256)")
    parser.add_argument("--length", type=int, default=2048, help="most tokens of a text (default: 2048)")
    parser.add_argument("--gptq", action="store_true", help="let later columns make up for the errors of earlier ones")
    parser.add_argument(
        "--four-over-six",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="NVFP4: spread each block over +-6 or +-4, whichever errs less (default: on)",
    )
    parser.add_argument("--group", type=int, default=64, help="w4a16: columns that share a scale (default: 64)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N; auto: cuda if there is one")
    parser.add_argument("--shard-bytes", type=int, default=5 * 10**9, metavar="N", help="most bytes of a weight file")
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    return parser
