"""Bad words: the last token of a banned sequence is closed where the tokens before it are the rest of the sequence.

All of it is on the device, because with async scheduling the host learns a token only when the next one is under way:
a table keeps the newest tokens of every slot, and the sequences of a step's rows are compared with them at once. Only
the answer counts: a sequence that begins in the prompt is not banned (as in vLLM).
"""

import torch
from torch import Tensor

from leyden.types import Admit, Row

_ANY = -2  # in front of a sequence that is shorter than the longest one
_NONE = -1  # there is no token yet


class Banned:
    """A table row per slot, and the sequences of the slots that have some. Steps without any cost nothing."""

    def __init__(self, slots: int, device: torch.device | str):
        self._device = device
        self._recent = torch.full((slots, 0), _NONE, dtype=torch.int64, device=device)  # [slots, K], newest last
        self._sequences: dict[int, Tensor] = {}  # slot -> int64 [sequences, K + 1]
        # Those of the rows that were sampled last: the same rows come many times.
        self._gathered: tuple[list[int], Tensor, Tensor] | None = None

    def admit(self, admits: list[Admit]) -> None:
        """Fill the rows of sequences that start, or that go on after a pause."""
        for a in admits:
            if self._sequences.pop(a.slot, None) is not None or a.params.banned:
                self._gathered = None
            if a.params.banned:
                self._widen(max(map(len, a.params.banned)) - 1)
                width = self._recent.shape[1]
                padded = [[_ANY] * (width + 1 - len(ids)) + ids for ids in a.params.banned]
                self._sequences[a.slot] = torch.tensor(padded, device=self._device)
                known = ([_NONE] * width + a.tokens[a.prompt_len :])[len(a.tokens) - a.prompt_len :]
                self._recent[a.slot] = torch.tensor(known, dtype=torch.int64, device=self._device)

    def concern(self, rows: list[Row]) -> bool:
        """Whether anything is banned in any of the rows."""
        return bool(self._sequences) and any(row.slot in self._sequences for row in rows)

    def before(self, slots: Tensor) -> Tensor:
        """int64 [S, K]: the tokens of the answers so far that matter to close(), newest last."""
        return self._recent[slots]

    def close(self, rows: list[Row], before: Tensor, logits: Tensor) -> Tensor:
        """logits fp32 [S, V] without the tokens that would complete a banned sequence; the ones given are left alone.

        rows    one for each row of the logits; several may be of one slot
        before  int64 [S, K]: what stands in front of each of them, from before() or with drafts behind that
        """
        if not self.concern(rows):
            return logits
        at, sequences = self._gather([row.slot for row in rows])
        prefixes, last = sequences[:, :-1], sequences[:, -1]
        met = ((prefixes == before[at]) | (prefixes == _ANY)).all(-1)
        closing = torch.where(met, float("-inf"), 0.0).to(logits.dtype)
        return logits.index_put((at, last), closing, accumulate=True)

    def follow(self, rows: list[Row], slots: Tensor, tokens: Tensor, counts: Tensor | None = None) -> None:
        """Take in what the answers of `slots` int64 [R], none of them twice, go on with: tokens int64 [R, W].

        counts  int64 [R]: how many of a row's tokens are taken, the first ones; None: all
        """
        if not self.concern(rows):
            return
        every, width = torch.cat((self._recent[slots], tokens), 1), self._recent.shape[1]
        if counts is None:
            self._recent[slots] = every[:, tokens.shape[1] :]
        else:
            self._recent[slots] = every.gather(1, counts[:, None] + torch.arange(width, device=every.device))

    def _gather(self, slots: list[int]) -> tuple[Tensor, Tensor]:
        """(index of the row int64 [N], sequence int64 [N, K + 1]) of all sequences of all rows."""
        if self._gathered is None or self._gathered[0] != slots:
            found = [(i, self._sequences[slot]) for i, slot in enumerate(slots) if slot in self._sequences]
            at = [i for i, sequences in found for _ in range(len(sequences))]
            every = torch.cat([sequences for _, sequences in found])
            self._gathered = slots, torch.tensor(at, device=self._device), every
        return self._gathered[1:]

    def _widen(self, width: int) -> None:
        """Make room for longer sequences. What is there needs no older tokens than it has."""
        if (more := width - self._recent.shape[1]) > 0:
            self._recent = torch.nn.functional.pad(self._recent, (more, 0), value=_NONE)
            pad = torch.nn.functional.pad
            self._sequences = {slot: pad(ids, (more, 0), value=_ANY) for slot, ids in self._sequences.items()}
            self._gathered = None
