import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.text.stream import Detokenizer, StopStrings, TextStream
from leyden.types import SamplingParams

MIXED = "ok 🙂 안녕 שלום 世界!"


def byte_ids(tokenizer, data: bytes):
    """One token per byte."""
    single = {tokenizer.bytes_of(id): id for id in range(tokenizer.vocab_size)}
    return [single[bytes([byte])] for byte in data]


def pieces(text, cuts):
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]


# --- Detokenizer


def test_D23a_one_byte_per_step(tokenizer):
    stream = Detokenizer(tokenizer)
    deltas = [stream.push([id]) for id in byte_ids(tokenizer, MIXED.encode())]
    assert "".join(deltas) == MIXED
    assert not any("\ufffd" in delta for delta in deltas)
    assert stream.flush() == ""


def test_D23a_cut_inside_a_character_ends_in_one_replacement_character(tokenizer):
    stream = Detokenizer(tokenizer)
    assert stream.push(byte_ids(tokenizer, "ok 🙂".encode()[:-1])) == "ok "
    assert stream.flush() == "\ufffd"


def test_D23e_nothing_of_the_prompt_comes_out(tokenizer):
    begun = "世".encode()
    prompt = tokenizer.encode("secret ") + byte_ids(tokenizer, begun[:2])
    answer = byte_ids(tokenizer, begun[2:]) + tokenizer.encode("!")
    assert Detokenizer(tokenizer, prompt=prompt).push(answer) == "世!"
    assert Detokenizer(tokenizer, prompt=tokenizer.encode("secret é")).push(answer) == "\ufffd!"


def test_bytes_that_are_no_utf8_come_out_as_soon_as_that_is_certain(tokenizer):
    stream = Detokenizer(tokenizer)
    assert [stream.push(byte_ids(tokenizer, data)) for data in (b"a\xe4", b"\xb8", b"b\xff", b"c")] == [
        "a",
        "",
        "\ufffdb\ufffd",
        "c",
    ]


def test_special_tokens_are_skipped_if_asked(tokenizer):
    ids = tokenizer.encode("<think>\na</think>b<|im_end|>")
    assert Detokenizer(tokenizer).push(ids) == "<think>\na</think>b<|im_end|>"
    assert Detokenizer(tokenizer, tokenizer.special_ids).push(ids) == "\nab"
    params = SamplingParams()
    assert TextStream(tokenizer, params, keep={12, 13}).push(ids) == "<think>\na</think>b"
    assert TextStream(tokenizer, SamplingParams(skip_special_tokens=False)).push(ids).endswith("<|im_end|>")


@settings(deadline=None)
@given(st.binary(), st.lists(st.integers(0, 99)))
def test_any_bytes_in_any_pieces(tokenizer, data, cuts):
    ids = byte_ids(tokenizer, data)
    stream = Detokenizer(tokenizer)
    deltas = [stream.push(piece) for piece in pieces(ids, cuts)]
    assert "".join(deltas) + stream.flush() == tokenizer.decode(ids) == data.decode("utf-8", "replace")


# --- StopStrings


def run(stop, texts, include=False):
    stops = StopStrings(stop, include)
    shown = [stops.push(text) for text in texts]
    return "".join(shown) + stops.flush(), stops.found, shown


def test_D23b_stop_string_across_pieces():
    text, found, shown = run(["own fox"], ["The quick br", "own", " fox", " jumps"])
    assert (text, found) == ("The quick br", "own fox")
    assert shown == ["The quick br", "", "", ""]


def test_D23c_held_text_is_released():
    text, found, shown = run(["own fox"], ["The quick br", "own", " dog"])
    assert (text, found) == ("The quick brown dog", None)
    assert shown == ["The quick br", "", "own dog"]


@pytest.mark.parametrize(
    ("stop", "text", "expected", "found"),
    [
        (["world", "hello"], "say hello world", "say ", "hello"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["bc", "abc"], "xabcd", "x", "abc"),
        (["aab"], "aaaab", "aa", "aab"),
        (["\n\n"], "a\n\n\nb", "a", "\n\n"),
        (["x"], "", "", None),
        (["abc"], "zzab", "zzab", None),
    ],
)
def test_the_stop_string_that_ends_first_wins(stop, text, expected, found):
    for texts in ([text], list(text)):
        assert run(stop, texts)[:2] == (expected, found)
        assert run(stop, texts, include=True)[:2] == (expected + (found or ""), found)


stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(deadline=None)
@given(stops, st.text("abc", max_size=30), st.lists(st.integers(0, 99)), st.booleans())
def test_stop_strings_do_not_depend_on_the_cutting(stop, text, cuts, include):
    """Against the definition: read character by character until some stop string stands at the end."""
    expected, found = text, None
    for end in range(1, len(text) + 1):
        if ended := [string for string in stop if text[:end].endswith(string)]:
            found = max(ended, key=len)
            expected = text[: end if include else end - len(found)]
            break
    got, got_found, _ = run(stop, pieces(text, cuts), include)
    assert (got, got_found) == (expected, found)


@settings(deadline=None)
@given(stops, st.text("abc", max_size=30))
def test_only_the_beginning_of_a_stop_string_is_held_back(stop, text):
    stops = StopStrings(stop)
    shown = 0
    for end, char in enumerate(text, 1):
        shown += len(stops.push(char))
        if stops.found is not None:
            break
        held = text[shown:end]
        assert held == "" or any(string.startswith(held) and string != held for string in stop)


# --- TextStream


def stream_of(tokenizer, **params):
    return TextStream(tokenizer, SamplingParams(max_tokens=None, **params))


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_tokens_after_the_stop_string_do_not_count(tokenizer, step):
    ids = byte_ids(tokenizer, b"one STOP two")
    stream = stream_of(tokenizer, stop=["STOP"])
    text = "".join(stream.push(ids[i : i + step]) for i in range(0, len(ids), step)) + stream.finish()
    assert (text, stream.stop, stream.tokens) == ("one ", "STOP", 8)


@pytest.mark.parametrize("step", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, ("", 2)), (1, ("", 2)), (2, ("ab", 4)), (3, ("ab", 4)), (4, ("ababx", 5))],
)
def test_stop_strings_count_after_min_tokens(tokenizer, step, min_tokens, expected):
    ids = byte_ids(tokenizer, b"ababx")
    stream = stream_of(tokenizer, stop=["ab", "abc"], min_tokens=min_tokens)
    text = "".join(stream.push(ids[i : i + step]) for i in range(0, len(ids), step)) + stream.finish()
    assert (text, stream.tokens) == expected
    assert stream.stop == (None if min_tokens == 4 else "ab")


def test_D23d_stop_strings_apply_in_thinking_too(tokenizer):
    ids = tokenizer.encode("plan STOP</think>x")
    stream = TextStream(tokenizer, SamplingParams(stop=["STOP"]), keep={13})
    assert "".join(stream.push([id]) for id in ids) + stream.finish() == "plan "
    assert stream.stop == "STOP"


def test_held_text_comes_before_an_unfinished_character(tokenizer):
    stream = stream_of(tokenizer, stop=["abc"])
    assert stream.push(byte_ids(tokenizer, b"xab\xe4")) == "x"
    assert stream.finish() == "ab\ufffd"


def test_without_stop_strings(tokenizer):
    stream = stream_of(tokenizer)
    ids = tokenizer.encode(MIXED)
    assert stream.push(ids) + stream.finish() == MIXED
    assert (stream.stop, stream.tokens) == (None, len(ids))


def test_work_per_token_does_not_grow_with_the_text(tokenizer):
    """Each push asks for the bytes of its own tokens only, and what is held back is shorter than a stop string."""
    asked = []

    class Counting:
        special_ids = tokenizer.special_ids

        def bytes_of(self, id):
            asked.append(id)
            return tokenizer.bytes_of(id)

    stream = TextStream(Counting(), SamplingParams(stop=["\n\nHuman:", "###"]))
    ids = tokenizer.encode("\n\nHum#an " * 200)
    longest = 0
    for id in ids:
        stream.push((id,))
        longest = max(longest, len(stream._stops._held))
    assert asked == ids
    assert longest < len("\n\nHuman:")
