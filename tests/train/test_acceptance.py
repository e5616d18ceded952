import numpy as np
import pytest
import torch

from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.train.acceptance import acceptance
from leyden.train.batches import Corpus
from leyden.train.trainer import Options, Trainer
from tests.train.examples import corpus, model


def drafts_after(net: Nemotron, tokens: list[int], place: int, count: int) -> list[int]:
    """Greedy drafts for the tokens after tokens[place]: the module runs over all known pairs, then over its own."""
    known = torch.tensor(tokens[: place + 1])
    hidden, _ = net(known, Context.packed([place + 1]))
    states, following, found = list(hidden[:place]), tokens[1 : place + 1], []
    for _ in range(count):
        ctx = Context.packed([len(states)])
        states.append(net.mtp(torch.stack(states), net.embed(torch.tensor(following)), ctx)[-1])
        found.append(int(net.logits(states[-1]).argmax()))
        following.append(found[-1])
    return found


@pytest.mark.parametrize("batch_tokens", [40, 1000])
@torch.no_grad()
def test_counts_equal_drafting_place_by_place(batch_tokens: int) -> None:
    data = corpus(8, longest=20)
    with torch.enable_grad():  # half learned: some drafts are right, some are not
        trainer = Trainer(model(), data, Options(steps=60, batch_tokens=200, lr=1e-2, warmup=5, optimizer="muon"))
        for _ in range(25):
            trainer.step()
    net = trainer.model
    steps = tokens = places = 0
    hits = np.zeros(3)
    for i in range(len(data)):
        span = slice(*data.starts[i : i + 2])
        ids, first = data.tokens[span].tolist(), int(np.flatnonzero(data.learn[span])[0])
        counts = {}
        for place in range(first, len(ids) - 1):
            drafted, wanted = drafts_after(net, ids, place, 3), ids[place + 1 : place + 4]
            counts[place] = 0
            while counts[place] < len(wanted) and drafted[counts[place]] == wanted[counts[place]]:
                counts[place] += 1
        at = first
        while at < len(ids) - 1:
            steps, at = steps + 1, at + 1 + counts[at]
        tokens += len(ids) - 1 - first
        places += len(counts)
        hits += [sum(count >= depth for count in counts.values()) for depth in (1, 2, 3)]
    found = acceptance(net, data, 3, batch_tokens)
    assert 0 < hits[2] < hits[0] < places, "the model must be neither ignorant nor perfect for this to tell anything"
    assert (found.steps, found.tokens) == (steps, tokens)
    assert found.accepted == pytest.approx((hits / places).tolist())
    assert found.tokens_per_step == tokens / steps
    assert net.training


def test_answers_of_one_example_are_separate_and_the_first_token_is_no_answer() -> None:
    data = Corpus.collect(
        [([1, 2, 3, 4, 5, 6, 7], [True, True, True, False, False, True, True]), ([8, 9], [False, True])]
    )
    found = acceptance(model(), data, 2, 100)
    assert found.tokens == 1 + 1, "of answers 2 3, 6 7 and 9, each without its first token"
