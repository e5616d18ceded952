"""/metrics against the recorded list of vLLM's names, labels and buckets; the numbers themselves; the log's report."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from leyden.config.server import ServerConfig
from leyden.server.metrics import Report
from leyden.server.service import _drafts
from leyden.testing.scripted import Case
from leyden.types import EngineStats
from tests.server.conftest import DATA, Server, events, eventually

VLLM = json.loads((DATA / "vllm_metrics.json").read_text())
# Of things that we have not, or that vLLM has only with a flag of its own.
LEFT_OUT = {"vllm:engine_sleep_state", "vllm:external_prefix_cache_queries", "vllm:external_prefix_cache_hits"} | {
    "vllm:mm_cache_queries", "vllm:mm_cache_hits",
}  # fmt: skip
QUICK = [0.001, 0.002, 0.004, 0.006, 0.008]  # our addition to the buckets of token times
CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
CASES: dict[str, str | Case] = {
    "hi": "Think.</think>Hello",
    "call": f"</think>{CALL}",
    "cached": Case("</think>Hi", cached_tokens=16),
    "fails": Case("H", "error"),
    "long": "</think>" + "word " * 300,
}


def samples(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values by name and labels, without the labels that all of them have."""
    response = server.http.get("/metrics")
    assert (
        response.status_code == 200 and response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    )
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if (k, v) not in (("model_name", "tiny"), ("engine", "0"))}
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def value(server: Server, name: str, **labels: str) -> float:
    return samples(server)[name, frozenset(labels.items())]


def test_names_labels_and_buckets_are_vllms(start: Any):
    with start(CASES, max_model_len=262144) as server:
        for kind in ("chat", "tools"):
            assert server.chat(
                **({"tools": [{"type": "function", "function": {"name": "f"}}]} if kind == "tools" else {})
            )
        text = server.http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    exposed = {sample.name for family in families.values() for sample in family.samples}
    for row in VLLM["metrics"]:
        if row["name"] in LEFT_OUT or row["ours"] != "must":
            assert not exposed & set(row["exposed"]) or row["ours"] == "optional"
            continue
        if row["name"].endswith("_per_pos"):
            assert "# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter" in text
            continue  # a sample per position of a draft; there are no drafts here
        assert set(row["exposed"]) <= exposed, row["name"]
        family = next(f for f in families.values() if any(s.name == row["exposed"][0] for s in f.samples))
        (labels,) = {frozenset(s.labels) - {"le"} for s in family.samples if s.name == row["exposed"][0]}
        assert labels == set(row["labels"]), row["name"]
        for label, wanted in row.get("label_values", {}).items():
            if isinstance(wanted, list):
                assert {s.labels[label] for s in family.samples} == set(wanted), row["name"]
        if "buckets" in row:
            bounds = {float(s.labels["le"]) for s in family.samples if "le" in s.labels} - {float("inf")}
            more = QUICK if row["name"].endswith(("inter_token_latency_seconds", "per_output_token_seconds")) else []
            assert bounds == {*row["buckets"], *more}, row["name"]
    http = {row["name"] for row in VLLM["http_and_process"]}
    assert http <= exposed | families.keys() | {f"{name}_created" for name in families}, http - exposed


