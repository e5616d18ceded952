import json
import shutil

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from leyden.errors import CheckpointError
from leyden.text.tokenizer import Tokenizer

TEXTS = ["Hello, world!\n", "ok 🙂 안녕 שלום 世界!", "  if x:\n\treturn '1'\r\n", "", "é\u0301 \x00\x7f\xa0"]
MARKUP = "<|im_start|>user\nhi<|im_end|>\n<think></think><tool_call>"


@pytest.fixture
def copy(folder, tmp_path):
    """A folder whose files a test may damage."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(tokenizer, text):
    for special in (True, False):
        ids = tokenizer.encode(text, special=special)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.bytes_of, ids)) == text.encode()


@settings(deadline=None)
@given(st.text())
def test_any_text_survives_as_plain_text(tokenizer, text):
    ids = tokenizer.encode(text, special=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.special_ids.isdisjoint(ids)


def test_every_token_has_its_exact_bytes(tokenizer, folder):
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for id in range(tokenizer.vocab_size):
        alone = reference.decode([id], skip_special_tokens=False)
        assert tokenizer.bytes_of(id).decode("utf-8", "replace") == alone
    single = [tokenizer.bytes_of(id) for id in range(tokenizer.vocab_size) if len(tokenizer.bytes_of(id)) == 1]
    assert sorted(single) == [bytes([byte]) for byte in range(256)]


def test_markup_is_special_or_plain_as_asked(tokenizer):
    special = tokenizer.encode(MARKUP)
    assert [id for id in special if id in tokenizer.special_ids] == [10, 11, 12, 13, 14]
    plain = tokenizer.encode(MARKUP, special=False)
    assert tokenizer.special_ids.isdisjoint(plain)
    assert tokenizer.decode(plain) == tokenizer.decode(special) == MARKUP
    assert tokenizer.decode(special, skip_special_tokens=True) == "user\nhi\n"


def test_plain_text_never_becomes_a_special_token_even_if_merges_lead_there():
    alphabet = {char: id for id, char in enumerate("<e>")}
    backend = tokenizers.Tokenizer(models.BPE(alphabet | {"<e": 3, "<e>": 4}, [("<", "e"), ("<e", ">")]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<e>"])
    tokenizer = Tokenizer(backend, {"eos_token": "<e>"})
    assert tokenizer.encode("<e>") == [4]
    assert tokenizer.encode("e<e>", special=False) == [1, 0, 1, 2]


def test_bos_is_added_once_and_only_if_asked(tokenizer):
    assert tokenizer.encode("hi")[0] != tokenizer.bos_token_id
    once = tokenizer.encode("hi", add_special_tokens=True)
    assert once == [tokenizer.bos_token_id, *tokenizer.encode("hi")]
    assert tokenizer.encode("<s>hi", add_special_tokens=True) == once


def test_names(tokenizer):
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (11, 1)
    assert tokenizer.id_of("</think>") == tokenizer.added["</think>"] == 13
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.vocab_size == 512
    with pytest.raises(CheckpointError, match="<nothing>"):
        tokenizer.id_of("<nothing>")


def test_ids_outside_the_vocabulary_have_no_text(tokenizer):
    assert tokenizer.decode([512, 99, -1, 2**40]) == tokenizer.decode([99])


def test_half_a_surrogate_pair_is_no_character(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude42", special=False)) == "🙂"


def test_pattern_takes_the_longest_added_token(tokenizer):
    text = "<think><SPECIAL_1><SPECIAL_18></think><|im_en<|im_end|>[/INST]"
    found = tokenizer.added_pattern.findall(text)
    assert found == ["<think>", "<SPECIAL_18>", "</think>", "<|im_end|>", "[/INST]"]


def test_eos_comes_from_either_file_in_either_form(copy):
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>", "lstrip": False}}))
    assert Tokenizer.from_folder(copy).eos_token_id == 2
    (copy / "tokenizer_config.json").unlink()
    assert Tokenizer.from_folder(copy).eos_token_id == 11
    (copy / "special_tokens_map.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no eos_token"):
        Tokenizer.from_folder(copy)


def test_truncation_settings_of_the_file_do_not_count(copy):
    backend = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    backend.save(str(copy / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(copy)
    assert tokenizer.decode(tokenizer.encode("one two three")) == "one two three"


def test_normalizer_and_a_sequence_of_decoders(copy):
    backend = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    backend.save(str(copy / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(copy)
    for special in (True, False):
        assert tokenizer.decode(tokenizer.encode("e\u0301", special=special)) == "é"


def test_broken_files_are_named(copy):
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        Tokenizer.from_folder(copy / "nowhere")
    (copy / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.from_folder(copy)
    (copy / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, found list"):
        Tokenizer.from_folder(copy)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(copy)
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(copy / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="byte-level BPE tokenizer, found WordLevel"):
        Tokenizer.from_folder(copy)
