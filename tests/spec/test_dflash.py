"""DFlash and DSpark over pages, against the packed forward pass that they were trained with."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from leyden.model.draft_checkpoint import load
from leyden.model.drafters import DrafterNetwork
from leyden.model.nemotron import Nemotron
from leyden.spec.dflash import DFlash
from leyden.testing.drafters import tiny
from leyden.train.batches import Batch
from leyden.train.blocks import ROW, Blocks
from leyden.train.drafting import draft_hidden, view
from tests import batches
from tests.spec.harness import Sequences, journey, likeliest, pool
from tests.spec.test_mtp import texts
from tests.train.examples import CONFIG

TARGET = replace(CONFIG, num_nextn_predict_layers=0)
# as published, and with what the other published one has
KINDS = {
    "dflash": ("dflash", {}),
    "dspark": ("dspark", {"sliding_window": 9}),
    "anchor first": ("dspark", {"sample_from_anchor": True, "sliding_window": 9}),
    "dflash with windows and sinks": (
        "dflash",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "attention_sink_bias": True},
    ),
}


@pytest.fixture(scope="module")
def model() -> Nemotron:
    made = Nemotron(TARGET, torch.float32).eval().requires_grad_(False)
    batches.fill(made, seed=3)
    return made


@pytest.fixture(params=KINDS)
def network(request: pytest.FixtureRequest, model: Nemotron, tmp_path: Path) -> DrafterNetwork:
    method, keys = KINDS[request.param]
    return made(model, tmp_path, method, **keys)


def made(model: Nemotron, folder: Path, method: str = "dspark", **keys: object) -> DrafterNetwork:
    tiny(folder, TARGET, method, **keys)
    return load(folder, model).requires_grad_(False)


def run(network: DrafterNetwork, model: Nemotron, texts: dict[int, list[int]], width: int, **options) -> Sequences:
    cache = pool(model)
    config = network.config
    shape = (config.num_hidden_layers, *cache.kv.shape[1:4], config.num_key_value_heads, config.head_dim)
    cache.draft = torch.full(shape, 1e3)
    return Sequences(model, DFlash(network, model, width, **options), cache, texts)


@torch.no_grad()
def packed(network: DrafterNetwork, model: Nemotron, text: list[int], anchor: int, count: int) -> Tensor:
    """Hidden states [count, H] of the block at one anchor, as training computes them."""
    tokens = np.array(text)
    batch = Batch(tokens=tokens, lens=(len(text),), weights=np.ones(len(text), dtype=np.float32))
    at = np.zeros((1, ROW), dtype=np.int64)
    at[0, 0] = anchor
    blocks = Blocks(np.zeros(1, dtype=np.int64), at, at, at)
    return draft_hidden(network, view(model, network.config.target_layer_ids, batch), blocks, count)[0]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_drafts_are_those_of_the_packed_block(network: DrafterNetwork, model: Nemotron, count: int):
    """Pitfalls 6, 8, 9, 10, 14 and 42: chunked prompts, ragged steps, wrong drafts written over, both layouts."""
    sequences = run(network, model, texts(count, 40, 33, 47), count)
    checked = 0
    for slots, draft in journey(sequences, count, seed=count):
        for slot, found in zip(slots, draft.tokens, strict=True):
            text, anchor = sequences.texts[slot], sequences.done[slot]
            logits = model.logits(packed(network, model, text, anchor, count))[None]
            expected = network.chain(logits, torch.tensor([text[anchor]]), lambda z: z.argmax(-1))[0]
            assert found.tolist() == expected[0].tolist()
            checked += 1
    assert checked > 20


def test_a_block_may_be_shorter_than_the_widest(network: DrafterNetwork, model: Nemotron):
    sequences = run(network, model, texts(0, 30), 7)
    sequences.step({1: 20})
    for count in (7, 2, 4):
        logits = model.logits(packed(network, model, sequences.texts[1], 20, count))[None]
        expected = network.chain(logits, torch.tensor([sequences.texts[1][20]]), lambda z: z.argmax(-1))[0]
        assert sequences.draft([1], count).tokens.tolist() == expected.tolist()


def test_drafts_are_drawn_one_after_the_other(model: Nemotron, tmp_path: Path):
    """pick() is told which draft it draws, and its choice decides over the next one's logits."""
    network = made(model, tmp_path)
    sequences, asked = run(network, model, texts(0, 30, 30), 3), []
    sequences.step({1: 20, 2: 9})

    def pick(logits: Tensor, i: int) -> Tensor:
        asked.append((i, logits))
        return logits.argmin(-1)

    found = sequences.draft([2, 1], 3, pick).tokens
    assert [i for i, _ in asked] == [0, 1, 2]
    hidden = packed(network, model, sequences.texts[1], 20, 3)
    expected = network.correct(model.logits(hidden[2]), found[1, 1])
    torch.testing.assert_close(asked[2][1][1], expected, atol=1e-4, rtol=1e-4)
    assert sequences.draft([2, 1], 3, likeliest).tokens.tolist() != found.tolist()


@pytest.mark.parametrize("reads", ["hidden", "markov"])
def test_confidence_of_the_head(model: Nemotron, tmp_path: Path, reads: str):
    network = made(model, tmp_path, enable_confidence_head=True, confidence_head_with_markov=reads == "markov")
    sequences = run(network, model, texts(0, 30), 3, confident=True)
    sequences.step({1: 20})
    draft = sequences.draft([1], 3)
    previous = torch.tensor([sequences.texts[1][20], *draft.tokens[0, :2].tolist()])
    expected = network.confidence(packed(network, model, sequences.texts[1], 20, 3), previous)
    assert draft.confidence is not None
    torch.testing.assert_close(draft.confidence[0], expected, atol=1e-4, rtol=1e-4)


def test_confidence_without_a_head_is_learned_and_costs_no_draft(model: Nemotron, tmp_path: Path):
    network = made(model, tmp_path)
    plain, learning = (run(network, model, texts(5, 90, 90), 3, confident=c) for c in (False, True))
    for (slots, a), (same, b) in zip(journey(plain, 3, 1), journey(learning, 3, 1), strict=True):
        assert slots == same and torch.equal(a.tokens, b.tokens) and a.confidence is None
        assert b.confidence is not None and b.confidence.shape == b.tokens.shape and b.confidence.isfinite().all()


def test_pitfall_36_windows_are_seen_or_not(model: Nemotron, tmp_path: Path):
    """What was written before the window is not read; without windows it is."""
    for kind, matters in (({}, False), ({"layer_types": ["full_attention"] * 2}, True)):
        network = made(model, tmp_path, sliding_window=9, **kind)
        sequences = run(network, model, texts(0, 60), 3)
        sequences.step({1: 50})
        before = first_logits(sequences)
        sequences.pool.draft[:, :, sequences.pool.tables[1, :3].long()] += 1
        assert torch.equal(before, first_logits(sequences)) != matters


def first_logits(sequences: Sequences) -> Tensor:
    found: list[Tensor] = []

    def pick(logits: Tensor, i: int) -> Tensor:
        found.append(logits)
        return logits.argmax(-1)

    sequences.draft([1], 3, pick)
    return found[0]
