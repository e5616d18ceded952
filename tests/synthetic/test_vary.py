import re

import pytest

from leyden.synthetic.draw import Draw, phrases, table
from leyden.synthetic.vary import EMBEDDED, framed, reworded


def draws(count=300):
    return [Draw(2, i, "train") for i in range(count)]


def test_words_are_replaced_by_their_equals():
    texts = {reworded(draw, "Please reply with the value and nothing else.") for draw in draws()}
    assert len(texts) > 8 and {text.split()[0] for text in texts} == {"Please", "Kindly"}
    assert any(text.endswith("the value and nothing more.") for text in texts)


def test_slots_quotes_and_placeholders_stay():
    template = '{largest} {which} "please reply with" <nothing else> {key}'
    assert {reworded(draw, template) for draw in draws()} == {template}


def test_framing_keeps_the_slots_in_order():
    template = "Sort {numbers} and put {new} at the end of the list."
    for draw in draws():
        assert re.findall(r"\{\w+\}", framed(draw, template)) == ["{numbers}", "{new}"]


def test_nothing_is_put_next_to_a_value():
    assert all(framed(draw, "List: {items}").endswith("ist: {items}") for draw in draws())
    assert all(framed(draw, "{items}: sort.").startswith("{items}: sort") for draw in draws())


def test_framing_leaves_most_phrases_as_they_are():
    template = "Sort the numbers."
    same = sum(framed(draw, template) == template for draw in draws())
    assert 150 < same < 270


@pytest.mark.parametrize("name", sorted(EMBEDDED))
def test_embedded_places_exist(name):
    section, key = name.split(".")
    assert key in table("phrases")[section]


def test_heldout_phrases_are_used_as_written():
    known = set(phrases("dialogue.times", "heldout"))
    assert {Draw(0, i, "heldout").text("dialogue.times", n="{n}") for i in range(20)} <= known
