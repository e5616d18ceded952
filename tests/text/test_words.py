from leyden.text.tokenizer import Tokenizer
from leyden.text.words import spellings


def test_words_are_spelled_with_and_without_a_blank(tokenizer: Tokenizer):
    found = spellings(["zzz", " zzz", "the"], tokenizer)
    assert [tokenizer.decode(ids) for ids in found] == ["zzz", " zzz", "the", " the"]
    assert found == [tokenizer.encode(text) for text in ("zzz", " zzz", "the", " the")]


def test_added_tokens_are_tokens_and_blanks_a_word(tokenizer: Tokenizer):
    found = spellings(["<think>", " "], tokenizer)
    assert found[0] == [tokenizer.id_of("<think>")]
    assert [tokenizer.decode(ids) for ids in found[1:]] == [" <think>", " "]
