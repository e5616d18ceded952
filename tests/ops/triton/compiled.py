"""What test_compiling.py runs in processes of their own, where Triton compiles: python compiled.py WHAT FOLDER."""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime.driver import driver

from leyden.ops.triton import norm, table
from leyden.ops.triton.compiling import Absent, Compilation, Job, noted


@triton.jit
def _broken(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), nothing_of_that_name)  # noqa: F821


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "meta") -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def some() -> list[Job]:
    with noted(90) as jobs:
        for rows in (3, 3, 5):
            norm.rms_norm(empty(rows, 64), empty(64), 1e-5)
        slots = empty(9, dtype=torch.int32)
        table.take(empty(8, 1, dtype=torch.int64), slots[:8])
        table.take(empty(8, 1, dtype=torch.int64), slots[1:])
    return jobs


def first_list() -> Iterator[list[Job]]:
    yield []
    time.sleep(300)


def same() -> None:
    """What is noted is what a launch compiles."""
    jobs = some()
    assert [job.name for job in jobs] == ["_norm", "_copy", "_copy"], jobs
    aligned, shifted = (job.source.attrs for job in jobs[1:])
    assert len([kinds for kinds in aligned.values() if kinds]) == 1 + len(
        [kinds for kinds in shifted.values() if kinds]
    )
    with noted(90) as broken:
        _broken[(1,)](empty(16), 16)
    assert not any(job.done for job in jobs + broken)
    compilation = Compilation(lambda: [broken + jobs], 2, "some")
    compilation.wait()
    assert [job.done for job in broken + jobs] == [False, True, True, True]
    assert compilation._told is not None and os.read(compilation._told, 1) == b"", "it has ended"
    assert Compilation(lambda: 1 / 0, 2, "some")._told is None, "not begun again"
    compilation.close()
    for awaited in (True, False):  # where the first list was compiled once nobody waits for it
        compilation = Compilation(first_list, 2, "first list")
        assert (compilation._told is not None) == awaited
        compilation.wait()
        compilation.close()

    hits = []
    knobs.compilation.listener = lambda *, cache_hit, **rest: hits.append(cache_hit)
    driver.set_active(Absent(jobs[0].target))
    for kernel in (norm._norm, table._copy):
        run = type(kernel).run
        kernel.run = lambda *args, run=run, kernel=kernel, **more: run(kernel, *args, **more | {"warmup": True})
    norm.rms_norm(empty(3, 64, device="cpu"), empty(64, device="cpu"), 1e-5)
    slots = empty(9, dtype=torch.int32, device="cpu")
    for some_slots in (slots[:8], slots[1:]):
        table.take(empty(8, 1, dtype=torch.int64, device="cpu"), some_slots)
    assert hits == [True, True, True], hits


@dataclass
class Endless:
    folder: Path
    name: str = "endless"
    call: tuple[str, ...] = ()
    done: bool = False

    def compile(self) -> Any:
        (self.folder / str(os.getpid())).touch()
        time.sleep(300)


def endless(folder: Path) -> None:
    """Compiles until it is killed; the processes are files."""

    def stages() -> Any:
        (folder / str(os.getpid())).touch()
        yield [Endless(folder), Endless(folder)]

    Compilation(stages, 2).wait()


if __name__ == "__main__":
    same() if sys.argv[1] == "same" else endless(Path(sys.argv[2]))
