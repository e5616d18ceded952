"""A drafter with matrices in 4 bits, as released, against its twin with the matrices that they stand for."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leyden import ops
from leyden.config.model import ModelConfig
from leyden.formats import Dense
from leyden.formats.nvfp4 import NVFP4, Tiled
from leyden.model.checkpoint import matrices
from leyden.model.draft_checkpoint import load
from leyden.model.drafters import DraftAttention, DrafterNetwork
from leyden.model.nemotron import Nemotron
from leyden.ops import registry
from leyden.ops.cpu.program import available
from leyden.ops.rows import Rows
from leyden.testing.drafters import tiny

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import linear  # noqa: E402

PAGE, PAST, WIDTH, SEQUENCES = 4, 6, 4, 2


def run(network: DrafterNetwork, head: Tensor, drafts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(drafts [R, 3] of each sequence, behind a context of PAST tokens; the logits of each draft [R, 3, V]). With
    `drafts` the logits if these are the drafts."""
    device, config = head.device, network.config
    generator = torch.Generator().manual_seed(1)
    count = SEQUENCES * PAST
    taps = [torch.randn(count, config.hidden_size, generator=generator).to(device, torch.bfloat16) for _ in range(2)]
    past, starts = torch.zeros(SEQUENCES, dtype=torch.int32), torch.arange(SEQUENCES + 1, dtype=torch.int32)
    pages = torch.arange(1, 1 + 2 * SEQUENCES, dtype=torch.int32).view(SEQUENCES, 2).to(device)
    slots = (starts[:-1] + 1).to(device)
    anchors = torch.tensor([3, 40], device=device)
    keys = torch.zeros(len(network.layers), 2, 1 + 2 * SEQUENCES, PAGE, config.num_key_value_heads, config.head_dim)
    keys = keys.to(device, torch.bfloat16)
    with torch.inference_mode():
        before = Rows((PAST,) * SEQUENCES, (starts * PAST).to(device), past.to(device), slots, pages)
        positions = torch.arange(PAST, dtype=torch.int32, device=device).repeat(SEQUENCES)
        for cache, (k, v) in zip(keys, network.context(taps, positions), strict=True):
            ops.kv_write(k, v, cache, before)
        places = (past + PAST).to(device)
        tokens, positions, starts = ops.begin_block(anchors, places, WIDTH, config.mask_token_id)
        rows = Rows((WIDTH,) * SEQUENCES, starts, places, slots, pages)

        def attend(layer: DraftAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options = layer.causal, layer.window, layer.attention_sink_bias
            return ops.block_attention(q, k, v, keys[layer.index], rows, *options)

        hidden = network(tokens, positions, attend)
        logits = network.predicting(hidden.unflatten(0, (SEQUENCES, WIDTH))).float() @ head.float()
        forced = iter(drafts.unbind(1)) if drafts is not None else None
        found, each = network.chain(logits, anchors, lambda z: next(forced) if forced else ops.likeliest(z))
        return found, torch.stack(each, 1)


def coded(network: DrafterNetwork) -> Iterator[Any]:
    return (weight for _, weight in matrices(network) if weight.format != Dense())


@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
def test_it_drafts_what_its_twin_drafts(kernels: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if kernels == "cpu" and not available:
        pytest.skip("the kernels need a C compiler")
    place = device if kernels == "cuda" else "cpu"
    config = ModelConfig(vocab_size=96, hidden_size=64, pattern="M*E-", intermediate_sizes=(32,))
    tiny(tmp_path, config, layout="nvfp4", markov_rank=64, num_hidden_layers=1, layer_types=["sliding_attention"])
    network = load(tmp_path, Nemotron(config, torch.bfloat16).to(place)).requires_grad_(False)
    assert sum(1 for _ in coded(network)) == 1 + 3 + 1, "fc, the MLPs and W2 of the Markov head"
    twin = copy.deepcopy(network)
    for weight in coded(twin):
        values = weight.dense()
        weight.allot(Dense(), values.device)
        weight.parts["weight"].data.copy_(values)
    twin.requires_grad_(False)
    monkeypatch.setattr(registry, "_device", lambda args: kernels)
    if kernels == "cuda" and place == "cpu":  # the interpreter has no products of bfloat16 but those of the codes
        monkeypatch.setattr(linear, "NARROW_ROWS", 1)
        monkeypatch.delitem(ops.block_attention._kernels, ("cuda", "dense"))
    head = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)).to(place, torch.bfloat16) / 8
    for form in (NVFP4, Tiled):
        monkeypatch.setattr(form, "dequantize", None)  # nothing decodes a matrix
    drafts, found = run(network, head)
    _, wanted = run(twin, head, drafts)
    assert float((found - wanted).norm() / wanted.norm()) < 2e-2
    right = wanted.argmax(-1)
    assert (drafts == right).sum() >= drafts.numel() - 1 and len(set(drafts.flatten().tolist())) > 2  # a near tie
    if kernels == "cuda":
        assert {weight.format for weight in coded(network)} == {Tiled(NVFP4())}
