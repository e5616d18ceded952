"""An op: a contract, a reference in plain PyTorch, and as many fast versions as somebody cared to write."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import Tensor

_BACKENDS: dict[str, str] = {}  # device type -> module that registers its kernels when imported
_loaded: set[str] = set()
_reference_only = False
_watchers: list[Callable[["Op", tuple[Any, ...]], None]] = []


class Op:
    """Callable that picks a kernel by the device of its first tensor and the format of its first weight.

    A (device, format) pair without a kernel runs the reference, which dequantises: right everywhere, fast where
    someone wrote a kernel.
    """

    def __init__(self, reference: Callable[..., Any]):
        self.name = reference.__name__
        self.reference = reference
        self.__doc__ = reference.__doc__
        self._kernels: dict[tuple[str, str], Callable[..., Any]] = {}

    def register(self, device: str, kernel: Callable[..., Any], format: str = "dense") -> None:
        self._kernels[device, format] = kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for watch in _watchers:
            watch(self, args)
        if _reference_only:
            return self.reference(*args, **kwargs)
        device = _device(args)
        if device in _BACKENDS and device not in _loaded:
            _loaded.add(device)
            import_module(_BACKENDS[device])
        kernel = self._kernels.get((device, _format(args)), self.reference)
        return kernel(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def _device(args: tuple[Any, ...]) -> str:
    return next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")


def _format(args: tuple[Any, ...]) -> str:
    return next((a.format.name for a in args if hasattr(a, "format")), "dense")


@contextmanager
def using(version: str) -> Iterator[None]:
    """`with using("reference"):` runs every op by its reference: the oracle of kernel tests."""
    global _reference_only
    if version != "reference":
        raise ValueError(f'using() knows "reference" only, got {version!r}')
    before, _reference_only = _reference_only, True
    try:
        yield
    finally:
        _reference_only = before


@contextmanager
def watching(watch: Callable[[Op, tuple[Any, ...]], None]) -> Iterator[None]:
    """Calls watch(op, arguments) before every op: calibration wants to see what the matrices are multiplied with."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)
