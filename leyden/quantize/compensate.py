"""Rounding a matrix column by column, each column making up for the errors of those before it.

GPTQ (Frantar et al., 2022, algorithm 1) with scales that are set beforehand: what is kept small is the error of the
matrix's outputs on the inputs that were seen, not that of its elements.
"""

import torch
from torch import Tensor

from leyden.formats import Grid

_BLOCK = 128  # columns whose corrections are carried to the rest together
_DAMP = 0.01  # of the mean of the diagonal


def compensate(format: Grid, weight: Tensor, inputs: Tensor) -> dict[str, Tensor]:
    """weight [N, K], inputs fp32 [K, K]: the sum of x x^T over the inputs x -> the tensors of the matrix in `format`.

    Columns whose inputs were always zero are rounded as they are. If the inputs say too little (the sum cannot be
    factored), the whole matrix is.
    """
    tensors = format.quantize(weight)
    steps = format.steps(tensors)
    factor = _inverse_factor(inputs)
    if factor is None:
        return tensors
    rest, units = weight.float().clone(), torch.empty_like(steps)
    for start in range(0, weight.shape[1], _BLOCK):
        stop = min(start + _BLOCK, weight.shape[1])
        errors = torch.empty_like(rest[:, start:stop])
        for column in range(start, stop):
            step, value = steps[:, column], rest[:, column]
            units[:, column] = format.snap((value / step).nan_to_num(0))
            error = (value - units[:, column] * step) / factor[column, column]
            rest[:, column + 1 : stop] -= error[:, None] * factor[column, column + 1 : stop]
            errors[:, column - start] = error
        rest[:, stop:] -= errors @ factor[start:stop, stop:]
    return format.recode(tensors, units)


def _inverse_factor(inputs: Tensor) -> Tensor | None:
    """The upper Cholesky factor of the inverse of the damped sum."""
    damped = inputs.clone()
    diagonal = damped.diagonal()
    diagonal += _DAMP * diagonal.mean()
    diagonal[diagonal == 0] = 1
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if failed else upper
