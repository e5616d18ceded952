"""The team of threads: any number of them, callers side by side, children of a fork."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from leyden.ops.cpu import program
from tests.batches import weight

pytestmark = pytest.mark.skipif(not program.available, reason="the kernels need a C compiler")

ROOT = Path(__file__).parents[3]
X = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
UP, DOWN = weight(70, 100), weight(100, 70)


def once(threads: int, depth: int = 5) -> torch.Tensor:
    """Some products after each other, each of which reads what all threads wrote before."""
    from leyden.ops.cpu.linear import two_products
    from leyden.ops.cpu.matrix import matrix

    x, steps = X, []
    for _ in range(depth):
        out = torch.empty_like(X)
        steps += two_products(x, matrix(UP), matrix(DOWN), out)
        x = out
    program._execute(b"".join(step.words for step in steps), threads)
    return x


def test_more_threads_than_processors_and_fewer_again() -> None:
    expected = once(1)
    for threads in (2, 9, 1, 3, 17, 2):
        for _ in range(20):
            assert torch.equal(once(threads), expected)


def test_callers_side_by_side_take_turns() -> None:
    expected = once(1)
    with ThreadPoolExecutor(4) as callers:
        results = list(callers.map(once, [2, 3, 2, 1, 4] * 20))
    assert all(torch.equal(result, expected) for result in results)


def test_workers_that_slept_wake_up() -> None:
    expected = once(2)
    for pause in (0.0, 0.001, 0.05, 0.3):
        time.sleep(pause)
        assert torch.equal(once(2), expected)


def test_a_forked_child_has_a_team_of_its_own() -> None:
    code = """
import os, torch
from tests.ops.cpu.test_team import once
expected = once(3)
child = os.fork()
if child == 0:
    same = torch.equal(once(3), expected)
    os._exit(0 if same else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(once(3), expected)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, env=environment, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
