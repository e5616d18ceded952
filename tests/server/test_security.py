"""One test per known weakness of servers of this kind, named after the advisory that told of it.

What applies here: what a client sends may make its own request fail, and nothing else. It is never code, never a file,
never an address to connect to, and never worth more time or memory than its size.
"""

import ast
import contextlib
import hmac
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from leyden.server.parsers import OutputParser, collect
from leyden.testing.scripted import Case
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer
from tests.server.conftest import Server, eventually

PACKAGE = Path(__file__).parent.parent.parent / "leyden"
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def healthy(server: Server) -> bool:
    return server.chat("hi").status_code == 200


def names_used() -> Iterator[tuple[Path, str]]:
    """(file, dotted name) of everything that is imported or called anywhere in the package."""
    for path, text in SOURCES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None)
                for alias in node.names:
                    yield path, f"{module}.{alias.name}" if module else alias.name
            elif isinstance(node, ast.Call):
                yield path, ast.unparse(node.func)


def test_CVE_2025_9141_arguments_of_calls_are_never_evaluated():
    text = "<tool_call><function=f><parameter=x>__import__('os').system('true')</parameter></function></tool_call>"
    for schema in (
        {},
        {"properties": {"x": {"type": "object"}}},
        {"properties": {"x": {"type": ["array", "integer"]}}},
    ):
        parser = OutputParser([{"function": {"name": "f", "parameters": schema}}], thinking=False)
        (call,) = collect(parser.feed(text) + parser.finish()).tool_calls
        assert json.loads(call.arguments) == {"x": "__import__('os').system('true')"}
    assert not {name for _, name in names_used()} & {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/v1/models/",
        "/health/../v1/models",
        "/v1/./models",
        "/%76%31/models",
        "/health%2f..%2fv1/models",
    ],
)
def test_CVE_2026_48746_no_spelling_of_a_path_or_host_goes_past_the_key(start: Any, path: str):
    with start({}, api_key=("k",), allowed_hosts=("127.0.0.1", "x/health", "localhost")) as server:
        for host in ("127.0.0.1", "localhost/health?", "x/health"):
            response = server.http.get(path, headers={"Host": host})
            assert response.status_code in (401, 403)
            assert server.http.get("/v1/models", headers={"Host": host}).status_code in (401, 403)


def test_CVE_2026_34756_the_number_of_answers_is_limited(server: Server):
    server.engine.received.clear()
    for body in ({"n": 10**9}, {"n": 129}):
        assert server.chat(**body).json()["error"]["param"] == "n"
    assert server.complete(["a"] * 1024, n=5).json()["error"]["param"] == "n"
    assert server.complete(["a"] * 1025).json()["error"]["param"] == "prompt"
    assert server.engine.received == []


def test_CVE_2026_27893_no_code_of_a_checkpoint_is_run():
    for path, text in SOURCES.items():
        assert "trust_remote_code=True" not in text, path
        assert "auto_map" not in text, path  # CVE-2026-22807, CVE-2025-66448
    assert not {name for _, name in names_used() if name.split(".")[0] in ("runpy", "imp")}


def test_CVE_2025_62426_template_variables_do_not_change_what_the_server_does(server: Server):
    for name in ("tokenize", "chat_template", "messages", "tools", "add_generation_prompt", "tokenizer", "documents"):
        response = server.chat(chat_template_kwargs={name: True})
        assert response.status_code == 400 and name in response.json()["error"]["message"]


def test_CVE_2025_61620_clients_bring_no_templates(server: Server):
    template = "{% for i in range(10**9) %}x{% endfor %}"
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "chat_template": template}),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "hi"}], "chat_template": template}),
        ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "chat_template": template}),
    ):
        assert server.http.post(path, json=body).json()["error"]["param"] == "chat_template"
    started = time.monotonic()
    assert server.chat(chat_template_kwargs={"enable_thinking": template}).status_code == 200  # data, not a template
    assert time.monotonic() - started < 5


def test_CVE_2025_48956_headers_are_limited(server: Server):
    assert server.http.get("/health", headers={"x-long": "y" * 70_000}).status_code == 431
    assert server.http.get("/health", headers={f"x-{index}": "y" for index in range(200)}).status_code == 431
    assert server.http.get("/health?" + "y" * 9000).status_code == 414


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"x": {"type": "string", "pattern": "(a+)+$"}}},
        {"type": "object", "properties": {"x": {"type": "string", "pattern": "["}}},
        {"type": "nonsense", "properties": {"x": {"type": 5}}},
        {"properties": []},
        {"properties": {"x": "y"}, "required": {"a": 1}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"properties": {"x": {"anyOf": [{"$ref": "#"}] * 3}}},
        {"properties": {"x": {"enum": [[[]]], "const": {}}}},
    ],
    ids=str,
)
def test_CVE_2025_48944_odd_schemas_hurt_nobody(start: Any, parameters: dict[str, Any]):
    call = (
        "</think><tool_call>\n<function=f>\n<parameter=x>\n" + "a" * 50 + "!\n</parameter>\n</function>\n</tool_call>"
    )
    with start({"call": call, "hi": "</think>Hi"}) as server:
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        for stream in (False, True):
            assert server.chat("call", tools=[tool], stream=stream).status_code in (200, 400)
        assert healthy(server)


