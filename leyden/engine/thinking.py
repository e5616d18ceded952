"""Thinking budgets: where one is spent, the tokens that end thinking take the place of what was sampled.

All of it is on the device, because with async scheduling the host learns a token only when the next one is under way.
Two positions per slot say everything, and follow from nothing but the tokens before them:

    due    from here on the budget is spent: thinking ends behind the first token that ends a line
    cut    here the forced tokens begin; due + grace, unless the end of a line brings it nearer

Both are FAR while there is no thinking. Thinking that begins again gets the whole budget again.
"""

import torch
from torch import Tensor

from leyden.types import Admit, Markers, Row

FAR = 2**62
_MOST = 2**32  # tokens; no context is longer
_NEUTRAL = Markers(opens=None, ends=(), forced=(0,))


class Budgets:
    """A table row per slot. A step without a budget costs nothing."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str):
        self._vocab_size = vocab_size
        self._device = device
        self._budgeted: set[int] = set()
        # which markers, due, cut, budget, grace
        self._slots = torch.tensor([[0, FAR, FAR, 0, 0]], device=device).repeat(slots, 1)
        # Nearly all requests have the same markers: they are kept once, and numbered. Number 0 never opens anything.
        self._numbers: dict[Markers, int] = {}
        self._upload(_NEUTRAL)

    def admit(self, admits: list[Admit]) -> None:
        """Fill the rows of sequences that start, or that go on after a pause."""
        rows = {a.slot: [0, FAR, FAR, 0, 0] for a in admits if a.slot in self._budgeted}
        self._budgeted -= rows.keys()
        for a in admits:
            if a.params.budgeted:
                rows[a.slot] = self._row(a)
                self._budgeted.add(a.slot)
        if rows:
            self._slots[list(rows)] = torch.tensor(list(rows.values()), device=self._device)

    def concern(self, rows: list[Row]) -> bool:
        """Whether any of the rows has a budget."""
        return any(row.slot in self._budgeted for row in rows)

    def apply(
        self,
        rows: list[Row],
        slots: Tensor,
        positions: Tensor,
        before: Tensor,
        tokens: Tensor,
        alive: Tensor | None = None,
    ) -> Tensor:
        """What stands at `positions`: the sampled `tokens`, or forced ones. `before` is what stands in front of them.

        Tensors are int64 [S], one entry for each of `rows`; rows that are not `alive` (bool [S]) stay where they are.
        """
        if not self.concern(rows):
            return tokens
        number, due, cut, budget, grace = self._slots[slots].unbind(-1)
        ends_line = self._line_ends[number, before] & (positions >= due)
        cut = torch.where(ends_line, torch.minimum(cut, positions), cut)
        at = (positions - cut).clamp(0, self._forced.shape[1] - 1)
        tokens = torch.where(positions >= cut, self._forced[number, at], tokens)
        begins = (tokens == self._opens[number]) & (due == FAR)
        ends = self._ends[number, tokens]
        due = torch.where(begins, positions + 1 + budget, torch.where(ends, FAR, due))
        cut = torch.where(begins, due + grace, torch.where(ends, FAR, cut))
        after = torch.stack((number, due, cut, budget, grace), -1)
        self._slots[slots] = after if alive is None else torch.where(alive[:, None], after, self._slots[slots])
        return tokens

    def _row(self, a: Admit) -> list[int]:
        """Where a sequence stands after a.tokens."""
        params, thinking = a.params, a.params.thinking
        assert thinking is not None and params.thinking_token_budget is not None and a.tokens
        markers, budget = thinking.markers, min(params.thinking_token_budget, _MOST)
        grace = min(params.thinking_token_grace, _MOST) if budget else 0
        due = max(a.prompt_len, a.prompt_len - thinking.spent + budget) if thinking.open else FAR
        for position in range(a.prompt_len, len(a.tokens)):
            token = a.tokens[position]
            if token in markers.ends:
                due = FAR
            elif token == markers.opens and due == FAR:
                due = position + 1 + budget
        cut = FAR
        if due < FAR:
            line_ends = frozenset(markers.line_ends)
            over = range(due, min(due + grace, len(a.tokens)))
            cut = next((p for p in over if a.tokens[p - 1] in line_ends), due + grace)
        return [self._number(markers), due, cut, budget, grace]

    def _number(self, markers: Markers) -> int:
        if markers not in self._numbers:
            self._upload(markers)
        return self._numbers[markers]

    def _upload(self, markers: Markers) -> None:
        self._numbers[markers] = len(self._numbers)
        every = list(self._numbers)
        longest = max(len(m.forced) for m in every)
        forced = [[*m.forced, *(0 for _ in range(longest - len(m.forced)))] for m in every]
        self._forced = torch.tensor(forced, device=self._device)
        self._opens = torch.tensor([-1 if m.opens is None else m.opens for m in every], device=self._device)
        self._ends = self._among([m.ends for m in every])
        self._line_ends = self._among([m.line_ends for m in every])

    def _among(self, every: list[tuple[int, ...]]) -> Tensor:
        """bool [markers, V]: whether an id is one of them."""
        table = torch.zeros(len(every), self._vocab_size, dtype=torch.bool)
        for row, ids in zip(table, every, strict=True):
            row[list(ids)] = True
        return table.to(self._device)
