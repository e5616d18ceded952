"""The loop: plan (host), run (device), commit (host)."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod
from pathlib import Path
from typing import Any

import torch

from leyden import log
from leyden.cache import saved
from leyden.cache.pool import NO_DRAFTER, Pool
from leyden.cache.store import Store
from leyden.config import cores
from leyden.config.engine import CAPTURE_SIZES, EngineConfig
from leyden.config.folder import resolve
from leyden.config.model import ModelConfig
from leyden.config.speculative import SpeculativeConfig
from leyden.engine import backends
from leyden.engine.compiling import Compilation, Nothing, Start
from leyden.engine.grammar import Allowed, Compiler, Grammars
from leyden.engine.memory import Split, check_host_room, divide, dtype_of, free
from leyden.engine.runner import Runner, StepOutput
from leyden.engine.sampler import Sampler
from leyden.engine.scheduler import Limits, Scheduler
from leyden.errors import ConfigError, RequestError
from leyden.formats import Weight
from leyden.model import checkpoint, twins
from leyden.model.eight import round_above
from leyden.model.nemotron import Nemotron
from leyden.model.rounded import narrow
from leyden.ops import eight
from leyden.spec.drafter import Drafter
from leyden.spec.load import load, networks, room
from leyden.spec.schedule import Schedule
from leyden.spec.synthetic import Synthetic
from leyden.text.tokenizer import Tokenizer
from leyden.types import Delta, EngineStats, Plan, Request, Row

logger = log.get(__name__)

# Saving the cache may take one part of so many of the time: whoever waits for a token waits for that, too.
_SAVING = 10
# Tokens of a step up to which activations are never rounded, however few sequences may run.
_NARROW = 512
# Bytes of weights from which the ops of a step are long enough for threads to share on a CPU.
_SHARED = 64 * 2**20


def _no_tokenizer() -> Tokenizer:
    raise ConfigError("this engine was made without a tokenizer")


class Engine:
    """One model on one device, serving any number of requests.

    submit() and abort() queue work; each step() launches one device step and returns what the step before (with async
    scheduling) or this step (without) brought.
    """

    def __init__(
        self,
        model: Nemotron,
        split: Split,
        *,
        tokenizer: Callable[[], Tokenizer] = _no_tokenizer,
        overlap: bool = False,
        max_logprobs: int = 20,
        cache_dir: str | None = None,
        cache_save_interval: float = 0,
        drafters: Sequence[Drafter] = (),
        coupled: bool = False,
        capture_sizes: tuple[int, ...] = CAPTURE_SIZES,
        rates: Sequence[float] = (),
        drafting: str = "",
        **limits: Any,
    ):
        """`tokenizer` is called when the first request with a grammar comes. `drafters` have room in the pool if
        `split` knows of them; `coupled`: their drafts are drawn with the noise of the tokens that they guess; `rates`:
        so often are 1, 2, ... of them kept, whatever the target says; `drafting`: all that in words. `capture_sizes`:
        EngineConfig's, of the steps on CUDA.

        With `cache_dir` the cache is read from there now, and saved at close() and every `cache_save_interval` seconds,
        or later if requests are under way (at most twice that) or if it takes long.
        """
        shape = split.shape
        device = next(model.parameters()).device
        self.config = model.config
        self.max_model_len = shape.max_model_len
        self.max_logprobs = max_logprobs
        self.split = split
        self.scheduler = Scheduler(
            Limits(
                seqs=split.seqs,
                snapshots=shape.slots - 1 - split.seqs,
                pages=shape.pages - 1,
                page=shape.page,
                max_model_len=shape.max_model_len,
                step_tokens=split.step_tokens,
                row_tokens=limits.pop("row_tokens", 0),
                partial_prefills=limits.pop("partial_prefills", 0),
                long_partial_prefills=limits.pop("long_partial_prefills", 0),
                paced=limits.pop("paced", True),
                policy=limits.pop("policy", "fcfs"),
                prefix_caching=limits.pop("prefix_caching", True),
                host_slots=split.host_slots,
                host_pages=split.host_pages,
                drafts=shape.draft.width,
                lookahead=shape.draft.lookahead,
            ),
            eos_token_ids=model.config.eos_token_ids,
            quiet_eos=model.config.tokenizer_eos_id,
            **limits,
        )
        pool = Pool(model.config, shape, device)
        store = Store(pool, split.host_slots, split.host_pages) if split.host_slots else None
        sampler = Sampler(shape.slots, model.config.vocab_size, device, shape.draft.width)
        if rates:
            sampler.decree = Synthetic(rates, limits.get("seed", 0), device)
        self.runner = Runner(model, pool, sampler, drafters, coupled, store, capture_sizes)
        eos = self.config.eos_token_ids
        self.grammars = Grammars(Compiler(tokenizer, self.config.vocab_size, eos), self.config.vocab_size, eos)
        self._overlap, self._drafting = overlap, drafting
        self.compilation: Compilation = Nothing()
        self._launched: tuple[Plan, StepOutput] | None = None
        self._cache_dir = Path(cache_dir) if cache_dir and self.scheduler.limits.prefix_caching else None
        self._save_interval = self._save_pause = cache_save_interval if self._cache_dir is not None else 0
        self._saved_at, self._saved_steps = time.monotonic(), 0
        self._made_with: dict[str, Any] = {}
        if self._cache_dir is not None:
            self._made_with = saved.identity(model, pool)
            saved.load(self._cache_dir, self._made_with, self.scheduler.cache, pool, store)

    @classmethod
    def load(cls, config: EngineConfig) -> "Engine":
        """Read a checkpoint and get ready. Raises ConfigError or CheckpointError."""
        started = time.monotonic()
        device = _device(config.device)
        foreign = backends.named(config, device)
        check_host_room(config, device)
        if config.cache_dir:
            saved.check_folder(Path(config.cache_dir))
        _take_processors(config)
        folder = resolve(config.model, config.revision)
        texts = resolve(config.tokenizer) if config.tokenizer else folder
        architecture = ModelConfig.from_folder(folder, config.hf_overrides)
        dtype = dtype_of(config.dtype, getattr(torch, architecture.dtype), "--dtype")
        if config.prefill_dtype == "fp8":
            eight.check(device, dtype)
        drafting = config.speculative.settle(architecture, str(folder)) if config.speculative else None
        start = Start(config, folder, architecture, dtype, drafting, partial(_round_prompts, config))
        compilation = start.compiled(device)
        mtp = drafting is not None and "mtp" in drafting.methods(architecture)
        model = checkpoint.build(architecture, dtype, device, mtp)
        if config.load_format == "dummy":
            if config.quantization:
                narrow(model, config.quantization)
            checkpoint.dummy(model, config.seed)
        else:
            keep = config.safetensors_load_strategy != "eager"
            checkpoint.load(model, folder, quantization=config.quantization, keep=keep)
        if (
            device.type == "cpu"
            and sum(p.nbytes for p in model.parameters()) < _SHARED
            and not (config.threads or config.cpu_affinity or os.getenv("OMP_NUM_THREADS"))
        ):
            torch.set_num_threads(1)
        model.eval().requires_grad_(False)
        drafters = load(drafting, model) if drafting else []
        taken = room(drafting, architecture) if drafting else NO_DRAFTER
        if device.type == "cuda":
            twins.keep([model, *networks(drafters)], torch.cuda.mem_get_info(device)[1])
        backends.apply(foreign, model)  # a matrix that a package takes over loses its twin
        split = divide(config, architecture, dtype, device.type, free(config, device), taken)
        _round_prompts(config, model, split)
        if split.shape.kv_dtype.itemsize == 1:
            if device.type == "cpu":
                logger.warning("an FP8 cache has no kernels on the CPU: steps are slower than with other caches")
            if not dict(checkpoint.cache_scales(model)):
                logger.warning("the checkpoint has no scales for an FP8 cache (k_scale, v_scale): 1.0 is used")
        engine = cls(
            model,
            split,
            capture_sizes=config.capture_sizes,
            drafters=drafters,
            **(_speculation(drafting, drafters) if drafting else {}),
            tokenizer=lambda: Tokenizer.from_folder(texts),
            overlap=device.type == "cuda" if config.async_scheduling is None else config.async_scheduling,
            max_logprobs=config.max_logprobs,
            cache_dir=config.cache_dir,
            cache_save_interval=config.cache_save_interval,
            row_tokens=config.long_prefill_token_threshold,
            partial_prefills=config.max_num_partial_prefills,
            long_partial_prefills=config.max_long_partial_prefills,
            paced=config.performance_mode != "throughput",
            policy=config.scheduling_policy,
            prefix_caching=config.enable_prefix_caching is not False,
            seed=config.seed,
        )
        engine.compilation = compilation
        compilation.wait()
        backends.try_out(foreign, model, engine.runner.pool)
        seconds = time.monotonic() - started
        logger.info("engine ready in %.1f s: %s", seconds, split, extra={"fields": {"seconds": seconds}})
        return engine

    def describe(self) -> dict[str, Any]:
        """Facts for the banner and for clients."""
        matrices = [one for one in self.runner.model.modules() if isinstance(one, Weight)]
        stored = {
            id(part) for one in matrices for part in one.parts.values()
        }  # codes stand for other numbers of values
        parameters = sum(prod(one.shape) for one in matrices)
        parameters += sum(p.numel() for p in self.runner.model.parameters() if id(p) not in stored)
        weights = sum(p.numel() * p.element_size() for p in self.runner.model.parameters())
        return {
            "device": str(self.runner.pool.committed.device),
            "dtype": str(self.split.shape.conv_dtype).removeprefix("torch."),
            "parameters": parameters,
            "weight_bytes": weights,
            "memory": str(self.split),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.split.seqs,
            "max_num_batched_tokens": self.split.step_tokens,
            "cache_tokens": self.split.cache_tokens,
            "page_tokens": self.scheduler.limits.page,
            "pages": self.scheduler.limits.pages,
            "prefix_caching": self.scheduler.limits.prefix_caching,
            "max_logprobs": self.max_logprobs,
            "async_scheduling": self._overlap,
            "vocab_size": self.config.vocab_size,
            "drafting": self._drafting,
            "drafts": self.scheduler.limits.drafts,
        }

    def ready(self, request: Request) -> bool:
        """Whether submit() would return at once; starts what is needed for that. RequestError as from submit()."""
        return self.grammars.ready(request)

    def submit(self, request: Request) -> None:
        """Queue a request, when its grammar is compiled. Raises RequestError if it can never be served as asked."""
        self._validate(request)
        self.grammars.begin(request)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request; a last Delta with finish_reason "abort" comes with the next step. Unknown ids are ignored."""
        self.scheduler.abort(request_id)

    @property
    def busy(self) -> bool:
        """Whether step() has anything to do."""
        return self._answering or self._due

    @property
    def rest(self) -> float:
        """Seconds until step() has something to do, if no request comes: until the cache is to be saved; inf: never."""
        if self.busy:
            return 0
        if not self._save_pause or self.scheduler.steps == self._saved_steps:
            return inf
        return max(0, self._saved_at + self._save_pause - time.monotonic())

    @property
    def _answering(self) -> bool:
        return self._launched is not None or self.scheduler.unfinished

    @property
    def _due(self) -> bool:
        """Whether the cache is to be saved now: after the interval if nobody waits, else after two."""
        if not self._save_pause or self.scheduler.steps == self._saved_steps:
            return False
        since = time.monotonic() - self._saved_at
        return since > self._save_pause * (1 + self._answering)

    def step(self) -> list[Delta]:
        """Launch a step, commit a step. Async scheduling is nothing but committing one launch late."""
        plan = self.scheduler.plan()
        out = self._follow(self.scheduler.drain())
        launched = None
        if plan is not None:
            self.grammars.admit(plan.admits)
            try:
                launched = (plan, self.runner.run(plan, lambda rows: self._allowed(rows, out)))
            except (torch.AcceleratorError, AssertionError):
                raise  # the device or our own books are in an unknown state: this process is of no more use
            except Exception as error:
                logger.exception("a step failed; its %d requests end with an error", len(plan.rows))
                message = f"{type(error).__name__} in the engine; see the server's log"
                out += self._follow(self.scheduler.fail(plan, message))
        if self._overlap:
            out += self._settle()
            self._launched = launched
        else:
            self._launched = launched
            out += self._settle()
        if self._due:
            out += self._settle()
            self.save_cache()
        return out

    def _settle(self) -> list[Delta]:
        """Commit what is launched and not committed. Waits for the device."""
        if self._launched is None:
            return []
        (plan, output), self._launched = self._launched, None
        results = output.read()
        deltas = self._follow(self.scheduler.commit(plan, results))
        self.grammars.expect(plan.rows, results)
        return deltas

    def _allowed(self, rows: list[Row], out: list[Delta]) -> Allowed | None:
        """What the grammars of `rows` allow now. That depends on the tokens of the step before: it is committed first,
        to `out`, while the device is busy with the forward pass of this one. Steps without grammars wait for nothing.
        """
        if not self.grammars.concern(rows):
            return None
        out += self._settle()
        return self.grammars.allowed(rows)

    def _follow(self, deltas: list[Delta]) -> list[Delta]:
        """Tell the grammars what was sampled."""
        for request_id, reason in self.grammars.follow(deltas).items():
            logger.warning("%s: %s", request_id, reason)
            self.scheduler.abort(request_id, error=reason)
        return deltas

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        stats.recorded_steps = self.runner.recorded_steps
        if self.runner.drafting is not None:
            stats.failed_drafts, stats.draft_seconds = self.runner.drafting.failures, self.runner.drafting.seconds
            stats.verify_seconds = self.runner.verify_seconds
            stats.synthetic = self.runner.sampler.decree is not None
        return stats

    def check(self) -> None:
        """Assert the sums of the cache; with nothing under way, that everything is free."""
        self.scheduler.check()

    def close(self) -> None:
        """End every request, and save the cache if it is to be. The engine must not be stepped again."""
        self._settle()
        self.scheduler.abort_all()
        self.compilation.close()
        self.save_cache()

    def save_cache(self) -> None:
        """Write what the cache holds to its folder, if it has one; waits for the device. A failure is only logged."""
        if self._cache_dir is None:
            return
        started, self._saved_steps = time.monotonic(), self.scheduler.steps
        moves, copies = self.scheduler.cache.moves()
        self.runner.apply(Plan(moves=moves, copies=copies))
        self.runner.waiting.fold()
        try:
            saved.save(self._cache_dir, self._made_with, self.scheduler.cache, self.runner.pool, self.runner.store)
        except OSError as error:
            logger.error("the cache could not be saved to %s: %s", self._cache_dir, error)
        self._saved_at = time.monotonic()
        if self._save_interval:
            self._save_pause = max(self._save_interval, (_SAVING - 1) * (self._saved_at - started))

    def _validate(self, request: Request) -> None:
        params, length = request.params, len(request.prompt)
        if not request.prompt:
            raise RequestError("the prompt must hold at least one token", "prompt")
        if length >= self.max_model_len:
            raise RequestError(
                f"This model's maximum context length is {self.max_model_len} tokens, but the prompt alone has "
                f"{length} tokens and at least 1 is to be generated. Please reduce the length of the prompt.",
                "prompt",
            )
        vocab = self.config.vocab_size
        if not all(0 <= token < vocab for token in request.prompt):
            raise RequestError(f"prompt token ids must be between 0 and {vocab - 1}", "prompt")
        markers = params.thinking.markers if params.thinking is not None else None
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("stop_token_ids", params.stop_token_ids),
            ("logprob_token_ids", params.logprob_token_ids or ()),
            ("bad_words", [token for word in params.banned for token in word]),
            ("thinking", (*markers.ends, *markers.forced, *markers.line_ends) if markers is not None else ()),
        ):
            if bad := [token for token in ids if not 0 <= token < vocab]:
                raise RequestError(f"{name}: token ids must be between 0 and {vocab - 1}, got {bad[0]}", name)
        for name in ("logprobs", "prompt_logprobs"):
            k = getattr(params, name)
            if k is not None and self.max_logprobs >= 0 and not 0 <= k <= self.max_logprobs:
                raise RequestError(f"{name} must be between 0 and {self.max_logprobs} (--max-logprobs), got {k}", name)
        if params.grammar is not None and not self.config.eos_token_ids:
            message = "an answer with a grammar needs an end-of-sequence token, and this model has none"
            raise RequestError(message, params.grammar.param)
        if self.scheduler.has(request.id):
            raise RequestError(f"a request with the id {request.id!r} is running already", "request_id")


