"""Drafters that follow a script, and check on the way what the engine tells them."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.ops.rows import Rows
from leyden.spec.drafter import Draft, Heads, Pick, Seen


class Scripted:
    """Knows the texts that will come, and proposes what `rule` makes of them.

    rule(text, position, step): the draft for a position, given the text that has the right token there, if it goes on.
    """

    taps: tuple[int, ...] = ()
    steady = False

    def __init__(self, width: int, texts: list[list[int]], rule: "Rule", lookahead: int = 0):
        self.width, self.lookahead, self.rule, self.texts = width, lookahead, rule, texts
        self.step = 0
        self.history: dict[int, tuple[int, list[int]]] = {}  # slot -> (tokens that were cached, those seen since)
        self.promised: dict[int, tuple[int, int]] = {}  # slot -> (position, the token that a step said would be there)

    def observe(self, seen: Seen) -> None:
        self.step += 1
        assert len(seen.tokens) == len(seen.following) == len(seen.hidden) == len(seen.ctx.positions)
        assert len(seen.taps) == len(self.taps)
        self.seen = seen
        start = 0
        for _, rows, _ in seen.ctx.parts():
            for n, past, slot in zip(rows.lens, rows.past.tolist(), rows.slots.tolist(), strict=True):
                tokens = seen.tokens[start : start + n].tolist()
                assert seen.ctx.positions[start : start + n].tolist() == list(range(past, past + n))
                first, known = self.history.get(slot, (past, []))
                if not first <= past <= first + len(known):
                    first, known = past, []
                position, token = self.promised.pop(slot, (0, 0))
                if position == past and first < past:
                    assert token == tokens[0], "a step was told that another token would follow"
                self.promised[slot] = (past + n, int(seen.following[start + n - 1]))
                self.history[slot] = (first, known[: past - first] + tokens)
                start += n
        assert start == len(seen.tokens)

    def draft(self, heads: Heads, count: int, pick: Pick) -> Draft:
        assert 1 <= count <= self.width
        assert self.seen.following[heads.ends].tolist() == heads.anchors.tolist()
        assert (self.seen.ctx.positions[heads.ends] + 1).tolist() == heads.positions.tolist()
        rows = []
        for slot, anchor, position, pages in zip(
            heads.slots.tolist(), heads.anchors.tolist(), heads.positions.tolist(), heads.pages, strict=True
        ):
            first, known = self.history[slot]
            known = known[: position - first] + [anchor]
            self.promised[slot] = (position, anchor)
            self.history[slot] = (first, known[:-1])
            page = self.seen.ctx.pool.shape.page
            assert bool((pages[: -(-(position + self.lookahead) // page)] > 0).all()), "a page is not mapped"
            text = next((t for t in self.texts if t[first : position + 1] == known), [])
            rows.append([self.rule(text, position + 1 + i, self.step) for i in range(count)])
        return Draft(torch.tensor(rows))


Rule = Callable[[list[int], int, int], int]


def perfect(text: list[int], position: int, step: int) -> int:
    return text[position] if position < len(text) else 0


def wrong(text: list[int], position: int, step: int) -> int:
    return (perfect(text, position, step) + 1) % 7


def nothing(text: list[int], position: int, step: int) -> int:
    return -1


def half(text: list[int], position: int, step: int) -> int:
    """Right or wrong by a coin that the position and the step throw."""
    return (perfect if random.Random(position * 1009 + step).random() < 0.7 else wrong)(text, position, step)


def odd(text: list[int], position: int, step: int) -> int:
    return perfect(text, position, step) if step % 2 else -1


def garbage(text: list[int], position: int, step: int) -> int:
    return [10**6, -7, 2**40, perfect(text, position, step)][(position + step) % 4]


def raising(text: list[int], position: int, step: int) -> int:
    if step % 3:
        raise RuntimeError("a drafter's own trouble")
    return perfect(text, position, step)


def right_for(j: int) -> Rule:
    """Right at j positions out of j + 1."""
    return lambda text, position, step: (wrong if position % (j + 1) == j else perfect)(text, position, step)


class Twin(Scripted):
    """Draws from the target's own logits, as far as the whole text up to there gives them again."""

    def __init__(self, width: int, logits: Callable[[list[int]], Tensor]):
        super().__init__(width, [], nothing)
        self.logits = logits

    def draft(self, heads: Heads, count: int, pick: Pick) -> Draft:
        super().draft(heads, count, pick)
        texts = [
            self.history[slot][1][:position] + [anchor]
            for slot, anchor, position in zip(
                heads.slots.tolist(), heads.anchors.tolist(), heads.positions.tolist(), strict=True
            )
        ]
        drafts = []
        for i in range(count):
            drafts.append(pick(torch.stack([self.logits(text) for text in texts]), i))
            texts = [[*text, token] for text, token in zip(texts, drafts[-1].tolist(), strict=True)]
        return Draft(torch.stack(drafts, 1))


class Recurrent:
    """The MTP module of a model, step after step, with keys in the pool behind those of the model."""

    taps: tuple[int, ...] = ()
    steady = True

    def __init__(self, width: int, model: Nemotron):
        self.width, self.lookahead, self.model = width, width - 1, model

    def observe(self, seen: Seen) -> None:
        self.pool = seen.ctx.pool
        self.out = self.model.mtp(seen.hidden, self.model.embed(seen.following), seen.ctx)

    def draft(self, heads: Heads, count: int, pick: Pick) -> Draft:
        hidden, drafts = self.out[heads.ends], []
        for i in range(count):
            if drafts:
                hidden = self.model.mtp(hidden, self.model.embed(drafts[-1]), self._single(heads, i - 1))
            drafts.append(pick(self.model.logits(hidden), i))
        return Draft(torch.stack(drafts, 1))

    def _single(self, heads: Heads, i: int) -> Context:
        """A token of each sequence, i places behind its newest one."""
        rows = len(heads.slots)
        starts, past = torch.arange(rows + 1, dtype=torch.int32), heads.positions + i
        narrow = Rows((1,) * rows, starts, past, heads.slots.int(), heads.pages)
        wide = Rows((), starts[:1], past[:0], narrow.slots[:0], heads.pages[:0])
        return Context(narrow, wide, past, self.pool)
