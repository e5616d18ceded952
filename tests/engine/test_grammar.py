"""Grammars: compiling within limits, and answers of random weights that follow them whatever happens around."""

import json
import random
import re
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from leyden.engine import grammar as module
from leyden.engine.grammar import Compiler
from leyden.errors import RequestError
from leyden.spec.ngram import NGram
from leyden.testing import tokenizer as testing_tokenizer
from leyden.text.tokenizer import Tokenizer
from leyden.types import Grammar, Markers, Request, SamplingParams, Thinking
from tests.engine import drafters
from tests.engine.conftest import TINY, engine, run, tiny

OPEN, END, CALL, EOS = 12, 13, 14, 11
THINKING = Thinking(markers=Markers(opens=None, ends=(END,), forced=(END,)), open=True)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
JSON = Grammar("json", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    testing_tokenizer.write(folder, 512)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def model():
    model = tiny()
    model.config = replace(TINY, eos_token_ids=(EOS,))
    return model


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return Compiler(lambda: tokenizer, 512, (EOS,))


def request(name, grammar, prompt=(10, 60, 70), **changes):
    params = {"temperature": 1.0, "seed": 0, "max_tokens": 200, "grammar": grammar}
    return Request(id=name, prompt=list(prompt), params=SamplingParams(**(params | changes)))


def answers(worker, arrivals):
    """Token ids and finish_reason of each answer, the end token left out."""
    out = {}
    for name, deltas in run(worker, arrivals).items():
        assert deltas[-1].error is None
        ids = [token for delta in deltas for token in delta.token_ids]
        ended = deltas[-1].finish_reason == "stop"
        out[name] = (ids[:-1] if ended else ids), deltas[-1].finish_reason
    assert worker.grammars._answers == {}
    return out


def valid(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"ok", "n"} and type(value["ok"]) is bool and value["n"] in range(100)


# compiling


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json", '{"type": "nope"}', 'Unsupported type "nope"'),
        ("json", "", "between 1 and"),
        ("json", '{"type":', "not JSON"),
        ("json", '{"not": "closed"', "not JSON"),
        ("json", "[1", "not JSON"),
        ("json", '{"a":' * 65 + "1" + "}" * 65, "nested deeper than 64"),
        ("json", "[" * 100_000, "nested deeper than 64"),
        ("json", '{"enum": ["' + "x" * 2**18 + '"]}', "between 1 and 262144 characters"),
        ("regex", "(a", "parenthesis"),
        ("regex", "a" * 8193, "between 1 and 8192 characters"),
        ("regex", "(" * 4000 + "a" + ")" * 4000, "limit"),
        ("ebnf", 'root ::= "a', "line 1"),
        ("ebnf", "root ::= other", '"other" is not defined'),
        ("lark", "start: other", "unknown name"),
        ("structural_tag", '{"type": "structural_tag"}', "must have a format"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "nope"}}', "not recognized"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_field_and_reason(compiler, kind, text, says):
    for _ in range(2):
        with pytest.raises(RequestError, match=re.escape(says)) as caught:
            compiler.get(Grammar(kind, text, param="response_format"))
        assert caught.value.param == "response_format" and caught.value.message.startswith("response_format: ")
        assert "/project/" not in caught.value.message and len(caught.value.message) < 700


def test_error_in_a_tool_names_it(compiler):
    def tag(name, schema):
        content = {"type": "json_schema", "json_schema": schema, "style": "qwen_xml"}
        return {"type": "tag", "begin": f"<function={name}>", "content": content, "end": "</function>"}

    tags = [tag("fine", {"type": "object"}), tag("broken", {"type": "nope"})]
    text = json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": tags}})
    with pytest.raises(RequestError, match=r"tools: '<function=broken>': .*nope"):
        compiler.get(Grammar("structural_tag", text, param="tools"))


def test_unknown_kind_is_refused():
    with pytest.raises(RequestError, match="json, compact_json"):
        Grammar("xml", "<a/>")


