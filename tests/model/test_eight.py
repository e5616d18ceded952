from math import inf

import pytest
import torch

from leyden.errors import ConfigError
from leyden.formats import Dense, Format
from leyden.formats.fp8 import FP8, FP8Block, FP8Channel
from leyden.formats.nvfp4 import NVFP4
from leyden.model.checkpoint import matrices
from leyden.model.eight import round_above
from leyden.model.nemotron import Nemotron
from tests.engine.conftest import tiny


def stored(format: Format) -> Nemotron:
    """All in `format` that is not the embeddings'."""
    model = tiny(dtype=torch.bfloat16, mtp=True)
    for _, weight in matrices(model):
        if weight is not model.backbone.embeddings:
            weight.allot(format)
    return model


def taking_part(model: Nemotron) -> set[str]:
    return {name.split(".mixer.")[-1] for name, weight in matrices(model) if weight.eight_above == 600}


MAMBA, MOE = {"out_proj"}, {"experts.up_proj", "shared_experts.up_proj", "shared_experts.down_proj"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    "format, wanted",
    [
        (FP8(), MAMBA | MOE | ATTENTION | {"experts.down_proj"}),  # in_proj has rows that are no multiple of 16
        (FP8Channel(), MAMBA | MOE | ATTENTION | {"experts.down_proj"}),
        (NVFP4(), MAMBA | MOE),  # experts.down_proj has no whole tiles
    ],
)
def test_who_takes_part(format: Format, wanted: set[str]):
    model = stored(format)
    assert round_above(model, 600) == sum(weight.eight_above == 600 for _, weight in matrices(model)) > len(wanted)
    assert taking_part(model) == wanted
    assert all(w.eight_above == inf for n, w in matrices(model) if not n.startswith("backbone.layers"))


@pytest.mark.parametrize("format", [Dense(), FP8Block()])
def test_nobody_takes_part(format: Format):
    model = stored(format)
    with pytest.raises(ConfigError, match="is for weights in FP8 or NVFP4, and the layers of this model have none"):
        round_above(model, 600)
    assert taking_part(model) == set()
