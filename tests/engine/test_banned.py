"""Bad words: the table against the rule in plain words, and whole engines."""

import random
from collections.abc import Sequence

import pytest
import torch

from leyden.engine.banned import Banned
from leyden.errors import RequestError
from leyden.model.context import Context
from leyden.spec.ngram import NGram
from leyden.types import Admit, Request, Row, SamplingParams
from tests.engine.conftest import engine, run


def closed(answer: Sequence[int], banned: list[list[int]]) -> set[int]:
    """What may not follow an answer, in plain words."""
    return {ids[-1] for ids in banned if list(answer[len(answer) - len(ids) + 1 :]) == ids[:-1]}


def params(banned, **more) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 24, "banned": banned} | more))


def rows(*slots: int) -> list[Row]:
    return [Row(slot, 0, 1, [], True) for slot in slots]


@pytest.mark.parametrize("seed", range(20))
def test_table_is_the_rule_wherever_sequences_enter_and_pause(seed: int):
    draw = random.Random(seed)
    table, answers, wishes = Banned(4, "cpu"), {}, {}
    for _ in range(60):
        slot = draw.randrange(1, 4)
        if slot not in answers or draw.random() < 0.1:  # a new sequence, or one that was paused
            wishes[slot] = [[draw.randrange(4) for _ in range(draw.randint(1, 5))] for _ in range(draw.randint(0, 6))]
            answers[slot] = [draw.randrange(4) for _ in range(draw.choice((0, 0, 1, 7)))]
            prompt = [draw.randrange(4) for _ in range(5)]
            known = prompt + answers[slot]
            table.admit([Admit(slot, "r", params(wishes[slot]), 0, 5, (), known if wishes[slot] else [])])
        batch = draw.sample(sorted(answers), draw.randint(1, len(answers)))
        slots, logits = torch.tensor(batch), torch.zeros(len(batch), 4)
        found = table.close(rows(*batch), table.before(slots), logits)
        assert (logits == 0).all()
        for slot, row in zip(batch, found.tolist(), strict=True):
            over = {id for id, value in enumerate(row) if value == float("-inf")}
            assert over == closed(answers[slot], wishes[slot])
        tokens = [draw.randrange(4) for _ in batch]
        table.follow(rows(*batch), slots, torch.tensor(tokens)[:, None])
        for slot, token in zip(batch, tokens, strict=True):
            answers[slot].append(token)


def test_rows_of_drafts_look_at_the_drafts_before_them():
    table = Banned(3, "cpu")
    table.admit([Admit(2, "r", params([[7, 8, 9], [5]]), 0, 1, (), [1, 7])])
    drafts = [8, 9]
    history = torch.cat((table.before(torch.tensor([2]))[0], torch.tensor(drafts)))
    before = history.unfold(0, 2, 1)  # in front of the first draft, of the second, and of what follows
    found = table.close(rows(2, 2, 2), before, torch.zeros(3, 10))
    assert [[id for id in range(10) if row[id] < 0] for row in found.tolist()] == [[5], [5, 9], [5]]


@pytest.mark.parametrize("taken", range(4))
def test_of_drafts_the_accepted_ones_become_part_of_the_answer(taken: int):
    table, slot = Banned(3, "cpu"), torch.tensor([2])
    table.admit([Admit(2, "r", params([[7, 8, 9, 4]]), 0, 1, (), [1, 5, 6, 7])])
    table.follow(rows(2), slot, torch.tensor([[8, 9, 4]]), torch.tensor([taken]))
    assert table.before(slot).tolist() == [[5, 6, 7, 8, 9, 4][taken : taken + 3]]


def test_steps_without_bad_words_are_left_alone():
    table, logits = Banned(3, "cpu"), torch.zeros(1, 10)
    table.admit([Admit(1, "r", params([]), 0, 1, (), []), Admit(2, "s", params([[3]]), 0, 1, (), [1])])
    assert table.close(rows(1), table.before(torch.tensor([1])), logits) is logits
    table.admit([Admit(2, "t", params([]), 0, 1, (), [])])
    assert not table.concern(rows(1, 2))


def oracle(model, prompt: list[int], n: int, banned: list[list[int]]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            hidden, _ = model(torch.tensor(tokens), Context.packed([len(tokens)]))
            logits = model.logits(hidden[-1])
            logits[list(closed(tokens[len(prompt) :], banned))] = float("-inf")
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def answers(made, prompts, wishes) -> dict[str, list[int]]:
    requests = [
        Request(id=str(i), prompt=p, params=params(w)) for i, (p, w) in enumerate(zip(prompts, wishes, strict=True))
    ]
    out = run(made, [(i, request) for i, request in enumerate(requests)])
    return {id: [token for delta in deltas for token in delta.token_ids] for id, deltas in out.items()}


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("pages", [200, 6], ids=["roomy", "preempted"])
def test_an_engine_never_says_them_and_changes_nothing_else(model, overlap: bool, pages: int):
    draw = random.Random(1)
    prompts = [[draw.randrange(512) for _ in range(n)] for n in (3, 17, 30)]
    free = [oracle(model, prompt, 24, []) for prompt in prompts]
    wishes = [[free[0][2:3], free[0][5:8], free[0][10:14]], [], [free[2][4:6], [9, *free[2][:1]]]]
    made = engine(model, overlap=overlap, pages=pages, step_tokens=16)
    found = answers(made, prompts, wishes)
    assert found == {str(i): oracle(model, p, 24, w) for i, (p, w) in enumerate(zip(prompts, wishes, strict=True))}
    assert found["1"] == free[1] and found["0"] != free[0] and found["2"] != free[2]
    assert (made.stats().preemptions > 0) == (pages == 6)


def test_a_word_that_begins_in_the_prompt_is_none(model):
    prompt = [5, 6, 7]
    free = oracle(model, prompt, 4, [])
    assert answers(engine(model), [prompt], [[[7, free[0]]]])["0"][:4] == free


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("drafter", [None, NGram(2, 1, 4)], ids=["plain", "drafts"])
def test_where_nothing_is_left_open_the_answer_ends(model, drafter: NGram | None, temperature: float):
    wishes = {"allowed_token_ids": [30, 31], "temperature": temperature, "stop_token_ids": [40, 50]}
    banned = [[first, second] for first in (30, 31) for second in (30, 31)]
    request = Request(id="r", prompt=[30, 31, 30, 31], params=params(banned, **wishes))
    deltas = run(engine(model, drafter=drafter), [(0, request)])["r"]
    first, second = [token for delta in deltas for token in delta.token_ids]
    assert first in (30, 31) and second == 40
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", 40)


def test_if_nothing_can_end_the_answer_bad_words_do_not_count(model):
    request = Request(id="r", prompt=[5, 6, 7], params=params([[30]], allowed_token_ids=[30], max_tokens=3))
    deltas = run(engine(model), [(0, request)])["r"]
    assert [token for delta in deltas for token in delta.token_ids] == [30, 30, 30]
    assert deltas[-1].finish_reason == "length"


def test_ids_must_be_in_the_vocabulary(model):
    with pytest.raises(RequestError) as error:
        engine(model).submit(Request(id="r", prompt=[1], params=params([[3, 512]])))
    assert error.value.param == "bad_words"
    with pytest.raises(RequestError):
        params([[]])
