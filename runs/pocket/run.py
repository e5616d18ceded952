"""Makes pocket, the small model that ships with leyden: tokenizer, data, training, evaluation.

    python runs/pocket/run.py --out OUT          on one GPU, about a quarter of an hour on an H200
    python runs/pocket/run.py --out OUT --tiny   the same with a toy, within a minute on a CPU: does everything work?

What a stage has made is not made again, so the same command goes on after an interruption, within training too.

    OUT/start/               config.json, tokenizer, chat template
    OUT/train.safetensors    rendered examples; heldout.safetensors: of templates and words that training never sees
    OUT/run/                 the folder of `leyden train`: model/, log.jsonl, curves.png, state.safetensors
    OUT/calls.safetensors    more examples, most of them with tools, for a second and shorter training
    OUT/second/              the folder of that one
    OUT/model/               the result: the mean of what both trainings gave
    OUT/results.json         accuracy by kind of task, loss, accepted drafts
    OUT/answers.jsonl        what the model said to each held-out prompt; own.safetensors: the same as token ids
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from leyden.synthetic import check, generate
from leyden.testing import tokenizer as own_tokenizer
from leyden.text.template import ChatTemplate, normalise
from leyden.text.tokenizer import Tokenizer
from leyden.train.batches import Corpus
from leyden.train.data import sequences, texts

# torch is imported where it is needed: the processes that make the data do without.

HERE = Path(__file__).parent
SEED = 0
PIECE = 1000  # examples that one process makes at a time
SHARD_BYTES = 15_000_000
SHARE = 0.6  # of the second training in the mean of both: calls gain more than other answers lose
CALLING = ("call", "parallel", "none_fits", "missing", "retry", "chain", "again", "corrected")


@dataclass(frozen=True)
class Plan:
    config: dict[str, Any]
    tokenizer_examples: int
    examples: int
    heldout: int  # examples for loss and accepted drafts
    prompts: int  # held-out prompts that are answered
    answer_tokens: int  # most tokens of an answer
    seconds: float  # of training; the number of steps follows from the measured speed
    flags: tuple[str, ...]  # of leyden train
    second_examples: int
    second_seconds: float
    second_flags: tuple[str, ...]  # in addition to `flags`


def full() -> Plan:
    return Plan(
        config=json.loads((HERE / "config.json").read_text()),
        tokenizer_examples=20_000,
        examples=700_000,
        heldout=1_000,
        prompts=500,
        answer_tokens=640,
        seconds=700,
        flags=(
            *("--optimizer", "muon", "--lr", "4e-3", "--warmup", "100", "--batch-tokens", "65536"),
            *("--prompt-weight", "0.1", "--mtp-depths", "3", "--mtp-weight", "0.3"),
        ),
        second_examples=240_000,
        second_seconds=210,
        second_flags=("--lr", "2e-3", "--warmup", "50"),
    )


def tiny() -> Plan:
    small = {"vocab_size": 1024, "hidden_size": 64, "hybrid_override_pattern": "ME*E", "mamba_num_heads": 4}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "ssm_state_size": 16, "moe_intermediate_size": 64}
    return Plan(
        config=full().config | small | {"moe_shared_expert_intermediate_size": 64},
        tokenizer_examples=200,
        examples=200,
        heldout=20,
        prompts=8,
        answer_tokens=16,
        seconds=10,
        flags=("--optimizer", "muon", "--lr", "4e-3", "--warmup", "2", "--batch-tokens", "4096"),
        second_examples=100,
        second_seconds=5,
        second_flags=("--lr", "2e-3"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make pocket.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="a toy, to see that everything works")
    parser.add_argument("--seconds", type=float, help="of training, instead of the recipe's")
    parser.add_argument("--steps", type=int, help="of training, instead of as many as fit")
    parser.add_argument("--config", type=Path, help="keys that replace those of config.json, to try another model")
    parser.add_argument("--data", type=Path, help="folder of another run, whose tokenizer and data are taken")
    parser.add_argument("--second-seconds", type=float, help="of the second training, instead of the recipe's")
    parser.add_argument("--until", choices=("data", "training", "second", "evaluation"), default="evaluation")
    arguments = parser.parse_args()
    plan, out = tiny() if arguments.tiny else full(), arguments.out
    if arguments.config:
        plan.config.update(json.loads(arguments.config.read_text()))
    out.mkdir(parents=True, exist_ok=True)
    start, data = out / "start", arguments.data or out
    train, calls, heldout = (data / f"{name}.safetensors" for name in ("train", "calls", "heldout"))
    stage("tokenizer", start / "config.json", lambda: make_start(plan, start, arguments.data))
    stage("training data", train, lambda: make_data("train", start, train, Part(0, plan.examples)))
    stage("more data", calls, lambda: make_data("train", start, calls, *second_parts(plan)))
    stage("held-out data", heldout, lambda: make_data("heldout", start, heldout, Part(0, plan.heldout)))
    if arguments.until == "data":
        return
    common = ["--heldout", str(heldout), "--shard-bytes", str(SHARD_BYTES), *plan.flags]
    first = Training("pretrain", start, train, out / "run", arguments.seconds or plan.seconds, common)
    first.go(arguments.steps)
    if arguments.until == "training":
        return
    flags = [*common, *plan.second_flags]
    seconds = arguments.second_seconds or plan.second_seconds
    Training("sft", out / "run/model", calls, out / "second", seconds, flags).go(arguments.steps)
    stage("mean", out / "model", lambda: average(out / "run/model", out / "second/model", SHARE, out / "model"))
    if arguments.until == "second":
        return
    with timed("evaluation"):
        evaluation(plan, start, heldout, out)


def stage(name: str, result: Path, make: Callable[[], None]) -> None:
    if result.exists():
        say(f"{name}: {result} is there")
        return
    with timed(name):
        make()


class timed:
    """Says when a stage begins and how long it took."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        say(f"{self.name} ...")
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        say(f"{self.name}: {time.monotonic() - self.began:.0f} s")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def make_start(plan: Plan, start: Path, other: Path | None) -> None:
    """A tokenizer trained on what the model will read, and the files that make the folder a checkpoint's."""
    if other:
        shutil.copytree(other / "start", start)
    else:
        own_tokenizer.write(start, own_tokenizer.SMALLEST)
        template = ChatTemplate.from_folder(start, Tokenizer.from_folder(start))
        corpus = texts(generate(SEED, plan.tokenizer_examples), template)
        own_tokenizer.write(start, plan.config["vocab_size"], corpus, digits=1)  # it calculates digit by digit
    generation = {"bos_token_id": 1, "eos_token_id": [2, 11], "pad_token_id": 0, "do_sample": False}
    (start / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (start / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n")


@dataclass(frozen=True)
class Part:
    """`count` examples of `families` (None: of all) from number `first` on."""

    first: int
    count: int
    families: tuple[str, ...] | None = None

    def pieces(self) -> Iterator["Part"]:
        for done in range(0, self.count, PIECE):
            yield Part(self.first + done, min(PIECE, self.count - done), self.families)


def second_parts(plan: Plan) -> tuple[Part, Part]:
    """Three of five examples have calls to make; the others are of all kinds, new ones."""
    calling = plan.second_examples * 3 // 5
    return Part(0, calling, CALLING), Part(plan.examples, plan.second_examples - calling)


def make_data(split: str, start: Path, result: Path, *wanted: Part) -> None:
    jobs = [(start, split, piece) for part in wanted for piece in part.pieces()]
    parts, shown = [], time.monotonic()
    with get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        for part in pool.imap(render, jobs):
            parts.append(part)
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                say(f"  {len(parts) * PIECE:,} of {sum(each.count for each in wanted):,} examples")
    corpus = Corpus.join(parts)
    say(f"  {len(corpus):,} examples, {len(corpus.tokens):,} tokens, {int(corpus.learn.sum()):,} of them to be learned")
    corpus.save(result.with_suffix(".new"))
    result.with_suffix(".new").rename(result)


def render(job: tuple[Path, str, Part]) -> Corpus:
    start, split, part = job
    tokenizer = Tokenizer.from_folder(start)
    template = ChatTemplate.from_folder(start, tokenizer)
    made = generate(SEED, part.count, split, part.families, part.first)  # type: ignore[arg-type]
    return Corpus.collect((s.ids, s.learn) for each in made for s in sequences(each, template, tokenizer))


@dataclass(frozen=True)
class Training:
    """`leyden train kind` from the model or the configuration in `start`, with as many steps as fit into `seconds`."""

    kind: str
    start: Path
    data: Path
    out: Path
    seconds: float
    common: list[str]

    def go(self, steps: int | None) -> None:
        file = self.out / "steps.json"
        stage(f"speed of {self.out.name}", file, lambda: self._choose_steps(steps, file))
        chosen = json.loads(file.read_text())["steps"]
        with timed(f"training {self.out.name}"):
            self._train(["--out", str(self.out), "--steps", str(chosen), "--time-limit", str(1.2 * self.seconds)])

    @property
    def _flags(self) -> list[str]:
        return [self.kind, "--model", str(self.start), "--data", str(self.data), *self.common]

    def _choose_steps(self, steps: int | None, result: Path) -> None:
        """By the speed of a few, unless the number is given."""
        result.parent.mkdir(parents=True, exist_ok=True)
        if steps:
            result.write_text(json.dumps({"steps": steps}) + "\n")
            return
        import torch

        from leyden.train.command import prepare

        trainer, _ = prepare([*self._flags, "--out", "", "--steps", "1000"])
        for _ in range(5):
            trainer.step()
        began, tokens, timed_steps = time.monotonic(), trainer.tokens, 20 if torch.cuda.is_available() else 3
        for _ in range(timed_steps):
            last = trainer.step()
        last.tolist()  # wait for the device
        taken = time.monotonic() - began
        say(f"  {(trainer.tokens - tokens) / taken:,.0f} tokens/s, {taken / timed_steps * 1000:.0f} ms a step")
        chosen = max(1, int(self.seconds * timed_steps / taken))
        result.write_text(json.dumps({"steps": chosen, "seconds_per_step": taken / timed_steps}) + "\n")

    def _train(self, flags: list[str]) -> None:
        from leyden.train.command import main as train

        flags = [*self._flags, *flags]
        if (self.out / "state.safetensors").exists():
            flags.append("--resume")
        say(f"  leyden train {' '.join(flags)}")
        if train(flags) != 0:
            say("  not all steps are done; the same command goes on")


def average(first: Path, second: Path, share: float, out: Path) -> None:
    """Write `second` with weights that are its own to `share`, and those of `first` for the rest.

    A model that was trained on from another lies in the same valley of the loss, and between the two it is often better
    than at either end (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models")."""
    from safetensors.torch import load_file, save_file

    fresh = out.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(second, fresh)
    before = {name: weight for file in first.glob("*.safetensors") for name, weight in load_file(file).items()}
    for file in second.glob("*.safetensors"):
        mixed = {
            name: before[name].double().lerp(weight.double(), share).to(weight.dtype)
            for name, weight in load_file(file).items()
        }
        save_file(mixed, fresh / file.name, metadata={"format": "pt"})
    fresh.rename(out)


def evaluation(plan: Plan, start: Path, heldout: Path, out: Path) -> None:
    import torch

    from leyden.config.model import ModelConfig
    from leyden.llm import LLM
    from leyden.model import checkpoint
    from leyden.train.acceptance import acceptance
    from leyden.train.trainer import evaluate
    from leyden.types import SamplingParams

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = ModelConfig.from_folder(out / "model")
    model = checkpoint.build(config, getattr(torch, config.dtype if device == "cuda" else "float32"), device, mtp=True)
    checkpoint.load(model, out / "model", progress=False)
    corpus = Corpus.load(heldout)
    results: dict[str, Any] = {"steps": json.loads((out / "second/log.jsonl").read_text().splitlines()[-1])["step"]}
    results["heldout"] = evaluate(model, corpus, 32768, 3)
    results["drafts_on_reference_answers"] = drafts(acceptance(model, corpus, 3, 32768))
    write(results, out)

    examples = list(generate(SEED, plan.prompts, "heldout"))
    tokenizer = Tokenizer.from_folder(start)
    template = ChatTemplate.from_folder(start, tokenizer)
    prompts = [
        template.encode(normalise(each["messages"][:-1]), each["tools"], kwargs={"enable_thinking": each["thinking"]})
        for each in examples
    ]
    llm = LLM(str(out / "model"), max_model_len=2048, max_num_seqs=256, device=device, dtype=config.dtype)
    params = SamplingParams(temperature=0, max_tokens=plan.answer_tokens, skip_special_tokens=False)
    began = time.monotonic()
    answers = llm.generate(prompts, params, progress=True)
    written = sum(len(answer.outputs[0].token_ids) for answer in answers)
    say(f"  {written:,} tokens at {written / (time.monotonic() - began):,.0f} tokens/s")
    right = []
    with (out / "answers.jsonl").open("w") as file:
        for each, answer in zip(examples, answers, strict=True):
            message = parsed(answer.outputs[0].text, each)
            right.append(check(each, message))
            record = {"family": each["family"], "template": each["template"], "right": right[-1]}
            record |= {"expected": each["check"], "text": answer.outputs[0].text}
            print(json.dumps(record), file=file)
    results["accuracy"] = accuracy(examples, right)
    own = Corpus.collect(
        (prompt + ids, [False] * len(prompt) + [True] * len(ids))
        for prompt, answer in zip(prompts, answers, strict=True)
        if (ids := answer.outputs[0].token_ids)
    )
    own.save(out / "own.safetensors")
    results["drafts_on_own_answers"] = drafts(acceptance(model, own, 3, 32768))
    write(results, out)


def parsed(text: str, example: Any) -> dict[str, Any]:
    """The assistant message that the server would make of an answer."""
    from leyden.server.parsers import OutputParser, collect

    parser = OutputParser(example["tools"] or (), thinking=example["thinking"])
    found = collect([*parser.feed(text), *parser.finish()])
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in found.tool_calls]
    return {"content": found.content or "", "tool_calls": calls}


def accuracy(examples: Iterable[Any], right: Iterable[bool]) -> dict[str, float]:
    """Share of right answers: of all, by kind of check with and without thinking, and by family."""
    counts: dict[str, list[bool]] = defaultdict(list)
    for each, good in zip(examples, right, strict=True):
        for name in groups(each):
            counts[name].append(good)
    return {name: round(sum(found) / len(found), 4) for name, found in sorted(counts.items())}


def groups(example: Any) -> Iterator[str]:
    kind = "tool calls" if example["check"]["kind"] == "tool_calls" else "answers"
    yield "all"
    yield kind
    yield f"{kind}, {'with' if example['thinking'] else 'without'} thinking"
    yield f"family {example['family']}"


def drafts(found: Any) -> dict[str, Any]:
    return {"tokens_per_step": round(found.tokens_per_step, 3), "accepted": [round(a, 4) for a in found.accepted]}


def write(results: dict[str, Any], out: Path) -> None:
    text = json.dumps(results, indent=2)
    print(text, flush=True)
    (out / "results.json").write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
