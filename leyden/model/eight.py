"""Prompts with activations in 8 bits (`--prefill-dtype fp8`): which matrices take part.

Those in the backbone's layers that are stored in FP8, with a scale for the matrix or for each row, or in NVFP4; of
attention the ones in FP8 only. Matrices in BF16 and in other formats stay out of it, as do the router, the embeddings,
the head and the MTP module. What is computed: leyden.ops.reference.eight.
"""

from collections.abc import Iterator

from leyden.errors import ConfigError
from leyden.formats import Weight
from leyden.formats.fp8 import FP8, FP8Channel
from leyden.formats.nvfp4 import NVFP4, Tiled
from leyden.model.attention import Attention
from leyden.model.nemotron import Nemotron


def round_above(model: Nemotron, rows: int) -> int:
    """From now on products of more than `rows` rows may round them to 8 bits; -> how many matrices that concerns.

    ConfigError if there are none.
    """
    found = list(_taking_part(model))
    if not found:
        raise ConfigError(
            "--prefill-dtype fp8 is for weights in FP8 or NVFP4, and the layers of this model have none; leave it out,"
            " or round dense ones with --quantization fp8 or nvfp4"
        )
    for weight in found:
        weight.eight_above = rows
    return len(found)


def _taking_part(model: Nemotron) -> Iterator[Weight]:
    for layer in model.backbone.layers:
        attention = isinstance(layer.mixer, Attention)
        for weight in layer.modules():
            if not isinstance(weight, Weight) or weight.shape[-1] % 16 or weight.shape[-2] % 16:
                continue
            four = isinstance(weight.format, NVFP4 | Tiled) and Tiled.fits(weight.shape)
            if isinstance(weight.format, FP8 | FP8Channel) or (four and not attention):
                yield weight
