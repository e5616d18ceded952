"""Small tensors between host and device, without anybody waiting for the device's queue to run dry."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[Any], device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """torch.tensor(values) on the device. Returns at once: the copy waits in the stream, like everything else."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else made.to(device)


class Readback:
    """A tensor on its way to the host.

    On CUDA the copy runs beside the stream: whoever reads waits for what came before the copy, not for what was
    launched since.
    """

    def __init__(self, tensor: Tensor):
        self._host, self._copied = tensor, None
        if tensor.device.type == "cuda":
            main, side = torch.cuda.current_stream(tensor.device), _beside(tensor.device)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                self._host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
                tensor.record_stream(side)
                self._copied = side.record_event()

    def tolist(self) -> list[Any]:
        """Waits until the values are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
