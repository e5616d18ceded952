"""What Prometheus reads at /metrics: the names, labels and buckets of vLLM 0.27, and a few of our own (leyden:).

    Metrics          what the server counts itself: requests, their times, their tokens
    EngineNumbers    what the engine counts, read when somebody asks
    Report           the same as a line of the log, every few seconds

What vLLM has for things that we have not (adapters, media, an external cache, sleeping) is left out.
"""

import asyncio
import bisect
import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    Summary,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from leyden import log
from leyden.errors import EngineDead
from leyden.server.client import EngineClient
from leyden.types import STEP_SIZES, EngineStats

logger = log.get(__name__)

PARSED = ("chat_completions", "responses", "other")  # kinds of requests whose answers are parsed
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REPORT_SECONDS = 10.0
_PATIENCE = 2.0  # seconds that an engine gets for its numbers: a scrape does not wait for a long step
_LABELS = ("model_name", "engine")
_REASONS = ("stop", "length", "abort", "error", "repetition")
_UNCOUNTED = ("/metrics", "/health", "/load", "/ping", "/version", "/server_info")

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_QUICK_TOKEN = (0.001, 0.002, 0.004, 0.006, 0.008, *_TOKEN)  # an addition: vLLM's begin at 10 ms
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_HTTP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)

# The labels of vllm:cache_config_info; "None" where a word means nothing here.
_CACHE_LABELS = (
    "block_size", "user_specified_block_size", "user_specified_mamba_block_size", "prefix_match_unit",
    "gpu_memory_utilization", "cache_dtype", "is_attention_free", "num_gpu_blocks_override", "sliding_window",
    "enable_prefix_caching", "prefix_caching_hash_algo", "calculate_kv_scales", "kv_cache_dtype_skip_layers",
    "mamba_page_size_padded", "skip_page_size_padded", "mamba_block_size", "mamba_cache_dtype",
    "mamba_ssm_cache_dtype", "mamba_cache_mode", "replayssm_buffer_len", "use_replayssm", "num_gpu_blocks",
    "num_cpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency", "kv_sharing_fast_prefill",
    "kv_cache_memory_bytes", "kv_offloading_size", "kv_offloading_backend", "_block_size_resolved", "engine",
)  # fmt: skip
_CACHE_FACTS = {
    "block_size": "page_tokens",
    "_block_size_resolved": "page_tokens",
    "num_gpu_blocks": "pages",
    "enable_prefix_caching": "prefix_caching",
    "kv_cache_size_tokens": "cache_tokens",
}


class Buckets:
    """A histogram: how many values lie at or below each bound, and above the last one."""

    def __init__(self, name: str, about: str, bounds: Sequence[float]):
        self.name = f"vllm:{name}"
        self.about = about
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def family(self, labels: tuple[str, str], since: float) -> Metric:
        family = HistogramMetricFamily(self.name, self.about, labels=_LABELS)
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, itertools.accumulate(self.counts), strict=True)), self.sum)
        family.add_sample(f"{self.name}_created", dict(zip(_LABELS, labels, strict=True)), since)
        return family


