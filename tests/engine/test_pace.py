import pytest

from leyden.engine.pace import LEAST, PROBES, STRETCH, Pace


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
    assert max(seconds) < 2 * (machine.alone + machine.tax)
    assert pace.room() * machine.rate > 0.4 * (machine.alone + machine.tax)


def test_no_prompt_is_starved_and_no_step_is_overfull():
    assert learned(Machine(1e-3, 0, 1.0))[0].room() == LEAST
    assert learned(Machine(1.0, 0, 1e-9), step_tokens=512)[0].room() == 512


def test_what_was_not_measured_is_probed_and_probed_again():
    machine = Machine(1e-3, 1e-3, 1e-5)
    pace = Pace(4096, probe=5, clock=lambda: machine.now)
    chunks = []
    for _ in range(200):
        chunks.append(pace.room())
        machine.run(pace, 4, chunks[-1])
    assert chunks[:4] == [5, 5, 5, LEAST]
    assert chunks.count(5) == 3 + 197 // (PROBES + 1)


def test_noise_does_not_hold_it_down():
    """Every third step waits for something else as long as it takes itself."""
    machine = Machine(1e-3, 4e-3, 1e-5)
    pace = Pace(4096, clock=lambda: machine.now)
    sizes = []
    for i in range(400):
        started, chunk = machine.now, pace.room() if i > 20 else 0
        machine.now += machine.alone + (machine.tax + machine.rate * chunk if chunk else 0)
        machine.now += (i % 3 == 0) * 5e-3
        pace.took(started, 4, chunk)
        sizes.append(chunk)
    assert sum(sizes[-100:]) / 100 > 100


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
        pace.took(end - 2.0, 4, 2)
    assert pace._alone == pytest.approx(1, abs=0.1)
    assert pace._trials[-1] == pytest.approx(1)
