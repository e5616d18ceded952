"""The kernels of a start on CUDA, compiled side by side while the weights are read.

Which ones that are is found out by doing it: in another process, steps of the model that will be are run on tensors
without memory, and what they would launch is noted (leyden.ops.triton.compiling). First come those that an answer to a
short prompt needs; the engine waits for them. The others are compiled beside it. What is missed, because a step comes
that is not among those here, is compiled when it is first needed.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from leyden import log
from leyden.cache.pool import NO_DRAFTER, Pool
from leyden.config.engine import CAPTURE_SIZES, EngineConfig
from leyden.config.model import ModelConfig
from leyden.config.speculative import SpeculativeConfig
from leyden.engine.capture import PAGES
from leyden.engine.memory import Split, divide, free
from leyden.engine.runner import Runner
from leyden.engine.sampler import Sampler
from leyden.formats import Weight
from leyden.model import checkpoint, twins
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.model.rounded import narrow
from leyden.spec.load import load, networks, room
from leyden.types import Admit, Plan, Row, SamplingParams

logger = log.get(__name__)

_PROCESSES = 16  # at most: each takes some 200 MB
_FIRST = (16, 24, 100, 128, 300)  # tokens of the prompts of first answers
_HEADER = 5  # tokens of an assistant's header, before which the state of a prompt is kept
_START = 100  # tokens that are there before a step


class Compilation(Protocol):
    def wait(self) -> None:
        """Until the kernels of a first answer are there."""

    def close(self) -> object:
        """Leave it at what is compiled."""


class Nothing:
    """A Compilation of no kernels."""

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Start:
    """What is known of an engine before its weights are read."""

    config: EngineConfig
    folder: Path
    architecture: ModelConfig
    dtype: torch.dtype
    drafting: SpeculativeConfig | None
    settle: Callable[[Nemotron, Split], None]  # what is done to the model once memory is divided

    def compiled(self, device: torch.device) -> Compilation:
        """Begin, if `device` is a GPU. It never fails: kernels are compiled later, then."""
        if device.type != "cuda":
            return Nothing()
        try:
            from leyden.ops.triton import compiling  # needs Triton, which CPUs do without

            if compiling.INTERPRETED.value:
                return Nothing()
            major, minor = torch.cuda.get_device_capability(device)
            left, total = free(self.config, device), torch.cuda.mem_get_info(device)[1]
            config = replace(self.config, model="") if self.config.load_format == "dummy" else self.config
            what = f"{config} {self.architecture} {self.dtype} {self.drafting} {major}.{minor} {total}"
            processes = min(_PROCESSES, len(os.sched_getaffinity(0)))
            return compiling.Compilation(lambda: self.kernels(10 * major + minor, left, total), processes, what)
        except Exception:
            logger.debug("kernels are compiled when they are first needed", exc_info=True)
            return Nothing()

    def kernels(self, capability: int, left: int, total: int) -> Iterator[list[Any]]:
        """Those of a first answer, then those of other steps, as Jobs: on a GPU with `total` bytes, so many left
        for weights and cache. Nothing here touches it."""
        from leyden.ops.triton.compiling import noted

        with _quiet():
            split, runner = self._outline(left, total)
        for plans in (_first(split), _others(split, self.config)):
            failed: list[Exception] = []
            with noted(capability) as jobs, _quiet():
                for plan in plans:
                    try:
                        runner.run(plan)
                    except Exception as error:
                        failed.append(error)
            if failed:
                logger.debug("no kernels are noted of %d steps", len(failed), exc_info=failed[0])
            yield jobs

    def _outline(self, left: int, total: int) -> tuple[Split, Runner]:
        """The engine's split, and a runner like its own, without memory."""
        config, drafting = self.config, self.drafting
        mtp = drafting is not None and "mtp" in drafting.methods(self.architecture)
        model = checkpoint.build(self.architecture, self.dtype, "meta", mtp)
        if config.load_format != "dummy":
            checkpoint.match(model, self.folder)
        if config.quantization:
            narrow(model, config.quantization)
        model.eval().requires_grad_(False)
        drafters = load(drafting, model) if drafting else []
        taken = room(drafting, self.architecture) if drafting else NO_DRAFTER
        modules = nn.ModuleList([model, *networks(drafters)])
        twins.keep(modules, total)
        weights = sum(p.nbytes for p in modules.parameters())
        weights += sum(w.twin.nbytes for w in modules.modules() if isinstance(w, Weight) and w.twin is not None)
        split = divide(config, self.architecture, self.dtype, "cuda", left - weights, taken)
        self.settle(model, split)
        _thin(model)
        pool = Pool(model.config, split.shape, "meta")
        sampler = Sampler(split.shape.slots, model.config.vocab_size, "meta", split.shape.draft.width)
        coupled = drafting is not None and drafting.draft_sample_method == "probabilistic"
        return split, Runner(model, pool, sampler, drafters, coupled, None, config.capture_sizes)


