"""Blocks of drafts over packed batches, their loss and their acceptance, against one block at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from leyden import ops
from leyden.model.context import Context
from leyden.model.drafters import DrafterNetwork
from leyden.model.nemotron import Nemotron
from leyden.train import drafting
from leyden.train.batches import Batch, Corpus
from leyden.train.blocks import Blocks
from leyden.train.drafter import DrafterOptions, DrafterTrainer
from leyden.train.drafting import Objective, draft_acceptance, draft_hidden, score, view
from tests.train.examples import CONFIG, corpus, model

DRAFTS = 3
METHODS = ["dflash", "dspark"]


def examples(count: int, seed: int = 0) -> Corpus:
    """Without the token that stands for masks."""
    data = corpus(count, seed, longest=16)
    return replace(data, tokens=np.minimum(data.tokens, CONFIG.vocab_size - 2))


def trainer(method: str, data: Corpus, **options: object) -> DrafterTrainer:
    quick = {"block_size": DRAFTS + 1, "taps": 2, "markov_rank": 8, "window": 7, "batch_tokens": 100, "warmup": 2}
    quick |= {"mask_token_id": CONFIG.vocab_size - 1, "steps": 40, "lr": 1e-2} | options
    return DrafterTrainer(model(mtp=False), data, DrafterOptions(method=method, **quick))  # type: ignore[arg-type]


@pytest.fixture(params=METHODS)
def trained(request: pytest.FixtureRequest) -> tuple[DrafterNetwork, Nemotron, Corpus]:
    """A drafter that is right now and then."""
    data = examples(8)
    made = trainer(request.param, data)
    for _ in range(9):
        made.step()
    return made.network.requires_grad_(False), made.target, data


def alone(network: DrafterNetwork, target: Nemotron, tokens: Tensor, anchor: int) -> Tensor:
    """Hidden states [drafts, H] of one block, from a target that has read nothing but the tokens before the anchor."""
    _, taps = target(tokens[:anchor], Context.packed([anchor]), network.config.target_layer_ids)
    context = network.context(taps, torch.arange(anchor))

    def attend(layer, q, k, v):
        keys, values = context[layer.index]
        options = torch.tensor([[anchor]]), layer.causal, layer.window, layer.attention_sink_bias
        return ops.block_attention_packed(
            q[None, None], k[None, None], v[None, None], keys[None], values[None], *options
        )[0, 0]

    block = network.block(tokens[anchor], DRAFTS)
    return network.predicting(network(block, anchor + torch.arange(len(block)), attend))


def drafts_after(network: DrafterNetwork, target: Nemotron, tokens: Tensor, anchor: int) -> list[int]:
    found, previous = [], tokens[anchor]
    for hidden in alone(network, target, tokens, anchor):
        logits = target.logits(hidden)
        if network.markov_head is not None:
            logits = logits + network.markov_head.markov_w2.weight @ network.markov_head.markov_w1.weight[previous]
        previous = logits.argmax()
        found.append(int(previous))
    return found


def test_blocks_of_a_batch_are_those_of_each_sequence_alone(trained: tuple[DrafterNetwork, Nemotron, Corpus]) -> None:
    network, target, data = trained
    batch = data.batch(range(5))
    seen, blocks = view(target, network.config.target_layer_ids, batch), Blocks.all(batch)
    hidden = draft_hidden(network, seen, blocks, DRAFTS).unflatten(0, blocks.anchors.shape)
    sequences, checked = seen.tokens.split(batch.lens), 0
    for row, column in zip(*np.nonzero(blocks.reach), strict=True):
        tokens, anchor = sequences[blocks.sequences[row]], int(blocks.anchors[row, column])
        expected = alone(network, target, tokens, anchor)
        torch.testing.assert_close(hidden[row, column], expected, atol=2e-5, rtol=1e-4)
        checked += 1
    assert checked > 10


def naive(network: DrafterNetwork, target: Nemotron, batch: Batch, objective: Objective) -> tuple[float, list[float]]:
    """The formulas, one draft after the other."""
    total = weight_sum = 0.0
    right: list[list[bool]] = [[] for _ in range(DRAFTS)]
    learned = [part > 0 for part in torch.from_numpy(batch.weights).split(batch.lens)]
    for tokens, learn in zip(torch.from_numpy(batch.tokens).split(batch.lens), learned, strict=True):
        rows = target.logits(target(tokens, Context.packed([len(tokens)]))[0])
        for anchor in range(1, len(tokens) - 1):
            if not (learn[anchor] and learn[anchor + 1]):
                continue
            for k, hidden in enumerate(alone(network, target, tokens, anchor), 1):
                place = anchor + k
                if place >= len(tokens) or not learn[place]:
                    break
                z, previous, loss = target.logits(hidden), tokens[place - 1], 0.0
                if network.markov_head is not None:
                    z = z + network.markov_head.markov_w2.weight @ network.markov_head.markov_w1.weight[previous]
                p, q = z.softmax(-1), rows[place - 1].softmax(-1)
                loss += objective.cross_entropy * -p[tokens[place]].log().item()
                distance = (p - q).abs().sum().item()
                loss += objective.distance * distance
                if objective.confidence:
                    c, wanted = network.confidence(hidden, previous).sigmoid().item(), 1 - 0.5 * distance
                    loss -= objective.confidence * (wanted * np.log(c) + (1 - wanted) * np.log(1 - c))
                weight = np.exp(-(k - 1) / objective.decay)
                total, weight_sum = total + weight * loss, weight_sum + weight
                right[k - 1].append(bool(p.argmax() == q.argmax()))
    return total / weight_sum, [float(np.mean(depth)) for depth in right]


@pytest.mark.parametrize("logits", [2**28, 1000])
def test_loss_is_the_formula(
    trained: tuple[DrafterNetwork, Nemotron, Corpus], logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "_LOGITS", logits)  # few logits at a time: many parts
    network, target, data = trained
    dspark = network.config.method == "dspark"
    objective = Objective(0.1, 0.9, 1.0, decay=2.0) if dspark else Objective(1.0, 0.0, 0.0)
    batch = data.batch(range(5))
    seen = view(target, network.config.target_layer_ids, batch)
    loss, right = score(network, target, seen, Blocks.all(batch), objective, DRAFTS)
    expected, shares = naive(network, target, batch, objective)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert right.tolist() == pytest.approx(shares)


@pytest.mark.parametrize("method", METHODS)
def test_parts_give_the_gradients_of_the_whole(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(method, examples(4))
    made.step_number = 20  # every term of the loss counts
    batch = made.packing.corpus.batch(range(4))
    gradients = []
    for logits in (2**28, 1000):
        monkeypatch.setattr(drafting, "_LOGITS", logits)
        seen = view(made.target, made.network.config.target_layer_ids, batch)
        score(made.network, made.target, seen, Blocks.all(batch), made.objective, DRAFTS)[0].backward()
        gradients.append({name: p.grad.clone() for name, p in made.network.named_parameters() if p.grad is not None})
        made.network.zero_grad()
    assert gradients[0].keys() == dict(made.network.named_parameters()).keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_without_an_answer_teaches_nothing_and_breaks_nothing(method: str) -> None:
    data = Corpus.collect([([1, 2, 3], [False, False, True])])
    made = trainer(method, data)
    before = {name: parameter.clone() for name, parameter in made.network.named_parameters()}
    assert not made.step().any()
    assert all(torch.equal(before[name], parameter) for name, parameter in made.network.named_parameters())
    assert draft_acceptance(made.network, made.target, data, DRAFTS, 100).tokens == 0


@pytest.mark.parametrize(("batch_tokens", "pairs"), [(20, 2**29), (1000, 2**29), (1000, 10_000)])
def test_counts_equal_drafting_place_by_place(
    trained: tuple[DrafterNetwork, Nemotron, Corpus], batch_tokens: int, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "_PAIRS", pairs)  # few pairs at a time: a few blocks of each sequence
    network, target, data = trained
    steps = tokens = 0
    hits, places = np.zeros(DRAFTS), 0
    for i in range(len(data)):
        span = slice(*data.starts[i : i + 2])
        ids = torch.from_numpy(data.tokens[span].astype(np.int64))
        at = first = int(np.flatnonzero(data.learn[span])[0])
        counts = {}
        for anchor in range(first, len(ids) - 1):
            drafted, wanted = drafts_after(network, target, ids, anchor), ids[anchor + 1 : anchor + 1 + DRAFTS].tolist()
            counts[anchor] = 0
            while counts[anchor] < len(wanted) and drafted[counts[anchor]] == wanted[counts[anchor]]:
                counts[anchor] += 1
        while at < len(ids) - 1:
            steps, at = steps + 1, at + 1 + counts[at]
        tokens += len(ids) - 1 - first
        places += len(counts)
        hits += [sum(count >= depth for count in counts.values()) for depth in range(1, DRAFTS + 1)]
    found = draft_acceptance(network, target, data, DRAFTS, batch_tokens)
    assert 0 < hits[-1] < hits[0] < places, "the drafter must be neither ignorant nor perfect for this to tell anything"
    assert (found.steps, found.tokens) == (steps, tokens)
    assert found.accepted == pytest.approx((hits / places).tolist())
