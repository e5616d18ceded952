"""MTP drafts: the vectors of the reference, and a run over pages against one over packed rows."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from leyden.config.model import ModelConfig
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.spec.drafter import Heads, Seen
from leyden.spec.mtp import MTP
from tests import batches
from tests.spec.harness import Sequences, journey, pool
from tests.train.examples import CONFIG
from tests.train.test_acceptance import drafts_after

VECTOR = Path(__file__).parent.parent / "data" / "spec" / "mtp_block.npz"


def of_the_vector() -> tuple[Nemotron, dict[str, Tensor]]:
    with np.load(VECTOR) as file:
        t = {key: torch.from_numpy(file[key]) for key in file.files if key != "cfg"}
        cfg = json.loads(str(file["cfg"]))
    config = ModelConfig(
        pattern="-",
        intermediate_sizes=(8,),
        vocab_size=len(t["embed"]),
        num_nextn_predict_layers=1,
        moe_intermediate_size=t["moe.up"].shape[1],
        shared_expert_width=len(t["moe.sup"]),
        **{key: value for key, value in cfg.items() if key not in ("final_norm",)},
    )
    model = Nemotron(config, torch.float32, mtp=True)
    first, second = "mtp.layers.0.", "mtp.layers.1."
    names = {
        "backbone.embeddings": "embed",
        "lm_head": "lm_head",
        **{f"{first}{name}": f"w.{name}" for name in ("enorm", "hnorm", "eh_proj")},
        **{f"{first}mixer.{name}_proj": f"w.{name}" for name in "qkvo"},
        f"{first}norm": "w.norm0",
        f"{second}norm": "w.norm1",
        f"{second}final_layernorm": "w.final_layernorm",
        f"{second}mixer.gate": "moe.gate",
        f"{second}mixer.experts.up_proj": "moe.up",
        f"{second}mixer.experts.down_proj": "moe.down",
        f"{second}mixer.shared_experts.up_proj": "moe.sup",
        f"{second}mixer.shared_experts.down_proj": "moe.sdown",
    }
    weights = {f"{ours}.weight": t[theirs] for ours, theirs in names.items()}
    weights[f"{second}mixer.gate.e_score_correction_bias"] = t["moe.bias"]
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and all(key.startswith("backbone.") for key in missing.missing_keys)
    return model, t


@torch.no_grad()
def test_vector_of_a_prefill_three_drafts_and_a_step_that_keeps_one():
    model, t = of_the_vector()
    cache, drafter = pool(model), MTP(model, 3)
    length, slot = len(t["tokens"]), torch.tensor([2])
    anchor = t["anchor"][None]

    def seen(tokens: Tensor, following: Tensor, hidden: Tensor, past: int) -> None:
        drafter.observe(Seen(tokens, following, hidden, [], batches.context(cache, [(2, past, len(tokens))])))

    def draft(anchor: Tensor, position: int, end: int, count: int) -> tuple[list[int], list[Tensor]]:
        logits: list[Tensor] = []

        def pick(z: Tensor, i: int) -> Tensor:
            assert i == len(logits)
            logits.append(z[0])
            return z.argmax(-1)

        at = torch.tensor([position], dtype=torch.int32)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        heads = Heads(slot, anchor, at, torch.tensor([end]), cache.tables[slot], starts)
        return drafter.draft(heads, count, pick).tokens[0].tolist(), logits

    def keys_values(count: int) -> Tensor:
        return cache.kv[0][:, cache.tables[2].long()].flatten(1, 2)[:, :count]

    seen(t["tokens"], t["shifted_ids"], t["target_hidden"], 0)
    drafts, logits = draft(anchor, length, length - 1, 3)
    assert drafts == t["drafts"].tolist()
    close(torch.stack(logits), t["draft_logits"])

    # the verify step: anchor and three drafts, of which one is kept; what is behind it is not to be read
    step = torch.cat([anchor, t["drafts"]])
    following = torch.cat([t["step2_ids"], torch.tensor([1, 2])])  # some tokens behind those that are right
    seen(step, following, t["step2_target_hidden"], length)
    kept = int(t["step2_num_accepted"])
    close(keys_values(length + kept + 1)[0], t["step2_kv_k"])
    assert draft(t["step2_new_anchor"][None], length + kept + 1, kept, 1)[0] == [int(t["step2_next_draft"])]


@pytest.fixture(scope="module")
def model() -> Nemotron:
    made = Nemotron(CONFIG, torch.float32, mtp=True).eval().requires_grad_(False)
    batches.fill(made, seed=3)
    return made


def texts(seed: int, *lens: int) -> dict[int, list[int]]:
    random = np.random.default_rng(seed)
    return {slot: random.integers(0, CONFIG.vocab_size, n).tolist() for slot, n in enumerate(lens, start=1)}


@pytest.mark.parametrize("count", range(1, 8))
def test_drafts_are_those_of_a_pass_over_all_pairs(model: Nemotron, count: int):
    """Pitfalls 13 and 14: every depth, chunked prompts, ragged steps, wrong drafts written over."""
    sequences = Sequences(model, MTP(model, count), pool(model), texts(count, 40, 33, 47))
    checked = 0
    for slots, draft in journey(sequences, count, seed=count):
        assert draft.confidence is None
        for slot, found in zip(slots, draft.tokens.tolist(), strict=True):
            assert found == drafts_after(model, sequences.texts[slot], sequences.done[slot], count)
            checked += 1
    assert checked > 20


def test_a_cached_prefix_that_goes_on_otherwise_leaves_one_foreign_pair(model: Nemotron):
    """The keys at the last position of the prefix were made with another following token: that one alone differs."""
    first, second = texts(0, 30, 30).values()
    second[:12] = first[:12]
    cache = pool(model)
    before = Sequences(model, MTP(model, 2), cache, {1: first})
    before.step({1: 20})
    cache.tables[2, :3] = cache.tables[1, :3]  # a hit: three full pages
    shared = cache.kv[1][:, cache.tables[1, :3].long()].clone()
    sequences = Sequences(model, before.drafter, cache, {2: second})
    sequences.done[2] = 12
    sequences.step({2: 8})
    drafts = sequences.draft([2], 2).tokens.tolist()[0]
    assert torch.equal(cache.kv[1][:, cache.tables[1, :3].long()], shared) and len(drafts) == 2
    mixed = own_keys(model, second, 20)
    mixed[:, 11] = own_keys(model, first, 20)[:, 11]
    close(cache.kv[1][:, cache.tables[2].long()].flatten(1, 2)[:, :12], mixed[:, :12], atol=1e-4)


@torch.no_grad()
def own_keys(model: Nemotron, text: list[int], count: int) -> Tensor:
    """Keys and values [2, count, kv heads, dim] of the pairs of a text that is read in one go."""
    cache, drafter = pool(model), MTP(model, 1)
    hidden, _ = model(torch.tensor(text[:count]), Context.packed([count]))
    following = torch.tensor(text[1 : count + 1])
    drafter.observe(Seen(torch.tensor(text[:count]), following, hidden, [], batches.context(cache, [(1, 0, count)])))
    return cache.kv[1][:, cache.tables[1].long()].flatten(1, 2)[:, :count]


def close(a: Tensor, b: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-5)
