"""Against compressed-tensors, which defines the layout."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.utils import calculate_qparams

from leyden.errors import ConfigError
from leyden.formats.int8 import Int8
from leyden.formats.scheme import Scheme, describe
from tests.formats.test_int4 import matrix, scheme


@pytest.mark.parametrize("group", [64, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_bit_for_bit(group: int | None, dtype: torch.dtype) -> None:
    format, weight = Int8(group, scale_dtype=dtype), matrix(dtype=dtype)
    kind = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    made = scheme(num_bits=8, symmetric=True, **kind)
    runs = weight.unflatten(-1, (-1, group or weight.shape[-1]))
    scale, zero = calculate_qparams(runs.amin(-1), runs.amax(-1), made.weights)
    compressor = BaseCompressor.get_value_from_registry("int-quantized")
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    expected = compressor.compress(state, made)
    stored = format.quantize(weight)
    assert torch.equal(stored["weight"], expected["weight"]) and stored["weight"].dtype == torch.int8
    assert torch.equal(stored["weight_scale"], expected["weight_scale"])
    assert torch.equal(format.dequantize(stored, dtype), compressor.decompress(expected, made)["weight"])


def test_rows_that_do_not_divide_into_groups() -> None:
    with pytest.raises(ConfigError, match="int8 stores 128 columns at a time; a matrix has 1856"):
        Int8(128).tensors((2688, 1856), torch.bfloat16)


@pytest.mark.parametrize("format", [Int8(), Int8(128)])
def test_what_a_config_says_of_it_is_read_back(format: Int8) -> None:
    said = describe({"backbone.layers.0.mixer.in_proj": format, "lm_head": format, "backbone.embeddings": Int8(32)})
    scheme = Scheme(said)
    assert scheme.format_of("backbone.layers.0.mixer.in_proj") == format
    assert scheme.format_of("backbone.embeddings") == Int8(32)
