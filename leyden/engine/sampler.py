"""Sampling parameters on the device, one table row per slot, and the way from logits to the step's tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leyden import ops
from leyden.engine.banned import Banned
from leyden.engine.grammar import Allowed
from leyden.engine.thinking import Budgets
from leyden.engine.transfer import Readback, upload
from leyden.spec.synthetic import Synthetic
from leyden.types import Admit, Row, Sampled, TokenLogprobs

_COLUMNS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(slots=True)
class _Mask:
    """What only few requests ask for, kept per slot on the side."""

    bias_ids: Tensor  # int64 [B]
    bias: Tensor  # fp32 [B]
    allowed: Tensor | None  # int64 [A]
    stop_ids: Tensor  # int64 [E], masked until the sequence has `open_at` tokens
    open_at: int


class Sampler:
    """Owns what the next step reads its input from on the device: `last`, the token that every slot sampled last, and
    `drafts`, what a drafter proposes behind it, -1 where it proposes nothing.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str, width: int = 0):
        """`width`: most drafts of a row."""
        self._vocab_size = vocab_size
        self._device = device
        self.last = torch.zeros(slots, dtype=torch.int64, device=device)
        self.drafts = torch.full((slots, width), -1, dtype=torch.int64, device=device)
        self.decree: Synthetic | None = None  # what says how many drafts are kept, in place of the target
        # Ids that end a sequence, -1 behind them, and where they begin to.
        self.stops = torch.full((slots, 1), -1, dtype=torch.int64, device=device)
        self._open_at = torch.zeros(slots, dtype=torch.int64, device=device)
        self._budgets = Budgets(slots, vocab_size, device)
        self._banned = Banned(slots, device)
        # one table with two views, so that a step takes its rows once: the columns, then top_k and seed
        self._table = torch.zeros(slots, len(_COLUMNS) // 2 + 2, dtype=torch.int64, device=device)
        self._floats, self._ints = self._views(self._table)
        self._masks: dict[int, _Mask] = {}
        self._logprobs: dict[int, int] = {}  # slot -> k
        self._logprob_ids: dict[int, list[int]] = {}
        self._prompt_logprobs: dict[int, int] = {}
        self._penalized: set[int] = set()
        self._counts: Tensor | None = None  # int32 [slots, V], made when the first request asks for penalties
        self._seen: Tensor | None = None  # bool [slots, V]

    def admit(self, admits: list[Admit]) -> None:
        """Fill the rows of the tables for sequences that start."""
        if not admits:
            return
        slots = upload([a.slot for a in admits], self._device)
        floats = [[float(getattr(a.params, name)) for name in _COLUMNS] for a in admits]
        self._floats[slots] = upload(floats, self._device)
        ints = [[a.params.top_k, a.seed] for a in admits]
        self._ints[slots] = upload(ints, self._device, torch.int64)
        self._admit_stops(admits, slots)
        for a in admits:
            self._admit_one(a)
        self._budgets.admit(admits)
        self._banned.admit(admits)

    def _admit_stops(self, admits: list[Admit], slots: Tensor) -> None:
        self.drafts.index_fill_(0, slots, -1)
        missing = max(len(a.stop_ids) for a in admits) - self.stops.shape[1]
        if missing > 0:
            self.stops = torch.cat([self.stops, self.stops.new_full((len(self.stops), missing), -1)], dim=1)
        width = self.stops.shape[1]
        stops = [[*a.stop_ids, *[-1] * (width - len(a.stop_ids))] for a in admits]
        self.stops[slots] = upload(stops, self._device)
        open_at = [0 if a.params.grammar is not None else a.prompt_len + a.params.min_tokens for a in admits]
        self._open_at[slots] = upload(open_at, self._device)

    def _admit_one(self, a: Admit) -> None:
        params, slot = a.params, a.slot
        if a.tokens:
            self.last[slot] = a.tokens[-1]
        for table, value in ((self._logprobs, params.logprobs), (self._prompt_logprobs, params.prompt_logprobs)):
            table.pop(slot, None)
            if value is not None:
                table[slot] = self._vocab_size if value < 0 else value
        self._logprob_ids.pop(slot, None)
        if params.logprob_token_ids:
            self._logprob_ids[slot] = params.logprob_token_ids
        self._masks.pop(slot, None)
        if params.logit_bias or params.allowed_token_ids is not None or params.min_tokens:
            allowed = params.allowed_token_ids
            self._masks[slot] = _Mask(
                bias_ids=torch.tensor(list(params.logit_bias), dtype=torch.int64, device=self._device),
                bias=torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=self._device),
                allowed=None if allowed is None else torch.tensor(allowed, device=self._device),
                stop_ids=torch.tensor(a.stop_ids, dtype=torch.int64, device=self._device),
                open_at=a.prompt_len + params.min_tokens,
            )
        self._penalized.discard(slot)
        if params.penalized:
            self._penalized.add(slot)
            self._count(a)

    def _count(self, a: Admit) -> None:
        size = (len(self.last), self._vocab_size)
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros(size, dtype=torch.int32, device=self._device)
            self._seen = torch.zeros(size, dtype=torch.bool, device=self._device)
        known = torch.tensor(a.tokens, dtype=torch.int64, device=self._device)
        self._counts[a.slot] = torch.bincount(known[a.prompt_len :], minlength=self._vocab_size)
        self._seen[a.slot] = False
        self._seen[a.slot, known] = True

    def sample(
        self, rows: list[Row], slots: Tensor, positions: Tensor, logits: Tensor, allowed: Allowed | None = None
    ) -> "Drawn":
        """Sample behind each of `rows`: the tokens that stand in the places of its drafts, as far as they are the same,
        and one more. So every token is the one that would have been drawn without drafts, with the noise of its place.

        slots int64 [R]; positions int64 [P]: where the tokens will stand, row by row, for a row with n drafts n + 1 of
        them; logits fp32 [P, V], left as they are.
        """
        width = max(row.drafts for row in rows)
        if not width:
            tokens = self._one(rows, slots, positions, logits, allowed)[:, None]
            places, accepted = torch.arange(len(rows), device=self._device)[:, None], torch.zeros_like(slots)
            return Drawn(tokens, accepted, self._values(rows, places, logits, tokens))
        drafts = np.array([row.drafts for row in rows])
        firsts = np.cumsum(drafts + 1) - drafts - 1
        # [R, width + 1]; behind its last place a row has that one again
        grid = firsts[:, None] + np.minimum(np.arange(width + 1), drafts[:, None])
        places = torch.from_numpy(grid).to(self._device, non_blocking=True)
        guesses = torch.where(places.diff(dim=1) > 0, self.drafts[slots, :width], -1)
        begins, before = positions[places[:, 0]], self.last[slots]
        running = ~self._ends(slots, begins[:, None] - 1, before[:, None])[:, 0]  # nothing is right behind the end

        if allowed is None and self.plain(rows):
            of = torch.from_numpy(np.repeat(np.arange(len(rows)), drafts + 1)).to(self._device, non_blocking=True)
            tokens = self.draw(slots[of], positions, logits)[places]
            tokens = self.decided(slots, tokens, guesses, begins)
        else:
            tokens = self._walk(rows, slots, positions, logits, allowed, grid, guesses, running)
        kept, counts, newest, *_ = self.accept(slots, tokens, guesses, before, begins)
        self.last[slots] = newest
        return Drawn(kept, counts.long() - 1, self._values(rows, places, logits, tokens))

    def decided(self, slots: Tensor, tokens: Tensor, guesses: Tensor, positions: Tensor) -> Tensor:
        """tokens [R, width + 1] as drawn, or as the decree has it, if there is one; positions [R]: of the first."""
        if self.decree is None or not guesses.shape[1]:
            return tokens
        return _decreed(tokens, guesses, self.decree.kept(slots, positions - 1)[:, None])

    def accept(
        self, slots: Tensor, tokens: Tensor, guesses: Tensor, before: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """See ops.accept; what ends a sequence is known here."""
        stops, open_at = ops.take(self.stops, slots), ops.take(self._open_at, slots)
        return ops.accept(tokens, guesses, before, positions, stops, open_at)

    def _walk(
        self,
        rows: list[Row],
        slots: Tensor,
        positions: Tensor,
        logits: Tensor,
        allowed: Allowed | None,
        grid: "np.ndarray[Any, Any]",
        guesses: Tensor,
        alive: Tensor,
    ) -> Tensor:
        """Place by place, because what may stand in one depends on those before it -> int64 [R, width + 1].

        A row lives on, and what is kept of it changes, as long as its drafts are right.
        """
        tokens = torch.zeros(grid.shape, dtype=torch.int64, device=self._device)
        for i in range(grid.shape[1]):
            at = [r for r, row in enumerate(rows) if row.drafts >= i]
            here = grid[at, i].tolist()
            some = allowed.at(here) if allowed is not None else None
            drawn = self._one([rows[r] for r in at], slots[at], positions[here], logits[here], some, alive[at])
            tokens[at, i] = drawn
            if i < guesses.shape[1]:
                ends = self._ends(slots, positions[grid[:, i]][:, None], tokens[:, i, None])[:, 0]
                alive = alive & (tokens[:, i] == guesses[:, i]) & ~ends
        return tokens

    def _one(
        self,
        rows: list[Row],
        slots: Tensor,
        positions: Tensor,
        raw: Tensor,
        allowed: Allowed | None,
        alive: Tensor | None = None,
    ) -> Tensor:
        """One token for each of `rows`, int64 [R]; only rows that are `alive` (bool [R]) count it as theirs."""
        adjusted = self._adjust(rows, slots, positions, raw)
        logits = self._banned.close(rows, self._banned.before(slots), adjusted)
        if allowed is not None:
            logits = _constrain(raw, logits, allowed)
        if logits is not raw:
            logits = self._or_end(slots, adjusted, logits)
        tokens = self.draw(slots, positions, logits)
        before = self.last[slots]
        tokens = self._budgets.apply(rows, slots, positions, before, tokens, alive)
        self.last[slots] = tokens if alive is None else torch.where(alive, tokens, before)
        self._banned.follow(rows, slots, tokens[:, None], None if alive is None else alive.long())
        counted = [i for i, row in enumerate(rows) if row.slot in self._penalized]
        if counted and self._counts is not None and self._seen is not None:
            at = slots[counted], tokens[counted]
            self._counts[at] += 1 if alive is None else alive[counted].int()
            self._seen[at] = True if alive is None else self._seen[at] | alive[counted]
        return tokens

    def _or_end(self, slots: Tensor, adjusted: Tensor, logits: Tensor) -> Tensor:
        """Where nothing is left open the answer ends. If nothing ends it (ignore_eos), its bad words do not count."""
        closed = logits.amax(-1, keepdim=True) == float("-inf")
        stop = self.stops[slots, :1]
        end = torch.full_like(logits, float("-inf")).scatter(1, stop.clamp(min=0), 0.0)
        return torch.where(closed, torch.where(stop >= 0, end, adjusted), logits)

    def _values(self, rows: list[Row], places: Tensor, logits: Tensor, tokens: Tensor) -> "_Values | None":
        """Log-probabilities of those rows that ask for them; places and tokens [R, width + 1]."""
        wanted = {i: self._logprobs[row.slot] for i, row in enumerate(rows) if row.slot in self._logprobs}
        if not wanted:
            return None
        at = list(wanted)
        values = ops.logprobs(logits[places[at].flatten()], tokens[at].flatten(), max(wanted.values()))
        asked = {i: ids for i, row in enumerate(rows) if (ids := self._logprob_ids.get(row.slot))}
        scores = {i: logits[places[i]].log_softmax(-1)[:, ids] for i, ids in asked.items()}
        return _Values(wanted, values, asked, scores)

    def _ends(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        """bool [R, n]: whether `tokens` at `positions` (int64 [R, n]) end the sequences in slots [R]."""
        stops = (tokens[..., None] == self.stops[slots][:, None]).any(-1)
        return stops & (positions >= self._open_at[slots][:, None])

    def pick(self, slots: Tensor, positions: Tensor) -> Callable[[Tensor, int], Tensor]:
        """How to draw drafts for anchors at `positions`: with the noise that the target will have in their places.

        Then a draft is right most often: where target and draft are nearly of one mind, they draw the same token.
        (Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding", 2024.)
        """
        return lambda logits, i: self.draw(slots, ops.ahead(positions, i + 2, torch.int64)[i + 1], logits)

    def draw(self, slots: Tensor, positions: Tensor, logits: Tensor) -> Tensor:
        """int64 [S]: what temperature, min_p, top_k and top_p make of the logits."""
        floats, ints = self._views(ops.take(self._table, slots))
        temperature, top_p, min_p = floats[:, :3].unbind(-1)
        top_k, seed = ints.unbind(-1)
        return ops.sample(logits, temperature, top_k, top_p, min_p, seed, positions)

    @staticmethod
    def _views(table: Tensor) -> tuple[Tensor, Tensor]:
        """(fp32 [R, columns], int64 [R, 2]) of rows of the table."""
        return table[:, :-2].view(torch.float32), table[:, -2:]

    def plain(self, rows: list[Row]) -> bool:
        """Whether nothing but draw() decides over these rows, and nobody wants to know log-probabilities."""
        special = self._masks.keys() | self._penalized | self._logprobs.keys()
        concerned = self._budgets.concern(rows) or self._banned.concern(rows)
        return special.isdisjoint(row.slot for row in rows) and not concerned

    def _adjust(self, rows: list[Row], slots: Tensor, positions: Tensor, logits: Tensor) -> Tensor:
        masked = [(i, self._masks[row.slot]) for i, row in enumerate(rows) if row.slot in self._masks]
        penalized = [i for i, row in enumerate(rows) if row.slot in self._penalized]
        if masked or penalized:
            logits = logits.clone()
        for i, mask in masked:
            logits[i].index_add_(0, mask.bias_ids, mask.bias)
            if mask.allowed is not None:
                closed = torch.ones_like(logits[i], dtype=torch.bool)
                closed[mask.allowed] = False
                logits[i].masked_fill_(closed, float("-inf"))
            early = positions[i] < mask.open_at
            logits[i, mask.stop_ids] = torch.where(early, float("-inf"), logits[i, mask.stop_ids])
        if penalized and self._counts is not None and self._seen is not None:
            at = slots[penalized]
            presence, frequency, repetition = self._floats[at, 3:].unbind(-1)
            logits[penalized] = ops.penalize(
                logits[penalized], self._counts[at], self._seen[at], presence, frequency, repetition
            )
        return logits

    def prompt_logprobs(self, row: Row, logits: Tensor) -> list[TokenLogprobs]:
        """Log-probabilities of the row's targets, logits fp32 [len(targets), V]. Waits for the device."""
        k = self._prompt_logprobs[row.slot]
        targets = torch.tensor(row.targets, device=self._device)
        values = [value.tolist() for value in ops.logprobs(logits, targets, k)]
        return _entries(row.targets, [k] * len(row.targets), values)


def _constrain(raw: Tensor, logits: Tensor, allowed: Allowed) -> Tensor:
    """Close what a grammar does not allow. If the request's other wishes have closed all the rest, they do not count.

    raw, logits  fp32 [S, V], before and after those wishes
    """
    at = allowed.places
    closed = ~allowed.unpack(logits.shape[1], logits.device)
    wanted = logits[at].masked_fill(closed, float("-inf"))
    nothing = wanted.amax(-1, keepdim=True) == float("-inf")
    logits = logits.clone() if logits is raw else logits
    logits[at] = torch.where(nothing, raw[at].masked_fill(closed, float("-inf")), wanted)
    return logits


def _decreed(tokens: Tensor, guesses: Tensor, kept: Tensor) -> Tensor:
    """tokens [R, width + 1], equal to guesses [R, width] at the first kept [R, 1] places, and different behind them."""
    width = guesses.shape[1]
    same = (torch.arange(width, device=tokens.device) < kept) & (guesses >= 0)
    other = torch.where(tokens[:, :width] == guesses, (guesses == 0).long(), tokens[:, :width])
    return torch.cat([torch.where(same, guesses, other), tokens[:, width:]], dim=1)


@dataclass(slots=True)
class _Values:
    """Log-probabilities on their way to the host, for all places of the rows that asked."""

    wanted: dict[int, int]  # row of the R -> k
    values: tuple[Tensor, Tensor, Tensor, Tensor]  # what ops.logprobs gave for their places, row after row
    asked: dict[int, list[int]]  # row -> ids that it wants to know instead of the top
    scores: dict[int, Tensor]  # their log-probabilities, fp32 [width + 1, ids]


@dataclass(slots=True)
class Drawn:
    """Sampled tokens on their way to the host."""

    tokens: Tensor  # int64 [R, width + 1]: those of a row, then -1
    accepted: Tensor  # int64 [R]: how many of them are drafts
    logprobs: _Values | None = None
    _copies: list[Readback] = field(init=False)

    def __post_init__(self) -> None:
        found = self.logprobs
        scores = () if found is None else (*found.values, *found.scores.values())
        self._copies = [Readback(tensor) for tensor in (self.tokens, *scores)]

    def read(self) -> list[Sampled]:
        """Waits for the device."""
        tokens, *rest = (copy.tolist() for copy in self._copies)
        results = [Sampled([token for token in row if token >= 0]) for row in tokens]
        if self.logprobs is not None:
            found, width = self.logprobs, self.tokens.shape[1]
            ks = [k for k in found.wanted.values() for _ in range(width)]
            entries = _entries([token for i in found.wanted for token in tokens[i]], ks, rest[:4])
            scores = dict(zip(found.asked, rest[4:], strict=True))
            for n, i in enumerate(found.wanted):
                own = entries[n * width : n * width + len(results[i].tokens)]
                if i in scores:
                    for entry, values in zip(own, scores[i], strict=False):
                        entry.top_ids, entry.top_logprobs = found.asked[i], values
                results[i].logprobs = own
        return results


def _entries(tokens: list[int], ks: list[int], values: list[list[Any]]) -> list[TokenLogprobs]:
    own, rank, top_ids, top = values
    return [
        TokenLogprobs(token, own[i], rank[i], top_ids[i][:k], top[i][:k])
        for i, (token, k) in enumerate(zip(tokens, ks, strict=True))
    ]
