import numpy as np
import torch

from leyden import ops
from tests.batches import CLOSE, weight


def test_embed() -> None:
    table = weight(10, 6)
    assert torch.equal(ops.embed(torch.tensor([3, 0, 3], dtype=torch.int32), table), table.weight[[3, 0, 3]])


def test_mlp_formula() -> None:
    up, down = weight(12, 8), weight(8, 12, seed=1)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    inner = np.maximum(x.double().numpy() @ up.weight.double().numpy().T, 0) ** 2
    expected = torch.from_numpy(inner @ down.weight.double().numpy().T).float()
    torch.testing.assert_close(ops.mlp(x, up, down), expected, **CLOSE)


def test_bf16_products_are_rounded_sums_of_fp32() -> None:
    narrow, wide = weight(64, 96, dtype=torch.bfloat16), weight(64, 96)
    wide.weight.copy_(narrow.weight)
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = ops.linear(x.float(), wide)
    # one rounding, to nearest: half a unit in the last of 8 bits; a little more for the order of the fp32 sum
    assert ((ops.linear(x, narrow).float() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()
