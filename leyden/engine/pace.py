"""How many prompt tokens a step may take beside sequences whose next token somebody waits for. Host only, no torch.

A step with a chunk of a prompt takes longer than one without. What the clock says of both is learned while it runs:

    alone             a step without prompt tokens takes this long
    floor + rate * n  a step with n prompt tokens beside the others takes this long

and n is chosen so that the step takes at most STRETCH times what it takes anyhow (the larger of alone and floor). So
prompts get nearly half of the device's time while others wait, and all of it when nobody does. It refuses to starve
a prompt: LEAST tokens are always allowed.
"""

import time
from collections.abc import Callable

STRETCH = 1.7  # a step against one without the prompt; what is missing to 2 is for the clock's noise
LEAST = 16
_UNMEASURED = 8  # before anything was measured a chunk is this part of a whole step
_KEEP = 0.9  # what a measurement counts after the next one: some twenty of them make the estimate
_SPIKE = 3.0  # one that is longer than expected by this factor says something about the machine, not about the step


class Pace:
    """Learns from the steps that were run, one after the other."""

    def __init__(self, step_tokens: int, clock: Callable[[], float] = time.monotonic):
        self._step_tokens = step_tokens
        self._clock = clock
        self._ended = 0.0  # when the last step had been run
        self._alone = 0.0  # seconds; 0: not measured
        # Decaying sums over the steps with n prompt tokens that took t seconds: of 1, n, t, n * n, n * t.
        self._sums = [0.0] * 5

    def now(self) -> float:
        return self._clock()

    def took(self, started: float, streams: int, chunk: int) -> None:
        """A step launched at `started` is done: `streams` rows that somebody waits for, `chunk` tokens of prompts.

        With async scheduling it waited for the step before it: it took the time since that one was done.
        """
        now = self.now()
        seconds, self._ended = now - max(started, self._ended), now
        if not streams:
            return
        if not chunk:
            seconds = min(seconds, _SPIKE * self._alone) if self._alone else seconds
            self._alone = self._alone * _KEEP + seconds * (1 - _KEEP) if self._alone else seconds
            return
        if self._sums[0]:
            floor, rate = self._line()
            seconds = min(seconds, _SPIKE * (floor + rate * chunk))
        new = (1.0, chunk, seconds, chunk * chunk, chunk * seconds)
        self._sums = [_KEEP * old + value for old, value in zip(self._sums, new, strict=True)]

    def room(self) -> int:
        """Prompt tokens for the next step, if it has rows that somebody waits for."""
        if not self._alone or not self._sums[0]:
            return max(LEAST, self._step_tokens // _UNMEASURED)
        floor, rate = self._line()
        return max(LEAST, min(self._step_tokens, int((STRETCH - 1) * floor / rate)))

    def _line(self) -> tuple[float, float]:
        """(floor, rate): a straight line through the mean of the steps with prompt tokens, by least squares.

        Chunks that are all of one size say nothing about the slope. Then all that is over `alone` counts as the
        tokens' cost: the next chunk is smaller, and the two together tell the slope.
        """
        n, t, nn, nt = (total / self._sums[0] for total in self._sums[1:])
        floor = self._alone
        if nn - n * n > 0.01 * n * n:
            floor = t - (nt - n * t) / (nn - n * n) * n
        floor = max(min(self._alone, t), min(floor, 0.95 * t))
        return floor, max((t - floor) / n, 1e-9)
