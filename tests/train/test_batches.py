from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from leyden.errors import CheckpointError, ConfigError
from leyden.train.batches import Corpus, Packing
from tests.train.examples import corpus


def test_an_epoch_holds_every_example_once_within_the_budget() -> None:
    data = corpus(50)
    packing = Packing(data, 64, seed=3)
    for epoch in range(3):
        groups = packing.epoch(epoch)
        assert sorted(np.concatenate(groups).tolist()) == list(range(50))
        sizes = [data.lens[group].sum() for group in groups]
        assert max(sizes) <= 64
        following = [data.lens[group[0]] for group in groups[1:]]
        assert all(size + more > 64 for size, more in zip(sizes, following, strict=False)), "a batch closed early"


def test_order_depends_on_seed_and_epoch_only() -> None:
    orders = {
        (seed, epoch): np.concatenate(Packing(corpus(50), budget, seed).epoch(epoch)).tolist()
        for seed in (0, 1)
        for epoch in (0, 1)
        for budget in (64, 100)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    assert orders[0, 1] == np.concatenate(Packing(corpus(50), 500, 0).epoch(1)).tolist()


def test_batches_go_on_from_any_number() -> None:
    packing = Packing(corpus(20), 64, seed=0)
    whole = packing.batches(0)
    first = [next(whole) for _ in range(25)]
    for start in (0, 1, len(packing.epoch(0)), 17):
        again = packing.batches(start)
        for batch in first[start:]:
            same = next(again)
            assert same.lens == batch.lens and (same.tokens == batch.tokens).all()


def test_a_batch_is_its_examples_side_by_side() -> None:
    data = Corpus.collect([([1, 2, 3], [False, True, True]), ([4, 5], [False, True]), ([6], [True])])
    batch = data.batch([2, 0])
    assert batch.tokens.tolist() == [6, 1, 2, 3] and batch.lens == (1, 3)
    assert batch.weights.tolist() == [1, 0, 1, 1]
    assert data.batch([0], prompt_weight=0.25).weights.tolist() == [0.25, 1, 1]


def test_targets_stay_within_their_example() -> None:
    data = Corpus.collect([([1, 2, 3, 4], [False, True, False, True]), ([5], [True]), ([6, 7], [True, True])])
    batch = data.batch([0, 1, 2])
    places, ids, weights = batch.targets(1)
    assert list(zip(places, ids, strict=True)) == [(0, 2), (2, 4), (5, 7)]
    assert weights.tolist() == [1, 1, 1]
    places, ids, _ = batch.targets(2)
    assert list(zip(places, ids, strict=True)) == [(1, 4)]
    assert len(batch.targets(4)[0]) == 0


def test_an_example_longer_than_the_budget_is_refused() -> None:
    data = Corpus.collect([([1] * 5, [True] * 5), ([1] * 9, [True] * 9)])
    with pytest.raises(ConfigError, match=r"example 1 .* 9 tokens, the budget is 8"):
        Packing(data, 8, seed=0)


def test_no_example_is_refused() -> None:
    with pytest.raises(ConfigError, match="no example"):
        Corpus.collect([])


def test_a_corpus_comes_back_from_its_file(tmp_path: Path) -> None:
    data = corpus(7)
    data.save(tmp_path / "data.safetensors")
    again = Corpus.load(tmp_path / "data.safetensors")
    assert again.fingerprint == data.fingerprint != corpus(8).fingerprint
    assert (again.tokens == data.tokens).all() and (again.learn == data.learn).all()
    save_file({"weight": data.tokens}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="lacks learn, starts, tokens"):
        Corpus.load(tmp_path / "other.safetensors")
