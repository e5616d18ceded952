import pytest
import torch
from torch import Tensor

from leyden.formats import Dense, Weight
from leyden.formats.fp8 import FP8
from leyden.ops.registry import Op, standing_for, using, watching


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
    weight = Weight(1, 1, dtype=torch.float32).requires_grad_(False)
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


def test_watching_sees_arguments_before_the_op_runs() -> None:
    op, seen = Op(double), []
    with watching(lambda op, args: seen.append((op.name, args[0].item()))):
        assert op(torch.tensor(2.0)) == 4
    op(torch.tensor(3.0))
    assert seen == [("double", 2.0)]


def test_tensors_without_memory_can_stand_for_those_of_a_device() -> None:
    op, nothing = Op(double), torch.empty(1, device="meta")
    op.register("cpu", lambda x: "kernel")
    with standing_for("cpu"):
        assert op(nothing) == "kernel"
    assert op(nothing).is_meta


def test_training_has_its_own_versions_and_else_the_reference() -> None:
    op, other = Op(double), Op(double)
    op.register("training", lambda x: 2000 * x)
    other.register("cpu", lambda x: 20 * x)
    with using("training"):
        assert op(torch.ones(1)) == 2000
        assert other(torch.ones(1)) == 2
    assert (op(torch.ones(1)), other(torch.ones(1))) == (2, 20)


def test_a_recorded_call_runs_the_reference() -> None:
    op = Op(double)
    op.register("cpu", lambda x, weight=None: 20 * x)
    x, weight = torch.ones(1, requires_grad=True), Weight(1, 1, dtype=torch.float32)
    assert op(x) == 2 and op(torch.ones(1), weight) == 2
    with torch.no_grad():
        assert op(x, weight) == 20


@torch.no_grad()
def test_weights_of_different_formats_run_the_reference() -> None:
    op = Op(lambda x, up, down: "reference")
    op.register("cpu", lambda x, up, down: "kernel")
    op.register("cpu", lambda x, up, down: "fp8 kernel", "fp8")
    dense, fp8 = (Weight(4, 4, dtype=torch.float32, format=format) for format in (Dense(), FP8()))
    assert op(torch.ones(1), dense, dense) == "kernel"
    assert op(torch.ones(1), fp8, fp8) == "fp8 kernel"
    assert op(torch.ones(1), dense, fp8) == op(torch.ones(1), fp8, dense) == "reference"
