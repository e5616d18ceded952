"""Norms against their references."""

import pytest

from leyden.ops.reference import norm as reference_norm
from tests.ops.triton.inputs import close

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import norm  # noqa: E402


@pytest.mark.parametrize("size", [24, 64])
def test_norms(draw, monkeypatch, size: int):
    x, residual, z, w = draw(5, size), draw(5, size), draw(5, 2 * size)[:, size:], draw(size)
    close(norm.rms_norm(x, w, 1e-5), reference_norm.rms_norm(x, w, 1e-5))
    for got, wanted in zip(
        norm.add_rms_norm(x, residual, w, 1e-5), reference_norm.add_rms_norm(x, residual, w, 1e-5), strict=True
    ):
        close(got, wanted)
    close(norm.gated_norm(x, z, w, 4, 1e-5), reference_norm.gated_norm(x, z, w, 4, 1e-5))
    monkeypatch.setattr(norm, "_MANY_ROWS", 1)
    for groups in (6, 4) if size == 24 else (4, 8):
        close(norm.gated_norm(x, z, w, groups, 1e-5), reference_norm.gated_norm(x, z, w, groups, 1e-5))
