import json

import pytest

from leyden.synthetic import records
from leyden.synthetic.draw import Draw


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_answers_have_one_right_reading(split):
    for i in range(200):
        draw = Draw(4, i, split)
        data = records.some_records(draw)
        for column in (data.key, data.word, data.number):
            assert len({row[column] for row in data.rows}) == len(data.rows)
        question = records.ask(draw, data)
        assert question.answer and question.answer in question.working


def test_easy_questions_need_no_sum():
    for i in range(60):
        draw = Draw(5, i, "train")
        assert records.ask(draw, records.some_records(draw), easy=True).easy


def test_all_ways_to_write_a_table_hold_every_cell():
    for i in range(30):
        draw = Draw(6, i, "train")
        data = records.some_records(draw, noun="ticket", count=4)
        text = data.as_text(draw)
        assert all(str(cell) in text for row in data.rows for cell in row.values())
        found = json.loads(data.as_json(draw))
        assert (found["tickets"] if isinstance(found, dict) else found) == list(data.rows)
