import pytest

from leyden.testing.tokenizer import RESERVED, SMALLEST, SPECIAL, write
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer

FILES = ["chat_template.jinja", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("size", [SMALLEST, 400, 2000])
def test_sizes(size, tmp_path):
    write(tmp_path, size)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == size
    assert [tokenizer.id_of(text) for text in SPECIAL + RESERVED] == list(range(32))
    assert tokenizer.special_ids == set(range(32))
    text = "I will check both cities: 東京 and Köln 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert ChatTemplate.from_folder(tmp_path, tokenizer).variables == {"enable_thinking", "truncate_history_thinking"}


def test_more_tokens_make_shorter_texts(tmp_path):
    lengths = []
    for size in (SMALLEST, 512, 1024):
        write(tmp_path, size)
        lengths.append(len(Tokenizer.from_folder(tmp_path).encode("The weather in Paris is clear today.")))
    assert lengths[0] == 36 and lengths == sorted(lengths, reverse=True) and lengths[2] < 12


def test_files_are_the_same_every_time(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name)
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == FILES
    for file in FILES:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_numbers_and_words_split_as_in_the_family(tmp_path):
    write(tmp_path, SMALLEST + 4, ["12345 12345 cat's\n\n"] * 9)
    tokenizer = Tokenizer.from_folder(tmp_path)
    learned = [tokenizer.bytes_of(id) for id in range(SMALLEST, SMALLEST + 4)]
    assert b"123" in learned and b"45" in learned
    assert all(b" 1" not in token and b"34" not in token for token in learned)


def test_corpus_of_the_caller(tmp_path):
    write(tmp_path, SMALLEST + 2, ["zzzz<|im_end|>", "zzzz<think>"])
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert [tokenizer.bytes_of(SMALLEST + i) for i in range(2)] == [b"zz", b"zzzz"]
    with pytest.raises(ValueError, match=f"at most {SMALLEST + 2} with this corpus"):
        write(tmp_path, SMALLEST + 3, ["zzzz<|im_end|>", "zzzz<think>"])
    with pytest.raises(ValueError, match=f"at least {SMALLEST}"):
        write(tmp_path, SMALLEST - 1)


def test_digits_can_stand_alone(tmp_path):
    write(tmp_path, 400, digits=1)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert [tokenizer.decode([id]) for id in tokenizer.encode("1044")] == ["1", "0", "4", "4"]
