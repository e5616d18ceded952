"""DFlash and DSpark against vectors of the reference implementations, and by the properties of their blocks."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from leyden import ops
from leyden.config.drafter import DrafterConfig, Rope
from leyden.model.drafters import DraftAttention, DrafterNetwork, frequencies
from leyden.ops.rows import Rows

DATA = Path(__file__).parent.parent / "data" / "spec"
VECTORS = sorted(path.stem for path in DATA.glob("d*.npz"))
DRAFTERS = ["dflash_causal_swa_sinks", "dspark_markov", "dflash_noncausal_swa"]


class Vector:
    """One file: arrays as tensors, the network with its weights, and one block over one context."""

    def __init__(self, name: str):
        with np.load(DATA / f"{name}.npz") as file:
            arrays = {key: file[key] for key in file.files}
        self.cfg = json.loads(str(arrays.pop("cfg")))
        self.t = {key: torch.from_numpy(value) for key, value in arrays.items()}
        self.config = config_of(name, self.cfg)
        self.network = DrafterNetwork(self.config, torch.float32)
        weights = {key[2:]: value for key, value in self.t.items() if key.startswith("w.") and "lm_head" not in key}
        self.network.load_state_dict(weights)
        self.length, self.drafts = self.cfg["context_len"], self.cfg["num_speculative_tokens"]
        self.anchor = self.t["input_ids"][:1]
        self.positions = torch.arange(self.length)

    def context(self, positions: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        at = self.positions if positions is None else positions
        return self.network.context(self.t["features"][at].chunk(3, dim=-1), at)

    def hidden(self, drafts: int | None = None) -> Tensor:
        tokens = self.network.block(self.anchor, drafts or self.drafts)
        positions = self.length + torch.arange(tokens.shape[1])
        attend = packed(self.context(), torch.tensor([[self.length]]))
        return self.network(tokens[None], positions[None, None], attend)[0, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.t["w.lm_head.weight"].T


def config_of(name: str, cfg: dict[str, Any]) -> DrafterConfig:
    window, layers = cfg["sliding_window"], cfg["num_hidden_layers"]
    raw = {
        **cfg,
        "architectures": ["Qwen3DSparkModel" if name.startswith("dspark") else "DFlashDraftModel"],
        "layer_types": ["sliding_attention" if window else "full_attention"] * layers,
        "target_layer_ids": list(range(cfg["num_aux_layers"])),
        "dflash_config": {"causal": cfg["causal"]},
        "markov_rank": 6 if name.startswith("dspark") else None,
    }
    return DrafterConfig.from_dict(raw)


def packed(context: list[tuple[Tensor, Tensor]], anchors: Tensor):
    """Attention of blocks over contexts [S, L, ...] (one sequence: [L, ...])."""

    def attend(layer: DraftAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (t.view(len(anchors), -1, *t.shape[-2:]) for t in context[layer.index])
        sinks = layer.attention_sink_bias
        return ops.block_attention_packed(q, k, v, keys, values, anchors, layer.causal, layer.window, sinks)

    return attend


@pytest.fixture(params=VECTORS)
def vector(request: pytest.FixtureRequest) -> Vector:
    return Vector(request.param)


def test_context_features_and_keys_values(vector: Vector):
    net = vector.network
    close(net.hidden_norm(ops.linear(vector.t["features"], net.fc)), vector.t["context"])
    for i, (k, v) in enumerate(vector.context()):
        close(k, vector.t[f"ctx_k.{i}"])
        close(v, vector.t[f"ctx_v.{i}"])


def test_block_through_layers_norm_and_head(vector: Vector):
    outs = []
    for layer in vector.network.layers:
        layer.register_forward_hook(lambda module, args, out: outs.append(sum(out)[0, 0]))
    assert vector.network.block(vector.anchor, vector.drafts)[0].tolist() == vector.t["input_ids"].tolist()
    hidden = vector.hidden()
    for i, out in enumerate(outs):
        close(out, vector.t[f"layer_out.{i}"])
    close(hidden, vector.t["hidden"])
    close(vector.logits(hidden), vector.t["logits"])


def test_drafts(vector: Vector):
    logits = vector.logits(vector.network.predicting(vector.hidden()))[None]
    drafts, steps = vector.network.chain(logits, vector.anchor, lambda z: z.argmax(-1))
    dspark = vector.config.method == "dspark"
    assert drafts[0].tolist() == vector.t["greedy_drafts" if dspark else "drafts"].tolist()
    if dspark:
        close(torch.cat(steps), vector.t["greedy_step_logits"])


def test_a_sampled_chain_follows_what_was_drawn():
    vector = Vector("dspark_markov")
    temperature, draws = float(vector.t["sample_temp"]), iter(vector.t["sample_u"])

    def pick(z: Tensor) -> Tensor:
        return ((z / temperature).softmax(-1).cumsum(-1) > next(draws)).int().argmax(-1)

    logits = vector.logits(vector.network.predicting(vector.hidden()))[None]
    drafts, steps = vector.network.chain(logits, vector.anchor, pick)
    assert drafts[0].tolist() == vector.t["sampled_drafts"].tolist()
    close(torch.cat(steps), vector.t["sampled_step_logits"])


def test_rotary_frequencies(vector: Vector):
    rope = vector.config.rope
    torch.testing.assert_close(frequencies(rope, vector.config.head_dim), vector.t["inv_freq"], rtol=1e-6, atol=0)
    assert rope.scale == pytest.approx(float(vector.t["mscale"]), rel=1e-6)


def test_yarn_of_the_published_dflash():
    rope = Rope(10000.0, factor=128.0, original=8192)
    assert rope.scale == pytest.approx(1.4852030, abs=1e-7)
    ratio = frequencies(rope, 128) * 10000 ** (torch.arange(64) / 64)
    expected = 1 - ((torch.arange(64) - 25) / 25).clamp(0, 1) * (1 - 1 / 128)  # from plain to slow in pairs 25 .. 50
    torch.testing.assert_close(ratio, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", DRAFTERS)
def test_context_may_come_in_pieces(name: str):
    vector = Vector(name)
    cuts = [0, 1, 6, 7, vector.length]
    pieces = [vector.context(torch.arange(a, b)) for a, b in pairwise(cuts)]
    for i, whole in enumerate(vector.context()):
        for part, one in enumerate(whole):
            close(torch.cat([piece[i][part] for piece in pieces]), one, atol=1e-6)


@pytest.mark.parametrize("name", DRAFTERS)
def test_blocks_over_pages_are_blocks_over_packed_context(name: str):
    """Two sequences with different contexts, pages in no order, other sequences' numbers in the same pages."""
    torch.manual_seed(0)
    vector, page = Vector(name), 4
    lens = (vector.length, 6)
    context = [vector.context(), vector.context(torch.arange(6))]
    tables = torch.tensor([[5, 2, 9, 1, 7], [4, 8, 0, 0, 0]])
    caches = [torch.randn(2, 10, page, *k.shape[1:]) for k, _ in context[0]]
    for r, length in enumerate(lens):
        at = torch.arange(length)
        for cache, (k, v) in zip(caches, context[r], strict=True):
            cache[0, tables[r, at // page], at % page], cache[1, tables[r, at // page], at % page] = k, v

    width = vector.network.block(vector.anchor, vector.drafts).shape[1]
    past = torch.tensor(lens, dtype=torch.int32)
    rows = Rows(lens=(width, width), starts=torch.tensor([0, width, 2 * width]), past=past, pages=tables)

    def attend(layer: DraftAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = layer.causal, layer.window, layer.attention_sink_bias
        return ops.block_attention(q, k, v, caches[layer.index], rows, *options)

    tokens = vector.network.block(vector.anchor, vector.drafts).expand(2, -1)
    positions = past[:, None] + torch.arange(width)
    hidden = vector.network(tokens.flatten(), positions.flatten(), attend).unflatten(0, (2, width))
    close(hidden[0], vector.hidden(), atol=2e-6)
    alone = vector.network(tokens[None, 1:], positions[None, 1:], packed(context[1], past[None, 1:]))
    close(hidden[1], alone[0, 0], atol=2e-6)


def test_a_shorter_block_is_a_prefix_of_a_causal_one_only():
    for name, causal in (("dspark_markov", True), ("dflash_noncausal_swa", False)):
        vector = Vector(name)
        whole, short = vector.hidden(), vector.hidden(3)
        assert torch.allclose(whole[:4], short, atol=1e-6) == causal


@pytest.mark.parametrize("change", ["causal", "window", "sinks", "position"])
def test_causal_flag_window_sinks_and_position_matter(change: str):
    """Ignoring any of these loses acceptance and raises nothing, so each must show in the output."""
    vector = Vector("dflash_causal_swa_sinks")
    before = vector.hidden()
    layer = vector.network.layers[0].self_attn
    if change == "causal":
        layer.causal = False
    elif change == "window":
        layer.window += 1
    elif change == "sinks":
        layer.attention_sink_bias.data += 1
    else:
        vector.length += 1  # the anchor one position late: one unseen context row more, everything turned on
        vector.t["features"] = torch.cat([vector.t["features"], vector.t["features"][-1:]])
        vector.positions = torch.arange(vector.length)
    assert (vector.hidden() - before).abs().max() > 1e-3


def test_blocks_of_one_sequence_do_not_see_each_other_nor_what_is_behind_them():
    vector = Vector("dflash_noncausal_swa")
    anchors = torch.tensor([[4, 9, 15]])
    tokens = vector.network.block(torch.tensor([[1, 2, 3]]), 5)
    positions = anchors[..., None] + torch.arange(6)
    together = vector.network(tokens, positions, packed(vector.context(), anchors))
    for m, anchor in enumerate(anchors[0].tolist()):
        context = vector.context(torch.arange(anchor))
        alone = vector.network(tokens[:, m : m + 1], positions[:, m : m + 1], packed(context, anchors[:, m : m + 1]))
        close(together[0, m], alone[0, 0], atol=1e-6)


def test_confidence_reads_hidden_and_previous_token():
    vector = Vector("dspark_markov")
    config = DrafterConfig.from_dict(
        {**vector.config.to_dict(), "enable_confidence_head": True, "confidence_head_with_markov": True}
    )
    network = DrafterNetwork(config, torch.float32)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter)
    assert network.confidence_head is not None and network.markov_head is not None
    hidden, previous = torch.randn(3, 16), torch.tensor([1, 5, 5])
    proj = network.confidence_head.proj
    joined = torch.cat([hidden, network.markov_head.markov_w1.weight[previous]], dim=-1)
    close(network.confidence(hidden, previous), joined @ proj.weight[0] + proj.bias)


def close(a: Tensor, b: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-5)
