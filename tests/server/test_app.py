"""What is around the answers: health, models, keys, limits, ids, documentation, and the shape of every refusal."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from leyden import __version__
from leyden.config.server import ServerConfig
from leyden.errors import ConfigError
from tests.server.conftest import DATA, Server

SHAPES = {shape["id"]: shape for shape in json.loads((DATA / "shapes.json").read_text())["shapes"]}


def test_health_version_load(server: Server):
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        response = server.http.request(method, path)
        assert (response.status_code, response.content) == (200, b"")
    assert server.http.get("/version").json() == {"version": __version__, "vllm_compat": "0.27.1"}
    assert server.http.get("/load").json() == SHAPES["load"]["body"]


def test_models(server: Server):
    found = server.http.get("/v1/models").json()
    wanted = SHAPES["models"]["body"]["data"][0]
    (card,) = found["data"]
    assert card.keys() == wanted.keys()
    assert card["permission"][0].keys() == wanted["permission"][0].keys()
    assert card["max_model_len"] == 2048 and card["id"] == "tiny"
    assert server.http.get("/v1/models/tiny").json() == card
    response = server.http.get("/v1/models/some/other")
    assert response.status_code == 404 and "'some/other'" in response.json()["error"]["message"]


def test_served_names(start: Any):
    with start({"hi": "</think>Hello"}, served_model_name=("org/one", "two")) as server:
        assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["org/one", "two"]
        assert server.http.get("/v1/models/org/one").json()["root"] == "tiny"
        assert server.http.post("/v1/completions", json={"prompt": "a"}).json()["model"] == "org/one"
        assert server.http.post("/v1/completions", json={"prompt": "a", "model": "two"}).json()["model"] == "two"
        assert server.complete("a").status_code == 404


def test_unknown_routes_and_methods(server: Server):
    for method, path, status, kind in (
        ("GET", "/v1/nope", 404, "NotFoundError"),
        ("GET", "//v1/models", 404, "NotFoundError"),
        ("GET", "/v1/models/", 404, "NotFoundError"),
        ("DELETE", "/v1/models", 405, "MethodNotAllowedError"),
    ):
        response = server.http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"].items() >= {"type": kind, "param": None, "code": status}.items()
    assert "allow" in server.http.delete("/v1/models").headers


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load", "/metrics", "/v1/models", "/openapi.json"])
def test_head_is_get_without_a_body(server: Server, path: str):
    got, head = server.http.get(path), server.http.head(path)
    assert (head.status_code, head.content) == (200, b"") and head.headers.keys() == got.headers.keys()
    assert server.http.head("/tokenize").status_code == 405
    if path == "/v1/models":
        counted = 'http_requests_total{handler="/v1/models",method="HEAD",status="2xx"}'
        assert counted in server.http.get("/metrics").text


@pytest.fixture(scope="module")
def locked(start: Any) -> Iterator[Server]:
    with start({"hi": "</think>Hello"}, api_key=("first", "second key")) as server:
        yield server


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic first"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer first"}, 200),
        ({"Authorization": "bearer second key"}, 200),
        ({"x-api-key": "first"}, 200),
        ({"x-api-key": "firs"}, 401),
    ],
)
def test_keys(locked: Server, headers: dict[str, str], status: int):
    response = locked.http.get("/v1/models", headers=headers)
    assert response.status_code == status
    if status == 401:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("authentication_error", 401)
        assert response.headers["www-authenticate"] == "Bearer"


def test_what_needs_no_key(locked: Server):
    for path in ("/health", "/ping", "/version"):
        assert locked.http.get(path).status_code == 200
    for path in ("/load", "/openapi.json", "/docs", "/v1/nope", "//health", "/health/", "/v1/%2e%2e/health"):
        assert locked.http.get(path).status_code == 401, path
    assert locked.http.options("/v1/models").status_code == 405


def test_request_ids(server: Server):
    response = server.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "my-id-1"})
    assert response.headers["x-request-id"] == "my-id-1" and response.json()["id"] == "cmpl-my-id-1"
    for unsafe in ("a b", "x" * 129, "a\tb", "<script>"):
        response = server.http.get("/health", headers={"X-Request-Id": unsafe})
        assert len(response.headers["x-request-id"]) == 16
    response = server.http.post("/v1/completions", json={"prompt": "a", "request_id": "in.the:body"})
    assert response.json()["id"] == "cmpl-in.the:body"
    response = server.http.post("/v1/completions", json={"prompt": "a", "request_id": "bad id\n"})
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"


def test_body_size(start: Any):
    with start({}, max_body_bytes=1000) as server:
        assert server.complete("a" * 500, max_tokens=1).status_code == 200
        for content in (b"x" * 1001, iter([b"x" * 600] * 2)):  # declared, and found out while it comes
            headers = {"content-type": "application/json"}
            response = server.http.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == 413
            assert response.json()["error"]["type"] == "PayloadTooLargeError"


def test_headers_size(server: Server):
    response = server.http.get("/health", headers={f"x-{index}": "y" for index in range(200)})
    assert response.status_code == 431
    assert server.http.get("/health", headers={"x-long": "y" * 60_000}).status_code == 200
    assert server.http.get("/health", headers={"x-long": "y" * 70_000}).status_code == 431


def test_foreign_hosts_are_refused_on_loopback(start: Any, server: Server):
    for host in ("localhost", "localhost:8000", "127.0.0.1", "[::1]:80"):
        assert server.http.get("/health", headers={"Host": host}).status_code == 200, host
    response = server.http.get("/v1/models", headers={"Host": "evil.example:8000"})
    assert response.status_code == 403 and "evil.example" in response.json()["error"]["message"]
    with start({}, allowed_hosts=("my.name",)) as other:
        assert other.http.get("/health", headers={"Host": "my.name"}).status_code == 200
        assert other.http.get("/health").status_code == 403
    with start({}, host="0.0.0.0") as other:
        assert other.http.get("/health", headers={"Host": "any.name"}).status_code == 200


def test_cors_is_off_unless_asked_for(start: Any, server: Server):
    preflight = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    assert server.http.options("/v1/completions", headers=preflight).status_code == 405
    assert "access-control-allow-origin" not in server.http.get("/health", headers=preflight).headers
    with start({}, allowed_origins=("http://page.example",), api_key=("k",)) as other:
        response = other.http.options("/v1/completions", headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://page.example"
        refused = other.http.get("/v1/models", headers={"Origin": "http://page.example"})
        assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers


def test_documentation(start: Any, server: Server):
    document = server.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert {"ChatRequest", "CompletionRequest", "ChatCompletion", "Completion", "ErrorBody"} <= schemas.keys()
    assert "temperature" in schemas["ChatRequest"]["properties"]
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    assert server.http.get("/docs").status_code == 200
    paths = document["paths"]
    assert {"/v1/responses", "/v1/messages", "/tokenize", "/metrics", "/health"} <= paths.keys()
    statuses = {status for path in paths.values() for operation in path.values() for status in operation["responses"]}
    assert "422" not in statuses
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
        assert {"200", "400", "401", "404", "413", "429", "500", "503", "504"} <= paths[path]["post"][
            "responses"
        ].keys()
    error = paths["/v1/messages"]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    assert error == {"$ref": "#/components/schemas/AnthropicError"}
    with start({}, disable_fastapi_docs=True) as other:
        assert {other.http.get(path).status_code for path in ("/docs", "/redoc", "/openapi.json")} == {404}


def test_root_path(start: Any):
    with start({}, root_path="/llm", api_key=("k",)) as server:
        for prefix in ("", "/llm"):
            assert server.http.get(f"{prefix}/health").status_code == 200
            assert server.http.get(f"{prefix}/v1/models").status_code == 401
            assert server.http.get(f"{prefix}/v1/models", headers={"x-api-key": "k"}).status_code == 200


def test_load_counts_running_requests(start: Any):
    with (
        start({"hi": "</think>" + "word " * 200}, step_seconds=0.01, enable_server_load_tracking=True) as server,
        httpx.Client(base_url=server.url) as other,
        other.stream("POST", "/v1/completions", json={"prompt": "x " * 99, "max_tokens": 99, "stream": True}) as stream,
    ):
        assert stream.status_code == 200
        assert server.http.get("/load").json() == {"server_load": 1}


def test_requests_are_logged_only_if_asked_for(start: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, "leyden")
    with start({"secret": "</think>answer"}) as server:
        server.chat("secret")
    assert "secret" not in caplog.text and "answer" not in caplog.text
    logged = {"enable_log_requests": True, "enable_log_outputs": True, "max_log_len": 80}
    with start({"secret": "</think>answer"}, **logged) as server:
        server.chat("secret", request_id="me")
    lines = [record.getMessage() for record in caplog.records if "chatcmpl-me" in record.getMessage()]
    assert len(lines) == 3 and "prompt tokens" in lines[0] and lines[2].endswith(": answer '</think>answer<|im_end|>'")
    assert len(lines[1]) < 120


def test_access_log(start: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "leyden")

    def lines(**config: Any) -> list[str]:
        caplog.clear()
        with start({}, **config) as server:
            for path in ("/health?x=1", "/version", "/v1/no%0Ape"):
                server.http.get(path)
        return [record.getMessage() for record in caplog.records if record.name == "leyden.server.gate"]

    health, version, nope = lines()
    assert health.startswith("GET '/health' 200 in ") and version.endswith(" ms from 127.0.0.1")
    assert nope.startswith("GET '/v1/no\\npe' 404 in ")  # no line of the log can be forged
    assert len(lines(disable_access_log_for_endpoints=("/health", "/version"))) == 1
    assert lines(disable_uvicorn_access_log=True) == lines(uvicorn_log_level="warning") == []


@pytest.mark.parametrize(
    ("mode", "value", "wanted"),
    [
        ("full", None, f"leyden-{__version__}-none"),
        ("custom", "mine", "mine"),
        ("none", None, None),
        ("hash", None, "fp_"),
    ],
)
def test_fingerprint(start: Any, mode: str, value: str | None, wanted: str | None):
    with start({}, fingerprint_mode=mode, fingerprint_value=value) as server:
        found = server.complete("a").json()["system_fingerprint"]
        assert found == wanted or (mode == "hash" and found.startswith("fp_"))
        assert ("system_fingerprint" in server.complete("a", stream=True).text) is (wanted is not None)


def test_config():
    assert ServerConfig().local and ServerConfig(host="::1").local and ServerConfig(uds="x", host="0.0.0.0").local
    assert not ServerConfig(host="0.0.0.0").local and not ServerConfig(host="my.name").local
    for wrong in (
        {"port": 70000},
        {"stream_interval": 0},
        {"reasoning_field": "thoughts"},
        {"fingerprint_mode": "custom"},
        {"ssl_keyfile": "key.pem"},
        {"api_key": ("",)},
        {"default_thinking_budget": -1},
        {"default_thinking_grace": -1},
        {"reasoning_config": {"reasoning_end_str": 5}},
    ):
        with pytest.raises(ConfigError, match="--" + next(iter(wrong)).replace("_", "-")):
            ServerConfig(**wrong)
