"""Lists of processors, and a process that keeps to them."""

import os
import subprocess
import sys

import pytest

from leyden.config import cores
from leyden.config.engine import EngineConfig
from leyden.errors import ConfigError


def test_numbers_and_ranges() -> None:
    assert cores.parse("0-3,8") == (0, 1, 2, 3, 8)
    assert cores.parse("5, 2-2,5") == (2, 5)


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "0,,1", "0-", "1.5"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--cpu-affinity: expected .* such as 0-3,8"):
        EngineConfig(model="m", cpu_affinity=text)


def test_threads_are_at_least_one() -> None:
    with pytest.raises(ConfigError, match="--threads must be at least 1, got 0"):
        EngineConfig(model="m", threads=0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_processor_that_is_not_there() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match="there is no processor 99999 for this process, which may use"):
        cores.confine([min(before), 99999])
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_threads_started_later_keep_to_them() -> None:
    """In a process of its own: what is given away does not come back."""
    one = min(os.sched_getaffinity(0))
    program = f"""
import os, threading
from leyden.config import cores
cores.confine([{one}])
thread = threading.Thread(target=lambda: print(os.sched_getaffinity(0)))
thread.start()
thread.join()
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.strip() == str({one})
