"""The assembly of the fragments, which the interpreter cannot run, computed here for every code."""

import re

import pytest
import torch

from leyden.formats.fp8 import E4M3
from leyden.formats.nvfp4 import NVFP4, Tiled

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import fragments, moe  # noqa: E402

MASK = 2**32 - 1


def halves(word: torch.Tensor) -> torch.Tensor:
    """int64 words -> the bfloat16 values of their low and high halves [..., 2], fp64."""
    bits = torch.stack([word & 0xFFFF, word >> 16], -1)
    return torch.where(bits < 2**15, bits, bits - 2**16).short().view(torch.bfloat16).double()


def words(value: torch.Tensor) -> torch.Tensor:
    """The other way; the values must be bfloat16."""
    bits = value.bfloat16()
    assert (bits.double() == value).all()
    bits = bits.view(torch.int16).long() & 0xFFFF
    return bits[..., 0] | (bits[..., 1] << 16)


def run(assembly: str, results: int, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What `assembly` leaves in $0, $1, ... if the inputs are in the registers after them: unsigned words, as int64."""
    registers = {f"${results + i}": value for i, value in enumerate(inputs)}

    def value(name: str) -> torch.Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    for line in assembly.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *names = re.split(r",\s*", rest.strip())
        a, *others = (value(n) for n in names)
        if name == "prmt.b32":
            source, selected = a | (others[0] << 32), int(others[1])
            bytes_ = [(source >> (8 * (selected >> (4 * i) & 7))) & 255 for i in range(4)]
            made = sum((byte << (8 * i) for i, byte in enumerate(bytes_)), torch.tensor(0))
        elif name == "sub.f32":
            a, b = (word.int().view(torch.float32) for word in (a, others[0]))
            made = (a - b).view(torch.int32).long()
        elif name == "fma.rn.bf16x2":
            assert int(others[1]) == 0x80008000  # two zeros: a product
            made = words(halves(a) * halves(others[0]))
        else:
            made = {
                "mov.b32": lambda a: a,
                "and.b32": lambda a, b: a & b,
                "shl.b32": lambda a, b: a << b,
                "shr.b32": lambda a, b: a >> b,
                "mad.lo.u32": lambda a, b, c: a * b + c,
                "lop3.b32": lambda a, b, c, table: (a & b) | c if int(table) == 0xEA else 1 // 0,
            }[name](a, *others)
        registers[target] = made & MASK
    return [registers[f"${i}"] for i in range(results)]


def test_assembly_of_e2m1():
    """All codes under all scales, in each place of a word and with each byte of the scales."""
    scales = torch.arange(0x7F, dtype=torch.uint8)[:, None, None].expand(-1, 16, 4)  # one for each matrix of a stack
    for code in range(16):
        tensors = {
            "weight": torch.full((127, 16, 32), code * 17, dtype=torch.uint8),
            "weight_scale": scales.contiguous().view(E4M3),
            "weight_scale_2": torch.ones(127),
        }
        tiles = Tiled(NVFP4()).tile(tensors)
        wanted = NVFP4().dequantize(tensors, torch.float64)[:, 0, :2] * 2.0**-7
        for place in range(4):
            word = tiles["weight"][:, 0, 0, 0, place].long() & MASK
            four = tiles["weight_scale"].view(torch.int32)[:, 0, 0, 0].long() & MASK
            for got in run(getattr(fragments, f"_FOUR_{place}").value, 4, word, four):
                assert (halves(got) == wanted).all()


def test_each_code_comes_to_its_column():
    """Words of eight different codes: pair i of a word has its columns 2 i and 2 i + 1."""
    packed = torch.randint(256, (16, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors = {"weight": packed, "weight_scale": torch.ones(16, 4).to(E4M3), "weight_scale_2": torch.tensor(1.0)}
    tiles, wanted = Tiled(NVFP4()).tile(tensors), NVFP4().dequantize(tensors, torch.float64) * 2.0**-7
    for thread in range(32):
        g, t = thread // 4, thread % 4
        for place in range(4):
            word = tiles["weight"][0, 0, thread, place].long() & MASK
            scale = tiles["weight_scale"].view(torch.int32)[0, 0, g * 2 + t // 2].long() & MASK
            first = place % 2 * 32 + t * 8
            for i, got in enumerate(run(getattr(fragments, f"_FOUR_{place}").value, 4, word, scale)):
                there = first + 2 * i
                assert (halves(got) == wanted[g + place // 2 * 8, there : there + 2]).all()


def test_assembly_of_e4m3():
    """All 65,536 pairs, in either half of a word, the other half at random."""
    pairs = torch.arange(65536)
    other = torch.randperm(65536, generator=torch.Generator().manual_seed(0))
    byte = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
    byte[0x7F], byte[0xFF] = 480, -480  # in place of what is no number
    wanted = torch.stack([byte[pairs & 255], byte[pairs >> 8]], -1)
    assert (halves(run(fragments._EIGHT.value, 2, pairs | (other << 16))[0]) == wanted).all()
    assert (halves(run(fragments._EIGHT.value, 2, other | (pairs << 16))[1]) == wanted).all()


def test_assembly_of_thirds():
    """Three bfloat16 have all bits of a float."""
    draw = torch.Generator().manual_seed(0)
    floats = torch.randn(2, 20_000, generator=draw) * 10.0 ** torch.randint(-20, 20, (2, 20_000), generator=draw)
    pairs = run(moe._THIRDS.value, 3, *(row.view(torch.int32).long() & MASK for row in floats))
    assert (sum(halves(pair) for pair in pairs).t() == floats.double()).all()
