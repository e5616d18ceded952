import numpy as np
import pytest
import torch
from torch import Tensor

from leyden.formats.fp8 import FP8, MXFP8, FP8Block, FP8Channel, from_e8m0, to_e4m3
from tests.formats import reference


def matrix(n: int, k: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=random) * torch.rand(n, 1, generator=random) * 8


def bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


def test_all_e4m3_bytes() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[(every & 127) != 127]
    values = finite.view(torch.float8_e4m3fn).float()
    assert (values.numpy() == reference.from_e4m3(finite.numpy())).all()
    assert torch.equal(to_e4m3(values).view(torch.uint8), finite)
    assert to_e4m3(torch.tensor([449.0, 1e30, -470.0, float("inf")])).float().tolist() == [448, 448, -448, 448]


def test_one_scale() -> None:
    weight = matrix(48, 80)
    stored = FP8(input_scale=True).quantize(weight)
    scale = np.abs(weight.numpy()).max() / np.float32(448)
    assert stored["weight_scale"].numpy() == scale and stored["weight_scale"].shape == ()
    assert stored["input_scale"].item() == 1
    codes = reference.to_e4m3(weight.numpy() / scale)
    assert (bytes_of(stored["weight"]) == codes).all()
    assert (FP8().dequantize(stored, torch.float32).numpy() == reference.from_e4m3(codes) * scale).all()


def test_a_scale_for_each_row() -> None:
    weight = matrix(48, 80)
    stored = FP8Channel().quantize(weight)
    scale = np.abs(weight.numpy()).max(1, keepdims=True) / np.float32(448)
    codes = reference.to_e4m3(weight.numpy() / scale)
    assert (stored["weight_scale"].numpy() == scale).all()
    assert (bytes_of(stored["weight"]) == codes).all()
    assert (FP8Channel().dequantize(stored, torch.float32).numpy() == reference.from_e4m3(codes) * scale).all()


@pytest.mark.parametrize(("n", "k"), [(128, 128), (200, 144), (256, 320), (16, 16)])
def test_a_scale_for_each_block(n: int, k: int) -> None:
    weight = matrix(n, k)
    stored = FP8Block().quantize(weight)
    values, expected = weight.numpy(), np.empty((n, k), np.float32)
    for i in range(0, n, 128):
        for j in range(0, k, 128):
            block = values[i : i + 128, j : j + 128]
            scale = np.abs(block).max() / np.float32(448)
            assert stored["weight_scale"][i // 128, j // 128].numpy() == scale
            codes = reference.to_e4m3(block / scale)
            assert (bytes_of(stored["weight"])[i : i + 128, j : j + 128] == codes).all()
            expected[i : i + 128, j : j + 128] = reference.from_e4m3(codes) * scale
    assert (FP8Block().dequantize(stored, torch.float32).numpy() == expected).all()


def test_a_power_of_two_for_each_run() -> None:
    weight = matrix(24, 96)
    weight[0, :32] = torch.linspace(-448, 448, 32)  # exactly at the limit: the exponent must not go up
    weight[1, :32] = 0
    stored = MXFP8().quantize(weight)
    runs = weight.numpy().reshape(24, 3, 32)
    peaks = np.abs(runs).max(-1)
    exponents = np.where(peaks == 0, -127, np.ceil(np.log2(np.where(peaks == 0, 1, peaks).astype(np.float64) / 448)))
    assert (stored["weight_scale"].numpy() == exponents + 127).all()
    assert stored["weight_scale"][0, 0] == 127
    codes = reference.to_e4m3((runs / 2.0 ** exponents[..., None]).astype(np.float32))
    assert (bytes_of(stored["weight"]).reshape(runs.shape) == codes).all()
    expected = reference.from_e4m3(codes) * (2.0 ** exponents[..., None]).astype(np.float32)
    assert (MXFP8().dequantize(stored, torch.float32).numpy().reshape(runs.shape) == expected).all()


def test_e8m0() -> None:
    assert from_e8m0(torch.tensor([0, 1, 127, 128, 254], dtype=torch.uint8)).tolist() == [
        2.0**-127, 2.0**-126, 1, 2, 2.0**127,
    ]  # fmt: skip
