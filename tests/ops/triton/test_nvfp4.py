"""Products with stored codes, against the matrix that they stand for."""

import pytest
import torch

from leyden.formats import Weight
from leyden.formats.nvfp4 import NVFP4
from leyden.ops.reference import linear as reference_linear
from leyden.ops.reference import moe as reference_moe

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import nvfp4  # noqa: E402

BOUND = {torch.float32: 1e-6, torch.float16: 1e-3}


def stored(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Weight:
    """Codes and scales of random bytes: all values of both come up, zero scales included."""
    generator = torch.Generator().manual_seed(sum(shape))
    made = Weight(*shape, dtype=dtype, format=NVFP4()).requires_grad_(False).to(device)
    parts = made.parts
    parts["weight"].copy_(torch.randint(256, parts["weight"].shape, generator=generator))
    scales = torch.randint(0x7F, parts["weight_scale"].shape, generator=generator, dtype=torch.uint8)
    parts["weight_scale"].copy_(torch.where(scales % 5 == 0, 0x30, scales).view(torch.float8_e4m3fn))
    parts["weight_scale_2"].fill_(1e-3)
    return made


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_products(device: str, count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    up, down = stored(device, 48, 208, dtype=dtype), stored(device, 21, 48, dtype=dtype)
    x = torch.randn(count, 208, generator=torch.Generator().manual_seed(1)).to(device, dtype) / 64
    matrix = up.format.dequantize(up.parts, torch.float32).double()
    for wide in (0, 64):
        monkeypatch.setattr(nvfp4, "WIDE_ROWS", wide)
        assert off(nvfp4.linear_nvfp4(x, up, torch.float32), x.double() @ matrix.t()) < BOUND[dtype]
        if dtype == torch.float32:
            assert off(nvfp4.mlp_nvfp4(x, up, down), reference_linear.mlp(x, up, down)) < 1e-5


@pytest.mark.parametrize("count", [1, 2, 9])
def test_experts(device: str, count: int, monkeypatch: pytest.MonkeyPatch):
    up, down = stored(device, 6, 32, 48), stored(device, 6, 40, 32)
    shared_up, shared_down = stored(device, 64, 48), stored(device, 40, 64)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 48, generator=generator).to(device) / 1e3
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(count)]).to(device)
    weights = torch.rand(count, 2, generator=generator).to(device)
    arguments = (x, ids, weights, up, down, shared_up, shared_down)
    for wide in (0, 64):
        monkeypatch.setattr(nvfp4, "WIDE_ROWS", wide)
        assert off(nvfp4.moe_nvfp4(*arguments), reference_moe.moe(*arguments)) < 1e-5


def test_decoding_is_exact(device: str):
    made = stored(device, 3, 40, 48)
    assert torch.equal(nvfp4.decoded(made), made.dense())