class _Like(nn.Module):
    """In place of a layer that launches what an earlier one does."""

    mixer = None

    def forward(self, delta: Tensor, residual: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        return residual, residual


def _thin(model: Nemotron) -> None:
    """Leave one layer of each kind: that is its mixer, and how its matrices are stored."""
    kinds = set()
    for i, layer in enumerate(model.backbone.layers):
        matrices = (module for module in layer.modules() if isinstance(module, Weight))
        stored = [(matrix.shape, matrix.format, matrix.twin is None, matrix.eight_above) for matrix in matrices]
        kind = (i == 0, type(layer.mixer), *stored)
        if kind in kinds:
            model.backbone.layers[i] = _Like()
        kinds.add(kind)


@contextmanager
def _quiet() -> Iterator[None]:
    """What is logged in the block the engine says itself."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)


def _first(split: Split) -> Iterator[Plan]:
    drafts = split.shape.draft.width
    for tokens in _FIRST:
        yield from _steps(split, 0, 0, [tokens])
    yield from _steps(split, 0, 0, [_HEADER], start=_START)
    yield from _steps(split, 1, drafts)


def _others(split: Split, config: EngineConfig) -> Iterator[Plan]:
    """Steps of tokens, of prompts, and of both. Kernels are told apart by powers of two, by whether numbers and places
    divide by 16, and by one or more."""
    drafts, page, width = split.shape.draft.width, split.shape.page, split.step_tokens
    yield from _steps(split, 0, 0, [24], start=_START)  # of the sequence that had a step of tokens just now
    sizes = [*(size for size in config.capture_sizes or CAPTURE_SIZES if size < split.seqs), split.seqs]
    for count in sizes:
        yield from _steps(split, count, drafts)
    for pages in PAGES:
        for count in (1, 2, 8):
            yield from _steps(split, count, drafts, start=pages * page + _START)
    powers = (2**n for n in range(5, width.bit_length()))
    lengths = {*range(1, 18), *(n + more for n in powers for more in (-16, -1, 0, 1, n // 2)), width}
    for tokens in sorted(lengths):
        yield from _steps(split, 0, 0, [tokens])
        yield from _steps(split, 0, 0, [tokens], start=_START)
        yield from _steps(split, 0, 0, [tokens // 2, tokens - tokens // 2])
    for count in (1, 2, 3, 4, 8, 32, 128):
        for tokens in (24, 300, 500, 2048, width - count * (1 + drafts)):
            yield from _steps(split, count, drafts, [tokens])
    for count in sizes if drafts else ():
        yield from _steps(split, count, 0)


def _steps(split: Split, count: int, drafts: int, prompts: Iterable[int] = (), start: int = 0) -> Iterator[Plan]:
    """A step of `count` rows of a token and so many drafts, and of whole `prompts`, or of prompts from `start` on; none
    if there can be no such step."""
    new, prompts = 1 + drafts, list(prompts)
    rows = [Row(1 + i, start or _START, new, [], True, drafts=drafts) for i in range(count)]
    rows += [Row(1 + count + i, start, n, [0] * n, True) for i, n in enumerate(prompts)]
    longest = max((row.start + row.n for row in rows), default=0)
    fits = sum(row.n for row in rows) <= split.step_tokens and longest <= split.shape.max_model_len
    if fits and len(rows) <= split.seqs and min(prompts, default=1):
        admits = [Admit(row.slot, "", SamplingParams(), 0, row.n, (0,), []) for row in rows if not row.start]
        yield Plan(admits=admits, rows=rows, drafts=split.shape.draft.width)
