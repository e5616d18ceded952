"""How many prompt tokens a step may take beside sequences whose next token somebody waits for. Host only, no torch.

A step with a chunk of a prompt takes longer than one without. What the clock says is learned while it runs:

    alone   a step without prompt tokens takes this long
    floor   a step with next to no prompt tokens takes this long; a few of PROBES are like that to find out
    rate    what each prompt token adds to floor

and a chunk is chosen so that its step takes at most STRETCH times what it takes anyhow, the larger of alone and floor.
So prompts get nearly half of the device's time while others wait, and all of it when nobody does. It refuses to starve
a prompt: LEAST tokens are always allowed, but for the probes.
"""

import time
from collections import deque
from collections.abc import Callable

STRETCH = 1.7  # a step against one without the prompt; what is missing to 2 is for the clock's noise
LEAST = 8
PROBES = 64  # steps with a chunk between two that measure the floor: contexts grow, streams come and go
_TRIALS = 3  # at first; of the last ones the middle one counts
_NEW = 0.2  # weight of a new measurement
_SPIKE = 3.0  # one that is longer than expected by this factor says something about the machine, not about the step


class Pace:
    """Learns from the steps that were run, one after the other."""

    def __init__(self, step_tokens: int, probe: int = 2, clock: Callable[[], float] = time.monotonic):
        """`probe`: tokens of the shortest row that the device treats as a part of a prompt."""
        self._step_tokens = step_tokens
        self._probe = probe
        self._clock = clock
        self._ended = 0.0  # when the last step had been run
        self._alone = self._rate = 0.0  # seconds; 0: not measured
        self._trials: deque[float] = deque(maxlen=_TRIALS)
        self._since = 0  # steps with a chunk since the last trial
        self._last = LEAST  # tokens of the last chunk

    def now(self) -> float:
        return self._clock()

    def took(self, started: float, streams: int, chunk: int) -> float:
        """A step launched at `started` is done: `streams` rows that somebody waits for, `chunk` tokens of prompts.

        With async scheduling it waited for the step before it: it took the time since that one was done, which is told.
        """
        now = self.now()
        seconds, self._ended = now - max(started, self._ended), now
        if not streams:
            return seconds
        if not chunk:
            self._alone = _blend(self._alone, seconds)
        elif chunk <= self._probe:
            self._trials.append(seconds)
            self._since = 0
        else:
            self._since += 1
            if self._trials and chunk >= LEAST:
                self._rate = _blend(self._rate, max(seconds - self._floor, 0.01 * seconds) / chunk)
                self._last = max(LEAST, chunk)
        return seconds

    def room(self) -> int:
        """Prompt tokens for the next step, if it has rows that somebody waits for."""
        if len(self._trials) < _TRIALS or self._since >= PROBES:
            return self._probe
        if not self._rate:
            return min(self._step_tokens, LEAST)
        more = (STRETCH * max(self._alone, self._floor) - self._floor) / self._rate
        return min(self._step_tokens, max(LEAST, min(2 * self._last, int(more))))

    @property
    def _floor(self) -> float:
        return sorted(self._trials)[len(self._trials) // 2]


def _blend(old: float, new: float) -> float:
    return old + (min(new, _SPIKE * old) - old) * _NEW if old else new
