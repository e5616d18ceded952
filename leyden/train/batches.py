"""Examples as token ids, and their order: ragged batches of a token budget, without padding.

The order is a function of (seed, epoch) alone, so a run can go on from any step with nothing but its number. An example
is never cut or dropped: one that is longer than the budget is refused.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from leyden.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Batch:
    """Whole examples side by side.

    tokens int64 [T]; weights fp32 [T]: how much it matters to predict the token at this place; lens: tokens of each.
    """

    tokens: np.ndarray
    weights: np.ndarray
    lens: tuple[int, ...]

    def targets(self, ahead: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is to be predicted `ahead` tokens in advance: (places int64 [n], ids int64 [n], weights fp32 [n]).

        The model's output at places[i] shall predict ids[i]. Both lie in one example, and the weight is above zero.
        """
        within = np.arange(len(self.tokens)) - np.repeat(np.cumsum(self.lens) - self.lens, self.lens)
        wanted = np.flatnonzero((self.weights > 0) & (within >= ahead))
        return wanted - ahead, self.tokens[wanted], self.weights[wanted]


@dataclass(frozen=True)
class Corpus:
    """Rendered examples, one after the other.

    tokens int32 [N]; learn bool [N]: is this a token the model shall write; starts int64 [examples + 1]: the examples'
    borders.
    """

    tokens: np.ndarray
    learn: np.ndarray
    starts: np.ndarray

    @classmethod
    def collect(cls, examples: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> "Corpus":
        """From pairs (ids, which of them are to be learned)."""
        ids, learn, lens = [], [], []
        for tokens, mask in examples:
            assert len(tokens) == len(mask)
            ids.append(np.asarray(tokens, dtype=np.int32))
            learn.append(np.asarray(mask, dtype=bool))
            lens.append(len(tokens))
        if not lens:
            raise ConfigError("the data holds no example")
        return cls(np.concatenate(ids), np.concatenate(learn), np.cumsum([0, *lens]))

    @classmethod
    def join(cls, parts: Sequence["Corpus"]) -> "Corpus":
        """The examples of all parts, in their order."""
        lens = np.concatenate([part.lens for part in parts])
        tokens, learn = (np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "learn"))
        return cls(tokens, learn, np.cumsum([0, *lens]))

    def save(self, file: Path) -> None:
        save_file({"tokens": self.tokens, "learn": self.learn, "starts": self.starts}, file)

    @classmethod
    def load(cls, file: Path) -> "Corpus":
        tensors = load_file(file)
        if missing := {"tokens", "learn", "starts"} - tensors.keys():
            raise CheckpointError(f"{file} is no file of rendered examples: it lacks {', '.join(sorted(missing))}")
        return cls(**{name: tensors[name] for name in ("tokens", "learn", "starts")})

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lens(self) -> np.ndarray:
        return np.diff(self.starts)

    @cached_property
    def fingerprint(self) -> str:
        """Same examples in the same order, same fingerprint."""
        return sha256(self.tokens.tobytes() + self.learn.tobytes() + self.starts.tobytes()).hexdigest()[:16]

    def batch(self, examples: Iterable[int], prompt_weight: float = 0.0) -> Batch:
        """The examples of these indices; tokens that are not to be learned count `prompt_weight` instead of 1."""
        spans = [slice(*self.starts[i : i + 2]) for i in examples]
        learn = np.concatenate([self.learn[span] for span in spans])
        return Batch(
            tokens=np.concatenate([self.tokens[span] for span in spans]).astype(np.int64),
            weights=np.where(learn, 1.0, prompt_weight).astype(np.float32),
            lens=tuple(span.stop - span.start for span in spans),
        )


@dataclass(frozen=True)
class Packing:
    """Cuts a corpus into batches of at most `budget` tokens, epoch after epoch, each in a new order."""

    corpus: Corpus
    budget: int
    seed: int
    prompt_weight: float = 0.0

    def __post_init__(self) -> None:
        longest = int(self.corpus.lens.argmax())
        if (length := self.corpus.lens[longest]) > self.budget:
            raise ConfigError(
                f"a batch must hold the longest example: example {longest} (counted from 0) has {length} tokens, "
                f"the budget is {self.budget}; raise --batch-tokens or leave it out"
            )

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """The examples of each batch of this epoch; every example occurs once."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.corpus))
        ends = np.cumsum(self.corpus.lens[order])
        groups, first, taken = [], 0, 0
        while first < len(order):
            last = int(np.searchsorted(ends, taken + self.budget, side="right"))
            groups.append(order[first:last])
            first, taken = last, int(ends[last - 1])
        return groups

    def batches(self, start: int) -> Iterator[Batch]:
        """Batch number `start` (counted over all epochs) and those after it, without end."""
        epoch = 0
        while start >= len(groups := self.epoch(epoch)):
            start -= len(groups)
            epoch += 1
        while True:
            for group in groups[start:]:
                yield self.corpus.batch(group, self.prompt_weight)
            epoch, start = epoch + 1, 0
            groups = self.epoch(epoch)
