"""Steps and programs: how Python tells the kernels what to do.

A kernel's arguments are 8-byte words: addresses of tensors (0 for None), whole numbers, doubles. A step is a kernel
with its arguments; a program is steps that the threads run one after the other, in a single call.
"""

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

from leyden.ops.cpu import build

_SMALL = 2**17  # multiplications that one thread does while a second one wakes up

_native = build.library()
available = _native is not None
# As in kernels.h. Kernels refuse what is missing here, and the reference runs.
types = {torch.float32: 0, torch.bfloat16: 1}

if _native is not None:
    _native.run_program.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int]
    _native.run_program.restype = None
    if ctypes.c_int64.in_dll(_native, "has_f16").value:
        types[torch.float16] = 2
    dot_bf16 = bool(ctypes.c_int64.in_dll(_native, "dot_bf16").value)


class Kernel:
    """Called with its arguments, a kernel becomes a step; the caller keeps the tensors alive until the step has run.

    `layout` has a letter for each argument: t tensor, or None; i whole number; d double.
    """

    def __init__(self, name: str, layout: str):
        assert _native is not None
        address = ctypes.cast(getattr(_native, name), ctypes.c_void_p).value
        words = ctypes.c_int64.in_dll(_native, f"{name}_bytes").value // 8
        assert words == len(layout), f"{name} takes {words} arguments"
        self._head = (address, words)
        self._tensors = [i for i, letter in enumerate(layout) if letter == "t"]
        self._pack = struct.Struct("QQ" + layout.translate({ord("t"): "Q", ord("i"): "q"})).pack

    def __call__(self, *arguments: Any) -> bytes:
        words = list(arguments)
        for i in self._tensors:
            tensor: Tensor | None = words[i]
            words[i] = 0 if tensor is None else tensor.data_ptr()
        return self._pack(*self._head, *words)


def run(*steps: bytes, work: float = _SMALL) -> None:
    """Run the steps; with `work`, the number of their multiplications, below a limit, on this thread alone."""
    assert _native is not None
    program = b"".join(steps)
    _native.run_program(program, len(program) // 8, torch.get_num_threads() if work >= _SMALL else 1)


def has_rows(x: Tensor) -> bool:
    """Whether x [rows, width] is of a type that kernels know, each row in one piece."""
    return x.dtype in types and x.stride(-1) == 1
