"""Sampling."""

import torch
from torch import Tensor

from leyden.ops.cpu.program import Kernel, empty, run
from leyden.ops.reference import draft
from leyden.ops.reference import sample as reference

_SAMPLE = Kernel("sample", "ttttttttt" + "iiiiiiiii")
_CERTAINTY = Kernel("certainty", "ttiiid")
_LANES = 16  # the most that kernels.h knows


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, position: Tensor
) -> Tensor:
    floats, ints = (temperature, top_p, min_p), (top_k, seed, position)
    plain = all(t.dtype == torch.float32 for t in (logits, *floats)) and all(t.dtype == torch.int64 for t in ints)
    if not plain or logits.stride(1) != 1:
        return reference.sample(logits, temperature, top_k, top_p, min_p, seed, position)
    rows, vocabulary = logits.shape
    room = empty(torch.get_num_threads(), vocabulary + 2 * _LANES, dtype=torch.int64)
    out = empty(rows, dtype=torch.int64)
    strides = (t.stride(0) for t in (logits, *floats, *ints))
    run(_SAMPLE(logits, *floats, *ints, out, room, rows, vocabulary, *strides), work=2 * logits.numel())
    return out


def certainty(logits: Tensor) -> Tensor:
    if logits.dtype != torch.float32 or logits.dim() != 2 or logits.stride(1) != 1:
        return draft.certainty(logits)
    (rows, vocabulary), out = logits.shape, empty(len(logits), dtype=torch.float32)
    run(_CERTAINTY(logits, out, rows, vocabulary, logits.stride(0), draft.SUREST), work=20 * logits.numel())
    return out
