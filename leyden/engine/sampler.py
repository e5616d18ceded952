"""Sampling parameters on the device, one table row per slot, and the way from logits to the step's tokens."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from leyden import ops
from leyden.engine.grammar import Allowed
from leyden.engine.thinking import Budgets
from leyden.engine.transfer import Readback, upload
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
    """Owns `last`, the token every slot sampled last, from which the next step reads its input on the device."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device | str):
        self._vocab_size = vocab_size
        self._device = device
        self.last = torch.zeros(slots, dtype=torch.int64, device=device)
        self._budgets = Budgets(slots, vocab_size, device)
        self._floats = torch.zeros(slots, len(_COLUMNS), device=device)
        self._ints = torch.zeros(slots, 2, dtype=torch.int64, device=device)  # top_k, seed
        self._masks: dict[int, _Mask] = {}
        self._logprobs: dict[int, int] = {}  # slot -> k
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
        self._ints[slots] = upload(ints, self._device)
        for a in admits:
            self._admit_one(a)
        self._budgets.admit(admits)

    def _admit_one(self, a: Admit) -> None:
        params, slot = a.params, a.slot
        if a.tokens:
            self.last[slot] = a.tokens[-1]
        for table, value in ((self._logprobs, params.logprobs), (self._prompt_logprobs, params.prompt_logprobs)):
            table.pop(slot, None)
            if value is not None:
                table[slot] = self._vocab_size if value < 0 else value
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
        """Sample one token for each of `rows`.

        slots int64 [S]; positions int64 [S]: where the sampled token will stand; logits fp32 [S, V], left as they are.
        """
        raw = logits
        logits = self._adjust(rows, slots, positions, logits)
        if allowed is not None:
            logits = _constrain(raw, logits, allowed)
        tokens = self.draw(slots, positions, logits)
        tokens = self._budgets.apply(rows, slots, positions, self.last[slots], tokens)
        self.last[slots] = tokens
        counted = [i for i, row in enumerate(rows) if row.slot in self._penalized]
        if counted and self._counts is not None and self._seen is not None:
            self._counts[slots[counted], tokens[counted]] += 1
            self._seen[slots[counted], tokens[counted]] = True
        wanted = {i: self._logprobs[row.slot] for i, row in enumerate(rows) if row.slot in self._logprobs}
        values = None
        if wanted:
            at = list(wanted)
            values = ops.logprobs(raw[at], tokens[at], max(wanted.values()))
        return Drawn(tokens, wanted, values)

    def draw(self, slots: Tensor, positions: Tensor, logits: Tensor) -> Tensor:
        """int64 [S]: what temperature, min_p, top_k and top_p make of the logits."""
        temperature, top_p, min_p = ops.take(self._floats, slots)[:, :3].unbind(-1)
        top_k, seed = ops.take(self._ints, slots).unbind(-1)
        return ops.sample(logits, temperature, top_k, top_p, min_p, seed, positions)

    def plain(self, rows: list[Row]) -> bool:
        """Whether nothing but draw() decides over these rows, and nobody wants to know log-probabilities."""
        special = self._masks.keys() | self._penalized | self._logprobs.keys()
        return special.isdisjoint(row.slot for row in rows) and not self._budgets.concern(rows)

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
    at = allowed.rows
    closed = ~allowed.unpack(logits.shape[1], logits.device)
    wanted = logits[at].masked_fill(closed, float("-inf"))
    nothing = wanted.amax(-1, keepdim=True) == float("-inf")
    logits = logits.clone() if logits is raw else logits
    logits[at] = torch.where(nothing, raw[at].masked_fill(closed, float("-inf")), wanted)
    return logits


@dataclass(slots=True)
class Drawn:
    """Sampled tokens on their way to the host."""

    tokens: Tensor  # int64 [S]
    wanted: dict[int, int]  # row of the S -> k, where log-probabilities were asked for
    values: tuple[Tensor, Tensor, Tensor, Tensor] | None  # what ops.logprobs gave for those rows
    _copies: list[Readback] = field(init=False)

    def __post_init__(self) -> None:
        self._copies = [Readback(tensor) for tensor in (self.tokens, *(self.values or ()))]

    def read(self) -> list[Sampled]:
        """Waits for the device."""
        tokens, *values = (copy.tolist() for copy in self._copies)
        results = [Sampled(token) for token in tokens]
        if values:
            entries = _entries([tokens[i] for i in self.wanted], list(self.wanted.values()), values)
            for i, entry in zip(self.wanted, entries, strict=True):
                results[i].logprobs = entry
        return results


def _entries(tokens: list[int], ks: list[int], values: list[list[Any]]) -> list[TokenLogprobs]:
    own, rank, top_ids, top = values
    return [
        TokenLogprobs(token, own[i], rank[i], top_ids[i][:k], top[i][:k])
        for i, (token, k) in enumerate(zip(tokens, ks, strict=True))
    ]
