import json
import struct
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from leyden.config import gguf
from leyden.config.folder import resolve
from leyden.errors import CheckpointError
from leyden.testing.tokenizer import write as write_tokenizer
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer

VALUES = {
    "general.architecture": "nemotron_h_moe",
    "a.flag": True,
    "a.count": 4_000_000_000,
    "a.small": 0.25,
    "a.text": "ä\n",
    "a.numbers": [1, -2, 3],
    "a.texts": ["", "ü"],
}


def file(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], str]] | None = None) -> Path:
    """A file with room for its tensors, all zeros."""
    head = BytesIO()
    starts = gguf.write(head, metadata, tensors or {})
    size = max((s + gguf.tensor_bytes(*t) for s, t in zip(starts, (tensors or {}).values(), strict=True)), default=0)
    path.write_bytes(head.getvalue().ljust(size, b"\0"))
    return path


def test_header_there_and_back(tmp_path: Path) -> None:
    tensors = {"a": ((3, 5), "F32"), "b": ((2, 7, 64), "NVFP4"), "c": ((4,), "BF16")}
    header = gguf.read(file(tmp_path / "a.gguf", VALUES, tensors))
    assert header.metadata == VALUES
    assert {name: (info.shape, info.kind) for name, info in header.tensors.items()} == tensors
    offsets = [info.offset for info in header.tensors.values()]
    assert [offset % 32 for offset in offsets] == [0, 0, 0]
    assert [after - before for before, after in zip(offsets, offsets[1:], strict=False)] == [64, 512]  # 60, 504 bytes
    assert header.get("nothing", 7) == 7


@pytest.mark.parametrize(
    ("code", "packed", "value"),
    [
        (0, b"\xff", 255),
        (1, b"\xff", -1),
        (2, b"\xff\xff", 65535),
        (3, b"\xff\xff", -1),
        (5, b"\xff" * 4, -1),
        (10, b"\xff" * 8, 2**64 - 1),
        (11, b"\xff" * 8, -1),
        (12, struct.pack("<d", 0.1), 0.1),
        (9, struct.pack("<IQ3B", 7, 3, 1, 0, 1), [True, False, True]),
        (9, struct.pack("<IQIQBIQB", 9, 2, 0, 1, 5, 0, 1, 6), [[5], [6]]),
    ],
)
def test_all_kinds_of_values(code: int, packed: bytes, value: Any, tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", code) + packed
    (tmp_path / "a.gguf").write_bytes(head)
    assert gguf.read(tmp_path / "a.gguf").metadata == {"k": value}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged, or no GGUF file"),
        (b"PK\x03\x04" + bytes(40), "no GGUF file: it begins with b'PK"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version must be 2 or 3 .* found 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version must be 2 or 3 .* found 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1), "damaged, or no GGUF file"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "metadata of type 99"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 256, 16, 0),
            "t is stored as type 16",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 40, 8, 0),
            "rows of 40, which Q8_0",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"t" + struct.pack("<IQIQ", 1, 64, 0, 0),
            "t ends at 320, the fi",
        ),
    ],
)
def test_damaged_files(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        gguf.read(tmp_path / "a.gguf")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a.gguf: no such file"):
        resolve(tmp_path / "a.gguf")


def vocabulary(folder: Path, whole: bool) -> dict[str, Any]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    added = {token["content"] for token in tokenizer["added_tokens"]}
    metadata = {
        "general.architecture": "nemotron_h",
        "nemotron_h.block_count": 0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "pixtral",
        "tokenizer.ggml.tokens": [*tokens, "[PAD600]"],
        "tokenizer.ggml.token_type": [3 if token in added else 1 for token in tokens] + [5],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 11,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }
    return metadata | ({"tokenizer.huggingface.json": json.dumps(tokenizer)} if whole else {})


TENSORS = {"token_embd.weight": ((8, 4), "F32")}
TEXTS = ["The jar of Leyden, 1745!", "it's  we'LL\n\n\t x = 12345;", "über 東京 🙂", "<|im_start|>user\n<think>", ""]


@pytest.mark.parametrize("whole", [True, False])
def test_tokenizer_and_template(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_tokenizer(tmp_path / "original", 600)
    path = file(tmp_path / "a.gguf", vocabulary(tmp_path / "original", whole), TENSORS)
    folder = resolve(path)
    mine, theirs = Tokenizer.from_folder(folder), Tokenizer.from_folder(tmp_path / "original")
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=True)
        assert mine.encode(text, add_special_tokens=True) == ids and mine.encode(text) == theirs.encode(text)
        assert mine.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
    assert (mine.vocab_size, mine.eos_token_id, mine.bos_token_id) == (600, 11, 1)
    assert mine.special_ids == theirs.special_ids
    messages = [{"role": "user", "content": "Hi"}]
    template, other = ChatTemplate.from_folder(folder, mine), ChatTemplate.from_folder(tmp_path / "original", theirs)
    assert template.encode(messages) == other.encode(messages)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [11, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "byte-level BPE .* found llama"),
        ({"tokenizer.ggml.pre": "gpt-2"}, "tokenizer.ggml.pre must be one of pixtral, .*; found 'gpt-2'"),
        ({"general.architecture": "llama"}, "architecture must be nemotron_h or nemotron_h_moe, found llama"),
        ({"nemotron_h.block_count": 1}, "blk.0 must hold one of ssm_in.weight, .*; found 0 of them"),
    ],
)
def test_models_that_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_tokenizer(tmp_path / "original", 600)
    path = file(tmp_path / "a.gguf", vocabulary(tmp_path / "original", False) | change, TENSORS)
    with pytest.raises(CheckpointError, match=message):
        resolve(path)
    assert list((tmp_path / "leyden" / "gguf").glob("*")) == []  # nothing half done is left


def test_folder_is_made_once_for_each_state_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_tokenizer(tmp_path / "original", 600)
    metadata = vocabulary(tmp_path / "original", False) | {
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    path = file(tmp_path / "a.gguf", metadata, TENSORS)
    first = resolve(path)
    made = (first / "config.json").stat().st_mtime_ns
    assert resolve(path) == first and (first / "config.json").stat().st_mtime_ns == made
    assert (first / "a.gguf").resolve() == path
    assert json.loads((first / "generation_config.json").read_text()) == {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 20,
    }
    assert resolve(file(path, metadata | {"general.name": "b"}, TENSORS)) != first