class Metrics(Collector):
    """The server's own numbers. `model` is the label of everything, `longest` the most tokens a request can have."""

    def __init__(self, model: str, longest: int):
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self.registry.register(self)
        self.labels = (model, "0")
        self._since = time.time()
        self._histograms: list[Buckets] = []
        tokens = _one_two_five(longest)

        self.first_token = self._times("time_to_first_token", "time to first token", (*_FIRST_TOKEN, 640, 2560))
        self.next_token = self._times("inter_token_latency", "time between tokens", _QUICK_TOKEN)
        self.per_token = self._times("request_time_per_output_token", "mean time per token of a request", _QUICK_TOKEN)
        self.whole = self._times("e2e_request_latency", "whole request", _REQUEST)
        self.queued = self._times("request_queue_time", "time in queue", _REQUEST)
        self.inference = self._times("request_inference_time", "time in the batch", _REQUEST)
        self.prefill = self._times("request_prefill_time", "time until the first token, in the batch", _REQUEST)
        self.decode = self._times("request_decode_time", "time from the first to the last token", _REQUEST)
        self.prompt = self._sizes("request_prompt_tokens", "prompt length", tokens)
        self.generated = self._sizes("request_generation_tokens", "output length", tokens)
        self.most_generated = self._sizes("request_max_num_generation_tokens", "longest output of the choices", tokens)
        self.choices = self._sizes("request_params_n", "parameter n", (1, 2, 5, 10, 20))
        self.max_tokens = self._sizes("request_params_max_tokens", "parameter max_tokens", tokens)
        self.computed = self._sizes("request_prefill_kv_computed_tokens", "prompt tokens that were not cached", tokens)

        finished = self._counter("vllm:request_success", "finished requests", (*_LABELS, "finished_reason"))
        self.finished = {reason: finished.labels(*self.labels, reason) for reason in _REASONS}
        self._parsed = self._counter(
            "vllm:tool_call_parser_invocations", "parsed answers", ("model_name", "mode", "outcome", "request_type")
        )
        for kind, stream, called in itertools.product(PARSED, (False, True), (False, True)):
            self.parsed(kind, stream, called, 0)
        self.reasoning = self._counter("leyden:reasoning_tokens", "tokens of thinking", _LABELS).labels(*self.labels)
        aborts, rejected = "requests whose client went away", "requests refused because the queue was full"
        self.client_aborts = self._counter("leyden:client_aborts", aborts, _LABELS).labels(*self.labels)
        self.rejected = self._counter("leyden:queue_rejected", rejected, _LABELS).labels(*self.labels)

        self._requests = self._counter("http_requests", "HTTP requests", ("handler", "method", "status"))
        self._received = Summary("http_request_size_bytes", "length of bodies", ("handler",), registry=self.registry)
        self._sent = Summary("http_response_size_bytes", "length of answers", ("handler",), registry=self.registry)
        self._http_seconds = Histogram(
            "http_request_duration_seconds", "time of HTTP requests", ("handler", "method"),
            buckets=(0.1, 0.5, 1), registry=self.registry,
        )  # fmt: skip
        self._http_fine = Histogram(
            "http_request_duration_highr_seconds", "the same, finer", buckets=_HTTP, registry=self.registry
        )

    def parsed(self, kind: str, stream: bool, called: bool, count: int = 1) -> None:
        """An answer went through the tool parser; `called`: it holds a call. `kind` is one of PARSED."""
        mode = "streaming" if stream else "non_streaming"
        self._parsed.labels(self.labels[0], mode, "tool_call" if called else "no_tool_call", kind).inc(count)

    def http(self, path: str, method: str, status: int, seconds: float, received: int, sent: int) -> None:
        """An HTTP request is answered. `path` is that of the route, "none" if there is no such route."""
        if path in _UNCOUNTED:
            return
        self._requests.labels(path, method, f"{status // 100}xx").inc()
        self._received.labels(path).observe(received)
        self._sent.labels(path).observe(sent)
        self._http_seconds.labels(path, method).observe(seconds)
        self._http_fine.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        for histogram in self._histograms:
            yield histogram.family(self.labels, self._since)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, about: str, labels: Sequence[str]) -> Counter:
        return Counter(name, about, labels, registry=self.registry)

    def _times(self, name: str, about: str, bounds: Sequence[float]) -> Buckets:
        return self._sizes(f"{name}_seconds", f"{about}, in seconds", bounds)

    def _sizes(self, name: str, about: str, bounds: Sequence[float]) -> Buckets:
        self._histograms.append(Buckets(name, about, bounds))
        return self._histograms[-1]


