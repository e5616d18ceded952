"""Kernels run on the GPU where there is one, else under Triton's interpreter; the switch is read when triton loads."""

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def draw(device: str):
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device)

    return made


if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _with_index(tensor: type, scope: Any) -> None:
        """NumPy 2.4 converts only 0-dimensional arrays with int(); the interpreter's scalars have one dimension."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _with_index