def _speculation(config: SpeculativeConfig, drafters: Sequence[Drafter]) -> dict[str, Any]:
    """Options of the engine, as a settled configuration has them."""
    if config.rates:
        logger.warning("drafts are accepted by decree: answers are nonsense, only times mean something")
    ranges = config.num_speculative_tokens_per_batch_size
    if not config.scheduled and not ranges:
        ranges = ((1, sys.maxsize, config.num_speculative_tokens),)
    return {
        "coupled": config.draft_sample_method == "probabilistic",
        "rates": config.rates,
        "schedule": Schedule([drafter.width for drafter in drafters], ranges),
        "shorten": config.enable_adaptive_verification,
        "drafting": str(config),
    }


def _take_processors(config: EngineConfig) -> None:
    """Before anything is computed: threads that exist stay where they are."""
    if config.cpu_affinity is not None:
        wanted = cores.parse(config.cpu_affinity)
        cores.confine(wanted)
        torch.set_num_threads(config.threads or len(wanted))
    elif config.threads:
        torch.set_num_threads(config.threads)


def _round_prompts(config: EngineConfig, model: Nemotron, split: Split) -> None:
    """With --prefill-dtype fp8 steps that are wider than any without prompts may round activations to 8 bits: decoding
    never does."""
    if config.prefill_dtype != "fp8":
        return
    padded = next((size for size in config.capture_sizes if size >= split.seqs), split.seqs)
    rows = max(_NARROW, padded * (1 + split.shape.draft.width))
    if split.step_tokens <= rows:
        raise ConfigError(
            f"--prefill-dtype fp8 is for steps of more than {rows:,} tokens, which is what decoding may take here, and"
            f" --max-num-batched-tokens is {split.step_tokens:,}: raise it, or lower --max-num-seqs"
        )
    count = round_above(model, rows)
    logger.info("steps of more than %s tokens round activations to 8 bits before %d matrices", f"{rows:,}", count)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but PyTorch sees no CUDA device; use --device cpu or check the driver")
    return device
