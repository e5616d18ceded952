import numpy as np
import pytest
import torch
from torch import Tensor

from leyden.errors import ConfigError
from leyden.formats import Weight
from leyden.formats.nvfp4 import NVFP4, Tiled, arrange, from_e2m1, pack, restore, to_e2m1, unpack
from tests.formats import reference


def matrix(n: int = 48, k: int = 96, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of different sizes; one block of zeros, one of values that are all too small for their scale."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=random) * torch.rand(n, 1, generator=random)
    weight[3, 16:32] = 0
    weight[4, :16] *= 1e-6
    return weight.to(dtype)


def scales_of(weight: np.ndarray, stretch: float = 1.0, top: float = 448.0) -> tuple[np.ndarray, np.float32]:
    """(bytes of the block scales, matrix scale) that spread every block over +-6 / stretch."""
    f = np.float32
    largest = np.abs(weight).max()
    peaks = np.abs(weight.reshape(len(weight), -1, 16)).max(-1)
    scale_2 = largest / f(6 * top)
    if top == 448:
        wanted = np.where(peaks == 0, f(1), peaks / (f(6) * scale_2))
    else:
        wanted = np.where(peaks == 0, f(1), peaks * f(stretch) / f(6)) * f(top) / (largest / f(6))
    return reference.to_e4m3(np.clip(wanted, f(2**-9), f(448))), scale_2


def codes_of(weight: np.ndarray, scale: np.ndarray, scale_2: np.float32) -> np.ndarray:
    step = (reference.from_e4m3(scale) * scale_2)[..., None]
    return reference.to_e2m1((weight.reshape(len(weight), -1, 16) / step).astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_quantize_bit_for_bit(seed: int, dtype: torch.dtype) -> None:
    weight = matrix(seed=seed, dtype=dtype)
    stored = NVFP4().quantize(weight)
    values = weight.float().numpy()
    scale, scale_2 = scales_of(values)
    codes = codes_of(values, scale, scale_2).reshape(values.shape)
    assert stored["weight_scale_2"].numpy() == scale_2
    assert (stored["weight_scale"].view(torch.uint8).numpy() == scale).all()
    assert (stored["weight"].numpy() == (codes[:, ::2] | codes[:, 1::2] << 4)).all()

    expected = reference.from_e2m1(codes).reshape(48, -1, 16) * (reference.from_e4m3(scale) * scale_2)[..., None]
    assert (NVFP4().dequantize(stored, torch.float32).numpy() == expected.reshape(values.shape)).all()


def test_four_over_six_takes_the_better_of_two() -> None:
    weight = matrix(seed=5)
    plain, better = NVFP4(), NVFP4(four_over_six=True)
    stored = better.quantize(weight)
    values = weight.numpy()
    errors, tried = [], []
    for stretch in (1.0, 1.5):
        scale, scale_2 = scales_of(values, stretch, 256.0)
        codes = codes_of(values, scale, scale_2)
        step = (reference.from_e4m3(scale) * scale_2)[..., None]
        errors.append(((values.reshape(codes.shape) - reference.from_e2m1(codes) * step) ** 2).sum(-1))
        tried.append((scale, codes))
    assert stored["weight_scale_2"].numpy() == scale_2
    four = errors[1] < errors[0]
    assert 0.2 < four.mean() < 0.8
    scale = np.where(four, tried[1][0], tried[0][0])
    assert (stored["weight_scale"].view(torch.uint8).numpy() == scale).all()
    codes = np.where(four[..., None], tried[1][1], tried[0][1]).reshape(values.shape)
    assert (unpack(stored["weight"]).numpy() == codes).all()

    def error(format: NVFP4) -> float:
        return (format.dequantize(format.quantize(weight), torch.float32) - weight).square().mean().item()

    assert error(better) < 0.9 * error(plain)
    assert better == plain  # they are read alike


def test_e2m1_rounding() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert from_e2m1(to_e2m1(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    above, below = torch.nextafter(ties, torch.tensor(9.0)), torch.nextafter(ties, torch.tensor(0.0))
    assert from_e2m1(to_e2m1(above)).tolist() == [0.5, 1, 1.5, 2, 3, 4, 6]
    assert from_e2m1(to_e2m1(below)).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4]
    assert to_e2m1(torch.tensor([7.0, -7.0, 1e9, -1e-9, -0.0, 0.0])).tolist() == [7, 15, 7, 8, 0, 0]


def test_nibbles() -> None:
    codes = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    packed = pack(codes)
    assert packed.tolist() == [[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(unpack(packed), codes)


@pytest.mark.parametrize("shape", [(48, 192), (3, 32, 64)])
def test_tiles_hold_the_same(shape: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randint(0x7F if name == "weight_scale" else 256, size, generator=random, dtype=torch.uint8)
        for name, (size, _) in NVFP4().tensors(shape, torch.float32).items()
        if name != "weight_scale_2"
    }
    tensors["weight_scale"] = tensors["weight_scale"].view(torch.float8_e4m3fn)
    tensors["weight_scale_2"] = torch.rand(shape[:-2], generator=random)
    format = Tiled(NVFP4())
    tiles = format.tile(tensors)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tiles.items()} == format.tensors(shape, torch.float32)
    wanted = NVFP4().dequantize(tensors, torch.float32)
    assert torch.equal(format.dequantize(tiles, torch.float32), wanted)
    back = format.untile(tiles)
    assert torch.equal(back["weight_scale"].view(torch.uint8), tensors["weight_scale"].view(torch.uint8))
    kept = (tensors["weight_scale"].float() != 0).repeat_interleave(8, -1)
    assert torch.equal(back["weight"], tensors["weight"] * kept)
    if shape[-1] > 64:
        assert torch.equal(format.dequantize(format.shard(tiles, -1, 1, 3), torch.float32), wanted[..., 64:128])
    else:
        assert torch.equal(format.dequantize(format.shard(tiles, -2, 1, 2), torch.float32), wanted[..., 16:, :])


@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 128)])
def test_there_and_back(shape: tuple[int, ...]) -> None:
    weight = Weight(*shape, dtype=torch.float32, format=NVFP4())
    for name, tensor in NVFP4().quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0))).items():
        weight.parts[name].copy_(tensor)
    before, dense = {name: part.clone() for name, part in weight.parts.items()}, weight.dense()
    assert arrange(weight) and arrange(weight) and weight.format == Tiled(NVFP4())
    assert torch.equal(weight.dense(), dense)
    restore(weight)
    assert weight.format == NVFP4() and weight.parts.keys() == before.keys()
    assert all(torch.equal(weight.parts[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before
               if before[name].dim())  # fmt: skip
    odd = Weight(24, 64, dtype=torch.float32, format=NVFP4())
    assert not arrange(odd) and odd.format == NVFP4()


def test_tiles_are_whole() -> None:
    with pytest.raises(ConfigError, match="tiles of 16 x 64; a matrix has"):
        Tiled(NVFP4()).tensors((24, 64), torch.float32)
