import json
import subprocess
import sys

import pytest

from leyden.errors import ConfigError, RequestError
from leyden.synthetic import generate
from leyden.testing.tokenizer import write as write_tokenizer
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer
from leyden.train.data import read, sequences, texts, write


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 512)
    tokenizer = Tokenizer.from_folder(folder)
    corpus = texts(generate(0, 300), ChatTemplate.from_folder(folder, tokenizer))
    write_tokenizer(folder, 2048, corpus)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def template(tokenizer):
    from importlib.resources import files

    return ChatTemplate(files("leyden.testing").joinpath("chat_template.jinja").read_text(encoding="utf-8"), tokenizer)


def learnt(tokenizer, sequence):
    """The trained stretches of a sequence, as text."""
    pieces, previous = [], False
    for id, learn in zip(sequence.ids, sequence.learn, strict=True):
        if learn:
            pieces = [*pieces[:-1], [*pieces[-1], id]] if previous else [*pieces, [id]]
        previous = learn
    return [tokenizer.decode(piece) for piece in pieces]


ASK = {"role": "user", "content": "2 + 2?"}
CALL = {"type": "function", "id": "c", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
CALL_TEXT = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>\n"
)


def test_loss_covers_the_answer_and_its_end(tokenizer, template):
    (found,) = sequences({"messages": [ASK, {"role": "assistant", "content": "4"}]}, template, tokenizer)
    assert learnt(tokenizer, found) == ["4<|im_end|>"]
    prompt = template.encode([ASK], kwargs={"enable_thinking": False})
    assert found.ids[: found.learn.index(True)] == prompt


def test_loss_covers_reasoning_after_the_generation_prompt(tokenizer, template):
    answer = {"role": "assistant", "content": "4", "reasoning_content": "\n easy\n"}
    (found,) = sequences({"messages": [ASK, answer]}, template, tokenizer)
    assert learnt(tokenizer, found) == ["easy\n</think>\n4<|im_end|>"]
    assert found.ids[: found.learn.index(True)] == template.encode([ASK])


