"""The arithmetic of 8-bit products against the same sums in double precision, and how far it is from the exact ones."""

import pytest
import torch
from torch import Tensor

from leyden import ops
from leyden.errors import ConfigError
from leyden.formats import Format, Weight
from leyden.formats.fp8 import FP8, FP8Channel
from leyden.formats.nvfp4 import NVFP4
from leyden.ops import eight
from leyden.ops.reference import eight as reference

FORMATS = [FP8(), FP8Channel(), NVFP4(), NVFP4(four_over_six=True)]


def stored(format: Format, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Weight:
    generator = torch.Generator().manual_seed(sum(shape))
    matrix = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    made = Weight(*shape, dtype=dtype, format=format).requires_grad_(False)
    for name, tensor in format.quantize(matrix).items():
        made.parts[name].copy_(tensor)
    return made


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def off(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def double(x: Tensor, matrix: Tensor) -> Tensor:
    """x rounded to 8 bits times a matrix, nothing else rounded."""
    codes, scales = reference.rounded(x)
    return (codes.double() * scales.double()[:, None]) @ matrix.t()


def test_activations():
    x = random(6, 300) * torch.tensor([1e-20, 1e-3, 1, 50, 1e10, 0])[:, None]
    codes, scales = reference.rounded(x)
    assert torch.equal(scales, x.float().abs().amax(1) / 448) and not codes[-1].float().any()
    assert (codes.float().abs().amax(1)[:-1] == 448).all()
    made = codes.float() * scales[:, None]
    whole = x.float().abs() > scales[:, None] / 32  # of smaller ones the last bit is half a unit in 2^-9
    assert ((made - x.float()).abs() <= torch.where(whole, x.float().abs() / 16, scales[:, None] / 512) * 1.0001).all()


@pytest.mark.parametrize("format", FORMATS)
def test_linear(format: Format):
    weight, x = stored(format, 64, 256), random(40, 256)
    codes, scales = reference.operand(weight)
    matrix = codes.double() * scales.double()[:, None]
    got = reference.linear(x, weight)
    assert got.dtype == torch.bfloat16 and off(got, double(x, matrix)) < 2.5e-3
    assert off(matrix, weight.format.dequantize(weight.parts, torch.float32)) < (0.02 if "nv" in format.name else 1e-7)
    assert 1e-3 < off(got, ops.linear(x, weight)) < 4e-2
    assert reference.linear(x[None], weight, torch.float32).shape == (1, 40, 64)


@pytest.mark.parametrize("format", FORMATS)
def test_experts(format: Format):
    up, down = stored(format, 4, 64, 128), stored(format, 4, 48, 64)
    shared_up, shared_down = stored(format, 128, 128), stored(format, 48, 128)
    x, generator = random(20, 128), torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(20)])
    weights = torch.rand(20, 2, generator=generator)
    exact = [codes.double() * s.double()[..., None] for codes, s in map(reference.operand, (up, down))]
    wanted = torch.zeros(20, 48, dtype=torch.float64)
    for row in range(20):
        for choice in range(2):
            expert = ids[row, choice]
            hidden = double(x[row : row + 1], exact[0][expert]).bfloat16().double().relu().square()
            wanted[row] += weights[row, choice] * double(hidden, exact[1][expert])[0]
    arguments = x, ids, weights, up, down
    assert off(reference.experts(*arguments), wanted) < 5e-3
    for op in (ops.moe, ops.mlp):
        rest = (*arguments, shared_up, shared_down) if op is ops.moe else (x, shared_up, shared_down)
        assert 1e-3 < off(getattr(reference, op.name)(*rest), op(*rest)) < 6e-2


def test_where_it_begins():
    """A kernel is asked for the rows of x, however they are arranged, and for what all of its weights allow."""
    one, other = (Weight(16, 16, dtype=torch.bfloat16) for _ in range(2))
    kernel = eight.above(lambda x, *rest: "few", lambda x, *rest: "many")
    assert kernel(random(10**5, 16), one, other) == "few"
    one.eight_above = 6
    assert kernel(random(10**5, 16), one, other) == "few"
    other.eight_above = 7
    assert [kernel(random(*shape, 16), one, other) for shape in ((7,), (8,), (2, 3), (2, 4), (0,))] == [
        *("few", "many", "few", "many", "few")
    ]


def test_devices_that_have_no_such_products(monkeypatch: pytest.MonkeyPatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(ConfigError, match="needs a GPU of compute capability 9.0 or more; the device is cpu"):
        eight.check(cpu, torch.bfloat16)
    with pytest.raises(ConfigError, match="needs activations in bfloat16, got float16"):
        eight.check(cuda, torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ConfigError, match=r"for a GPU \(compute capability 9.0 is needed\)"):
        eight.check(cuda, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    tried, product = eight._tried, eight.product
    monkeypatch.setattr(eight, "_tried", lambda device: tried(cpu))
    monkeypatch.setattr(eight, "product", lambda x, weight: torch.zeros(40, 32))
    with pytest.raises(ConfigError, match=r"for a GPU \(its results are off by 1.0e\+00\)"):
        eight.check(cuda, torch.bfloat16)
    monkeypatch.setattr(eight, "product", product)
    eight.check(cuda, torch.bfloat16)


def test_what_torch_asks_of_operands_on_cuda(monkeypatch: pytest.MonkeyPatch):
    """Shapes of the 30B model: layouts, dtypes and multiples of 16, by torch's own description of these functions."""
    monkeypatch.setattr("torch._meta_registrations.device_hint", lambda tensor: "cuda")
    meta = torch.device("meta")

    def matrix(*shape: int) -> eight.Scaled:
        return eight.as_stored(Weight(*shape, dtype=torch.bfloat16, format=FP8()).to(meta))

    for n, k in ((10304, 2688), (2688, 4096), (3712, 2688), (2688, 3712)):
        assert eight.product(eight.empty(8191, k, meta), matrix(n, k)).shape == (8191, n)
    with pytest.raises(RuntimeError, match="divisible by 16"):
        eight.product(eight.empty(9, 40, meta), matrix(32, 40))