class EngineNumbers(Collector):
    """The engine's counters and gauges as of the last `refresh`."""

    def __init__(self, client: EngineClient, metrics: Metrics):
        self.stats = EngineStats()
        self._client = client
        self._labels = metrics.labels
        self._since = time.time()
        metrics.registry.register(self)

    async def refresh(self) -> EngineStats:
        """The newest numbers, or those of before if the engine does not answer now."""
        with contextlib.suppress(TimeoutError, EngineDead):
            self.stats = await asyncio.wait_for(self._client.stats(), _PATIENCE)
        return self.stats

    def collect(self) -> Iterator[Metric]:
        stats, facts = self.stats, self._client.facts
        yield self._gauge("vllm:num_requests_running", "requests in the batch", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "requests in the queue", stats.waiting)
        waiting = {"capacity": stats.waiting, "deferred": 0}
        yield self._gauges("vllm:num_requests_waiting_by_reason", "the same by reason", "reason", waiting)
        used = stats.pages_total - stats.pages_free - stats.pages_cached
        yield self._gauge("vllm:kv_cache_usage_perc", "used share of the pages", used / max(stats.pages_total, 1))
        yield self._counter("vllm:prefix_cache_queries", "prompt tokens looked up", stats.prompt_tokens)
        yield self._counter("vllm:prefix_cache_hits", "prompt tokens found", stats.cached_tokens)
        yield self._counter("vllm:num_preemptions", "requests pushed out of the batch", stats.preemptions)
        yield self._counter("vllm:prompt_tokens", "prompt tokens", stats.prompt_tokens)
        yield self._counter("vllm:prompt_tokens_cached", "prompt tokens from the cache", stats.cached_tokens)
        sources = {
            "local_compute": stats.prompt_tokens - stats.cached_tokens,
            "local_cache_hit": stats.cached_tokens,
            "external_kv_transfer": 0,
        }
        yield self._counters("vllm:prompt_tokens_by_source", "prompt tokens by origin", "source", sources)
        yield self._counter("vllm:generation_tokens", "generated tokens", stats.generated_tokens)
        yield self._counter("vllm:spec_decode_num_drafts", "drafts verified", stats.drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "tokens drafted", stats.drafted_tokens)
        accepted = stats.accepted_tokens
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "drafted tokens accepted", sum(accepted))
        by_place = {str(place): count for place, count in enumerate(accepted)}
        yield self._counters("vllm:spec_decode_num_accepted_tokens_per_pos", "by position", "position", by_place)
        if facts.get("drafting"):
            yield self._counter("leyden:spec_decode_failed_drafts", "steps whose drafter failed", stats.failed_drafts)
            seconds = {"draft": stats.draft_seconds, "verify": stats.verify_seconds}
            yield self._counters("leyden:spec_decode_seconds", "host time of steps with drafts", "part", seconds)
            decree = "1: drafts are kept by decree, answers are nonsense"
            yield self._gauge("leyden:spec_decode_synthetic", decree, stats.synthetic)
        steps = Buckets(
            "iteration_tokens_total", "tokens per engine step", STEP_SIZES
        )  # a histogram, whatever its name
        steps.counts, steps.sum = stats.step_sizes, stats.step_tokens
        yield steps.family(self._labels, self._since)
        yield _cache_config(facts, self._labels[1])

        yield self._gauge("leyden:state_slots_total", "slots for recurrent states", stats.slots_total)
        yield self._gauge("leyden:state_slots_used", "of these, in use or kept", stats.slots_total - stats.slots_free)
        yield self._gauge("leyden:snapshots", "states kept for later prompts", stats.snapshots)
        yield self._gauge("leyden:pages_total", "pages", stats.pages_total)
        yield self._gauge("leyden:pages_cached", "pages kept for later prompts", stats.pages_cached)
        if stats.host_slots_total:
            slots = stats.host_slots_total - stats.host_slots_free
            yield self._gauge("leyden:host_states_total", "places for states in host memory", stats.host_slots_total)
            yield self._gauge("leyden:host_states_used", "of these, in use", slots)
            yield self._gauge("leyden:host_pages_total", "places for pages in host memory", stats.host_pages_total)
            pages = stats.host_pages_total - stats.host_pages_free
            yield self._gauge("leyden:host_pages_used", "of these, in use", pages)
            yield self._counters("leyden:host_moves", "pages and states that went there or back", "kind", stats.moved)
        yield self._counters("leyden:cache_hits", "prompts by where their beginning was", "kind", stats.hits)
        yield self._counter("leyden:engine_steps", "steps of the engine", stats.steps)
        yield self._counter("leyden:recorded_steps", "of these, from a recording", stats.recorded_steps)

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        return self._gauges(name, about, None, {"": value})

    def _gauges(self, name: str, about: str, label: str | None, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, about, labels=(*_LABELS, *([label] if label else [])))
        for word, value in values.items():
            family.add_metric([*self._labels, *([word] if label else [])], value)
        return family

    def _counter(self, name: str, about: str, value: float) -> Metric:
        return self._counters(name, about, None, {"": value})

    def _counters(self, name: str, about: str, label: str | None, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, about, labels=(*_LABELS, *([label] if label else [])))
        for word, value in values.items():
            family.add_metric([*self._labels, *([word] if label else [])], value, created=self._since)
        return family


