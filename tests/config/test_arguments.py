"""Parsing: the cases of tests/data/cli.json, each of them run through vLLM's own parser, and what is ours."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from leyden.config.arguments import parse
from leyden.config.flags import table
from leyden.config.launch import Launch
from leyden.config.speculative import SpeculativeConfig
from leyden.errors import ConfigError

FLAGS = {flag.dest: flag for flag in table()[1]}
CASES = json.loads((Path(__file__).parent.parent / "data/cli.json").read_text())["cases"]

# What a message must say, by case; the rest must name the flag (or the word) at fault.
MESSAGES = {
    "prefix_abbrev": ["--max-num-s ", "--max-num-seqs", "--max-num-scheduled-tokens"],
    "prefix_ambiguous": ["--max-num ", "--max-num-seqs", "--max-num-batched-tokens"],
    "max_len_decimal_binary": ["--max-model-len", "1.5k", "'1.5K'"],
    "cc_json_unknown": ["--compilation-config", "'nope'", "cudagraph_capture_sizes"],
    "so_backend_bad": ["--structured-outputs-config", "backend", "xgrammar", "'nope'"],
    "dotted_missing_value": ["--speculative-config.x", "value is expected"],
    "unknown": ["unrecognised argument --no-such-flag"],
    "cfg_unknown_key": ["config.yaml", "unrecognised argument --no-such"],
    "extra_positional": ["unrecognised argument other"],
    "bool_value_refused": ["unrecognised argument true"],
    "bool_eq_refused": ["--enable-prefix-caching takes no value"],
    "cfg_bad_yaml": ["config.yaml", "not YAML in line 2, column 1"],
    "cfg_missing": ["missing.yaml", "No such file"],
    "cfg_wrong_ext": ["x.json", ".yaml"],
    "cfg_no_path": ["--config", "file name is expected"],
    "cfg_twice": ["--config", "one file"],
}


def given(argv: list[str]) -> dict[str, Any]:
    """The values that differ from the defaults, as the cases list them."""
    values = Launch.from_argv(argv).given
    return {dest: v for dest, v in values.items() if v != FLAGS[dest].default and FLAGS[dest].since != "older"}


def expected(case: dict[str, Any]) -> dict[str, Any]:
    ours = case.get("ours", {})
    return ours if "error" in ours or "parsed" in ours else case


def refused(dest: str) -> bool:
    return FLAGS[dest].treatment == "refuse"


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    if "config_yaml" in case:
        (tmp_path / "config.yaml").write_text(case["config_yaml"])
    argv, wanted = case["argv"][1:], expected(case)
    if "error" in wanted:
        with pytest.raises(ConfigError) as caught:
            Launch.from_argv(argv)
        words = MESSAGES.get(case["id"]) or [argv[1].split("=")[0]]
        assert [word for word in words if word not in str(caught.value)] == [], caught.value
        return
    known = {field.name for field in fields(SpeculativeConfig)} | {"moe_backend"}
    made_up = wanted["parsed"].get("speculative_config", {}).keys() - known
    odd = case["id"].startswith(("eq_with_eq", "dash_value_eq", "stochastic"))
    if odd or made_up or any(refused(dest) for dest in wanted["parsed"]):
        # They parse; what they ask for is refused afterwards, see test_launch.py.
        values = parse(argv, FLAGS.values()).values
        assert {dest: v for dest, v in values.items() if v != FLAGS[dest].default} == wanted["parsed"]
        with pytest.raises(ConfigError):
            Launch.from_argv(argv)
        return
    assert given(argv) == wanted["parsed"]


def test_all_cases_are_here():
    assert len(CASES) == 178


def warnings(*argv: str) -> list[str]:
    return list(parse(["m", *argv], FLAGS.values()).notices)


def test_repeated_flags_are_told():
    assert warnings("--port", "1", "--port", "2") == ["--port was given more than once, the last one counts: 2"]
    assert warnings("--port", "2", "--port", "2") == []
    assert warnings("--middleware", "a", "--middleware", "b") == []


def test_replaced_json_is_told(tmp_path: Path):
    whole = ["--speculative-config", '{"method": "mtp"}', "--speculative-config.x", "3"]
    assert warnings(*whole) == ['--speculative-config was given whole and by keys; the keys replace it: {"x": 3}']
    file = tmp_path / "c.yaml"
    file.write_text("speculative-config: {method: mtp}\n")
    assert len(warnings("--config", str(file), "--speculative-config.x", "3")) == 1
    twice = warnings("--speculative-config.x", "1", "--speculative-config.x", "2")
    assert twice == ["--speculative-config.x was given more than once, the last one counts: 2"]


def test_the_command_line_wins_over_the_file_without_a_warning(tmp_path: Path):
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\n")
    arguments = parse(["m", "--port", "2", "--config", str(file)], FLAGS.values())
    assert arguments.values["port"] == 2 and arguments.notices == []


def test_files_speak_of_themselves(tmp_path: Path):
    file = tmp_path / "c.yaml"
    for text, message in (
        ("- a\n", "expected flags and values, got list"),
        ("port: http\n", "--port: expected an integer, got 'http'"),
        ("port: true\n", "--port: expected an integer, got 'true'"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            parse(["m", "--config", str(file)], FLAGS.values())
        assert str(caught.value) == f"{file}: {message}"


def test_json_values_in_files(tmp_path: Path):
    file = tmp_path / "c.yml"
    file.write_text('allowed-origins: ["http://a"]\nspeculative-config.enforce_eager: true\nmiddleware: [a, b]\n')
    values = parse(["m", "--config", str(file)], FLAGS.values()).values
    assert values["allowed_origins"] == ["http://a"]
    assert values["speculative_config"] == {"enforce_eager": True}
    assert values["middleware"] == ["a", "b"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], "unrecognised argument --prot, did you mean --port?"),
        (["--port.x", "1"], "--port has no keys, got --port.x"),
        (
            ["--speculative-config.a", "1", "--speculative-config.a.b", "2"],
            "a already has the value 1, which has no keys",
        ),
        (["-tp"], "-tp: a value is expected"),
        (["-z"], "unrecognised argument -z"),
    ],
)
def test_refusals(argv: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        parse(["m", *argv], FLAGS.values())
    assert message in str(caught.value)


def test_spellings():
    def value(*argv: str) -> Any:
        return next(iter(parse(argv, FLAGS.values()).values.values()))

    assert value("-O3") == "3" and value("-n2") == 2 and value("-q=fp8") == "fp8"
    assert value("--disable-log-requests") is False
    assert value("--device-memory-utilization", "0.5") == 0.5
    assert value("--mamba-backend", "FlashInfer") == "flashinfer"
    assert value("--log-level", "debug") == "DEBUG"
    assert value("--chat-template", "a b") == "a b"


NAMES = sorted(name for flag in FLAGS.values() for name in (*flag.names, *flag.negations()))
NAMED = st.sampled_from(NAMES)
VALUE = st.sampled_from(
    ["", "-", "--", "-1", "a", "a b", "-a b", "{}", '{"a": {}}', "[1]", "1.5k", "None", "=", ".", "+"]
)
WORD = st.one_of(
    NAMED,
    VALUE,
    st.tuples(NAMED, st.sampled_from(["=", ".a=", ".a.b=", ".a+=", "."]), VALUE).map("".join),
    st.tuples(NAMED, st.integers(1, 12)).map(lambda pair: pair[0][: pair[1]]),
    st.text(max_size=6),
)


@settings(max_examples=300, deadline=None)
@drawn(st.lists(WORD, max_size=6))
def test_any_words_give_values_or_a_message(words: list[str]):
    try:
        values = parse(words, FLAGS.values()).values
    except ConfigError as error:
        assert str(error)
    else:
        assert values.keys() <= FLAGS.keys()