def test_loss_covers_calls_but_not_their_results(tokenizer, template):
    conversation = {
        "messages": [
            ASK,
            {"role": "assistant", "content": None, "reasoning": "add them", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "4"},
            {"role": "assistant", "content": "It is 4", "reasoning": "4"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
        ],
    }
    (found,) = sequences(conversation, template, tokenizer)
    assert learnt(tokenizer, found) == [
        f"add them\n</think>\n{CALL_TEXT}<|im_end|>",
        "4\n</think>\nIt is 4<|im_end|>",
    ]


def test_turns_without_reasoning_share_one_sequence(tokenizer, template):
    messages = [ASK, {"role": "assistant", "content": "4"}, ASK, {"role": "assistant", "content": "still 4"}]
    (found,) = sequences({"messages": messages}, template, tokenizer)
    assert learnt(tokenizer, found) == ["4<|im_end|>", "still 4<|im_end|>"]


def test_a_rewritten_history_starts_a_new_sequence(tokenizer, template):
    """The template drops the reasoning of the first turn once there is a second question."""
    first = {"role": "assistant", "content": "4", "reasoning_content": "easy"}
    second = {"role": "assistant", "content": "4 again", "reasoning_content": "as before"}
    one, two = sequences({"messages": [ASK, first, ASK, second]}, template, tokenizer)
    assert learnt(tokenizer, one) == ["easy\n</think>\n4<|im_end|>"]
    assert learnt(tokenizer, two) == ["as before\n</think>\n4 again<|im_end|>"]
    assert "easy" not in tokenizer.decode(two.ids)


def test_text_of_special_tokens_in_messages_stays_text(tokenizer, template):
    messages = [{"role": "user", "content": "Say <|im_end|>"}, {"role": "assistant", "content": "<|im_end|> said"}]
    (found,) = sequences({"messages": messages}, template, tokenizer)
    assert found.ids.count(tokenizer.eos_token_id) == 3  # system, user, assistant
    assert learnt(tokenizer, found) == ["<|im_end|> said<|im_end|>"]


def test_a_template_that_does_not_continue_its_prompt_is_refused(tokenizer):
    source = (
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    )
    with pytest.raises(RequestError, match=r"messages\[1\] does not continue the generation prompt"):
        sequences(
            {"messages": [ASK, {"role": "assistant", "content": "4"}]}, ChatTemplate(source, tokenizer), tokenizer
        )


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_synthetic_examples(split, tokenizer, template):
    for example in generate(8, 150, split):
        found = sequences(example, template, tokenizer)
        turns = [message for message in example["messages"] if message["role"] == "assistant"]
        texts = [text for sequence in found for text in learnt(tokenizer, sequence)]
        assert len(texts) == len(turns)
        for text, turn in zip(texts, turns, strict=True):
            assert text.endswith("<|im_end|>")
            expected = (
                turn.get("reasoning_content", "") + ("\n</think>\n" if example["thinking"] else "") + turn["content"]
            )
            assert text.startswith(expected)
            assert text.count("<function=") == len(turn.get("tool_calls", []))
        assert max(len(sequence.ids) for sequence in found) < 2048
        assert all(len(sequence.ids) == len(sequence.learn) for sequence in found)


def test_texts_keep_the_reasoning_of_every_turn(template):
    messages = [ASK, {"role": "assistant", "content": "4", "reasoning_content": "easy"}] * 2
    (text,) = texts([{"messages": messages}], template)
    assert text.count("easy") == 2 and text.endswith("4<|im_end|>\n")


def test_read_gives_back_what_write_wrote(tmp_path):
    examples = list(generate(1, 30))
    assert write(tmp_path / "data.jsonl", examples) == 30
    found = list(read(tmp_path / "data.jsonl"))
    assert [each["check"] for each in found] == [each["check"] for each in examples]
    assert all(len(a["messages"]) == len(b["messages"]) for a, b in zip(found, examples, strict=True))


def test_read_normalises_and_skips_empty_lines(tmp_path):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("\n" + json.dumps({"messages": messages}) + "\n\n", encoding="utf-8")
    (found,) = read(file)
    assert found["messages"][0]["content"] == "Hi"
    assert found["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 2}


GOOD = json.dumps({"messages": [ASK, {"role": "assistant", "content": "4"}]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: each line must be a JSON object, found no JSON"),
        ("[1]", r"line 2: each line must be a JSON object with a list of messages, found '\[1\]'"),
        ('{"text": "x"}', "line 2: each line must be a JSON object with a list of messages"),
        ('{"messages": []}', "line 2: messages must hold at least one message"),
        (json.dumps({"messages": [ASK]}), "line 2: messages must hold an assistant turn to learn from, found none"),
        (json.dumps({"messages": [{"role": "robot", "content": ""}]}), r"line 2: messages\[0\].role must be one of"),
        (
            json.dumps(
                {
                    "messages": [
                        ASK,
                        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                    ]
                }
            ),
            r"line 2: messages\[1\].tool_calls\[0\].function.arguments must be JSON",
        ),
        (
            json.dumps(json.loads(GOOD) | {"tools": "add"}),
            "line 2: tools must be a list of objects or null, found 'add'",
        ),
    ],
)
def test_a_bad_line_is_named(line, message, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(f"{GOOD}\n{line}\n{GOOD}\n", encoding="utf-8")
    lines = read(file)
    next(lines)
    with pytest.raises(ConfigError, match=message) as error:
        next(lines)
    assert str(file) in str(error.value)


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="missing.jsonl cannot be read"):
        next(read(tmp_path / "missing.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="binary.jsonl cannot be read"):
        next(read(tmp_path / "binary.jsonl"))


def test_data_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import leyden.synthetic, leyden.train.data"
    subprocess.run([sys.executable, "-c", code], check=True)
