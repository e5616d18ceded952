"""Humming's layers get checkpoints as they are, and what they give is what our ops give."""

import pytest
import torch
from torch import Tensor

from leyden.errors import ConfigError
from leyden.formats import Weight
from leyden.formats.nvfp4 import NVFP4
from leyden.ops.reference import linear as reference
from leyden.ops.reference import moe as reference_moe
from tests import packages

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden import ops  # noqa: E402
from leyden.ops import humming  # noqa: E402

FLAG = "--moe-backend humming"


def quantised(*shape: int, seed: int = 0, input_scale: bool = False, dtype: torch.dtype = torch.bfloat16) -> Weight:
    made = Weight(*shape, dtype=dtype, format=NVFP4(input_scale)).requires_grad_(False)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5
    for name, part in made.format.quantize(values).items():
        made.parts[name].copy_(part)
    return made


def laid(weight: Weight, monkeypatch: pytest.MonkeyPatch) -> Weight:
    packages.humming(monkeypatch)
    copy = Weight(*weight.shape, dtype=weight.dtype, format=weight.format)
    for name, part in weight.parts.items():
        copy.parts[name].data.copy_(part)
    copy.twin = weight.dense()
    assert humming.fits(copy)
    humming.lay(copy, humming.find_layer(FLAG))
    assert copy.twin is None, "nothing reads it any more"
    return copy


def randn(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("input_scale", [False, True])
@pytest.mark.parametrize("shape", [(3, 64), (2, 2, 64)])
def test_a_matrix(monkeypatch: pytest.MonkeyPatch, input_scale: bool, shape: tuple[int, ...]) -> None:
    weight = quantised(72, 64, input_scale=input_scale)
    made, x = laid(weight, monkeypatch), randn(*shape)
    assert made.format.name == "nvfp4_humming" and made.parts.keys() == {"weight", "weight_scale", "weight_scale_2"}
    assert made.parts["weight"] is made.format.layer.weight and not any(p.requires_grad for p in made.parameters())
    packages.assert_near(humming.linear(x, made), reference.linear(x, weight))
    assert humming.linear(x, made, torch.float32).dtype == torch.float32
    assert humming.linear(x[:0], made).shape == (0, *shape[1:-1], 72)


def test_two_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down, x = quantised(128, 64), quantised(64, 128, seed=1), randn(5, 64)
    found = humming.mlp(x, laid(up, monkeypatch), laid(down, monkeypatch))
    packages.assert_near(found, reference.mlp(x, up, down))


@pytest.mark.parametrize("count", [1, 7])
def test_experts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    up, down = quantised(5, 64, 192), quantised(5, 128, 64, seed=1)
    shared_up, shared_down = quantised(64, 192, seed=2), quantised(128, 64, seed=3)
    x, draw = randn(count, 192), torch.Generator().manual_seed(9)
    ids, weights = torch.randn(count, 5, generator=draw).topk(2).indices, torch.rand(count, 2, generator=draw)
    ours = [laid(w, monkeypatch) for w in (up, down, shared_up, shared_down)]
    found = humming.experts(x, ids, weights, *ours[:2])
    packages.assert_near(found, reference_moe.experts(x, ids, weights, up, down))
    wanted = reference_moe.moe(x, ids, weights, up, down, shared_up, shared_down)
    packages.assert_near(humming.moe(x, ids, weights, *ours), wanted)
    assert humming.experts(x[:0], ids[:0], weights[:0], *ours[:2]).shape == (0, 128)


def test_what_fits() -> None:
    assert humming.fits(quantised(8, 64)) and humming.fits(quantised(2, 1856, 64, dtype=torch.float16))
    assert not humming.fits(quantised(12, 64)) and not humming.fits(quantised(8, 96))
    assert not humming.fits(quantised(8, 64, dtype=torch.float32)) and not humming.fits(Weight(8, 64, dtype=torch.half))


def test_there_is_no_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made = laid(quantised(64, 64), monkeypatch)
    with pytest.raises(ConfigError, match="can only be multiplied with"):
        made.dense()
    with pytest.raises(ConfigError, match="not of values"):
        made.format.quantize(torch.ones(64, 64))
    with pytest.raises(ConfigError, match="cannot be divided"):
        made.format.shard({}, -1, 0, 2)


def test_kernels_are_for_that_format_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in (ops.linear, ops.mlp, ops.experts, ops.moe):
        monkeypatch.setattr(op, "_kernels", {})
    humming.register()
    assert {key for op in (ops.linear, ops.mlp, ops.experts, ops.moe) for key in op._kernels} == {
        ("cuda", "nvfp4_humming")
    }


@pytest.mark.parametrize("method", ["forward", "load_from_tensors", "transform"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    changed = type("HummingLayer", (packages.HummingLayer,), {method: lambda self, one, other: None})
    packages.humming(monkeypatch, changed)
    with pytest.raises(
        ConfigError, match=f"{FLAG}: humming.layer.HummingLayer.{method} of humming-kernels takes other"
    ):
        humming.find_layer(FLAG)
