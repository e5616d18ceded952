"""The pool that divide() asks for is as large as it says, drafters and all."""

import pytest
import torch

from leyden.cache.pool import NO_DRAFTER, DraftShape, Pool
from leyden.config.engine import EngineConfig
from leyden.engine.memory import divide
from leyden.errors import ConfigError
from tests.engine.conftest import TINY

MIB = 2**20
DRAFTS = {
    "none": NO_DRAFTER,
    "mtp": DraftShape(width=3, lookahead=2, mtp_layers=1),
    "dspark": DraftShape(width=7, layers=(2, 1, 32)),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("given", [{}, {"max_model_len": 1000}, {"max_num_seqs": 3, "enable_prefix_caching": False}])
def test_the_parts_are_the_whole(draft, given):
    config = EngineConfig(model="", **given)
    split = divide(config, TINY, torch.bfloat16, "cpu", 8 * MIB, DRAFTS[draft])
    pool = Pool(TINY, split.shape, "meta")
    parts = (pool.kv, pool.draft, pool.conv, pool.ssm, pool.ring)
    total = sum(part.nbytes for part in parts)
    assert total == split.shape.slots * split.slot_bytes + split.shape.pages * split.page_bytes
    assert total <= 8 * MIB
    # the longest sequence and what a drafter writes behind its end have pages, and places in the page table
    lookahead = DRAFTS[draft].lookahead
    assert split.cache_tokens >= split.shape.max_model_len + lookahead
    assert split.shape.pages_per_slot * split.shape.page >= split.shape.max_model_len + lookahead


def test_a_drafter_takes_room():
    config = EngineConfig(model="", max_num_seqs=4)
    plain, drafted = (divide(config, TINY, torch.float32, "cpu", 2 * MIB, DRAFTS[name]) for name in ("none", "dspark"))
    assert drafted.slot_bytes > plain.slot_bytes and drafted.page_bytes > plain.page_bytes
    assert drafted.cache_tokens < plain.cache_tokens
    with pytest.raises(ConfigError, match="does not fit"):
        divide(
            EngineConfig(model="", max_num_seqs=64, max_model_len=4096), TINY, torch.float32, "cpu", MIB, DRAFTS["mtp"]
        )
