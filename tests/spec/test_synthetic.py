"""Acceptance by decree."""

import pytest
import torch

from leyden.spec.synthetic import Synthetic


@pytest.mark.parametrize("rates", [(0.9, 0.6, 0.1), (1.0, 0.83, 0.0), (0.5, 0.5, 0.5)])
def test_every_rate_is_met(rates: tuple[float, ...]):
    positions, slots = torch.meshgrid(torch.arange(4000), torch.arange(1, 11), indexing="ij")
    kept = Synthetic(rates, 7, "cpu").kept(slots.flatten(), positions.flatten())
    for i, rate in enumerate(rates):
        assert (kept > i).float().mean().item() == pytest.approx(rate, abs=4 * (0.25 / len(kept)) ** 0.5)
    assert kept.dtype == torch.int64 and kept.max() <= 3


def test_the_same_seed_keeps_the_same_drafts_whatever_shares_the_step():
    slots, positions = torch.arange(1, 9), torch.arange(100, 108)
    first, other = (Synthetic((0.5, 0.4), seed, "cpu") for seed in (1, 2))
    kept = first.kept(slots, positions)
    assert first.kept(slots[3:5], positions[3:5]).tolist() == kept[3:5].tolist()
    assert other.kept(slots, positions).tolist() != kept.tolist()
