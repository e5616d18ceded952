"""`leyden train`: from conversations to a checkpoint that can be served.

    leyden train pretrain --model FOLDER --data FILE ... --out DIR     random weights, by FOLDER's config.json
    leyden train sft      --model FOLDER --data FILE ... --out DIR     FOLDER's weights

FOLDER also gives tokenizer and chat template. Data are JSON lines of chat messages, or files of rendered examples
(.safetensors) that a run script made. What a run leaves behind: see leyden.train.run.
"""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

import torch

from leyden import log
from leyden.config.folder import resolve
from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.model import checkpoint
from leyden.model.nemotron import Nemotron
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer
from leyden.train.batches import Corpus
from leyden.train.data import rendered
from leyden.train.init import initialize
from leyden.train.run import Run
from leyden.train.trainer import Options, Trainer

_VERBS = ("pretrain", "sft")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when all steps are done, 130 when the run was ended early (it can be resumed)."""
    log.setup()
    trainer, flags = prepare(argv)
    run = Run(
        trainer=trainer,
        out=Path(flags.out),
        source=resolve(flags.model),
        heldout=_corpus(flags.heldout, resolve(flags.model)) if flags.heldout else None,
        save_every=flags.save_every,
        eval_every=flags.eval_every,
        time_limit=flags.time_limit,
        shard_bytes=flags.shard_bytes,
    )
    if flags.resume:
        run.resume()
    return 0 if run.go() else 130


def prepare(argv: Sequence[str]) -> tuple[Trainer, argparse.Namespace]:
    """What a command line asks for, ready for its first step. Raises ConfigError and CheckpointError."""
    flags = _parser().parse_args(argv)
    if (Path(flags.out) / "state.safetensors").exists() and not flags.resume:
        raise ConfigError(f"{flags.out} holds a run already: --resume goes on with it, another --out starts a new one")
    options = Options(**{option.name: getattr(flags, option.name) for option in fields(Options)})
    folder = resolve(flags.model)
    corpus = _corpus(flags.data, folder)
    return Trainer(_model(flags, folder), corpus, options), flags


def _parser() -> _Parser:
    parser = _Parser(prog="leyden train", description="Train a model on conversations.", allow_abbrev=False)
    parser.add_argument("verb", choices=_VERBS, help="pretrain: from random weights; sft: from those of --model")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="checkpoint; pretrain needs no weights in it")
    parser.add_argument(
        "--data", required=True, nargs="+", type=Path, metavar="FILE", help="JSON lines of chat messages"
    )
    parser.add_argument("--heldout", nargs="+", type=Path, metavar="FILE", help="the same, to measure on, not to learn")
    parser.add_argument("--out", required=True, metavar="DIR", help="for checkpoint, log and figure")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N; auto: cuda if there is one")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="that is computed in")
    parser.add_argument("--save-every", type=int, default=500, metavar="STEPS")
    parser.add_argument("--eval-every", type=int, default=250, metavar="STEPS")
    parser.add_argument("--time-limit", type=float, default=float("inf"), metavar="SECONDS", help="then save and stop")
    parser.add_argument(
        "--shard-bytes", type=int, default=5 * 10**9, metavar="BYTES", help="most bytes of a weight file"
    )
    for option in fields(Options):
        name = f"--{option.name.replace('_', '-')}"
        about = f"{option.metadata['help']} (default: {option.default})"
        parser.add_argument(name, type=type(option.default), default=option.default, help=about)
    return parser


def _model(flags: argparse.Namespace, folder: Path) -> Nemotron:
    device = flags.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    config = ModelConfig.from_folder(folder)
    dtype = flags.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else config.dtype
    model = checkpoint.build(config, getattr(torch, dtype), device, mtp=config.num_nextn_predict_layers > 0)
    if flags.verb == "sft":
        checkpoint.load(model, folder)
    else:
        initialize(model, flags.seed)
    return model


def _corpus(files: Sequence[Path], folder: Path) -> Corpus:
    """All examples of `files`, in their order."""
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)

    def read(file: Path) -> Corpus:
        if file.suffix == ".safetensors":
            return Corpus.load(file)
        return Corpus.collect((found.ids, found.learn) for found in rendered(file, template, tokenizer))

    return Corpus.join([read(file) for file in files])
