"""The layer of experts: which ops it is made of."""

from typing import Any

import pytest
import torch

from leyden import ops
from leyden.config.model import ModelConfig
from leyden.formats.nvfp4 import NVFP4
from leyden.model.moe import MoE
from leyden.testing.checkpoints import PRESETS, randomise


@pytest.mark.parametrize(("shared", "expected"), [(False, {"experts", "mlp"}), (True, {"moe"})])
@torch.no_grad()
def test_a_layer_is_one_op_where_all_of_it_is_stored_alike(shared: bool, expected: set[str]) -> None:
    layer = MoE(ModelConfig.from_dict(PRESETS["mtp"], {}), torch.float32)
    randomise(layer)
    assert layer.shared_experts is not None
    pairs = [layer.experts, *([layer.shared_experts] if shared else [])]
    for weight in (matrix for pair in pairs for matrix in (pair.up_proj, pair.down_proj)):
        tensors = NVFP4().quantize(weight.dense())
        weight.allot(NVFP4())
        for name, tensor in tensors.items():
            weight.parts[name].copy_(tensor)
    seen: set[str] = set()
    x = torch.randn(5, layer.shared_experts.up_proj.shape[1])

    def watch(op: Any, _: object) -> None:
        seen.add(op.name)

    with ops.using("reference"), ops.watching(watch):
        out = layer(x)
    with ops.using("reference"):
        ids, weights = layer.route(x)
        wanted = ops.experts(x, ids, weights, layer.experts.up_proj, layer.experts.down_proj) + layer.shared_experts(x)
    assert seen & {"moe", "experts", "mlp"} == expected
    torch.testing.assert_close(out, wanted)
