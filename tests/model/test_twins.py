"""Decoded copies: which matrices get one, and when there is no room for any."""

import torch
from torch import nn

from leyden.formats import Dense, Weight
from leyden.formats.nvfp4 import NVFP4
from leyden.model import twins
from leyden.model.rounded import narrow
from tests.engine.conftest import tiny


def test_matrices_but_not_stacks():
    model = tiny()
    assert twins.keep([model], 1 << 40) == 0  # nothing is quantised
    narrow(model, "nvfp4")
    coded = [one for one in model.modules() if isinstance(one, Weight) and one.format != Dense()]
    for one in coded:
        for name, part in one.format.quantize(torch.randn(one.shape)).items():
            one.parts[name].copy_(part)
    single = [
        one for one in coded if len(one.shape) == 2 and one.format.name == "nvfp4"
    ]  # others have 8 bits, and no kernel
    size = sum(one.shape[0] * one.shape[1] * one.dtype.itemsize for one in single)
    assert single and len(single) < len(coded)
    assert twins.keep([model], 16 * size - 1) == 0 and all(one.twin is None for one in coded)
    assert twins.keep([model], 16 * size) == size
    for one in coded:
        assert (one.twin is None) == (one not in single)
        assert one.twin is None or torch.equal(one.twin, one.dense())


def test_a_model_and_its_drafter():
    one, other = (Weight(16, 32, dtype=torch.float32, format=NVFP4()) for _ in range(2))
    for weight in (one, other):
        for name, part in weight.format.quantize(torch.randn(16, 32)).items():
            weight.parts[name].copy_(part)
    assert twins.keep([one, nn.ModuleList([one, other])], 1 << 20) == 2 * 16 * 32 * 4
    assert one.twin is not None and other.twin is not None


def test_another_format_has_no_twin():
    one = Weight(4, 8, dtype=torch.float32)
    one.twin = torch.zeros(4, 8)
    one.allot(Dense())
    assert one.twin is None
