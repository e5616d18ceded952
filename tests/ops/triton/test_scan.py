"""Convolution and scan of prompts against the references."""

import pytest
import torch

from leyden.ops.reference import mamba as reference_mamba
from leyden.ops.rows import Rows
from tests.ops.triton.inputs import close, rows

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import (
    conv,  # noqa: E402
    scan,  # noqa: E402
)


@pytest.mark.parametrize(("lens", "kernel"), [([1, 1, 1], 4), ([35, 2, 17], 4), ([20, 5, 1], 2)])
def test_causal_conv(draw, device: str, lens: list[int], kernel: int):
    batch = rows(device, past=[0, 5, 2], lens=lens)
    x, w, bias = draw(batch.tokens, 60)[:, 7:47], draw(40, kernel), draw(40)
    state = draw(5, kernel - 1, 40)
    wanted_state = state.clone()
    close(conv.causal_conv(x, w, bias, state, batch), reference_mamba.causal_conv(x, w, bias, wanted_state, batch))
    assert torch.equal(state, wanted_state)
    batch.past.zero_()
    close(conv.causal_conv(x, w, None, None, batch), reference_mamba.causal_conv(x, w, None, None, batch))


WALKS = (16, 2, 4, 255), (32, 1, 4, 255)
SCANS = {  # of rows of up to 35 tokens
    "one segment": scan.Shape(64, 16, *WALKS),
    "segments of one chunk": scan.Shape(16, 16, *reversed(WALKS)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cannot multiply BF16
@pytest.mark.parametrize("shape", SCANS.values(), ids=SCANS)
def test_ssd_scan(draw, device: str, dtype: torch.dtype, shape: scan.Shape):
    """Rows shorter than a chunk, of whole chunks, and longer, in one segment and more; one starts from nothing."""
    heads, groups, dim, n = 4, 2, 24, 12
    batch = rows(device, past=[0, 5, 2], lens=[5, 16, 35])
    tokens = batch.tokens
    mixed = draw(tokens, heads * dim + 2 * groups * n).to(dtype)
    x, B, C = mixed.split([heads * dim, groups * n, groups * n], dim=-1)
    x, B, C = x.unflatten(1, (heads, dim)), B.unflatten(1, (groups, n)), C.unflatten(1, (groups, n))
    dt = draw(tokens, heads + 3)[:, 3:].to(dtype)
    recurrence = (draw(heads), draw(heads), draw(heads), (1e-3, float("inf")), 16)
    state = draw(5, heads, dim, n).to(torch.float16 if dtype == torch.float16 else torch.float32)
    exact = [t.float() for t in (x, dt, B, C)]
    wanted_state = state.float().clone()
    wanted = reference_mamba.ssd_scan(*exact, *recurrence, wanted_state, batch)
    wanted_state = wanted_state.to(state.dtype)
    off = 2e-5 if dtype == torch.float32 else 2e-3
    got = scan.ssd_scan(x, dt, B, C, *recurrence, state, batch, shape)
    assert (got.float() - wanted).norm() < off * wanted.norm()
    close(state, wanted_state, atol=20 * off, rtol=20 * off)
    batch.past.zero_()
    wanted = reference_mamba.ssd_scan(*exact, *recurrence, None, batch)
    got = scan.ssd_scan(x, dt, B, C, *recurrence, None, batch, shape)
    assert (got.float() - wanted).norm() < off * wanted.norm()


@pytest.mark.parametrize("segment", [16, 32])
def test_segments_of_unequal_rows(draw, device: str, segment: int):
    """The last segment of a row may be full or not, and one row may have many where others have one."""
    batch = rows(device, past=[0, 5, 2], lens=[1, 81, 64])
    x, B, C, dt = draw(146, 3, 8), draw(146, 1, 8), draw(146, 1, 8), draw(146, 3)
    recurrence = (draw(3), draw(3), draw(3), (1e-3, float("inf")), 16)
    got_state = draw(5, 3, 8, 8)
    wanted_state = got_state.clone()
    wanted = reference_mamba.ssd_scan(x, dt, B, C, *recurrence, wanted_state, batch)
    got = scan.ssd_scan(x, dt, B, C, *recurrence, got_state, batch, scan.Shape(segment, 16))
    assert (got - wanted).norm() < 2e-5 * wanted.norm()
    close(got_state, wanted_state)


def test_ssd_scan_of_extremes(draw, device: str):
    """Time steps of zero, states that are gone within a token or stay: logs of decays in the thousands, no infinity."""
    batch = rows(device, past=[3], lens=[50])
    x, B, C = draw(50, 3, 8), draw(50, 1, 8), draw(50, 1, 8)
    dt, A_log = draw(50, 3, scale=100.0), torch.tensor([-20.0, 0.0, 2.0], device=device)
    recurrence = (A_log, draw(3), draw(3), (0.0, float("inf")), 16)
    got_state = draw(4, 3, 8, 8)
    wanted_state = got_state.clone()
    wanted = reference_mamba.ssd_scan(x, dt, B, C, *recurrence, wanted_state, batch)
    got = scan.ssd_scan(x, dt, B, C, *recurrence, got_state, batch, scan.Shape(16, 16))
    assert (got - wanted).norm() < 1e-4 * wanted.norm()
    assert (got_state - wanted_state).norm() < 1e-4 * wanted_state.norm()


@pytest.mark.parametrize("lens", [[1], [256], [257], [8192], [40_000], [700, 64, 2000], [128] * 64, [1] * 70 + [9000]])
def test_segments_of_a_scan_are_enough_and_their_states_small(monkeypatch, lens: list[int]):
    """Programs for every multiprocessor if a row is long enough for that, and never many more states than programs."""
    grids = {}

    class Launched:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid: tuple[int, int, int]):
            return lambda *arguments, **options: grids.setdefault(self.name, (grid, arguments))

    for name in ("_chunks", "_states", "_pass", "_scan"):
        monkeypatch.setattr(scan, name, Launched(name))
    tokens = sum(lens)
    x, B = torch.empty(tokens, 64, 64, device="meta"), torch.empty(tokens, 8, 128, device="meta")
    dt, heads = torch.empty(tokens, 64, device="meta"), torch.empty(64, device="meta")
    batch = Rows(tuple(lens), *(torch.empty(len(lens) + 1, device="meta") for _ in range(3)))
    state = torch.empty(2, 64, 64, 128, device="meta")
    scan.ssd_scan(x, dt, B, B, heads, heads, heads, (0.0, 1.0), 128, state, batch)
    programs, segments, _ = grids["_scan"][0]
    assert programs * segments >= (512 if max(lens) > 2000 else 64)
    assert ("_states" in grids) == ("_pass" in grids) == (segments > 1) == (max(lens) > 256)
    if segments > 1:
        states = grids["_states"][1][3]
        assert states.numel() <= 2 * (1024 + 64) * 64 * 128
