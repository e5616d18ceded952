"""Products of many rows are oneDNN's where the machine has AMX.

The tests say that this one has: whose products they are, and what comes out, does not depend on it.
"""

import pytest
import torch

from leyden import ops
from leyden.formats import Dense
from leyden.ops.cpu.program import Arena, Program, available

if available:
    from leyden.ops.cpu import linear
from tests.ops.cpu.test_formats import FORMATS, draw, weight

pytestmark = pytest.mark.skipif(not available, reason="the kernels need a C compiler")
ALL = FORMATS | {"dense": Dense()}
X = draw(140, 64, seed=1).bfloat16()


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", ["dense", "int8 of rows", "int4 of 32", "nvfp4", "fp8 block", "q4_0"])
def test_results_are_those_of_the_references(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = weight(ALL[name], 96, 64, dtype=torch.bfloat16), weight(ALL[name], 64, 96, dtype=torch.bfloat16)
    monkeypatch.setattr(linear, "_has_tiles", True)
    to = draw(140, 96, seed=2).bfloat16()
    for op, arguments in ((ops.linear, (X, up)), (ops.add_linear, (X, up, to)), (ops.mlp, (X, up, down))):
        kernel = op._kernels["cpu", up.format.name]
        assert torch.equal(kernel(*arguments), op.reference(*arguments))  # which are torch's as well
    assert ops.linear(X, up, torch.float32).dtype == torch.float32


@pytest.mark.skipif("AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="torch leaves BF16 to others")
def test_they_are_onednns(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    matrix = weight(Dense(), 96, 64, dtype=torch.bfloat16)

    def said(rows: int) -> str:
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            ops.linear(X[:rows], matrix)
        return capfd.readouterr().out

    assert "matmul" not in said(140)
    monkeypatch.setattr(linear, "_has_tiles", True)
    assert "140x64:64x96" in said(140)
    assert "matmul" not in said(127)


def test_what_is_recorded_stays_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = weight(Dense(), 96, 64, dtype=torch.bfloat16)
    expected = ops.linear(X, matrix)
    monkeypatch.setattr(linear, "_has_tiles", True)
    assert torch.equal(Program(lambda: ops.linear(X, matrix), Arena())(), expected)
