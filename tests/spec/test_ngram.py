"""Prompt lookup against a plain search, and over pages."""

import time

import numpy as np
import pytest
import torch

from leyden.model.nemotron import Nemotron
from leyden.spec.ngram import NGram, look_up
from tests import batches
from tests.spec.harness import PAGE, Sequences, journey, pool
from tests.train.examples import CONFIG


def plain(text: list[int], count: int, least: int, most: int) -> list[int]:
    for n in range(most, least - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):  # text[:end] ends with the n-gram
            if text[end - n : end] == text[len(text) - n :]:
                text = list(text)
                for _ in range(count):
                    text.append(text[end])
                    end += 1
                return text[-count:]
    return [-1] * count


def texts(random: np.random.Generator, count: int, longest: int) -> list[list[int]]:
    """Of few different tokens, so that much repeats itself."""
    return [random.integers(0, random.integers(1, 5), random.integers(1, longest)).tolist() for _ in range(count)]


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 4), (2, 3), (3, 3), (5, 40)])
def test_the_longest_match_and_of_several_the_last(least: int, most: int):
    random = np.random.default_rng(least + most)
    for count in (1, 4):
        rows = texts(random, 60, 30)
        grid = torch.from_numpy(random.integers(0, 5, (60, 30))).int()  # behind a text there is anything
        for row, text in zip(grid, rows, strict=True):
            row[: len(text)] = torch.tensor(text)
        lengths = torch.tensor([len(text) for text in rows], dtype=torch.int32)
        found = look_up(grid, lengths, count, least, most).tolist()
        assert found == [plain(text, count, least, most) for text in rows]


def test_what_repeats_itself_is_continued_beyond_the_end():
    text = torch.tensor([[7, 1, 2, 3, 1, 2, 3, 1]], dtype=torch.int32)
    assert look_up(text, torch.tensor([8]), 7, 2, 5).tolist() == [[2, 3, 1, 2, 3, 1, 2]]


@pytest.fixture(scope="module")
def model() -> Nemotron:
    made = Nemotron(CONFIG, torch.float32).eval().requires_grad_(False)
    batches.fill(made)
    return made


def test_over_pages(model: Nemotron):
    """Chunked prompts, ragged steps, wrong drafts written over."""
    random = np.random.default_rng(0)
    known = {slot: random.integers(0, 3, n).tolist() for slot, n in ((1, 50), (2, 41), (3, 60))}
    sequences = Sequences(model, NGram(4, 1, 3), pool(model), known)
    found = 0
    for slots, draft in journey(sequences, 4, seed=0):
        for slot, tokens in zip(slots, draft.tokens.tolist(), strict=True):
            assert tokens == plain(known[slot][: sequences.done[slot] + 1], 4, 1, 3)
            found += tokens != [-1] * 4
    assert found > 20


def test_a_cached_prefix_is_known(model: Nemotron):
    cache = pool(model)
    first = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    before = Sequences(model, NGram(3, 2, 3), cache, {1: first})
    before.step({1: 13})
    pages = 8 // PAGE
    cache.tables[2, :pages] = cache.tables[1, :pages]
    after = Sequences(model, before.drafter, cache, {2: [*first[:8], 20, 2, 3, 4]})
    after.done[2] = 8
    after.step({2: 3})
    assert after.draft([2], 3).tokens.tolist() == [[5, 6, 7]]


def test_a_million_tokens_are_searched_in_a_moment():
    text = torch.arange(2**20, dtype=torch.int32)[None] % 1000003
    text[0, -3:] = torch.tensor([500, 501, 502])
    started = time.perf_counter()
    assert look_up(text, torch.tensor([2**20]), 3, 2, 5).tolist() == [[503, 504, 505]]
    assert time.perf_counter() - started < 3
