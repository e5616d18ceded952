"""Products with one stored matrix."""

import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.formats import Weight


def embed(tokens: Tensor, weight: Weight) -> Tensor:
    """Rows `tokens` (int [T]) of the matrix [V, H] -> [T, H]."""
    return F.embedding(tokens, weight.dense())


def linear(x: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K] @ W^T [K, N] -> [T, N] in `dtype`, or in that of x, which the products may be rounded to before."""
    y = F.linear(x, weight.dense())
    return y if dtype is None else y.to(dtype)


def mlp(x: Tensor, up: Weight, down: Weight) -> Tensor:
    """down(relu(up(x))^2): x [T, K], up [I, K], down [N, I] -> [T, N]; no gate, no bias."""
    return linear(F.relu(linear(x, up)).square(), down)
