"""A pytest plugin: the kernels under test run on an emulated ARM processor.

What Python loads then is a library with the names and constants of the ARM build that does nothing (test_arm.py makes
it). Steps are sent to arm.c instead, with the memory that their arguments name, which comes back as they left it.
"""

import ctypes
import struct
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from leyden.ops.cpu import program

Span = tuple[int, int]  # where memory begins and ends


class Machine:
    """Takes the place of the team of threads."""

    def __init__(self, command: list[str], names: list[str]):
        self._child = subprocess.Popen([*command, *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read(8 * len(names))
        self._call = program.Kernel.__call__
        addresses = [ctypes.cast(getattr(program._native, name), ctypes.c_void_p).value for name in names]
        self._kernels = {address: i for i, address in enumerate(addresses)}
        self._tensors: dict[bytes, list[tuple[int, Span]]] = {}  # of each kernel and its arguments: (word, memory)

    def watch(self, kernel: program.Kernel, *arguments: Any) -> program.Step:
        """What the kernel makes of its arguments, remembering where they lie."""
        step = self._call(kernel, *arguments)
        spans = self._tensors[step.words[:8] + step.words[16:]] = []
        for i in kernel._tensors:
            if isinstance(arguments[i], Tensor) and arguments[i].numel():
                memory = arguments[i].untyped_storage()
                spans.append((i, (memory.data_ptr(), memory.data_ptr() + memory.nbytes())))
        return step

    def execute(self, steps: bytes, threads: int) -> None:
        words = list(struct.unpack(f"{len(steps) // 8}Q", steps))
        tensors = list(self._addresses(steps))
        spans = merged([span for _, span in tensors])
        patches = []
        for at, (begin, _) in tensors:
            region = next(i for i, (first, end) in enumerate(spans) if first <= begin < end)
            words[at] -= spans[region][0]
            patches += [at, region]
        for at in heads(steps):
            words[at] = self._kernels[words[at]]
            patches += [at, -1]
        sizes = [end - begin for begin, end in spans]
        head = [len(spans), len(words), len(patches) // 2, threads]
        memory = [ctypes.string_at(begin, end - begin) for begin, end in spans]
        to = self._child.stdin
        assert to is not None
        to.write(struct.pack(f"{4 + len(sizes)}q{len(words)}Q{len(patches)}q", *head, *sizes, *words, *patches))
        to.writelines(memory)
        to.flush()
        for (begin, _), size in zip(spans, sizes, strict=True):
            ctypes.memmove(begin, self._read(size), size)

    def _read(self, size: int) -> bytes:
        assert self._child.stdout is not None
        said = self._child.stdout.read(size)
        assert len(said) == size, "the kernels crashed"
        return said

    def _addresses(self, steps: bytes) -> Iterator[tuple[int, Span]]:
        """(word, memory) of all tensors in a program"""
        ends = [*heads(steps), len(steps) // 8]
        for at, end in zip(ends, ends[1:], strict=False):
            step = steps[8 * at : 8 * at + 8] + steps[8 * at + 16 : 8 * end]  # without its size: see apart
            yield from ((at + 2 + i, span) for i, span in self._tensors[step])


def heads(steps: bytes) -> Iterator[int]:
    """The words with which steps begin."""
    at = 0
    while at < len(steps) // 8:
        yield at
        at += 2 + abs(struct.unpack_from("q", steps, 8 * at + 8)[0])


def merged(spans: list[Span]) -> list[Span]:
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin < out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulated", help="the command that runs arm.c, with its library and all names")


def pytest_configure(config: pytest.Config) -> None:
    words = config.getoption("--emulated").split()
    names = 1 + next(i for i, word in enumerate(words) if word.endswith(".so"))
    machine = Machine(words[:names], words[names:])
    program.Kernel.__call__ = lambda *arguments: machine.watch(*arguments)  # type: ignore[method-assign,assignment]
    program._execute = machine.execute
