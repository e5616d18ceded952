import pytest

from leyden.engine.pace import LEAST, STRETCH, Pace


class Machine:
    """A device with known costs, and the clock on its wall."""

    def __init__(self, alone: float, tax: float, rate: float):
        self.alone, self.tax, self.rate = alone, tax, rate
        self.now = 0.0

    def run(self, pace: Pace, streams: int, chunk: int) -> float:
        started = self.now
        seconds = self.alone + (self.tax + self.rate * chunk if chunk else 0)
        self.now += seconds
        pace.took(started, streams, chunk)
        return seconds


def learned(machine: Machine, step_tokens: int = 4096) -> tuple[Pace, list[float]]:
    pace = Pace(step_tokens, clock=lambda: machine.now)
    for _ in range(20):
        machine.run(pace, 4, 0)
    return pace, [machine.run(pace, 4, pace.room()) for _ in range(80)]


@pytest.mark.parametrize(("alone", "rate"), [(7e-3, 4e-5), (1e-3, 1e-5), (0.1, 1e-3)])
def test_a_step_with_a_chunk_stays_below_twice_a_step_without(alone, rate):
    _, seconds = learned(Machine(alone, 0, rate))
    assert max(seconds) < 2 * alone
    assert seconds[-1] > 1.5 * alone  # and the prompt gets what is left


def test_where_any_chunk_costs_more_than_that_the_cost_is_made_worth_it():
    machine = Machine(1e-3, 4e-3, 1e-5)
    pace, seconds = learned(machine)
    assert seconds[-1] < 2 * (machine.alone + machine.tax)
    assert pace.room() * machine.rate > 0.4 * (machine.alone + machine.tax)


def test_no_prompt_is_starved_and_no_step_is_overfull():
    assert learned(Machine(1e-3, 0, 1.0))[0].room() == LEAST
    assert learned(Machine(1.0, 0, 1e-9), step_tokens=512)[0].room() == 512


def test_unmeasured_it_is_the_least():
    assert Pace(4096).room() == LEAST


def test_a_context_that_grows_is_followed():
    machine = Machine(7e-3, 0, 1e-5)
    pace, _ = learned(machine)
    slowest = 0.0
    for _ in range(2000):
        slowest = max(slowest, machine.run(pace, 4, pace.room()))
        machine.rate *= 1.001
    assert slowest < 2 * 7e-3


def test_one_long_step_is_not_believed():
    machine = Machine(1e-3, 0, 1e-5)
    pace, _ = learned(machine)
    before = pace.room()
    machine.now += 1.0
    pace.took(machine.now - 1.0, 4, before)
    assert pace.room() > before / 2
    assert 1 < STRETCH < 2


def test_overlapping_steps_are_timed_from_the_end_of_the_one_before():
    now = 0.0
    pace = Pace(4096, clock=lambda: now)
    for end in range(1, 30):  # each is launched one step before it begins
        now = float(end)
        pace.took(end - 2.0, 4, 0)
    for end in range(30, 60):
        now = float(end)
        pace.took(end - 2.0, 4, LEAST)
    assert pace._alone == pytest.approx(1, abs=0.1)
    assert pace._trials[-1] == pytest.approx(1)
