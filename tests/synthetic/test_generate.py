import json
import re
from collections import Counter

import pytest

from leyden.errors import ConfigError
from leyden.synthetic import FAMILIES, check, example, generate

SPLITS = ("train", "heldout")
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}


@pytest.fixture(scope="module", params=SPLITS)
def examples(request):
    return list(generate(11, 1500, request.param))


def as_bytes(examples):
    return "\n".join(json.dumps(each) for each in examples).encode()


@pytest.mark.parametrize("split", SPLITS)
def test_the_same_arguments_give_the_same_bytes(split):
    assert as_bytes(generate(3, 80, split)) == as_bytes(generate(3, 80, split))
    assert as_bytes(generate(3, 80, split)) != as_bytes(generate(4, 80, split))


def test_an_example_depends_on_seed_and_index_only():
    whole = list(generate(5, 40))
    assert whole[25:] == list(generate(5, 15, start=25))
    assert whole[31] == example(5, 31)


def test_splits_differ():
    assert as_bytes(generate(3, 20, "train")) != as_bytes(generate(3, 20, "heldout"))


def test_families_can_be_chosen():
    assert {each["family"] for each in generate(0, 50, families=["weekday", "chain"])} == {"weekday", "chain"}


def test_an_unknown_family_is_refused():
    with pytest.raises(ConfigError, match="unknown family 'poetry'; there are: call,"):
        next(generate(0, 1, families=["poetry"]))


@pytest.mark.parametrize("split", SPLITS)
def test_every_family_occurs_in_both_modes(split):
    names = [name for name, family in FAMILIES.items() if split == "train" or not family.practice]
    modes = {(each["family"], each["thinking"]) for name in names for each in generate(1, 60, split, [name])}
    always = {name for name, family in FAMILIES.items() if family.thinking == 1.0}
    assert modes == {(name, mode) for name in names for mode in (True, False)} - {(name, False) for name in always}


def test_practice_is_a_tenth_of_training_and_never_held_out():
    practice = {name for name, family in FAMILIES.items() if family.practice}
    weights = {name: family.share("train")[0] for name, family in FAMILIES.items()}
    share = sum(weights[name] for name in practice) / sum(weights.values())
    assert 0.08 < share < 0.13
    assert not practice & {each["family"] for each in generate(2, 400, "heldout")}
    with pytest.raises(ConfigError, match="unknown family 'echo'"):
        next(generate(0, 1, "heldout", families=["echo"]))


def test_shares_follow_the_weights(examples):
    counts = Counter(each["family"] for each in examples)
    split = "train" if counts["echo"] else "heldout"
    families = {name: family for name, family in FAMILIES.items() if not family.practice or split == "train"}
    total = sum(family.share(split)[0] for family in families.values())
    for name, family in families.items():
        expected = len(examples) * family.share(split)[0] / total
        assert abs(counts[name] - expected) < 5 * expected**0.5 + 3


def test_training_draws_what_is_hard_more_often_and_never_only_one_way():
    for family in FAMILIES.values():
        weight, thinking = family.share("train")
        assert weight >= family.weight and 0 < thinking <= 1
        assert family.share("heldout") == (family.weight, family.thinking)


def test_the_target_passes_its_own_check(examples):
    for each in examples:
        assert check(each, each["messages"][-1]), each


def test_an_empty_answer_fails_every_check(examples):
    assert not any(check(each, {"role": "assistant", "content": ""}) for each in examples)


def test_turns_are_in_order(examples):
    for each in examples:
        roles = [message["role"] for message in each["messages"]]
        turns = " ".join(roles[roles[0] == "system" :])
        assert re.fullmatch(r"(user( assistant( tool)+)* assistant ?)+", turns), turns


def test_reasoning_is_there_exactly_with_thinking(examples):
    for each in examples:
        turns = [message for message in each["messages"] if message["role"] == "assistant"]
        assert all(("reasoning_content" in turn) == each["thinking"] for turn in turns)
        assert all(turn.get("reasoning_content", "x").strip() for turn in turns)


def test_calls_keep_to_the_schema(examples):
    for each in examples:
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in each["tools"] or []}
        assert len(tools) == len(each["tools"] or []), "two tools of one name"
        for message in each["messages"]:
            for call in message.get("tool_calls", []):
                schema, arguments = tools[call["function"]["name"]], json.loads(call["function"]["arguments"])
                assert set(schema.get("required", [])) <= arguments.keys() <= schema["properties"].keys()
                for name, value in arguments.items():
                    conforms(value, schema["properties"][name])


def conforms(value, schema):
    assert isinstance(value, TYPES[schema["type"]])
    assert schema["type"] == "boolean" or not isinstance(value, bool)
    assert value in schema.get("enum", [value])
    if schema["type"] == "array":
        for item in value:
            conforms(item, schema["items"])
    if schema["type"] == "object":
        assert list(value) == schema["required"]
        for key, item in value.items():
            conforms(item, schema["properties"][key])


def test_tool_results_answer_the_calls_before_them(examples):
    for each in examples:
        waiting = []
        for message in each["messages"]:
            if message["role"] == "tool":
                assert message["tool_call_id"] == waiting.pop(0)
            else:
                assert not waiting
                waiting = [call["id"] for call in message.get("tool_calls", [])]


def test_every_sum_of_the_reasoning_is_true(examples):
    seen = 0
    for each in examples:
        for message in each["messages"]:
            working = message.get("reasoning_content", "")
            for left, right, rest in re.findall(
                r"(?<![\d.:=])(\d+(?: ?[-+x/] ?\d+)+) ?= ?(\d+)(?: r (\d+))?(?![\d:])", working
            ):
                if "/" in left:
                    a, b = map(int, left.split("/"))
                    assert divmod(a, b) == (int(right), int(rest or 0)), working
                else:
                    assert eval(left.replace("x", "*")) == int(right), working
                seen += 1
    assert seen > 300


@pytest.mark.parametrize("split", SPLITS)
def test_the_request_of_a_chain_does_not_give_the_id_away(split):
    for each in generate(4, 150, split, ["chain"]):
        calls = [call for message in each["messages"] for call in message.get("tool_calls", [])]
        found = next(iter(json.loads(calls[1]["function"]["arguments"]).values()))
        request = next(message["content"] for message in each["messages"] if message["role"] == "user")
        assert not re.search(rf"(?<!\w){re.escape(found)}(?!\w)", request), request
