"""How fast memory delivers, as the kernels read it."""

import time

import torch

from leyden.ops.cpu.program import Kernel, prepare, run

_READ = Kernel("read_all", "tti")


class Probe:
    """Bytes that are larger than any cache, to be read over and over."""

    def __init__(self, megabytes: int = 512):
        self._memory = torch.empty(megabytes << 18, dtype=torch.int32)
        prepare([self._memory])  # in large pages, as weights are: small ones are read a quarter slower
        self._memory.zero_()
        self._out = torch.empty(torch.get_num_threads(), dtype=torch.int64)

    @property
    def bytes(self) -> int:
        return self._memory.nbytes

    def bandwidth(self, times: int = 3) -> float:
        """Bytes read per second by all threads, the best of some readings."""
        best = 0.0
        for _ in range(times):
            started = time.perf_counter()
            run(_READ(self._memory, self._out, self._memory.nbytes))
            best = max(best, self._memory.nbytes / (time.perf_counter() - started))
        return best
