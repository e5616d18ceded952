import json
import re

import pytest

from leyden.synthetic import copying
from leyden.synthetic.draw import Draw


def made(sample, n=200):
    return [sample(Draw(1, i, "train"), i % 2 == 0) for i in range(n)]


def test_the_larger_or_smaller_of_each_pair():
    for each in made(copying.larger):
        text, answer = each["messages"][-2]["content"], each["check"]["expected"]
        for a, b, best in zip(*[iter(map(int, re.findall(r"\d+", f"{text} ")))] * 2, answer.split(", "), strict=False):
            assert int(best) in (a, b)


@pytest.mark.parametrize("sample", [copying.echo, copying.at_place, copying.by_key])
def test_the_answer_stands_in_the_prompt(sample):
    for each in made(sample):
        assert each["check"]["expected"] in each["messages"][-2]["content"]


def test_keys_are_renamed_or_kept_in_order():
    for each in made(copying.keys):
        text = each["messages"][-2]["content"]
        given = json.loads(text[text.index("{") : text.rindex("}") + 1])
        result = each["check"]["expected"]
        if len(result) == len(given) and result != given:
            assert list(result.values()) == list(given.values())
            assert sum(a != b for a, b in zip(given, result, strict=True)) == 1
        else:
            assert list(result.items()) == [item for item in given.items() if item[0] in result]


def test_digits_are_right():
    for each in made(copying.digits):
        working = each["messages"][-1].get("reasoning_content")
        for fact in working.split(", ") if working else []:
            left, right = fact.split("=")
            if "/" in left:
                n, d = map(int, left.split("/"))
                assert right == f"{n // d} r {n % d}"
            else:
                assert eval(left.replace("x", "*")) == int(right)
