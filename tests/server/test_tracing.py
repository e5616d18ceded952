"""Spans, received by a collector that is just an HTTP server."""

import http.server
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from leyden.errors import ConfigError
from leyden.server.tracing import Tracing, exporters
from leyden.testing.scripted import Case

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Take)
        self.received: list[ExportTraceServiceRequest] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for message in self.received
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


class _Take(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append(ExportTraceServiceRequest.FromString(body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
    thread.start()
    yield collector
    collector.shutdown()
    thread.join()
    collector.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def test_a_request_is_a_span_with_vllms_names(start: Any, collector: Collector):
    with start({"hi": "Think.</think>Hello"}, otlp_traces_endpoint=collector.url) as server:
        parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "top_p": 0.9, "max_tokens": 99}
        answer = server.http.post("/v1/chat/completions", json=body, headers=parent).json()
        server.http.post("/v1/chat/completions", json={**body, "stream": True}, headers=parent)
        server.complete("hi", max_tokens=2)
    whole, streamed, completion = collector.spans  # sent at the end, if not before
    found = attributes(whole)
    assert (whole.name, whole.trace_id.hex(), whole.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
    assert found.pop("gen_ai.request.id").startswith(answer["id"])
    times = {key: found.pop(key) for key in list(found) if key.startswith("gen_ai.latency.")}
    assert [value.string_value for value in found.pop("gen_ai.response.finish_reasons").values] == ["stop"]
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 99,
        "gen_ai.usage.prompt_tokens": (prompt := answer["usage"]["prompt_tokens"]),
        "gen_ai.usage.completion_tokens": (tokens := answer["usage"]["completion_tokens"]),
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": tokens,
    }
    assert times.keys() == {
        f"gen_ai.latency.{name}"
        for name in (
            *("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill"),
            *("time_in_model_decode", "time_in_model_inference"),
        )
    }
    assert 0 < times["gen_ai.latency.time_to_first_token"] <= times["gen_ai.latency.e2e"] < 30
    lasted = (whole.end_time_unix_nano - whole.start_time_unix_nano) / 1e9
    assert lasted == pytest.approx(times["gen_ai.latency.e2e"], abs=1e-3)
    assert streamed.trace_id == whole.trace_id and streamed.span_id != whole.span_id
    assert attributes(completion)["gen_ai.operation.name"] == "text_completion"
    assert completion.trace_id != whole.trace_id and not completion.parent_span_id


def test_answers_that_fail_or_are_left_are_spans_too(start: Any, collector: Collector):
    with start({"fails": Case("H", "error")}, otlp_traces_endpoint=collector.url, step_seconds=0.01) as server:
        server.chat("fails")
        with pytest.raises(httpx.ReadTimeout):
            server.http.post("/v1/completions", json={"prompt": "a " * 200, "max_tokens": 500}, timeout=0.2)
    failed, left = collector.spans
    reasons = [attributes(span)["gen_ai.response.finish_reasons"].values[0].string_value for span in (failed, left)]
    assert reasons == ["error", "abort"] and failed.status.code == 2 and left.status.code == 0


def test_what_is_missing_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(ConfigError, match="grpc, http/protobuf, got 'carrier-pigeon'"):
        exporters()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"leyden\[tracing\]"):
        Tracing("http://127.0.0.1:1", "tiny")


def test_grpc_is_what_it_speaks_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    tracing = Tracing("http://127.0.0.1:1", "tiny")
    tracing.close()
