"""Products with one stored matrix."""

import torch.nn.functional as F
from torch import Tensor

from leyden.formats import Weight


def embed(tokens: Tensor, weight: Weight) -> Tensor:
    """Rows `tokens` (int [T]) of the matrix [V, H] -> [T, H]."""
    return F.embedding(tokens, weight.dense())


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [T, K] @ W^T [K, N] -> [T, N] in the dtype of x."""
    return F.linear(x, weight.dense())


def mlp(x: Tensor, up: Weight, down: Weight) -> Tensor:
    """down(relu(up(x))^2): x [T, K], up [I, K], down [N, I] -> [T, N]; no gate, no bias."""
    return linear(F.relu(linear(x, up)).square(), down)
