"""Mistakes that others made, and that show in no error: those that no other test is named after."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leyden import ops
from leyden.cache.pool import DraftShape, Pool
from leyden.config.speculative import SpeculativeConfig
from leyden.model import draft_checkpoint
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.server.service import cut
from leyden.testing.drafters import tiny as tiny_drafter
from leyden.types import Delta
from tests import batches
from tests.engine import drafters
from tests.engine.conftest import engine, oracle, run, tiny
from tests.engine.device import tokens_of
from tests.engine.test_engine import greedy, prompt_of
from tests.train.examples import CONFIG


def small() -> Nemotron:
    made = Nemotron(batches.SMALL, torch.float32).eval().requires_grad_(False)
    batches.fill(made)
    return made


@torch.no_grad()
def test_p1_p2_p3_p38_a_tap_is_the_sum_behind_its_layer_before_any_norm():
    """1: behind layer L, not before it; 2: mixer output and residual together; 3, 38: of the last layer, too."""
    model, tokens, ctx = small(), torch.arange(9), Context.packed([9])
    stream, after = model.embed(tokens), []
    for layer in model.backbone.layers:
        stream = stream + layer.mixer(ops.rms_norm(stream, layer.norm.weight, layer.norm.eps), ctx)
        after.append(stream)
    hidden, taps = model(tokens, ctx, (0, 2, len(after) - 1))
    for tap, layer in zip(taps, (0, 2, -1), strict=True):
        torch.testing.assert_close(tap, after[layer], **batches.CLOSE)
    assert (model.backbone.norm_f.weight - 1).abs().max() > 0.05
    assert (taps[-1] - hidden).abs().max() > 0.1


@pytest.mark.parametrize("first", [True, False])
def test_p7_a_block_begins_with_its_anchor(tmp_path: Path, first: bool):
    """And p9: the anchor's own row drafts in one layout and not in the other."""
    tiny_drafter(tmp_path, CONFIG, "dspark", sample_from_anchor=first)
    model = Nemotron(CONFIG, torch.float32, mtp=True).eval().requires_grad_(False)
    batches.fill(model)
    network = draft_checkpoint.load(tmp_path, model)
    block = network.block(torch.tensor([17, 18]), 3)
    assert block.shape == (2, 3 if first else 4) and block[:, 0].tolist() == [17, 18]
    assert (block[:, 1:] == network.config.mask_token_id).all()
    rows = torch.arange(block.shape[1])[None, :, None]
    assert network.predicting(rows)[0, :, 0].tolist() == ([0, 1, 2] if first else [1, 2, 3])


def test_p16_states_and_their_ring_have_a_size():
    shape = DraftShape(3)
    sizes = [Pool.slot_bytes(batches.SMALL, torch.bfloat16, torch.float32, draft) for draft in (DraftShape(), shape)]
    pool = batches.pool(batches.SMALL)
    pool = Pool(batches.SMALL, replace(pool.shape, conv_dtype=torch.bfloat16, draft=shape), "cpu")
    assert 0 < sizes[0] < sizes[1] == sum(array[:, 0].nbytes for array in (pool.conv, pool.ssm, pool.ring))


@pytest.mark.parametrize("overlap", [False, True])
def test_p19_rows_without_drafts_beside_rows_with_some(overlap: bool):
    """Every other sequence has drafts, by turns: whoever has none still goes on from what was kept."""
    model = tiny()
    lengths = (5, 6, 13, 14)
    answers = {n: oracle(model, prompt_of(n), 24) for n in lengths}

    def rule(text: list[int], position: int, step: int) -> int:
        return -1 if (len(text) + step) % 2 else drafters.half(text, position, step)

    made = engine(
        model, drafter=drafters.Scripted(3, [prompt_of(n) + answers[n] for n in lengths], rule), overlap=overlap
    )
    out = run(made, [(0, greedy(f"{n}", prompt_of(n), 24)) for n in lengths])
    assert {n: tokens_of(out[f"{n}"]) for n in lengths} == answers
    assert sum(made.stats().accepted_tokens) > 10 and not made.stats().failed_drafts


def test_p22_drafts_are_the_likeliest_unless_asked_for():
    assert SpeculativeConfig.from_dict({"method": "dflash", "model": "x"}).draft_sample_method == "greedy"


def test_p31_a_dspark_drafter_without_markov_head_is_a_dflash_one(tmp_path: Path):
    tiny_drafter(tmp_path, CONFIG, "dspark", markov_rank=0)
    for method in ("dspark", "dflash"):
        config = SpeculativeConfig.from_dict({"method": method, "model": str(tmp_path)}).settle(CONFIG, "target")
        assert config.network().markov_rank == 0
    model = Nemotron(CONFIG, torch.float32, mtp=True).eval().requires_grad_(False)
    batches.fill(model)
    assert draft_checkpoint.load(tmp_path, model).markov_head is None


def test_p34_positions_beyond_those_of_the_drafter_have_angles_of_their_own(tmp_path: Path):
    tiny_drafter(tmp_path, CONFIG, "dspark", max_position_embeddings=16)
    model = Nemotron(CONFIG, torch.float32, mtp=True).eval().requires_grad_(False)
    batches.fill(model)
    network = draft_checkpoint.load(tmp_path, model)
    cos, _ = network._angles(torch.tensor([15, 16, 5000]))
    assert cos.isfinite().all() and len({tuple(row) for row in cos.tolist()}) == 3


def test_p37_clients_of_single_tokens_get_single_tokens():
    delta = Delta(request_id="a", token_ids=[5, 6, 7], finish_reason="stop", stop_reason=7, drafted=3, accepted=2)
    parts = cut(delta)
    assert [part.token_ids for part in parts] == [[5], [6], [7]] and parts[-1].stop_reason == 7
    assert [part.finish_reason for part in parts] == [None, None, "stop"]
    assert [(part.drafted, part.accepted) for part in parts] == [(3, 2), (0, 0), (0, 0)]