def test_CVE_2025_48942_odd_grammars_are_client_errors(server: Server):
    for body in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"grammar": "root ::= "}},
    ):
        assert server.chat(**body).status_code == 400
    assert healthy(server)


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "</parameter>",
        "<function=f><parameter=a>",
        "<parameter=a",
        "< /",
        "<",
        "\\u0130",
        "<think>",
        "[[",
        '{"a":',
    ],
)
def test_CVE_2025_48887_parsing_takes_linear_time(unit: str):
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": ["object", "integer"]}}}}}]

    def seconds(count: int) -> float:
        parser = OutputParser(tools, thinking=False)
        text = "<tool_call><function=f><parameter=a>" + unit * count
        started = time.process_time()
        for start in range(0, len(text), 64):
            parser.feed(text[start : start + 64])
        parser.finish()
        return time.process_time() - started

    short = min(seconds(1000) for _ in range(3))
    assert min(seconds(8000) for _ in range(3)) < 8 * short * 4 + 0.2


def test_CVE_2025_59425_keys_are_compared_in_constant_time(start: Any, monkeypatch: pytest.MonkeyPatch):
    compared: list[bytes] = []
    real = hmac.compare_digest

    def compare(first: bytes, second: bytes) -> bool:
        compared.append(second)
        return real(first, second)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    with start({}, api_key=("one", "two", "three")) as server:
        for key in ("one", "nope"):
            compared.clear()
            server.http.get("/v1/models", headers={"x-api-key": key})
            assert len(compared) == 3 and {len(digest) for digest in compared} == {32}  # all of them, and all as long


def test_CVE_2025_46570_salts_separate_what_is_cached(start: Any):
    with start({"hi": "</think>Hi"}, api_key=("a", "b"), cache_salt_per_key=True) as server:
        salts = set()
        for key, salt in (("a", None), ("b", None), ("a", "s"), ("b", "s")):
            body = {"messages": [{"role": "user", "content": "hi"}], **({"cache_salt": salt} if salt else {})}
            assert server.http.post("/v1/chat/completions", json=body, headers={"x-api-key": key}).status_code == 200
            salts.add(server.engine.received[-1].cache_salt)
        assert len(salts) == 4
        for path, body in (
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/responses", {"input": "hi"}),
            ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}),
        ):
            assert server.http.post(path, json=body, headers={"x-api-key": "a"}).status_code == 200
            assert server.engine.received[-1].cache_salt in salts


def test_CVE_2025_25183_cached_prefixes_are_compared_not_hashed():
    tree = ast.parse(SOURCES[PACKAGE / "cache" / "prefix.py"])
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert "hash" not in calls


def test_CVE_2025_62164_prompts_are_no_tensors(server: Server):
    response = server.complete("hi", prompt_embeds="gASVAAAA")
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt_embeds"


def test_CVE_2025_30165_nothing_is_unpickled_and_no_socket_is_on_a_network():
    # Also: CVE-2024-11041, CVE-2025-24357, CVE-2025-32444, CVE-2025-30202, CVE-2025-47277, CVE-2025-10164,
    # CVE-2026-3059, CVE-2026-3060, CVE-2026-3989, CVE-2026-7301.
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    names = {name for _, name in names_used()}
    assert not {name for name in names if name.split(".")[0] in forbidden}
    assert not names & {"torch.load", "numpy.load", "np.load", "torch.package", "TCPStore"}
    assert not {name for name in names if name.endswith((".recv_pyobj", ".send_pyobj"))}
    assert [path for path, text in SOURCES.items() if "tcp://" in text] == []


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "input_image"])
def test_CVE_2025_6242_nothing_is_fetched(server: Server, kind: str):
    # Also: CVE-2026-24779, CVE-2026-22778, CVE-2026-22773: there is no media code at all.
    part = {"type": kind, kind: {"url": "http://169.254.169.254/latest"}}
    response = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
    assert response.status_code == 400 and kind in response.json()["error"]["message"]
    fetchers = {"httpx", "urllib", "requests", "aiohttp", "http.client"}
    server_only = {name for file, name in names_used() if file.parent.name == "server"}
    assert not {name for name in server_only if name.split(".")[0] in fetchers}


def test_CVE_2026_9540_whoever_goes_away_leaves_nothing_behind(start: Any):
    with start({"long": "</think>" + "word " * 2000}, step_seconds=0.001, max_model_len=16384) as server:
        for index in range(30):
            body = {"messages": [{"role": "user", "content": "long"}], "stream": index % 2 == 0, "n": 1 + index % 3}
            with contextlib.suppress(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=0.02) as client:
                request = client.build_request("POST", "/v1/chat/completions", json=body)
                response = client.send(request, stream=True)  # a whole answer takes longer than the client waits
                response.close()
        eventually(lambda: not server.engine.busy)
        assert server.client.requests == 0


def test_CVE_2026_5760_templates_run_in_a_sandbox(tokenizer: Tokenizer):
    for source in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ):
        with pytest.raises(Exception, match="cannot render|unsafe"):
            ChatTemplate(source, tokenizer).render([{"role": "user", "content": "x"}])


def test_CVE_2026_22778_errors_show_no_insides(start: Any):
    with start({"fails": Case("H", "error")}) as server:
        for response in (
            server.chat("fails"),
            server.chat(tools=[{"type": "function", "function": {"name": "f", "parameters": 5}}]),
            server.chat(messages=[{"role": "user", "content": object.__name__ * 50_000}]),
            server.http.get("/nope"),
        ):
            text = response.text
            assert response.status_code >= 400
            assert not any(word in text for word in ("Traceback", "/leyden/", ".py", " at 0x", "scripted failure"))


def test_line_ends_in_ids_and_paths_forge_no_log_lines(start: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "leyden")
    with start({}) as server:
        server.http.get("/v1/models%0d%0aFORGED", headers={"X-Request-Id": "a%0aFORGED"})
    assert not any("\n" in record.getMessage() or "\r" in record.getMessage() for record in caplog.records)
