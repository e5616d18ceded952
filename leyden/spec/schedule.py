"""How many drafts to try: with few sequences many, with many sequences few or none, and those that are likely first.

The host decides, from what steps took and what was kept of the drafts. No choice can change a text, only how soon it is
there. Source of budget and admit: the DSpark paper, algorithm 1 and what it says of its use in production.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log2

Speed = Callable[[int], float]  # tokens of a step -> such steps per second
Choice = tuple[int, int]  # (which drafter, drafts per sequence)
NONE: Choice = (0, 0)

_FADE = 0.1  # what a new measurement counts for
_KNOWN = 3  # measurements after which a number is taken for known
_STALE = 2000  # steps after which it is not any more
_TRIAL = 5  # steps of a trial; what the first one takes still depends on what was before
_LOSS = 0.02  # share of the time that trials may cost
_PRIOR = 0.7, 4.0  # drafts are kept so often, before anything is known; what that counts for, in drafts
_MEMORY = 2000.0  # drafts at each place that acceptance is averaged over


def budget(confidence: Sequence[Sequence[float]], speed: Speed) -> int:
    """How many drafts of all sequences together are best, wherever the maximum is.

    confidence: of each sequence, how likely each of its drafts is to be kept if those before it are.
    With the confidences of an earlier step: then it cannot depend on the drafts that admit() chooses among.
    """
    tokens, kept = len(confidence), float(len(confidence))
    best, at = kept * speed(tokens), 0
    for i, (survival, _, _) in enumerate(_likeliest(confidence), start=1):
        kept += survival
        if kept * speed(tokens + i) > best:
            best, at = kept * speed(tokens + i), i
    return at


def admit(confidence: Sequence[Sequence[float]], most: int) -> list[int]:
    """Drafts to try for each sequence: the `most` likeliest of all."""
    lengths = [0] * len(confidence)
    for _, (_, _, row) in zip(range(most), _likeliest(confidence), strict=False):
        lengths[row] += 1
    return lengths


def _likeliest(confidence: Sequence[Sequence[float]]) -> Iterator[tuple[float, int, int]]:
    """(how likely it and all before it are kept, its place, its sequence) of every draft, the likeliest first.

    Of equals the earlier place comes first: the drafts of a sequence are in order, whatever the numbers are.
    """
    found = []
    for row, chances in enumerate(confidence):
        survival = 1.0
        for place, chance in enumerate(chances):
            survival *= chance
            found.append((-survival, place, row))
    return ((-survival, place, row) for survival, place, row in sorted(found))


@dataclass(slots=True)
class _Cost:
    """Seconds of steps of one kind."""

    seconds: float = 0.0
    count: int = 0
    last: int = 0  # step of the last measurement

    def add(self, seconds: float, step: int) -> None:
        if self.count >= _KNOWN:  # a step may wait for something that is none of its business
            seconds = min(seconds, 2 * self.seconds)
        self.seconds += (seconds - self.seconds) * max(_FADE, 1 / (self.count + 1))
        self.count, self.last = self.count + 1, step


class Schedule:
    """Which drafter makes how many drafts per sequence, so that most tokens per second are to be expected.

    What a step takes is measured as it comes. What is not known is tried now and then, for a few steps, as long as
    trials cost no more than 2 % of the time. `ranges` (first, last number of sequences, drafts) fix the choice instead;
    where none fits, there are as many drafts as can be. A choice is (drafter, drafts): (0, 0) is to make none.
    """

    def __init__(self, widths: Sequence[int], ranges: Sequence[tuple[int, int, int]] = ()):
        """`widths`: most drafts of each drafter."""
        self._widths, self._ranges = widths, ranges
        self._costs: dict[int, dict[Choice, _Cost]] = {}  # size of the batch -> choice -> cost
        self._right = [[_PRIOR[0] * _PRIOR[1]] * width for width in widths]
        self._tried = [[_PRIOR[1]] * width for width in widths]
        self._bests: dict[int, Choice] = {}  # by size of the batch, until something new is told
        self._step = self._left = 0
        self._trial = NONE
        self._seconds = self._lost = 0.0

    def choose(self, running: int) -> Choice:
        """What to make now for each of `running` sequences."""
        if self._ranges:
            return 0, next((n for low, high, n in self._ranges if low <= running <= high), self._widths[0])
        size = _size(running)
        best = self._best(size)
        if self._left == 0 and self._lost <= _LOSS * self._seconds:
            near = [NONE, *enumerate(self._widths), (best[0], best[1] + 1), (best[0], best[1] - 1)]
            unknown = [choice for choice in near if self._possible(choice) and not self._known(size, choice)]
            if unknown:
                self._trial, self._left = unknown[0], _TRIAL
        if self._left == 0:
            return best
        self._left -= 1
        return self._trial

    def lengths(self, drafter: int, confidence: Sequence[Sequence[float]]) -> list[int]:
        """How many of the drafts that `drafter` has made for each sequence to try; confidence as in budget().

        All of them in a trial, and where it is not known what a shorter step takes.
        """
        rows, made = len(confidence), max(map(len, confidence), default=0)
        size = _size(rows)
        if not confidence or self._left or not (self._known(size, NONE) and self._known(size, (drafter, made))):
            return [len(chances) for chances in confidence]

        def speed(tokens: int) -> float:
            return 1 / self.cost(size, drafter, (tokens - rows) / rows)

        return admit(confidence, budget(confidence, speed))

    def told(self, drafter: int, tried: Sequence[int], made: Choice, seconds: float, kept: Sequence[int]) -> None:
        """A step of single sequences is over, in `seconds`; new drafts were `made` in it.

        Of each sequence: `tried` drafts of `drafter` were checked, and so many of them `kept`.
        """
        if self._ranges:
            return
        self._step += 1
        self._bests.clear()
        for place in range(max(tried)):
            reached = [n for n, most in zip(kept, tried, strict=True) if n >= place and most > place]
            fade = 1 - min(1.0, len(reached) / _MEMORY)
            for numbers, more in ((self._tried, len(reached)), (self._right, sum(n > place for n in reached))):
                numbers[drafter][place] = numbers[drafter][place] * fade + more
        self._seconds += seconds
        if any((drafter if n else 0, n) != made for n in tried):  # between one choice and another
            return
        size = _size(len(kept))
        self._costs.setdefault(size, {}).setdefault(made, _Cost()).add(seconds, self._step)
        best = self._best(size)
        if made != best:
            self._lost += max(0.0, seconds - self.expected(made) / self.expected(best) * self.cost(size, *best))

    def expected(self, choice: Choice) -> float:
        """Tokens that a step brings a sequence."""
        drafter, drafts = choice
        total = survival = 1.0
        for right, tried in zip(self._right[drafter][:drafts], self._tried[drafter][:drafts], strict=True):
            survival *= right / tried
            total += survival
        return total

    def cost(self, size: int, drafter: int, drafts: float) -> float:
        """Seconds of a step: measured, or read off a line through what is measured next to it."""
        found = self._costs.get(size, {})
        known = {n: cost.seconds for (which, n), cost in found.items() if which == drafter or n == 0}
        if not known:  # as it is for other batches; what all choices have in common does not matter
            sizes = [
                s for s, costs in self._costs.items() if s != size and any(w == drafter or not n for w, n in costs)
            ]
            return self.cost(min(sizes, key=lambda other: abs(other - size)), drafter, drafts) if sizes else 1.0
        below = max((n for n in known if n <= drafts), default=min(known))
        above = min((n for n in known if n >= drafts), default=max(known))
        low, high = known[below], known[above]
        return low if below == above else low + (high - low) * (drafts - below) / (above - below)

    def _best(self, size: int) -> Choice:
        if size not in self._bests:
            choices = [NONE, *((which, n) for which, width in enumerate(self._widths) for n in range(1, width + 1))]
            rated = [(self.expected(choice) / self.cost(size, *choice), choice[1], choice) for choice in choices]
            self._bests[size] = max(rated, key=lambda each: each[:2])[2]
        return self._bests[size]

    def _possible(self, choice: Choice) -> bool:
        drafter, drafts = choice
        return choice == NONE or 1 <= drafts <= self._widths[drafter]

    def _known(self, size: int, choice: Choice) -> bool:
        cost = self._costs.get(size, {}).get(choice)
        return cost is not None and cost.count >= _KNOWN and self._step - cost.last < _STALE


def _size(running: int) -> int:
    """Batches that differ by less than a fifth count as one."""
    return round(4 * log2(max(1, running)))
