"""Inputs of kernels, and how near results are to be."""

import torch
from torch import Tensor

from leyden.formats import Weight
from leyden.ops.rows import Rows

CLOSE = {"atol": 2e-5, "rtol": 2e-5}


def weight(matrix: Tensor) -> Weight:
    made = Weight(*matrix.shape, dtype=matrix.dtype).requires_grad_(False)
    made.weight = torch.nn.Parameter(matrix, requires_grad=False)
    return made


def close(got: Tensor, wanted: Tensor, **options: float) -> None:
    torch.testing.assert_close(got, wanted, **{**CLOSE, **options})


def rows(device: str, past: list[int], lens: list[int] | None = None, page: int = 4, tokens: int = 64) -> Rows:
    """Slots 1, 2, ...; every slot's pages in mixed order."""
    lens = lens or [1] * len(past)
    per = tokens // page
    table = torch.randperm(len(past) * per, generator=torch.Generator().manual_seed(1)).add(1).view(len(past), per)
    starts = torch.tensor([0, *lens]).cumsum(0)
    ints = (starts, torch.tensor(past), torch.arange(len(past), 0, -1), table)
    starts, before, slots, table = (t.to(device, torch.int32) for t in ints)
    return Rows(tuple(lens), starts, before, slots, table)


def step_inputs(draw, device: str, heads: int, groups: int, dim: int, n: int, lens: list[int] | None = None):
    inner, channels = heads * dim, heads * dim + 2 * groups * n
    batch = rows(device, past=[0, 5, 2], lens=lens)
    count = batch.tokens
    window, ssm_state = draw(5, 3, channels), draw(5, heads, dim, n)
    arguments = (
        draw(count, inner + channels + heads), draw(channels, 4), draw(channels), draw(heads), draw(heads),
        draw(heads, scale=5.0), (1e-3, float("inf")), draw(inner), groups, 1e-5,
    )  # fmt: skip
    return arguments, window, ssm_state, batch
