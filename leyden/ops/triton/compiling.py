"""Kernels are compiled before anybody launches them, by several processes at once.

    noted         what would be launched in a block is noted instead, as Triton itself would compile it
    Compilation   processes that compile what is noted into Triton's cache on disk, where a launch then finds it

A quarter of the work on a kernel is Python's, so threads would wait for each other. The processes are forks of one that
has no other threads: it must not have used the GPU itself, nor do they. A kernel that does not compile is passed over:
whoever launches it gets the error.
"""

import ctypes
import logging
import os
import select
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from leyden import log, ops
from leyden.ops.triton.launch import INTERPRETED

logger = log.get(__name__)

_FIRST, _ALL = "first", "all"  # names of files without content
_PR_SET_PDEATHSIG = 1  # of Linux' prctl
_PATIENCE = 10  # nice(2) of what nobody waits for
_PAUSE = 2  # seconds between two lines of progress
_SILENCE = 60  # seconds without a finished kernel after which nobody waits any more


@dataclass(frozen=True)
class Job:
    """A kernel as it would be compiled for a launch."""

    source: ASTSource
    target: GPUTarget
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.source.name)

    @property
    def done(self) -> bool:
        """Whether Triton's cache has it."""
        backend = make_backend(self.target)
        key = get_cache_key(
            self.source, backend, backend.parse_options(dict(self.options)), get_cache_invalidating_env_vars()
        )
        file = f"{self.name[:150]}.json"
        group = get_cache_manager(sha256(key.encode()).hexdigest()).get_group(file) or {}
        return file in group

    @property
    def call(self) -> tuple[str, ...]:
        """What kernels have in common that one C function of Triton's can launch."""
        return tuple("*" if kind.startswith("*") else kind for kind in map(str, self.source.signature.values()))

    def compile(self) -> Any:
        return triton.compile(self.source, target=self.target, options=self.options)


class Absent:
    """In place of Triton's driver: a GPU of which nothing but the target is known."""

    def __init__(self, target: GPUTarget):
        self.target, self.device = target, object()  # a device of its own: nothing is known of other blocks' kernels

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> object:
        return self.device

    def get_current_stream(self, device: object) -> int:
        return 0


class _Noted:
    """In place of a compiled kernel."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        pass

    def run(self, *args: Any) -> None:
        pass


@contextmanager
def noted(capability: int) -> Iterator[list[Job]]:
    """Within the block no kernel is launched: each is noted once, as it would be compiled for a GPU of the `capability`
    (90: Hopper). Ops take tensors without memory for the GPU's.

    Where a tensor without memory would begin follows from its offset; allocations are aligned. Kernels noted before are
    noted again in another block.
    """
    assert not INTERPRETED.value
    absent, jobs = Absent(GPUTarget("cuda", capability, 32)), []
    before, compile, address = driver._active, JITFunction._do_compile, Tensor.data_ptr

    def note(
        self: JITFunction, key: Any, signature: Any, device: Any, constants: Any, options: Any, attrs: Any, warmup: Any
    ) -> _Noted:
        jobs.append(Job(ASTSource(self, signature, constants, attrs), absent.target, options.__dict__))
        made = self.device_caches[device][0][key] = _Noted()
        return made

    def begin(self: Tensor) -> int:
        return int(self.storage_offset()) * self.itemsize if self.is_meta else address(self)

    driver.set_active(absent)
    JITFunction._do_compile = note
    setattr(Tensor, "data_ptr", begin)  # noqa: B010
    try:
        with ops.standing_for("cuda"):
            yield jobs
    finally:
        JITFunction._do_compile = compile
        setattr(Tensor, "data_ptr", address)  # noqa: B010
        driver._active = before


class Compilation:
    """Kernels that other processes compile while this one goes on. They end with the thread that began it, if not
    before."""

    def __init__(self, stages: Callable[[], Iterable[list[Job]]], processes: int, what: str = ""):
        """`stages` is called in another process, which has no other threads and no GPU; every list that it gives is
        compiled by up to so many `processes`. The first list is what wait() waits for. `what`, if given, says in words
        all that the lists depend on, but for the kernels: what was done to its end on this machine is not begun again.
        """
        mark = _mark(what) if what else None
        there = get_cache_manager(mark).get_file if mark else lambda name: None
        self.close: Callable[[], object] = lambda: None
        self._told: int | None = None
        if not there(_ALL):
            awaited, (told, tell) = not there(_FIRST), os.pipe()
            pid = _forked(lambda: _work(stages, processes, tell, mark))
            os.close(tell)
            self.close = weakref.finalize(self, _end, pid, told)
            self._told = told if awaited else None
        if knobs.compilation.listener is None:
            knobs.compilation.listener = _compiled_here

    def wait(self) -> None:
        """Until the first list is compiled, or will not be."""
        triton_key()  # a part of every key, from all the files of Triton: there is time for it now
        while self._told is not None and select.select([self._told], [], [], _SILENCE)[0]:
            if os.read(self._told, 1) != b".":
                return  # it is, or the process has ended
        if self._told is not None:
            logger.warning("no kernel was compiled for %d s: each is compiled when it is first needed", _SILENCE)
            self.close()


def _mark(what: str) -> str:
    """The key, in Triton's cache, of a file that says that all of it is there."""
    parts = [what.encode(), *(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))]
    return sha256(triton.__version__.encode() + torch.__version__.encode() + b"".join(parts)).hexdigest()


