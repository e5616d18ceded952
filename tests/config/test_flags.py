"""The table of flags: complete, and true to what the code does."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from leyden.config import launch
from leyden.config.engine import EngineConfig
from leyden.config.flags import READERS, Flag, size, table
from leyden.config.server import ServerConfig
from leyden.errors import ConfigError

GROUPS, FLAGS = table()
BY_DEST = {flag.dest: flag for flag in FLAGS}
VLLM = json.loads((Path(__file__).parent.parent / "data/vllm_flags.json").read_text())

OWN_OBJECT = "config object with its own defaults"
# Values of ours that differ on purpose: no model is served by accident, no foreign web page is let in.
OTHER_DEFAULTS = {"model", "allowed_origins"}
# Closed on purpose where vLLM checks late or never.
OTHER_CHOICES = {"tool_call_parser", "mamba_backend", "reasoning_parser", "load_format", "quantization"}
MORE_CHOICES = {"spec_method": {"auto"}}
# Read by Launch or by `leyden serve` itself.
READ_ELSEWHERE = {"model_tag", "config", "tokenizer", "log_level", "log_format"}
READ_ELSEWHERE |= {*launch.ENVIRONMENT, *launch.RENAMED, *launch.SHORT}


def test_every_flag_of_vllm_is_known():
    assert sum(row["since"] == "0.27.1" for row in VLLM) == 283 and sum(row["since"] == "0.33" for row in VLLM) == 41
    assert [row["dest"] for row in VLLM if row["dest"] not in BY_DEST] == []
    for row in VLLM:
        flag = BY_DEST[row["dest"]]
        assert set(row["names"]) <= set(flag.names), row
        assert flag.since == ("" if row["since"] == "0.27.1" else "0.33"), row
        if row["off"]:
            assert row["off"] in flag.negations(), row
        if row["dest"] not in OTHER_DEFAULTS:
            assert flag.default == (None if row["default"] == OWN_OBJECT else row["default"]), row
        if row["dest"] not in OTHER_CHOICES:
            choices = {choice for choice in row["choices"] or () if choice is not None}
            assert set(flag.choices) == choices | MORE_CHOICES.get(row["dest"], set()), row


def test_rows_are_whole():
    names = [name for flag in FLAGS for name in flag.names]
    assert len(set(names)) == len(names) and len(BY_DEST) == len(FLAGS)
    assert {flag.group for flag in FLAGS} == {group.name for group in GROUPS}
    for flag in FLAGS:
        assert flag.type == "switch" or flag.type in READERS, flag
        assert flag.help and len(flag.help) < 110 and not flag.help.endswith("."), flag
        assert flag.treatment in ("effect", "no-effect", "refuse"), flag
        assert bool(flag.reason) == (flag.treatment != "effect" or bool(flag.accepts)), flag
        assert flag.treatment == "effect" or not (flag.cpu or flag.always), flag
        assert not flag.choices or set(flag.accepts) <= set(flag.choices), flag


def test_what_has_an_effect_is_read():
    read = {field.name for config in (EngineConfig, ServerConfig) for field in fields(config)} | READ_ELSEWHERE
    unread = {flag.dest for flag in FLAGS if flag.treatment == "effect" and not flag.always} - read
    assert not unread, f"give them a field, or say in the table that they have no effect: {unread}"


def test_every_field_has_a_flag():
    known = {launch.RENAMED.get(dest, dest) for dest in BY_DEST}
    for config in (EngineConfig, ServerConfig):
        assert {field.name for field in fields(config)} <= known


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("8k", 8000),
        ("8K", 8192),
        ("1.5k", 1500),
        ("25.6k", 25600),
        ("2M", 2 << 20),
        ("1g", 10**9),
        (" 1t ", 10**12),
    ],
)
def test_size(text: str, value: int):
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "8 k", "8kb", "0x10", "1e3", "٣x"])
def test_size_refuses(text: str):
    with pytest.raises(ValueError):
        size(text)


def test_a_wrong_value_is_named_with_what_is_accepted():
    with pytest.raises(ConfigError, match=r"--dtype: expected one of auto, .*half, got 'int4'"):
        BY_DEST["dtype"].read("int4")
    with pytest.raises(
        ConfigError, match=r"--max-model-len: expected a whole number before K \(or 1.5k\), or auto, got"
    ):
        BY_DEST["max_model_len"].read("1.5K")
    with pytest.raises(ConfigError, match=r"--hf-overrides: expected JSON .* got '{a'"):
        BY_DEST["hf_overrides"].read("{a")


def test_negations():
    def switch(name: str) -> list[str]:
        return Flag(names=(name,), dest="x", type="switch", group="", help="").negations()

    assert switch("--enable-x") == ["--no-enable-x", "--disable-x"]
    assert switch("--disable-x") == ["--no-disable-x", "--enable-x"]
    assert switch("--x") == ["--no-x"]
