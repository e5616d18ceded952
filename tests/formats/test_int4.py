"""Against compressed-tensors, which defines the layout."""

from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from leyden.errors import ConfigError
from leyden.formats.fp8 import FP8, FP8Channel
from leyden.formats.int4 import Int4
from leyden.formats.nvfp4 import NVFP4


def scheme(**weights: Any) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def theirs(weight: Tensor, format: Int4) -> tuple[dict[str, Tensor], QuantizationScheme]:
    kind = {"strategy": "group", "group_size": format.group} if format.group else {"strategy": "channel"}
    made = scheme(num_bits=4, symmetric=format.symmetric, **kind)
    runs = weight.unflatten(-1, (-1, format.group or weight.shape[-1]))
    scale, zero = calculate_qparams(runs.amin(-1), runs.amax(-1), made.weights)
    state = {"weight": weight, "weight_scale": scale.to(format.scale_dtype), "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    return compressor.compress(state, made), made


def matrix(n: int = 40, k: int = 256, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(n, k, generator=random) * torch.rand(n, 1, generator=random) + 0.1
    weight[5] = 0
    weight[6] = weight[6].abs()
    return weight.to(dtype)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_bit_for_bit(group: int | None, symmetric: bool, dtype: torch.dtype) -> None:
    format = Int4(group, symmetric, scale_dtype=dtype)
    weight = matrix(dtype=dtype)
    expected, made = theirs(weight, format)
    stored = format.quantize(weight)
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor) and stored[name].dtype == tensor.dtype, name
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    assert torch.equal(format.dequantize(expected, dtype), compressor.decompress(expected, made)["weight"])


@pytest.mark.parametrize("symmetric", [True, False])
def test_by_the_definition(symmetric: bool) -> None:
    format = Int4(32, symmetric, torch.float32)
    weight = matrix(dtype=torch.float32)
    stored = format.quantize(weight)
    words = stored["weight_packed"].numpy().view(np.uint32)
    codes = np.stack([words >> 4 * i & 15 for i in range(8)], -1).reshape(40, 256).astype(int) - 8
    zeros = 0
    if not symmetric:
        words = stored["weight_zero_point"].numpy().view(np.uint32)
        zeros = np.stack([words >> 4 * i & 15 for i in range(8)], 1).reshape(40, 8).astype(int).repeat(32, 1) - 8
    expected = (codes - zeros).astype(np.float32) * stored["weight_scale"].numpy().repeat(32, 1)
    assert (format.dequantize(stored, torch.float32).numpy() == expected).all()
    assert np.abs(expected - weight.numpy()).max() <= stored["weight_scale"].max().item()


def test_rows_that_do_not_divide_into_groups() -> None:
    with pytest.raises(ConfigError, match="int4 stores 128 columns at a time; a matrix has 1856"):
        Int4(128).tensors((2688, 1856), torch.bfloat16)
    assert Int4(64).tensors((2688, 1856), torch.bfloat16)["weight_scale"] == ((2688, 29), torch.bfloat16)
    assert Int4(None).tensors((3, 2688, 1856), torch.bfloat16)["weight_scale"] == ((3, 2688, 1), torch.bfloat16)


def test_zero_points_of_rows_that_do_not_fill_a_word() -> None:
    format = Int4(32, symmetric=False)
    weight = matrix(n=13)
    stored = format.quantize(weight)
    assert stored["weight_zero_point"].shape == (2, 8)
    assert (format.dequantize(stored, torch.float32) - weight).abs().max() < 0.3


def test_reading_their_nvfp4() -> None:
    weight = matrix(dtype=torch.float32)
    made = scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn)
    stored = NVFP4().quantize(weight)
    global_scale = 1 / stored["weight_scale_2"].reshape(1)
    state = {"weight": weight, "weight_scale": stored["weight_scale"].float(), "weight_global_scale": global_scale}
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    packed = compressor.compress(state, made)
    decompressed = compressor.decompress(packed, made)["weight"]
    read = {
        "weight": packed["weight_packed"],
        "weight_scale": packed["weight_scale"],
        "weight_scale_2": 1 / packed["weight_global_scale"][0],
    }
    assert torch.equal(NVFP4().dequantize(read, torch.bfloat16), decompressed.bfloat16())


@pytest.mark.parametrize(("format", "strategy"), [(FP8(), "tensor"), (FP8Channel(), "channel")])
def test_reading_their_fp8(format: FP8 | FP8Channel, strategy: str) -> None:
    weight = matrix(dtype=torch.float32)
    weight[5] = 1
    stored = format.quantize(weight)
    made = scheme(num_bits=8, type="float", strategy=strategy)
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    state = {"weight": weight, "weight_scale": stored["weight_scale"].reshape(-1, 1)}
    packed = compressor.compress(state, made)
    assert torch.equal(packed["weight"].view(torch.uint8), stored["weight"].view(torch.uint8))
    decompressed = compressor.decompress(packed, made)["weight"]
    assert torch.equal(format.dequantize(stored, torch.float32), decompressed.float())
