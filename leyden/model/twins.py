"""Decoded copies of small quantised matrices, for a GPU with memory to spare.

Products of some dozens of rows and more are bound by decoding, not by memory, and the library's product with a dense
matrix is two to six times as fast. All matrices of the 30B-A3B but the experts take 3.2 GiB once more, those of its
drafter 0.8.
"""

from collections.abc import Iterable

import torch
from torch import nn

from leyden import log
from leyden.formats import Weight

logger = log.get(__name__)

_FORMATS = ("fp8", "nvfp4")  # for which there are kernels that would decode
_SHARE = 16  # copies may take one part in so many of the device's memory


def keep(models: Iterable[nn.Module], room: int) -> int:
    """Give each matrix in FP8 or NVFP4 that is not one of a stack its twin, if all of them fit into a 16th of `room`
    bytes. -> the bytes that they take."""
    every = {one: None for model in models for one in model.modules()}  # models may share embeddings
    matrices = [one for one in every if isinstance(one, Weight) and len(one.shape) == 2]
    coded = [one for one in matrices if one.format.name in _FORMATS]
    size = sum(one.shape[0] * one.shape[1] * one.dtype.itemsize for one in coded)
    if not coded or size * _SHARE > room:
        return 0
    with torch.inference_mode():
        for one in coded:
            one.twin = one.dense()
    if coded[0].twin is not None and coded[0].twin.is_cuda:
        torch.cuda.empty_cache()  # what decoding took is room for the cache
    logger.info("%d matrices are kept decoded, too (%.2f GiB): faster from 17 rows on", len(coded), size / 2**30)
    return size
