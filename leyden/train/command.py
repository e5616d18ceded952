"""`leyden train`: from conversations to a checkpoint that can be served.

    leyden train pretrain --model FOLDER --data FILE ... --out DIR     random weights, by FOLDER's config.json
    leyden train sft      --model FOLDER --data FILE ... --out DIR     FOLDER's weights
    leyden train drafter  --target FOLDER --data FILE ... --out DIR    a DFlash or DSpark drafter for FOLDER's model

FOLDER also gives tokenizer and chat template. Data are JSON lines of chat messages, or files of rendered examples
(.safetensors) that a run script made. What a run leaves behind: see leyden.train.run.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import NoReturn

import torch

from leyden import log
from leyden.config.folder import resolve
from leyden.config.model import ModelConfig
from leyden.errors import CheckpointError, ConfigError
from leyden.model import checkpoint
from leyden.model.nemotron import Nemotron
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer
from leyden.train.batches import Corpus
from leyden.train.data import rendered
from leyden.train.drafter import DrafterOptions, DrafterTrainer, judge, table
from leyden.train.init import initialize
from leyden.train.run import Run
from leyden.train.trainer import Options, Trainer

# verb -> what it makes, and its options
_VERBS: dict[str, tuple[str, type[Options] | type[DrafterOptions]]] = {
    "pretrain": ("a model from random weights, by the config.json of --model", Options),
    "sft": ("a model from the weights of --model", Options),
    "drafter": ("a drafter network from random weights, for the model --target", DrafterOptions),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when all steps are done, 130 when the run was ended early (it can be resumed)."""
    log.setup()
    trainer, flags = prepare(argv)
    folder = resolve(flags.model)
    run = Run(
        trainer=trainer,
        out=Path(flags.out),
        source=folder if isinstance(trainer, Trainer) else None,
        heldout=_corpus(flags.heldout, folder) if flags.heldout else None,
        save_every=flags.save_every,
        eval_every=flags.eval_every,
        time_limit=flags.time_limit,
        shard_bytes=flags.shard_bytes,
    )
    if flags.resume:
        run.resume()
    if not run.go():
        return 130
    if isinstance(trainer, DrafterTrainer) and run.heldout is not None:
        found = judge(run.out / "model", trainer.target, run.heldout, flags.batch_tokens)
        print(table(found))
        (run.out / "acceptance.json").write_text(
            json.dumps({n: asdict(of) for n, of in found.items()}, indent=2) + "\n"
        )
    return 0


def prepare(argv: Sequence[str]) -> tuple[Trainer | DrafterTrainer, argparse.Namespace]:
    """What a command line asks for, ready for its first step. Raises ConfigError and CheckpointError."""
    verb = argv[0] if argv and argv[0] in _VERBS else "pretrain"
    flags = _parser(verb).parse_args(argv)
    if (Path(flags.out) / "state.safetensors").exists() and not flags.resume:
        raise ConfigError(f"{flags.out} holds a run already: --resume goes on with it, another --out starts a new one")
    kind = _VERBS[verb][1]
    options = kind(**{option.name: getattr(flags, option.name) for option in fields(kind)})
    folder = resolve(flags.model)
    corpus = _corpus(flags.data, folder)
    if isinstance(options, Options):
        return Trainer(_model(flags, folder), corpus, options), flags
    if options.mask_token_id < 0:
        options = replace(options, mask_token_id=_spare_token(Tokenizer.from_folder(folder)))
    return DrafterTrainer(_model(flags, folder), corpus, options), flags


def _parser(verb: str) -> _Parser:
    """Of the flags of one verb."""
    parser = _Parser(prog="leyden train", description="Train a model on conversations.", allow_abbrev=False)
    verbs = "; ".join(f"{name}: {about}" for name, (about, _) in _VERBS.items())
    parser.add_argument("verb", choices=_VERBS, help=verbs)
    model = "--target" if verb == "drafter" else "--model"
    about = "checkpoint; pretrain needs no weights in it"
    parser.add_argument(model, dest="model", required=True, metavar="FOLDER", help=about)
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
    for option in fields(_VERBS[verb][1]):
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
    mtp = config.num_nextn_predict_layers > 0 and flags.verb != "drafter"
    model = checkpoint.build(config, getattr(torch, dtype), device, mtp)
    if flags.verb == "pretrain":
        initialize(model, flags.seed)
    else:
        checkpoint.load(model, folder)
    return model


def _spare_token(tokenizer: Tokenizer) -> int:
    """The family's token 990, or the last reserved one of a vocabulary that has fewer."""
    for number in range(990, -1, -1):
        with suppress(CheckpointError):
            return tokenizer.id_of(f"<SPECIAL_{number}>")
    raise ConfigError("--mask-token-id must be given: the tokenizer has no reserved tokens <SPECIAL_...>")


def _corpus(files: Sequence[Path], folder: Path) -> Corpus:
    """All examples of `files`, in their order."""
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder, tokenizer)

    def read(file: Path) -> Corpus:
        if file.suffix == ".safetensors":
            return Corpus.load(file)
        return Corpus.collect((found.ids, found.learn) for found in rendered(file, template, tokenizer))

    return Corpus.join([read(file) for file in files])
