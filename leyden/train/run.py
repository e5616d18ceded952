"""A training run in its folder: progress, log, checkpoints, and going on after an interruption.

log.jsonl           one line per step, and one per evaluation on held-out data
curves.png          the same as a figure
model/              the checkpoint, ready to be served
state.safetensors   what it takes to go on exactly where the run stopped
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from leyden.errors import CheckpointError, ConfigError
from leyden.log import get
from leyden.train.batches import Corpus, Packing
from leyden.train.curves import draw

log = get(__name__)

# Files of a checkpoint that training does not touch.
_BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "generation_config.json"),
)


class Trainee(Protocol):
    """What a run trains: `step_number` steps of `steps` are done, `tokens` have been seen; see Trainer."""

    options: Any  # a dataclass, whose values must not change in the middle of a run
    packing: Packing
    steps: int
    step_number: int
    tokens: int

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def measures(self) -> list[str]:
        """Names of the values that step() returns; "loss" is the first."""

    def rate(self) -> float: ...
    def step(self) -> Tensor: ...
    def evaluate(self, corpus: Corpus) -> dict[str, float]: ...
    def save(self, folder: Path, shard_bytes: int) -> None: ...
    def state(self) -> dict[str, Tensor]: ...
    def load(self, state: dict[str, Tensor], step_number: int, tokens: int) -> None: ...


@dataclass(kw_only=True)
class Run:
    """`trainer` at work in the folder `out`. `source` is the folder whose tokenizer and template the model takes."""

    trainer: Trainee
    out: Path
    source: Path | None  # None: a drafter has neither
    heldout: Corpus | None = None
    save_every: int = 500  # steps
    eval_every: int = 250  # steps
    log_every: int = 10  # steps between two looks at the device
    time_limit: float = float("inf")  # seconds; then save and stop
    shard_bytes: int = 5 * 10**9
    _pending: list[tuple[dict[str, Any], Tensor]] = field(default_factory=list)

    def go(self) -> bool:
        """Train until all steps are done (True), or until SIGINT, SIGTERM or the time limit ends it early (False)."""
        trainer = self.trainer
        self.out.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with (
            _signals() as stopped,
            tqdm(total=trainer.steps, initial=trainer.step_number, unit="step", mininterval=2) as bar,
            (self.out / "log.jsonl").open("a", encoding="utf-8") as lines,
        ):
            mark, tokens = began, trainer.tokens
            while trainer.step_number < trainer.steps:
                rate = trainer.rate()
                measured = trainer.step()
                number = trainer.step_number
                self._pending.append(({"step": number, "tokens": trainer.tokens, "lr": rate}, measured))
                bar.update()
                stop = bool(stopped) or time.monotonic() - began > self.time_limit
                last = stop or number == trainer.steps
                judge = self.heldout is not None and (number == trainer.steps or number % self.eval_every == 0)
                save = last or number % self.save_every == 0
                if judge or save or number % self.log_every == 0:
                    speed = (trainer.tokens - tokens) / (time.monotonic() - mark)
                    for record in self._read():
                        print(json.dumps(record | {"tokens_per_s": round(speed)}), file=lines, flush=True)
                    bar.set_postfix_str(f"loss {record['loss']:.4f}, {speed:,.0f} tokens/s")
                    if judge:
                        found = self.evaluate()
                        print(json.dumps({"step": number, "heldout": found}), file=lines, flush=True)
                        bar.write(f"step {number}, held out: " + ", ".join(f"{n} {v:.4f}" for n, v in found.items()))
                    if save:
                        self.save()
                    mark, tokens = time.monotonic(), trainer.tokens
                if stop:
                    break
        draw(self.out / "log.jsonl", self.out / "curves.png")
        done = trainer.step_number == trainer.steps
        if not done:
            log.info("stopped after step %d of %d; --resume goes on from there", trainer.step_number, trainer.steps)
        return done

    def evaluate(self) -> dict[str, float]:
        """The model on the held-out data."""
        assert self.heldout is not None
        found = self.trainer.evaluate(self.heldout)
        return {name: round(value, 6) for name, value in found.items()}

    def _read(self) -> list[dict[str, Any]]:
        """The steps since the last call as log records. Waits for the device."""
        values = torch.stack([measured for _, measured in self._pending]).tolist()
        records = []
        for (facts, _), row in zip(self._pending, values, strict=True):
            record = facts | {n: round(v, 6) for n, v in zip(self.trainer.measures, row, strict=True)}
            if record["loss"] != record["loss"]:
                raise ConfigError(f"the loss is not a number at step {facts['step']}: lower --lr, or lengthen --warmup")
            records.append(record)
        self._pending = []
        return records

    def save(self) -> None:
        """Write model and state; either is complete at any moment, whatever interrupts."""
        trainer, out = self.trainer, self.out
        fresh, old = out / "model.new", out / "model.old"
        for folder in (fresh, old):
            shutil.rmtree(folder, ignore_errors=True)
        trainer.save(fresh, self.shard_bytes)
        beside = [] if self.source is None else [self.source / name for name in _BESIDE]
        for file in beside:
            if file.exists():
                shutil.copy(file, fresh / file.name)
        if (out / "model").exists():
            (out / "model").rename(old)
        fresh.rename(out / "model")
        shutil.rmtree(old, ignore_errors=True)
        facts = {"step": trainer.step_number, "tokens": trainer.tokens} | _identity(trainer)
        state = {name: tensor.cpu().contiguous() for name, tensor in trainer.state().items()}
        save_file(state, out / "state.new", metadata={"run": json.dumps(facts)})
        os.replace(out / "state.new", out / "state.safetensors")

    def resume(self) -> None:
        """Go on from state.safetensors. ConfigError if an option or the data is not what it was."""
        file = self.out / "state.safetensors"
        if not file.exists():
            raise ConfigError(f"--resume: {self.out} holds no state.safetensors; start the run without it")
        try:
            with safe_open(file, framework="pt") as stored:
                facts = json.loads(stored.metadata()["run"])
                state = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
        except Exception as error:
            raise CheckpointError(f"{file}: damaged, or not written by a training run ({error})") from error
        for name, value in _identity(self.trainer).items():
            if facts[name] != value:
                raise ConfigError(f"--resume: {name} was {facts[name]} before and is {value} now; keep it as it was")
        self.trainer.load(state, facts["step"], facts["tokens"])
        logged = self.out / "log.jsonl"
        if logged.exists():  # steps after the last save are made again
            lines = [
                line for line in logged.read_text("utf-8").splitlines() if json.loads(line)["step"] <= facts["step"]
            ]
            logged.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        log.info("going on after step %d of %d", facts["step"], self.trainer.steps)


def _identity(trainer: Trainee) -> dict[str, Any]:
    """What must not change in the middle of a run."""
    options = asdict(trainer.options)
    return options | {"steps": trainer.steps, "data": trainer.packing.corpus.fingerprint, "dtype": str(trainer.dtype)}


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are noted in the list; the second SIGINT interrupts as usual."""
    seen: list[int] = []

    def note(number: int, _: object) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
