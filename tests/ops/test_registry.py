import pytest
import torch
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.registry import Op, using


def double(x: Tensor, weight: Weight | None = None) -> Tensor:
    """twice x"""
    return 2 * x


def test_an_op_without_kernels_is_its_reference() -> None:
    op = Op(double)
    assert op(torch.ones(1)) == 2
    assert (op.name, op.__doc__) == ("double", "twice x")


def test_a_kernel_is_picked_by_device_and_format() -> None:
    op = Op(double)
    op.register("cpu", lambda x, weight=None: 20 * x)
    op.register("cpu", lambda x, weight=None: 200 * x, format="other")
    weight = Weight(1, 1, dtype=torch.float32)
    assert op(torch.ones(1)) == 20
    assert op(torch.ones(1), weight) == 20
    weight.format = type("Other", (), {"name": "other"})()
    assert op(torch.ones(1), weight) == 200
    weight.format = type("Unknown", (), {"name": "unknown"})()
    assert op(torch.ones(1), weight) == 2, "no kernel for the format: the reference"


def test_using_the_reference_ends_with_the_block() -> None:
    op = Op(double)
    op.register("cpu", lambda x: 20 * x)
    with using("reference"):
        assert op(torch.ones(1)) == 2
    assert op(torch.ones(1)) == 20
    with pytest.raises(ValueError, match="reference"), using("fast"):
        pass


def test_training_has_its_own_versions_and_else_the_reference() -> None:
    op, other = Op(double), Op(double)
    op.register("training", lambda x: 2000 * x)
    other.register("cpu", lambda x: 20 * x)
    with using("training"):
        assert op(torch.ones(1)) == 2000
        assert other(torch.ones(1)) == 2
    assert (op(torch.ones(1)), other(torch.ones(1))) == (2, 20)
