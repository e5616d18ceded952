"""The measurements of the cache and the scheduler, small: that they measure what they say."""

import statistics

import pytest

from leyden.bench import hit, pace, soak
from leyden.bench.sized import engine
from leyden.testing.checkpoints import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny(folder)
    return str(folder)


@pytest.mark.parametrize("overlap", [False, True])
def test_seconds_of_full_load_leave_nothing_behind(folder, overlap):
    made = engine(
        folder,
        seqs=4,
        snapshots=6,
        pages=40,
        max_model_len=240,
        step_tokens=64,
        host=(12, 100),
        overlap=overlap,
        policy="priority",
    )
    figures = soak.soak(made, soak.Load(made.config.vocab_size, made.max_model_len, seed=1), seconds=4)
    stats, cache = made.stats(), made.scheduler.cache
    assert figures.aborted and stats.preemptions and stats.cached_tokens and cache.far_snapshots
    assert soak.leaks(made) == []
    cache.take_slot()
    cache.tier.free_pages.pop()
    cache.check = made.scheduler.check = lambda *_: None
    assert soak.leaks(made) == ["1 of 10 slots", "1 of 100 host pages"]


def test_the_trend_is_a_slope():
    figures = soak.Figures(memory=[(float(t), 1000 + 3 * t if t > 2 else 0) for t in range(30)])
    assert figures.trend() == pytest.approx(3)


def test_a_hit_costs_a_fraction_of_the_prompt(folder, capsys):
    assert hit.main([folder, "--tokens", "1500"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[2].rstrip(":") for line in lines] == ["computed", "device", "host"]
    assert all(float(line[-1].rstrip("%")) < 50 for line in lines[1:])


def test_pace_sees_every_gap_of_every_stream(folder):
    made = engine(folder, seqs=3, snapshots=2, pages=200, max_model_len=800, step_tokens=64)
    figures = pace.measure(made, 2, 320, steps=30)
    assert len(figures.alone) == 2 * 19 and len(figures.beside) >= 2 * 4
    assert figures.first >= sum(figures.beside) / 2 * 0.9
    assert figures.ratio == pace.percentile(figures.beside, 0.99) / statistics.median(figures.beside) >= 1