def _cache_config(facts: Mapping[str, Any], engine: str) -> Metric:
    family = GaugeMetricFamily("vllm:cache_config_info", "settings of the cache", labels=_CACHE_LABELS)
    words = {label: str(facts.get(_CACHE_FACTS.get(label, label))) for label in _CACHE_LABELS} | {"engine": engine}
    family.add_metric([words[label] for label in _CACHE_LABELS], 1)
    return family


def _one_two_five(most: int) -> Sequence[float]:
    """1, 2, 5, 10, 20 ... up to `most`."""
    steps: Iterable[int] = (step * 10**power for power in range(len(str(most))) for step in (1, 2, 5))
    return [step for step in steps if step <= most]


class Report:
    """A line about what the engine did since the line before; None if it did nothing."""

    def __init__(self) -> None:
        self._before = (time.monotonic(), 0, 0, 0, 0, 0, 0)
        self._idle = True

    def line(self, stats: EngineStats) -> str | None:
        now = (
            time.monotonic(),
            stats.prompt_tokens,
            stats.generated_tokens,
            stats.cached_tokens,
            stats.drafts,
            stats.drafted_tokens,
            sum(stats.accepted_tokens),
        )
        seconds, read, written, cached, drafts, drafted, accepted = (
            new - old for new, old in zip(now, self._before, strict=True)
        )
        self._before = now
        was_idle, self._idle = self._idle, not (read or written or stats.running or stats.waiting)
        if was_idle and self._idle:
            return None
        pages = stats.pages_total - stats.pages_free - stats.pages_cached
        line = (
            f"{read / seconds:,.1f} prompt tokens/s, {written / seconds:,.1f} generated tokens/s, "
            f"{stats.running} running, {stats.waiting} waiting, "
            f"{pages / max(stats.pages_total, 1):.1%} of the pages in use, {cached / max(read, 1):.1%} cache hits"
        )
        if stats.host_slots_total:
            line += (
                f", in host memory {stats.host_slots_total - stats.host_slots_free} of {stats.host_slots_total} states "
                f"and {stats.host_pages_total - stats.host_pages_free} of {stats.host_pages_total} pages"
            )
        if drafts:
            line += f", {1 + accepted / drafts:.2f} tokens per draft ({accepted / max(drafted, 1):.1%} accepted)"
            line += ", SYNTHETIC: by decree" if stats.synthetic else ""
        return line


async def report(numbers: EngineNumbers, seconds: float = REPORT_SECONDS) -> None:
    """Log a line whenever there is something to tell, until cancelled."""
    lines = Report()
    while True:
        await asyncio.sleep(seconds)
        if (line := lines.line(await numbers.refresh())) is not None:
            logger.info("%s", line)
