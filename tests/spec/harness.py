"""Runs the contract of drafters step by step around a target that knows no cache: what it says is beyond doubt.

A step feeds every sequence what it still has to read, cut as wanted, or its newest token and drafts behind it. The
target reads each whole sequence again for that; only the drafter lives on pages, and on what came before.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from leyden.cache.pool import Pool
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.spec.drafter import Draft, Drafter, Heads, Pick, Seen
from tests import batches

PAGE = 4


def pool(model: Nemotron, slots: int = 4, tokens: int = 96) -> Pool:
    """Every page holds garbage; page tables are in no order."""
    made = batches.pool(model.config, slots, tokens, PAGE)
    layers = model.config.pattern.count("*") + (model.config.mtp_pattern.count("*") if model.mtp else 0)
    made.kv = torch.full((layers, *made.kv.shape[1:]), 1e3)
    return made


def likeliest(logits: Tensor, i: int) -> Tensor:
    return logits.argmax(-1)


class Sequences:
    """Texts in slots of one pool, and a drafter that has seen as much of them as the target has read.

    The next token of a text is its anchor: known, but not read.
    """

    def __init__(self, model: Nemotron, drafter: Drafter, pool: Pool, texts: dict[int, list[int]]):
        self.model, self.drafter, self.pool, self.texts = model, drafter, pool, texts
        self.done = dict.fromkeys(texts, 0)  # tokens that the target has read
        self.ends: dict[int, int] = {}

    @torch.no_grad()
    def step(self, rows: dict[int, int | list[int]]) -> None:
        """slot -> how many tokens of its text to read, or drafts to try behind its anchor."""
        texts, done = self.texts, self.done
        fed = {
            slot: texts[slot][done[slot] :][:row] if isinstance(row, int) else [texts[slot][done[slot]], *row]
            for slot, row in rows.items()
        }
        narrow = [slot for slot in fed if len(fed[slot]) <= self.drafter.width + 1]  # come first, as in the engine
        wide = [slot for slot in fed if slot not in narrow]
        parts = [batches.rows(self.pool, [(slot, done[slot], len(fed[slot])) for slot in s]) for s in (narrow, wide)]
        outputs = [self._target(texts[slot][: done[slot]] + fed[slot], len(fed[slot])) for slot in narrow + wide]
        positions, following, start = [], [], 0
        for slot in narrow + wide:
            tokens, text = fed[slot], texts[slot][done[slot] :]
            positions.append(torch.arange(done[slot], done[slot] + len(tokens), dtype=torch.int32))
            right = next((i for i, (a, b) in enumerate(zip(tokens, text, strict=False)) if a != b), len(tokens))
            following += text[1 : right + 1] + [0] * (len(tokens) - right)  # behind a wrong draft nothing follows
            self.ends[slot] = start + right - 1
            start += len(tokens)
            done[slot] += right
        tokens = torch.tensor([token for slot in narrow + wide for token in fed[slot]])
        taps = [torch.cat(streams) for streams in zip(*(taps for _, taps in outputs), strict=True)]
        ctx = Context(*parts, torch.cat(positions), self.pool)
        self.drafter.observe(Seen(tokens, torch.tensor(following), torch.cat([h for h, _ in outputs]), taps, ctx))

    @torch.no_grad()
    def draft(self, slots: list[int], count: int, pick: Pick = likeliest) -> Draft:
        at = torch.tensor(slots)
        heads = Heads(
            slots=at,
            anchors=torch.tensor([self.texts[slot][self.done[slot]] for slot in slots]),
            positions=torch.tensor([self.done[slot] for slot in slots], dtype=torch.int32),
            ends=torch.tensor([self.ends[slot] for slot in slots]),
            pages=self.pool.tables[at],
            starts=torch.arange(len(slots) + 1, dtype=torch.int32),
        )
        return self.drafter.draft(heads, count, pick)

    def _target(self, tokens: list[int], last: int) -> tuple[Tensor, list[Tensor]]:
        hidden, taps = self.model(torch.tensor(tokens), Context.packed([len(tokens)]), self.drafter.taps)
        return hidden[-last:], [tap[-last:] for tap in taps]


def journey(sequences: Sequences, count: int, seed: int) -> Iterator[tuple[list[int], Draft]]:
    """Reads every text to its end: chunks of the first part, then steps whose drafts are right for a while.

    Some sequences sit a step out. After every step those that can draft do: their slots, and what they propose.
    """
    random = np.random.default_rng(seed)
    texts, done, vocab = sequences.texts, sequences.done, sequences.model.config.vocab_size
    prompt = {slot: len(text) // 3 for slot, text in texts.items()}
    while going := [slot for slot in texts if done[slot] + count + 2 < len(texts[slot])]:
        rows: dict[int, int | list[int]] = {}
        for slot in going:
            if done[slot] < prompt[slot]:
                rows[slot] = int(random.integers(1, prompt[slot] - done[slot] + 1))
            elif random.random() < 0.8:
                right, tried = random.integers(0, count + 1, 2)
                ahead = texts[slot][done[slot] + 1 :][: int(tried)]
                rows[slot] = [t if i < right else (t + 1) % vocab for i, t in enumerate(ahead)]
        if rows:
            sequences.step(rows)
            if slots := [slot for slot in random.permutation(list(rows)).tolist() if done[slot] >= prompt[slot]]:
                yield slots, sequences.draft(slots, count)
