"""What stands for a CUDA graph on a machine without CUDA."""

from collections.abc import Callable
from typing import Any


class Again:
    """In place of engine.capture.Captured: the step, done again at every call."""

    def __init__(self, step: Callable[[], object], memory: Any):
        self._step = step
        step()

    def __call__(self) -> None:
        self._step()
