"""OpenTelemetry spans: one for every answer of the engine, sent to --otlp-traces-endpoint.

Needs opentelemetry-sdk and opentelemetry-exporter-otlp, which are imported only if there is an endpoint. What their
users expect holds: OTEL_EXPORTER_OTLP_TRACES_PROTOCOL (grpc, http/protobuf), OTEL_SERVICE_NAME and the like. A request
with a traceparent header makes its span a child of the caller's.

Attributes: the names of vLLM 0.27 (latencies in seconds), and beside them those that OpenTelemetry's conventions for
generative AI have today. Neither prompts nor answers are among them.
"""

import importlib
import os
import time
from types import ModuleType

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from leyden.errors import ConfigError
from leyden.server.service import Choice

_PROTOCOLS = ("grpc", "http/protobuf")


def exporters() -> ModuleType:
    """The package that sends spans. ConfigError if it is missing, or if the protocol is one that there is not."""
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    if protocol not in _PROTOCOLS:
        names = ", ".join(_PROTOCOLS)
        raise ConfigError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL must be one of {names}, got {protocol!r}")
    kind = protocol.partition("/")[0]
    try:
        return importlib.import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs opentelemetry-sdk and opentelemetry-exporter-otlp ({error}); "
            "install leyden[tracing]"
        ) from None


class Tracing:
    """The way to a collector at `endpoint`; `model` is the served name. ConfigError as from exporters()."""

    def __init__(self, endpoint: str, model: str):
        exporter = exporters().OTLPSpanExporter(endpoint=endpoint)
        from opentelemetry import context, trace
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource({"service.name": "leyden"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("leyden")
        self._model = model
        self._context = context
        self._extract = TraceContextTextMapPropagator().extract
        self._server = trace.SpanKind.SERVER
        self._failed = trace.Status(trace.StatusCode.ERROR)

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app`, with the caller's span as the current one while a request is handled."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            token = self._context.attach(self._extract(Headers(scope=scope)))
            try:
                await app(scope, receive, send)
            finally:
                self._context.detach(token)

        return traced

    def record(self, choice: Choice, reason: str) -> None:
        """The span of an answer that is over because of `reason`."""
        request, params, tokens = choice.request, choice.request.params, len(choice.token_ids)
        now, wall = time.monotonic(), time.time()
        seconds = now - request.arrival
        attributes: dict[str, str | int | float | list[str]] = {
            "gen_ai.operation.name": "text_completion" if request.id.startswith("cmpl-") else "chat",
            "gen_ai.request.id": request.id,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [reason],
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens or 0,
            "gen_ai.usage.prompt_tokens": len(request.prompt),
            "gen_ai.usage.completion_tokens": tokens,
            "gen_ai.usage.input_tokens": len(request.prompt),
            "gen_ai.usage.output_tokens": tokens,
            "gen_ai.latency.time_in_queue": choice.queued,
            "gen_ai.latency.e2e": seconds,
        }
        if choice.first is not None:
            attributes |= {
                "gen_ai.latency.time_to_first_token": choice.first - request.arrival,
                "gen_ai.latency.time_in_model_prefill": choice.first - request.arrival - choice.queued,
                "gen_ai.latency.time_in_model_decode": choice.last - choice.first,
                "gen_ai.latency.time_in_model_inference": choice.last - request.arrival - choice.queued,
            }
        span = self._tracer.start_span(
            "llm_request", kind=self._server, attributes=attributes, start_time=int(1e9 * (wall - seconds))
        )
        if reason == "error":
            span.set_status(self._failed)
        span.end(int(1e9 * wall))

    def close(self) -> None:
        """Send what is left. Waits for the collector."""
        self._provider.shutdown()
