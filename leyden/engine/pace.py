"""How many prompt tokens a step may take beside sequences whose next token somebody waits for. Host only, no torch.

A step with a chunk of a prompt takes longer than one without. What the clock says is learned while it runs:

    alone   a step without prompt tokens takes this long
    least   a step with the smallest chunk takes this long; a few of PROBES are of that size to find out
    rate    what each token more adds

and a chunk is chosen so that its step takes at most STRETCH times what it takes anyhow: the larger of alone, and of
least without what its tokens cost. So prompts get nearly
half of the device's time while others wait, and all of it when nobody does. It refuses to starve a prompt: LEAST tokens
are always allowed.
"""

import time
from collections import deque
from collections.abc import Callable

STRETCH = 1.7  # a step against one without the prompt; what is missing to 2 is for the clock's noise
LEAST = 16
PROBES = 64  # steps with a chunk after which the smallest one is tried again: contexts grow, streams come and go
_TRIED = 3  # of these trials the fastest counts
_NEW = 0.2  # weight of a new measurement
_SPIKE = 3.0  # one that is longer than expected by this factor says something about the machine, not about the step


class Pace:
    """Learns from the steps that were run, one after the other."""

    def __init__(self, step_tokens: int, clock: Callable[[], float] = time.monotonic):
        self._step_tokens = step_tokens
        self._clock = clock
        self._ended = 0.0  # when the last step had been run
        self._alone = self._rate = 0.0  # seconds; 0: not measured
        self._trials: deque[float] = deque(maxlen=_TRIED)
        self._since = 0  # steps with a chunk since the last trial
        self._last = LEAST  # tokens of the last chunk

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
            self._alone = _blend(self._alone, seconds)
        elif chunk <= LEAST:
            self._trials.append(seconds)
            self._since = 0
        elif self._trials:
            self._rate = _blend(self._rate, max(seconds - min(self._trials), 0.01 * seconds) / (chunk - LEAST))
            self._since += 1
            self._last = chunk

    def room(self) -> int:
        """Prompt tokens for the next step, if it has rows that somebody waits for."""
        if len(self._trials) < _TRIED or self._since >= PROBES:
            return LEAST
        if not self._rate:
            return min(self._step_tokens, 2 * LEAST)
        least = min(self._trials)
        anyhow = max(self._alone, least - LEAST * self._rate)
        more = max(0.0, STRETCH * anyhow - least) / self._rate
        return min(self._step_tokens, 2 * self._last, LEAST + int(more))


def _blend(old: float, new: float) -> float:
    return old + (min(new, _SPIKE * old) - old) * _NEW if old else new
