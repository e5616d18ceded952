"""From the configuration to a drafter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.cache.pool import DraftShape
from leyden.config.speculative import SpeculativeConfig
from leyden.errors import CheckpointError
from leyden.model.nemotron import Nemotron
from leyden.spec.dflash import DFlash
from leyden.spec.drafter import Drafter
from leyden.spec.load import load, networks, room
from leyden.spec.mtp import MTP
from leyden.spec.ngram import NGram
from leyden.testing.drafters import tiny
from tests import batches
from tests.train.examples import CONFIG


def model() -> Nemotron:
    made = Nemotron(CONFIG, torch.float32, mtp=True).eval().requires_grad_(False)
    batches.fill(made)
    return made


def loaded(**raw: Any) -> tuple[Drafter, DraftShape]:
    config = SpeculativeConfig.from_dict(raw).settle(CONFIG, "target")
    (drafter,) = load(config, model())
    return drafter, room(config, CONFIG)


def test_each_method(tmp_path: Path):
    folder = str(tmp_path)
    tiny(tmp_path, CONFIG, "dspark")
    dspark, room = loaded(model=folder)
    assert type(dspark) is DFlash and (dspark.width, dspark.taps) == (7, (1, CONFIG.num_hidden_layers - 1))
    assert room == DraftShape(width=7, layers=(2, 2, 16))
    mtp, room = loaded(num_speculative_tokens=3)
    assert type(mtp) is MTP and (mtp.width, mtp.taps) == (3, ())
    assert room == DraftShape(width=3, lookahead=2, mtp_layers=1)
    ngram, room = loaded(method="ngram", num_speculative_tokens=4)
    assert type(ngram) is NGram and ngram.taps == ()
    assert room == DraftShape(width=4, lookahead=1)
    assert loaded(model=folder, num_speculative_tokens=3)[1].width == 3


def test_pitfall_4_a_drafter_for_another_target_is_refused(tmp_path: Path):
    tiny(tmp_path, replace(CONFIG, hidden_size=2 * CONFIG.hidden_size))
    with pytest.raises(CheckpointError, match="is a drafter for another target"):
        loaded(model=str(tmp_path))


def test_auto_is_all_that_there_is(tmp_path: Path):
    tiny(tmp_path, CONFIG, "dspark")
    config = SpeculativeConfig.from_dict({"method": "auto", "model": str(tmp_path)}).settle(CONFIG, "target")
    drafters = load(config, model())
    assert [type(drafter) for drafter in drafters] == [MTP, DFlash]
    assert networks(drafters) == [drafters[1].network]  # type: ignore[attr-defined]
    assert room(config, CONFIG) == DraftShape(width=7, lookahead=6, mtp_layers=1, layers=(2, 2, 16))
    without = replace(CONFIG, num_nextn_predict_layers=0)
    config = SpeculativeConfig.from_dict({"method": "auto"}).settle(without, "target")
    assert config.methods(without) == ("ngram",) and config.num_speculative_tokens == 3