def test_equal_grammars_are_compiled_once_and_the_oldest_are_forgotten(compiler, monkeypatch):
    monkeypatch.setattr(module, "_KEPT", 3)
    first = compiler.get(Grammar("regex", "x1"))
    assert compiler.get(Grammar("regex", "x1", param="other")) is first
    for n in range(2, 6):
        compiler.get(Grammar("regex", f"x{n}"))
    assert len(compiler._jobs) <= 4 and Grammar("regex", "x1") not in compiler._jobs
    monkeypatch.setattr(module, "_KEPT_BYTES", 0)
    compiler.get(Grammar("regex", "x6"))
    assert list(compiler._jobs) == [Grammar("regex", "x6")]


def test_a_slow_compile_is_refused_holds_nobody_up_and_is_there_when_it_is_done(compiler, monkeypatch):
    go_on = threading.Event()
    compile = compiler._compile

    def slow(grammar):
        if grammar.text == "slow":
            go_on.wait(10)
        return compile(grammar)

    monkeypatch.setattr(compiler, "_compile", slow)
    monkeypatch.setattr(module, "_THREADS", 2)
    threading.Thread(target=compiler._work, daemon=True).start()  # a second one: this machine may have one core
    slow_one = Grammar("regex", "slow")
    assert not compiler.ready(slow_one)
    compiler.get(Grammar("regex", "quick"))
    monkeypatch.setattr(module, "SECONDS", 0.05)
    time.sleep(0.06)
    with pytest.raises(RequestError, match="took longer than 0.05 s"):
        compiler.ready(slow_one)
    go_on.set()
    monkeypatch.setattr(module, "SECONDS", 5.0)
    compiler.get(slow_one)


def test_a_compile_that_never_began_is_forgotten(compiler, monkeypatch):
    monkeypatch.setattr(compiler, "_submit", lambda work: Future())
    monkeypatch.setattr(module, "SECONDS", 0.0)
    with pytest.raises(RequestError, match="took longer"):
        compiler.ready(Grammar("regex", "waits"))
    assert Grammar("regex", "waits") not in compiler._jobs


