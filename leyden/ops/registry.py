"""An op: a contract, a reference in plain PyTorch, and as many fast versions as somebody cared to write."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

# Device type, or a version that stands for all devices -> module that registers its kernels when imported.
_BACKENDS = {"cpu": "leyden.ops.cpu", "cuda": "leyden.ops.triton", "training": "leyden.ops.training"}
_VERSIONS = ("reference", "training")
_loaded: set[str] = set()
_version: str | None = None
_stood_for = "meta"  # the device whose kernels tensors without memory get
_watchers: list[Callable[["Op", tuple[Any, ...]], None]] = []


class NotRecordable(Exception):
    """The function did something that is not a step; run it as it is. The message names the operation."""


class Op:
    """Callable that picks a kernel by the device of its first tensor and the format of its weights, if they share one.

    A (device, format) pair without a kernel runs the reference, which dequantises: right everywhere, fast where
    someone wrote a kernel. Kernels have no gradients, so the reference runs where one is asked for, too.
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
        if _version == "reference" or (_version is None and _recorded(args)):
            return self.reference(*args, **kwargs)
        device = _version or _device(args)
        if device in _BACKENDS and device not in _loaded:
            _loaded.add(device)
            import_module(_BACKENDS[device])
        return self.kernel(device, _format(args))(*args, **kwargs)

    def kernel(self, device: str, format: str) -> Callable[..., Any]:
        """What runs there: the reference, where nothing is registered."""
        return self._kernels.get((device, format), self.reference)

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def _device(args: tuple[Any, ...]) -> str:
    found = next((a.device.type for a in args if isinstance(a, Tensor)), "cpu")
    return _stood_for if found == "meta" else found


def _format(args: tuple[Any, ...]) -> str:
    names = {a.format.name for a in args if hasattr(a, "format")} or {"dense"}
    return names.pop() if len(names) == 1 else "mixed"  # for which there are no kernels


def _recorded(args: tuple[Any, ...]) -> bool:
    """Whether autograd records this call."""
    if not torch.is_grad_enabled():
        return False
    tensors = (t for a in args for t in (a.parameters() if isinstance(a, nn.Module) else (a,)))
    return any(isinstance(t, Tensor) and t.requires_grad for t in tensors)


def prepare(weights: Iterable[Tensor]) -> None:
    """Get the kernels ready for weights that have memory but no values yet: now, not when the first request waits."""
    weights = list(weights)
    device = weights[0].device.type
    if device in _BACKENDS:
        _loaded.add(device)
        backend = import_module(_BACKENDS[device])
        if hasattr(backend, "prepare"):
            backend.prepare(weights)


def forced() -> bool:
    """Whether a using() block says which version of the ops runs."""
    return _version is not None


@contextmanager
def using(version: str) -> Iterator[None]:
    """Within the block, run every op by one version on all devices.

    "reference": the oracle of kernel tests. "training": differentiable code for packed rows, else the reference.
    """
    global _version
    if version not in _VERSIONS:
        raise ValueError(f"using() knows {' and '.join(_VERSIONS)}, got {version!r}")
    before, _version = _version, version
    try:
        yield
    finally:
        _version = before


@contextmanager
def standing_for(device: str) -> Iterator[None]:
    """Within the block tensors without memory are taken for those of `device`. Its kernels cannot run on them: whoever
    opens the block sees to it that they need not."""
    global _stood_for
    before, _stood_for = _stood_for, device
    try:
        yield
    finally:
        _stood_for = before


@contextmanager
def watching(watch: Callable[[Op, tuple[Any, ...]], None]) -> Iterator[None]:
    """Calls watch(op, arguments) before every op: calibration wants to see what the matrices are multiplied with."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)
