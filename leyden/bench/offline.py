"""What the measurements without a server share: their flags, and an LLM with the flags of `leyden serve`.

As in vllm bench latency and throughput (0.27), so that numbers compare: sampling with temperature 1, end-of-sequence
tokens ignored, so that every answer has the length that was asked for; random tokens as prompts; text is made of the
answers unless --disable-detokenize says otherwise.
"""

import argparse
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from leyden import log
from leyden.config.arguments import normal
from leyden.config.engine import EngineConfig
from leyden.config.folder import resolve
from leyden.config.launch import Launch
from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.llm import LLM

logger = log.get(__name__)


def whole(least: int) -> Callable[[str], int]:
    """The reader of a flag's whole number, from `least` on."""

    def read(word: str) -> int:
        if not word.isdecimal() or int(word) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {word!r}")
        return int(word)

    return read


def parser(name: str, about: str) -> argparse.ArgumentParser:
    """With the flags that both measurements have."""
    made = argparse.ArgumentParser(
        f"leyden bench {name}",
        usage=f"leyden bench {name} MODEL [flags below] [FLAGS of leyden serve]",
        description=about,
        epilog="All other flags are those of leyden serve, such as --max-model-len; leyden serve --help lists them",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a beginning may be meant for a flag of leyden serve
    )
    made.add_argument("--n", type=whole(1), metavar="N", default=1, help="answers to each prompt (default 1)")
    made.add_argument(
        "--disable-detokenize", action="store_true", help="make no text of the answers, and leave its time out"
    )
    made.add_argument("--output-json", type=Path, metavar="FILE", help="write the numbers into a JSON file too")
    made.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    return made


def parse(made: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, Launch]:
    """(own flags, all others as `leyden serve` reads them). Raises ConfigError."""
    given, rest = made.parse_known_args([normal(word) for word in argv])
    if given.profile:
        raise ConfigError("--profile: there is no profiler; leyden bench kernels says how long each op takes")
    if given.output_json and not given.output_json.parent.is_dir():
        raise ConfigError(f"--output-json {given.output_json}: there is no such folder")
    launch = Launch.from_argv(rest)
    log.setup(launch.log_level, launch.log_format)
    os.environ.update(launch.environment)
    return given, launch


def texts(config: EngineConfig) -> Path:
    """The folder of the tokenizer."""
    return resolve(config.tokenizer) if config.tokenizer else resolve(config.model, config.revision)


def load(launch: Launch, given: argparse.Namespace, longest: int, **changes: Any) -> LLM:
    """The model, with `changes` of the engine's configuration.

    Raises ConfigError if a prompt and its answer, `longest` tokens together, are more than the model takes.
    """
    config = replace(launch.engine, **changes)
    _check(config.max_model_len, longest)  # better known now than after a minute of loading
    words = not given.disable_detokenize
    if words and not (texts(config) / "tokenizer.json").exists():
        logger.warning("there is no tokenizer.json: the answers stay token ids, as with --disable-detokenize")
        words = False
    llm = LLM(**asdict(config), skip_tokenizer_init=not words)
    _check(llm.engine.max_model_len, longest)
    for line in (*launch.warnings, *launch.notes(llm.engine.describe()["device"].partition(":")[0])):
        logger.warning(line)
    return llm


def _check(most: int | None, longest: int) -> None:
    if most is not None and longest > most:
        raise ConfigError(
            f"a prompt and its answer have up to {longest:,} tokens, and the longest context is {most:,} "
            "(--max-model-len): shorten prompts (--input-len) or answers (--output-len)"
        )


def tokens(launch: Launch, lengths: Sequence[int], seed: int | None = None) -> list[list[int]]:
    """Prompts of so many random tokens each; `seed`: instead of the engine's."""
    folder = resolve(launch.engine.model, launch.engine.revision)
    vocabulary = ModelConfig.from_folder(folder, launch.engine.hf_overrides).vocab_size
    made = random.Random(launch.engine.seed if seed is None else seed)
    return [made.choices(range(vocabulary), k=length) for length in lengths]


def keep(file: Path | None, numbers: dict[str, Any]) -> None:
    """Write --output-json, if it was given."""
    if file is not None:
        file.write_text(json.dumps(numbers, indent=4) + "\n", encoding="utf-8")