def test_without_xgrammar_only_answers_with_a_grammar_are_refused(model, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    worker = engine(model, tokenizer=lambda: tokenizer)
    with pytest.raises(RequestError, match="response_format: answers with a grammar need the package xgrammar"):
        worker.submit(request("a", Grammar("regex", "a", param="response_format")))
    run(worker, [(0, request("b", None, max_tokens=3))])


def test_without_tokenizer_or_end_token_a_grammar_is_refused(model):
    with pytest.raises(RequestError, match="made without a tokenizer"):
        engine(model).submit(request("a", JSON))
    with pytest.raises(RequestError, match="end-of-sequence"):
        engine(tiny()).submit(request("a", JSON))


# following


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("thinks", [False, True])
def test_D18_thinking_first_then_the_schema(model, tokenizer, overlap, thinks, drafts):
    """20 seeds and temperature 0, 8 at a time, among requests without a grammar, which are as they are alone."""
    thinking = {"thinking": THINKING, "thinking_token_budget": 8} if thinks else {}
    requests = [request(f"g{seed}", JSON, seed=seed, **thinking) for seed in range(20)]
    requests.append(request("greedy", JSON, temperature=0, **thinking))
    free = [request(f"f{seed}", None, seed=seed, max_tokens=30, ignore_eos=True) for seed in range(4)]
    drafter = NGram(drafts, 1, 3) if drafts else None
    worker = engine(model, tokenizer=lambda: tokenizer, overlap=overlap, drafter=drafter)
    found = answers(worker, [(n, r) for n, r in enumerate(requests + free)])
    assert bool(sum(worker.stats().accepted_tokens)) == bool(drafts)
    for r in requests:
        ids, reason = found[r.id]
        thought = ids.index(END) if thinks else 0
        assert thought == 8 or ids[thought] == END if thinks else END not in ids
        assert reason == "stop" and valid(tokenizer.decode(ids[thought + thinks :]))
    alone = answers(engine(model), [(0, r) for r in free])
    assert {r.id: found[r.id] for r in free} == alone


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("compact_json", json.dumps(SCHEMA)), r'\{"ok": (true|false), "n": \d{1,2}\}'),
        (
            Grammar("json", '{"type": "array", "items": {"enum": ["a", 1]}, "minItems": 1, "maxItems": 3}'),
            r"\[(.|\s)+\]",
        ),
        (Grammar("regex", r"[a-c]{2,5}-\d{3}"), r"[a-c]{2,5}-\d{3}"),
        (Grammar("ebnf", 'root ::= "yes" | "no" root'), r"(no){0,99}yes"),
        (Grammar("lark", 'start: "yes" | /no{1,3}/'), r"yes|no{1,3}"),
        (
            Grammar("structural_tag", '{"format": {"type": "const_string", "value": "<tool_call>a\\"\\n"}}'),
            r'<tool_call>a"\n',
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_every_kind(model, tokenizer, grammar, pattern):
    requests = [(0, request(f"{seed}", grammar, seed=seed, max_tokens=150)) for seed in range(8)]
    for ids, reason in answers(engine(model, tokenizer=lambda: tokenizer), requests).values():
        assert re.fullmatch(pattern, tokenizer.decode(ids)) and reason == "stop"


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_and_the_prefix_cache_change_nothing(model, tokenizer, overlap):
    draw = random.Random(3)
    requests = []
    for n in range(10):
        prompt = [draw.randrange(32, 500) for _ in range(draw.randrange(1, 50))]
        grammar = draw.choice((JSON, Grammar("regex", "[a-z ]{20,40}"), None))
        thinking = draw.choice(({}, {"thinking": THINKING, "thinking_token_budget": 9}))
        requests.append(request(f"{n}", grammar, prompt, seed=n, max_tokens=60, **thinking))
    worker = engine(
        model, tokenizer=lambda: tokenizer, overlap=overlap, seqs=4, snapshots=6, pages=14, page=8, step_tokens=24
    )
    together = answers(worker, [(n, r) for n, r in enumerate(requests)])
    assert worker.stats().preemptions
    solo = engine(model, tokenizer=lambda: tokenizer)
    assert together == {r.id: answers(solo, [(0, r)])[r.id] for r in requests}


def ids_of(tokenizer, text):
    return tokenizer.encode(text, special=False)


@pytest.mark.parametrize(
    ("wishes", "text"),
    [
        ({"min_tokens": 50}, "no"),  # a complete answer can only end
        ({"allowed_token_ids": [100]}, "no"),
        ({"logit_bias": {EOS: 100.0, 10: 100.0}}, "no"),
        ({"presence_penalty": 2.0, "repetition_penalty": 5.0}, "no"),
        ({"temperature": 2.0, "top_k": 1, "min_p": 0.9}, "no"),
        ({"ignore_eos": True, "max_tokens": 6}, "no"),
        ({"max_tokens": 1}, None),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_other_wishes_never_break_the_grammar(model, tokenizer, wishes, text):
    found = answers(engine(model, tokenizer=lambda: tokenizer), [(0, request("a", Grammar("regex", "no"), **wishes))])
    ids, reason = found["a"]
    if wishes.get("ignore_eos"):
        assert len(ids) == 6 and reason == "length"
        ids = ids[: ids.index(EOS)]
    if text is None:
        assert reason == "length" and len(ids) == 1
    else:
        assert tokenizer.decode(ids) == text


def test_min_tokens_and_stop_tokens_within_a_grammar(model, tokenizer):
    (a,) = ids_of(tokenizer, "a")
    worker = engine(model, tokenizer=lambda: tokenizer)
    grammar = Grammar("regex", "a*")
    ids, _ = answers(worker, [(0, request("a", grammar, min_tokens=7, logit_bias={EOS: 100.0}))])["a"]
    assert len(ids) == 7
    ids, reason = answers(worker, [(0, request("a", Grammar("regex", "ba{5}"), stop_token_ids=[a]))])["a"]
    assert tokenizer.decode(ids) == "b" and reason == "stop"


def test_thinking_cannot_end_the_answer_before_its_grammar_has_begun(model, tokenizer):
    """The model does all it can to end: by end token, by stop token. Free of a grammar it would."""
    (q,) = ids_of(tokenizer, "Q")
    wish = {"stop_token_ids": [q], "logit_bias": {EOS: 100.0, q: 100.0}, "thinking": THINKING}
    worker = engine(model, tokenizer=lambda: tokenizer)
    ids, reason = answers(worker, [(0, request("a", JSON, thinking_token_budget=8, **wish))])["a"]
    assert ids[8] == END and valid(tokenizer.decode(ids[9:])) and reason == "stop"
    assert answers(worker, [(0, request("a", None, **wish))])["a"] == ([], "stop")


def test_special_tokens_are_no_text(model, tokenizer):
    """A string in JSON may hold any text; control tokens are none, however much the model wants them."""
    grammar = Grammar("json", '{"type": "object", "properties": {"a": {"type": "string", "minLength": 30}}}')
    bias = {"logit_bias": {id: 100.0 for id in tokenizer.added.values()}, "max_tokens": 100}
    ids, _ = answers(engine(model, tokenizer=lambda: tokenizer), [(0, request("a", grammar, **bias))])["a"]
    assert not tokenizer.special_ids.intersection(ids)


def test_a_tool_call_ends_thinking_and_is_part_of_the_answer(model, tokenizer):
    form = {
        "format": {
            "type": "tag",
            "begin": "<tool_call>",
            "content": {"type": "regex", "pattern": "[a-z]{3}"},
            "end": "!",
        }
    }
    markers = Markers(opens=None, ends=(END, CALL), forced=(END,))
    params = {"thinking": Thinking(markers=markers, open=True), "allowed_token_ids": [CALL, 300]}
    worker = engine(model, tokenizer=lambda: tokenizer)
    ids, _ = answers(worker, [(0, request("a", Grammar("structural_tag", json.dumps(form)), **params))])["a"]
    assert re.fullmatch("(.|\\s)*<tool_call>[a-z]{3}!", tokenizer.decode(ids)) and END not in ids


def test_a_lone_answer_takes_one_step_per_token_with_async_scheduling_too(model, tokenizer):
    worker = engine(model, tokenizer=lambda: tokenizer, overlap=True)
    ids, _ = answers(worker, [(0, request("a", JSON))])["a"]
    assert worker.stats().steps <= len(ids) + 2  # the end, and the step that was under way when it came


def test_raw_logprobs_know_no_grammar(model, tokenizer):
    plain, bound = (request("a", grammar, temperature=0, max_tokens=1, logprobs=3) for grammar in (None, JSON))
    worker = engine(model, tokenizer=lambda: tokenizer)
    (first,), (second,) = (run(worker, [(0, r)])["a"][0].logprobs for r in (plain, bound))
    assert first.top_ids == second.top_ids and first.top_logprobs == second.top_logprobs


# what goes wrong


def test_an_answer_that_leaves_its_grammar_ends_with_an_error_and_the_others_go_on(model, tokenizer, monkeypatch):
    worker = engine(model, tokenizer=lambda: tokenizer, overlap=True)
    for r in (request("bad", JSON), request("good", JSON), request("free", None, max_tokens=5)):
        worker.submit(r)
    worker.grammars._answers["bad"].matcher = Refusing(worker.grammars._answers["bad"].matcher)
    out = {name: [] for name in ("bad", "good", "free")}
    while worker.busy:
        for delta in worker.step():
            out[delta.request_id].append(delta)
        worker.check()
    assert out["bad"][-1].finish_reason == "error" and "does not allow" in out["bad"][-1].error
    assert out["good"][-1].finish_reason == "stop" and out["free"][-1].finish_reason
    assert worker.grammars._answers == {}


class Refusing:
    """A matcher that allows what it then refuses."""

    def __init__(self, matcher):
        self._handle = matcher._handle

    def is_terminated(self):
        return False

    def accept_token(self, token):
        return False


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_grammar_that_leads_nowhere_ends_with_an_error(model, tokenizer, temperature):
    nowhere = request("a", Grammar("regex", r"ab[^\x00-\U0010FFFF]"), temperature=temperature, top_p=0.9)
    out = run(engine(model, tokenizer=lambda: tokenizer), [(0, nowhere)])
    assert out["a"][-1].finish_reason == "error" and "does not allow" in out["a"][-1].error


def test_a_grammar_that_costs_more_with_every_token_is_given_up(model, tokenizer, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    monkeypatch.setattr(module, "_PATIENCE_PER_TOKEN", 2e-5)
    ambiguous = Grammar("ebnf", 'root ::= s\ns ::= "" | "a" s "a" s | s s')
    worker = engine(model, tokenizer=lambda: tokenizer)
    deltas = run(worker, [(0, request("a", ambiguous, max_tokens=400, logit_bias={EOS: -100.0}))])["a"]
    assert deltas[-1].finish_reason == "error" and "ambiguous" in deltas[-1].error


def test_aborts_and_failing_steps_leave_nothing_behind(model, tokenizer, monkeypatch):
    worker = engine(model, tokenizer=lambda: tokenizer, overlap=True)
    for name in "ab":
        worker.submit(request(name, JSON))
    for _ in range(3):
        worker.step()
    worker.abort("a")
    worker.step()
    assert worker.grammars._answers.keys() == {"b"}
    monkeypatch.setattr(worker.grammars, "allowed", lambda rows: 1 / 0)
    reasons = [delta.finish_reason for _ in range(3) for delta in worker.step()]
    assert "error" in reasons and worker.grammars._answers == {} and not worker.busy
    monkeypatch.undo()
    worker.check()
    assert answers(worker, [(0, request("c", JSON))])["c"][1] == "stop"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rule", [drafters.perfect, drafters.half, drafters.garbage], ids=lambda rule: rule.__name__)
def test_p29_drafts_within_a_grammar(model, tokenizer, rule, overlap):
    """Every draft place has its mask, nothing follows the end, and a refused draft is like any wrong one."""
    draw = random.Random(3)
    requests = []
    for n in range(10):
        prompt = [draw.randrange(32, 500) for _ in range(draw.randrange(1, 30))]
        grammar = draw.choice((JSON, Grammar("regex", "[a-z ]{20,40}"), None))
        more = draw.choice(({}, {"thinking": THINKING, "thinking_token_budget": 9}, {"temperature": 0}))
        more = more | draw.choice(({}, {"min_tokens": 50}, {"presence_penalty": 1.0}, {"logprobs": 2}))
        requests.append(request(f"{n}", grammar, prompt, seed=n, max_tokens=60, **more))
    alone = run(engine(model, tokenizer=lambda: tokenizer), [(0, r) for r in requests])
    texts = [r.prompt + [token for delta in alone[r.id] for token in delta.token_ids] for r in requests]
    drafter = drafters.Scripted(4, texts, rule)
    worker = engine(model, tokenizer=lambda: tokenizer, overlap=overlap, drafter=drafter)
    out = run(worker, [(n, r) for n, r in enumerate(requests)])
    for r in requests:
        got, want = ([token for delta in deltas[r.id] for token in delta.token_ids] for deltas in (out, alone))
        assert (got, out[r.id][-1].finish_reason) == (want, alone[r.id][-1].finish_reason)
    stats = worker.stats()
    assert not stats.failed_drafts and sum(stats.accepted_tokens) > (0 if rule is drafters.garbage else 50)
    if rule is drafters.perfect:
        assert sum(stats.accepted_tokens) > 0.9 * stats.drafted_tokens
