"""From the configuration to a drafter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.config.speculative import SpeculativeConfig
from leyden.errors import CheckpointError
from leyden.model.nemotron import Nemotron
from leyden.spec.dflash import DFlash
from leyden.spec.load import load
from leyden.spec.mtp import MTP
from leyden.spec.ngram import NGram
from leyden.testing.drafters import tiny
from tests import batches
from tests.train.examples import CONFIG


def model() -> Nemotron:
    made = Nemotron(CONFIG, torch.float32, mtp=True).eval().requires_grad_(False)
    batches.fill(made)
    return made


def loaded(**raw: Any):
    config = SpeculativeConfig.from_dict(raw).settle(CONFIG, "target")
    return load(config, model())


def test_each_method(tmp_path: Path):
    folder = str(tmp_path)
    tiny(tmp_path, CONFIG, "dspark")
    dspark, mtp = loaded(model=folder), loaded(num_speculative_tokens=3)
    ngram = loaded(method="ngram", num_speculative_tokens=4)
    assert [type(drafter) for drafter in (dspark, mtp, ngram)] == [DFlash, MTP, NGram]
    assert [drafter.width for drafter in (dspark, mtp, ngram)] == [7, 3, 4]
    assert [drafter.lookahead for drafter in (dspark, mtp, ngram)] == [0, 2, 1]
    assert [drafter.taps for drafter in (dspark, mtp, ngram)] == [(1, CONFIG.num_hidden_layers - 1), (), ()]
    assert loaded(model=folder, num_speculative_tokens=3).width == 3


def test_pitfall_4_a_drafter_for_another_target_is_refused(tmp_path: Path):
    tiny(tmp_path, replace(CONFIG, hidden_size=2 * CONFIG.hidden_size))
    with pytest.raises(CheckpointError, match="is a drafter for another target"):
        loaded(model=str(tmp_path))
