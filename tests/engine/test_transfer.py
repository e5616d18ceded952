"""What travels between host and device arrives as it was."""

import pytest
import torch

from leyden.engine.transfer import Readback, upload

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here"))]


@pytest.mark.parametrize("device", DEVICES)
def test_there_and_back(device: str) -> None:
    for values, dtype in (([[1, 2], [3, 4]], torch.int64), ([0.5, -1.0], torch.float32), ([7], torch.int32)):
        there = upload(values, device, dtype)
        assert there.device.type == device and there.dtype == dtype
        assert Readback(there).tolist() == values


@pytest.mark.parametrize("device", DEVICES)
def test_types_are_those_of_the_values(device: str) -> None:
    assert upload([1, 2], device).dtype == torch.int64
    assert upload([1.0], device).dtype == torch.float32