def _work(stages: Callable[[], Iterable[list[Job]]], processes: int, tell: int, mark: str | None) -> None:
    """What the process between the engine and the compilers does; `tell`: "." for a kernel, "!" for the first list."""
    torch.set_num_threads(1)
    first = True
    for jobs in stages():
        todo, started, told = [job for job in jobs if not job.done], time.monotonic(), 0.0
        for done in compile_all(todo, processes):
            if first and done:
                os.write(tell, b".")
            elif first:
                with suppress(Exception):
                    nvidia.CudaUtils()  # C, too, and of every kernel
            if time.monotonic() > told + _PAUSE:
                level = logging.INFO if first else logging.DEBUG
                logger.log(level, "compiling kernels, %d of %d", done, len(todo))
                told = time.monotonic()
        if todo:
            logger.info("compiled %d kernels in %.1f s", len(todo), time.monotonic() - started)
        if first:
            if mark is not None:
                get_cache_manager(mark).put("", _FIRST)
            os.write(tell, b"!")
            os.nice(_PATIENCE)  # nobody waits for the others
            first = False
    if mark is not None:
        get_cache_manager(mark).put("", _ALL)


def compile_all(jobs: Sequence[Job], processes: int) -> Iterator[int]:
    """Compile `jobs`, and the C functions that launch them, in up to so many `processes`: 0, then each time that one is
    done how many are."""
    if not jobs:
        return
    first = {job.call: i for i, job in reversed(list(enumerate(jobs)))}
    (queue, put), (told, tell) = os.pipe(), os.pipe()
    os.write(put, b"".join(i.to_bytes(2) for i in range(len(jobs))))  # they are read two bytes at a time, each once
    os.close(put)

    def work() -> None:
        while number := os.read(queue, 2):
            i = int.from_bytes(number)
            try:
                made = jobs[i].compile()
                if first[jobs[i].call] == i:
                    nvidia.CudaLauncher(made.src, made.metadata)
            except Exception as error:
                logger.debug("%s is left to whoever launches it: %s", jobs[i].name, error)
            os.write(tell, b".")

    pids = [_forked(work) for _ in range(min(processes, len(jobs)))]
    os.close(queue)
    os.close(tell)
    yield 0
    done = 0
    while os.read(told, 1):
        done += 1
        yield done
    os.close(told)
    for pid in pids:
        os.waitpid(pid, 0)


def _forked(work: Callable[[], None]) -> int:
    """The id of a process that does `work` and ends, with its parent at the latest."""
    parent = os.getpid()
    with warnings.catch_warnings():
        # Python warns that another thread may hold a lock that the child then waits for. The child takes none but those
        # of Python, of the allocator and of logging, which see to it themselves.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            work()
    except Exception:
        logger.debug("kernels are compiled when they are first needed", exc_info=True)
    finally:
        os._exit(0)  # nothing that the parent opened is ours to close


def _end(pid: int, told: int) -> None:
    os.close(told)
    with suppress(ChildProcessError):  # it is gone, and its number may be another's
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _compiled_here(*, src: Any, cache_hit: bool, **_: Any) -> None:
    """For whoever wonders which kernels were not noted."""
    if not cache_hit:
        logger.debug("compiled %s when it was needed: %s %s", src.name, src.constants, src.attrs)
