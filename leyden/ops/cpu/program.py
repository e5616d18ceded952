"""Steps and programs: how Python tells the kernels what to do.

A kernel's arguments are 8-byte words: addresses of tensors (0 for None), whole numbers, doubles. A step is a kernel
with its arguments; a program is steps that the threads run one after the other, in a single call.

Ops run their steps at once, or write them down: a Program is all that a function did, to be done again on what its
input tensors hold then, at the price of one call. Python's part of a decode step so shrinks to almost nothing.
"""

import ctypes
import struct
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from leyden.ops.cpu import build
from leyden.ops.registry import NotRecordable

_SMALL = 2**17  # multiplications that one thread does while a second one wakes up
_ALIGNMENT = 64  # bytes: a cache line

_native = build.library()
available = _native is not None
# As in kernels.h. Kernels refuse what is missing here, and the reference runs.
types = {torch.float32: 0, torch.bfloat16: 1}

if _native is not None:
    _native.run_program.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int]
    _native.run_program.restype = None
    if ctypes.c_int64.in_dll(_native, "has_f16").value:
        types[torch.float16] = 2


def constant(name: str) -> int:
    """A number that the kernels were built with."""
    assert _native is not None
    return ctypes.c_int64.in_dll(_native, name).value


class Step(NamedTuple):
    """A kernel with its arguments, and what must not be freed before it has run."""

    words: bytes
    arguments: tuple[Any, ...]


class Kernel:
    """Called with its arguments, a kernel becomes a step.

    `layout` has a letter for each argument: t tensor, or None; i whole number; d double.
    """

    def __init__(self, name: str, layout: str):
        assert _native is not None
        address = ctypes.cast(getattr(_native, name), ctypes.c_void_p).value
        words = constant(f"{name}_bytes") // 8
        assert words == len(layout), f"{name} takes {words} arguments"
        self._head = (address, words)
        self._tensors = [i for i, letter in enumerate(layout) if letter == "t"]
        self._pack = struct.Struct("QQ" + layout.translate({ord("t"): "Q", ord("i"): "q"})).pack

    def __call__(self, *arguments: Any) -> Step:
        words = list(arguments)
        for i in self._tensors:
            tensor: Tensor | None = words[i]
            words[i] = 0 if tensor is None else tensor.data_ptr()
        return Step(self._pack(*self._head, *words), arguments)


def apart(*steps: Step) -> list[Step]:
    """The same steps, but no thread waits for the others between them: none reads what another thread writes."""
    *some, last = steps
    hurried = []
    for words, arguments in some:
        address, size = struct.unpack_from("Qq", words)
        hurried.append(Step(struct.pack("Qq", address, -abs(size)) + words[16:], arguments))
    return [*hurried, last]


def run(*steps: Step, work: float = _SMALL) -> None:
    """Run the steps; with `work`, the number of their multiplications, below a limit, on this thread alone."""
    words = [step.words for step in steps]
    if _thread.recorder is not None:
        _thread.recorder.steps += words
    else:
        _execute(b"".join(words), torch.get_num_threads() if work >= _SMALL else 1)


def recording() -> bool:
    """Whether a Program is being made of what runs now: it takes steps, and nothing else."""
    return _thread.recorder is not None


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Room for a result or for work in progress: every binding of a kernel gets its memory here."""
    recorder = _thread.recorder
    return torch.empty(shape, dtype=dtype) if recorder is None else recorder.arena.empty(shape, dtype)


def prepare(weights: Iterable[Tensor]) -> None:
    """See ops.prepare: large pages for what is read in every step. Memory that has been written keeps small ones."""
    for weight in weights:
        if _native is not None:
            _native.large_pages(ctypes.c_void_p(weight.data_ptr()), ctypes.c_int64(weight.nbytes))


def has_rows(x: Tensor) -> bool:
    """Whether x [rows, width] is of a type that kernels know, each row in one piece."""
    return x.dtype in types and x.stride(-1) == 1


def _execute(program: bytes, threads: int) -> None:
    assert _native is not None
    _native.run_program(program, len(program) // 8, threads)


class Arena:
    """Memory of programs: what a tensor had is used again once the tensor is gone, as it was while recording.

    Programs may share an arena if they do not run side by side; the results of one are then valid until another runs.
    """

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._free: defaultdict[int, list[np.ndarray]] = defaultdict(list)  # by size

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        wanted = max(1, -(-prod(shape) * dtype.itemsize // _ALIGNMENT)) * _ALIGNMENT
        block = self._take(wanted)
        # A tensor and its views hold on to this array; when the last of them goes, so does it.
        array = block[: prod(shape) * dtype.itemsize]
        weakref.finalize(array, self._free[len(block)].append, block)
        return torch.from_numpy(array).view(dtype).view(shape)

    def released(self, x: Tensor) -> Tensor:
        """A contiguous tensor, looking at the same memory without a claim to it."""
        for block in self._blocks:
            start = x.data_ptr() - block.ctypes.data
            if 0 <= start < len(block):
                return torch.from_numpy(block[start : start + x.nbytes]).view(x.dtype).view(x.shape)
        return x

    def _take(self, wanted: int) -> np.ndarray:
        fitting = min((size for size, blocks in self._free.items() if blocks and size >= wanted), default=None)
        if fitting is not None and fitting <= 2 * wanted:
            return self._free[fitting].pop()
        raw = np.empty(wanted + _ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        self._blocks.append(raw[start : start + wanted])
        return self._blocks[-1]


# What may be asked of a tensor while a program is recorded, and how it may be looked at.
_FACTS = {"data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "stride", "untyped_storage", "__len__"}
_VIEWS = {"__getitem__", "__get__", "chunk", "contiguous", "detach", "expand", "flatten", "float", "int", "long"}
_VIEWS |= {"narrow", "permute", "reshape", "select", "split", "squeeze", "t", "to", "transpose", "type", "unbind"}
_VIEWS |= {"unflatten", "unsqueeze", "view", "view_as"}


class _Recorder(TorchFunctionMode):
    """Collects steps, and refuses tensor operations that compute: they would happen now, and never again."""

    def __init__(self, arena: Arena):
        super().__init__()
        self.arena = arena
        self.steps: list[bytes] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        if name in _FACTS | _VIEWS:
            result = function(*args, **(kwargs or {}))
            parts = result if isinstance(result, tuple | list) else [result]
            made = {_memory(t) for t in parts if isinstance(t, Tensor)}
            if made <= {_memory(t) for t in args if isinstance(t, Tensor)}:  # reshape or to may copy
                return result
        raise NotRecordable(name)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class _Thread(threading.local):
    recorder: _Recorder | None = None


_thread = _Thread()


class Program:
    """All that `function()` does with CPU kernels, to be done again by calling the program.

    The function is called once, without effect: the tensor that it returns is filled when the program is called. The
    tensors that it uses (inputs, weights) must stay where they are as long as the program lives. Raises NotRecordable.
    """

    def __init__(self, function: Callable[[], Tensor], arena: Arena):
        assert _thread.recorder is None, "a program cannot be recorded while another one is"
        _thread.recorder = recorder = _Recorder(arena)
        try:
            with recorder:
                result = function()
        finally:
            _thread.recorder = None
        self._arena = arena
        self._result = arena.released(result)
        self._steps = b"".join(recorder.steps)
        self._threads = torch.get_num_threads()  # steps may bring room for each

    def __call__(self) -> Tensor:
        """The function's result: valid until another program of the same arena is called."""
        _execute(self._steps, self._threads)
        return self._result