def test_numbers_of_requests(start: Any):
    with start(CASES, step_seconds=0.01) as server:
        answers = [server.chat("hi"), server.chat("cached", n=2, max_tokens=50), server.chat("hi", max_tokens=2)]
        answers.append(server.chat("fails"))
        events(server.chat("hi", stream=True))
        usages = [answer.json()["usage"] for answer in answers[:3]]
        assert value(server, "vllm:request_success_total", finished_reason="stop") == 4
        assert value(server, "vllm:request_success_total", finished_reason="length") == 1
        assert value(server, "vllm:request_success_total", finished_reason="error") == 1
        assert value(server, "vllm:request_params_n_sum") == 6 and value(server, "vllm:request_params_n_count") == 5
        generated = sum(usage["completion_tokens"] for usage in usages) + usages[0]["completion_tokens"]
        assert value(server, "vllm:request_generation_tokens_sum") == generated
        assert value(server, "vllm:generation_tokens_total") == generated + 1  # the failing one had a token
        prompts = usages[0]["prompt_tokens"] * 3 + usages[1]["prompt_tokens"] * 2
        assert value(server, "vllm:request_prompt_tokens_sum") == prompts
        assert value(server, "vllm:request_prefill_kv_computed_tokens_sum") == prompts - 32
        assert value(server, "vllm:prompt_tokens_cached_total") == 32
        assert value(server, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 32
        assert value(server, "vllm:time_to_first_token_seconds_count") == 6
        assert value(server, "vllm:inter_token_latency_seconds_count") == generated + 1 - 6
        for name in ("e2e_request_latency", "request_queue_time", "request_inference_time", "request_decode_time"):
            assert value(server, f"vllm:{name}_seconds_count") == 5
        whole, queued, inside = (
            value(server, f"vllm:{name}_seconds_sum")
            for name in ("e2e_request_latency", "request_queue_time", "request_inference_time")
        )
        assert 0 < inside < whole and abs(whole - queued - inside) < 1e-6
        reasoning = sum(usage["completion_tokens_details"]["reasoning_tokens"] for usage in usages)
        assert value(server, "leyden:reasoning_tokens_total") >= reasoning
        assert value(server, "vllm:iteration_tokens_total_count") == value(server, "leyden:engine_steps_total")


def test_parsed_answers(start: Any):
    tools = [{"type": "function", "function": {"name": "f"}}]
    with start(CASES) as server:
        server.chat("call", tools=tools)
        server.chat("hi", tools=tools)
        server.chat("hi")
        events(server.chat("call", tools=tools, stream=True))
        server.http.post("/v1/responses", json={"input": "call", "tools": [{"type": "function", "name": "f"}]})

        def parsed(kind: str, mode: str, outcome: str) -> float:
            labels = {"request_type": kind, "mode": mode, "outcome": outcome}
            return value(server, "vllm:tool_call_parser_invocations_total", **labels)

        assert parsed("chat_completions", "non_streaming", "tool_call") == 1
        assert parsed("chat_completions", "non_streaming", "no_tool_call") == 1
        assert parsed("chat_completions", "streaming", "tool_call") == 1
        assert parsed("responses", "non_streaming", "tool_call") == 1
        assert parsed("other", "streaming", "tool_call") == 0


def test_running_and_aborted_requests(start: Any):
    with start(CASES, step_seconds=0.005) as server:
        body = {"messages": [{"role": "user", "content": "long"}], "stream": True}
        with (
            httpx.Client(base_url=server.url) as other,
            other.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            lines = response.iter_lines()  # forgetting it would close the stream
            next(lines)
            assert value(server, "vllm:num_requests_running") == 1
        eventually(lambda: value(server, "vllm:num_requests_running") == 0)
        eventually(lambda: value(server, "vllm:request_success_total", finished_reason="abort") == 1)
        assert value(server, "leyden:client_aborts_total") == 1


def test_http_requests(start: Any):
    with start(CASES) as server:
        server.chat()
        server.http.get("/v1/models/tiny")
        server.http.get("/v1/models/other")
        server.http.get("/nope")
        server.http.get("/health")

        def count(handler: str, method: str, status: str) -> float:
            return value(server, "http_requests_total", handler=handler, method=method, status=status)

        assert count("/v1/chat/completions", "POST", "2xx") == 1
        assert count("/v1/models/{name:path}", "GET", "2xx") == count("/v1/models/{name:path}", "GET", "4xx") == 1
        assert count("none", "GET", "4xx") == 1
        assert not any(dict(labels).get("handler") in ("/health", "/metrics") for _, labels in samples(server))


def test_a_key_only_if_asked_for(start: Any):
    with start({}, api_key=("k",)) as server:
        assert server.http.get("/metrics").status_code == 200
        assert server.http.get("/metrics/").status_code == 401  # no such route, and no redirect
    with start({}, api_key=("k",), metrics_auth=True) as server:
        assert server.http.get("/metrics").status_code == 401
        assert server.http.get("/metrics", headers={"x-api-key": "k"}).status_code == 200


def test_timings_in_answers(start: Any):
    wanted = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
    with start(CASES, enable_per_request_metrics=True, step_seconds=0.001) as server:
        assert server.chat().json()["metrics"].keys() == server.complete("hi").json()["metrics"].keys() == wanted
        assert server.chat(n=2).json()["metrics"] is None
        last = events(server.chat(stream=True, stream_options={"include_usage": True}))[-1]
        assert last["metrics"].keys() == wanted and last["metrics"]["generation_time_ms"] > 0


def test_drafts_in_answers(start: Any):
    keys = {"mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps"}
    keys |= {"num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens"}
    with start(CASES, per_request_spec_decode_metrics="summary") as server:
        found = server.chat().json()["metrics"]
        assert found.keys() == {"speculative_decoding"} and found["speculative_decoding"].keys() == keys
        assert found["speculative_decoding"]["num_spec_steps"] == 0
    with start(CASES, per_request_spec_decode_metrics="detailed") as server:
        assert server.complete("hi").json()["metrics"]["speculative_decoding"].keys() - keys == {
            "per_step_accepted", "per_step_drafted",
        }  # fmt: skip
    # the example of vLLM's own description
    told = _drafts([(3, 0)] * 39 + [(3, 1)] + [(3, 3)] * 3, 3, detailed=False)
    assert told == {
        "mean_acceptance_length": pytest.approx(1.2325581395348837),
        "draft_acceptance_rate": pytest.approx(0.07751937984496124),
        "acceptance_histogram": [39, 1, 0, 3],
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    }
    assert _drafts([(3, 1), (1, 1)], 3, detailed=True)["per_step_accepted"] == [1, 1]


def test_report_speaks_only_when_something_happens():
    report = Report()
    stats = EngineStats(pages_total=100, pages_free=60, pages_cached=30)
    assert report.line(stats) is None
    stats.prompt_tokens, stats.generated_tokens, stats.cached_tokens, stats.running = 100, 50, 25, 2
    line = report.line(stats)
    assert line is not None and "2 running, 0 waiting" in line and "10.0% of the pages" in line and "25.0%" in line
    assert "draft" not in line and "host" not in line
    stats.host_slots_total, stats.host_slots_free, stats.host_pages_total, stats.host_pages_free = 8, 5, 100, 60
    assert "in host memory 3 of 8 states and 40 of 100 pages" in str(report.line(stats))
    stats.running = 0
    stats.drafts, stats.drafted_tokens, stats.accepted_tokens = 10, 30, [8, 4, 3]
    line = report.line(stats)
    assert line is not None and "2.50 tokens per draft (50.0% accepted)" in line and "SYNTHETIC" not in line
    stats.drafts, stats.generated_tokens, stats.synthetic = 20, 80, True
    assert "SYNTHETIC" in str(report.line(stats))
    report.line(stats)
    assert report.line(stats) is None


def test_host_memory_is_told_where_there_is_some(server: Server):
    assert not any(name.startswith("leyden:host") for name, _ in samples(server))
    server.engine.stats = lambda: EngineStats(
        host_slots_total=8, host_slots_free=5, host_pages_total=100, host_pages_free=60,
        moved={"pages_out": 50, "pages_in": 10, "states_out": 4, "states_in": 1},
    )  # fmt: skip
    assert value(server, "leyden:host_states_total") == 8 and value(server, "leyden:host_states_used") == 3
    assert value(server, "leyden:host_pages_total") == 100 and value(server, "leyden:host_pages_used") == 40
    assert value(server, "leyden:host_moves_total", kind="pages_out") == 50
    assert value(server, "leyden:host_moves_total", kind="states_in") == 1


@pytest.mark.parametrize("wrong", [{"max_queued_requests": -1}, {"request_timeout": -1.0}])
def test_limits_of_the_configuration(wrong: dict[str, Any]):
    with pytest.raises(Exception, match="at least 0"):
        ServerConfig(**wrong)


def test_the_dashboard_asks_for_what_there_is(server: Server):
    board = json.loads((Path(__file__).parent.parent.parent / "docs" / "grafana.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|leyden):\w+|http_\w+", target["expr"])
    }
    text = server.http.get("/metrics").text
    known = set(re.findall(r"^(?:# TYPE )?([a-z][\w:]+)[{ ]", text, re.MULTILINE))
    assert len(board["panels"]) == 15 and asked - known == set()
