"""What holds of every packed matrix: where each code lies, and what its scales do; by the definitions."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leyden.formats import Format, Grid
from leyden.formats.fp8 import E4M3, FP8, MXFP8, FP8Block, FP8Channel
from leyden.formats.gguf import Blocks, from_nvfp4_blocks, to_nvfp4_blocks
from leyden.formats.int4 import Int4
from leyden.formats.nvfp4 import NVFP4

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
GRIDS = [NVFP4(), NVFP4(four_over_six=True), Int4(32), Int4(None)]
SCALES = {  # format -> its scales, the finest first
    NVFP4(): ("weight_scale", "weight_scale_2"),
    FP8(): ("weight_scale",),
    FP8Channel(): ("weight_scale",),
    FP8Block(): ("weight_scale",),
    Int4(32): ("weight_scale",),
}
sizes = st.tuples(st.integers(1, 3), st.integers(1, 3).map(lambda n: 32 * n))  # rows, columns
few = settings(max_examples=25, deadline=None)


def noise(rows: int, columns: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=random) * torch.rand(rows, 1, generator=random)


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(code: int) -> float:
    return -E2M1[code & 7] if code & 8 else E2M1[code & 7]


@few
@given(sizes, st.data())
def test_nvfp4_by_its_bytes(size: tuple[int, int], data: st.DataObject) -> None:
    rows, columns = size
    packed = data.draw(st.binary(min_size=rows * columns // 2, max_size=rows * columns // 2))
    scales = data.draw(st.lists(st.integers(0, 0x7E), min_size=rows * columns // 16, max_size=rows * columns // 16))
    whole = data.draw(st.sampled_from([1.0, 0.25, 2.0**-12]))
    found = NVFP4().dequantize(
        {
            "weight": torch.tensor(list(packed), dtype=torch.uint8).view(rows, -1),
            "weight_scale": torch.tensor(scales, dtype=torch.uint8).view(E4M3).view(rows, -1),
            "weight_scale_2": torch.tensor(whole),
        },
        torch.float32,
    )
    for row in range(rows):
        for column in range(columns):
            byte = packed[(row * columns + column) // 2]
            code = byte >> 4 if column % 2 else byte & 15
            assert found[row, column].item() == e2m1(code) * (e4m3(scales[(row * columns + column) // 16]) * whole)


@few
@given(sizes, st.data())
def test_int4_by_its_words(size: tuple[int, int], data: st.DataObject) -> None:
    rows, columns = size
    count = rows * columns // 8
    words = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count))
    scales = [2.0 ** (i % 5 - 3) for i in range(rows * columns // 32)]
    packed = torch.frombuffer(bytearray(struct.pack(f"<{count}I", *words)), dtype=torch.int32)
    stored = {"weight_packed": packed.view(rows, -1), "weight_scale": torch.tensor(scales).view(rows, -1)}
    found = Int4(32).dequantize(stored, torch.float32)
    for row in range(rows):
        for column in range(columns):
            nibble = words[(row * columns + column) // 8] >> 4 * (column % 8) & 15
            assert found[row, column].item() == (nibble - 8) * scales[(row * columns + column) // 32]


@few
@given(sizes, st.data())
def test_q8_0_and_q4_0_by_their_bytes(size: tuple[int, int], data: st.DataObject) -> None:
    rows, columns = size
    codes = {
        "Q8_0": lambda body, j: body[j] - 256 * (body[j] > 127),
        "Q4_0": lambda body, j: (body[j % 16] >> 4 * (j // 16) & 15) - 8,  # j and j + 16 share a byte
    }
    for kind, length in (("Q8_0", 34), ("Q4_0", 18)):
        count = rows * columns // 32
        bodies = data.draw(
            st.lists(st.binary(min_size=length - 2, max_size=length - 2), min_size=count, max_size=count)
        )
        blocks = [struct.pack("<e", 2.0 ** (i % 7 - 5)) + body for i, body in enumerate(bodies)]
        weight = torch.tensor(list(b"".join(blocks)), dtype=torch.uint8).view(rows, -1)
        found = Blocks(kind).dequantize({"weight": weight}, torch.float32).flatten()
        for i, body in enumerate(bodies):
            for j in range(32):
                assert found[32 * i + j].item() == codes[kind](body, j) * 2.0 ** (i % 7 - 5)


@few
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31))
def test_nvfp4_blocks_of_gguf_hold_the_same_numbers(rows: int, blocks: int, seed: int) -> None:
    stored = NVFP4(four_over_six=True).quantize(noise(rows, 64 * blocks, seed))
    weight, scale = from_nvfp4_blocks(to_nvfp4_blocks(stored["weight"], stored["weight_scale"]))
    assert torch.equal(weight, stored["weight"])
    assert torch.equal(scale.view(torch.uint8), stored["weight_scale"].view(torch.uint8))


@pytest.mark.parametrize("format", SCALES, ids=lambda format: format.name)
@few
@given(sizes, st.integers(0, 2**31), st.sampled_from([0.25, 2.0, 8.0]))
def test_scales_are_multipliers(format: Format, size: tuple[int, int], seed: int, factor: float) -> None:
    stored = format.quantize(noise(*size, seed))
    values = format.dequantize(stored, torch.float32)
    for name in SCALES[format]:
        if stored[name].dtype == E4M3 and stored[name].float().max() * factor > 448:
            continue
        larger = stored | {name: (stored[name].float() * factor).to(stored[name].dtype)}
        if torch.equal(larger[name].float(), stored[name].float() * factor):  # no small E4M3 was rounded
            assert torch.equal(format.dequantize(larger, torch.float32), values * factor)


@pytest.mark.parametrize("format", [*SCALES, MXFP8(), NVFP4(four_over_six=True)], ids=lambda format: format.name)
@few
@given(sizes, st.integers(0, 2**31), st.integers(-20, 20))
def test_a_matrix_times_a_power_of_two_has_the_same_codes(
    format: Format, size: tuple[int, int], seed: int, exponent: int
) -> None:
    weight = noise(*size, seed)
    first, second = format.quantize(weight), format.quantize(weight * 2.0**exponent)
    code = next(iter(first))
    assert torch.equal(first[code].view(torch.uint8), second[code].view(torch.uint8))
    scaled = format.dequantize(first, torch.float32) * 2.0**exponent
    assert torch.equal(format.dequantize(second, torch.float32), scaled)


@pytest.mark.parametrize("format", GRIDS, ids=str)
@few
@given(sizes, st.integers(0, 2**31))
def test_what_is_on_the_grid_stays_there(format: Grid, size: tuple[int, int], seed: int) -> None:
    stored = format.quantize(noise(*size, seed))
    values = format.dequantize(stored, torch.float32)
    steps = format.steps(stored)
    units = (values / steps).nan_to_num(0)  # right but for the rounding of this division
    again = format.recode(stored, format.snap(units))
    assert torch.equal(format.dequantize(again, torch.float32), values)
    torch.testing.assert_close(format.snap(units), units, rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", GRIDS, ids=str)
@few
@given(sizes, st.integers(0, 2**31))
def test_no_neighbour_on_the_grid_is_nearer(format: Grid, size: tuple[int, int], seed: int) -> None:
    weight = noise(*size, seed)
    stored = format.quantize(weight)
    steps, values = format.steps(stored), format.dequantize(stored, torch.float32)
    for move in (-1.0, -0.5, 0.5, 1.0):  # of the unit; between the values of E2M1 are no smaller steps
        other = format.snap((values / steps).nan_to_num(0) + move) * steps
        assert ((weight - values).abs() <= (weight - other).abs() + 1e-5 * steps).all()
