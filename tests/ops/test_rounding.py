"""States rounded at random: the rule by hand, its mean, and that neighbours go their own ways."""

import pytest
import torch

from leyden.ops.reference.mamba import at_random
from leyden.ops.reference.philox import philox


def test_philox_is_that_of_its_authors():
    """The known answers of Random123 for 4x32 with 10 rounds."""
    ones = 0xFFFFFFFF
    cases = [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones, ones, ones, ones), -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0x299F31D0 << 32) | 0xA4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, words in cases:
        found = philox(*(torch.tensor([c]) for c in counter), torch.tensor([key]), 10)
        assert tuple(int(word) for word in found) == words


def drawn(c0: int, k0: int, k1: int, rounds: int) -> tuple[int, int, int, int]:
    """Philox 4x32 of (c0, 0, 0, 0) in whole numbers of Python."""
    c1 = c2 = c3 = 0
    for _ in range(rounds):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 % 2**32, p0 >> 32 ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@pytest.mark.parametrize("rounds", [5, 10])
@pytest.mark.parametrize("dim", [4, 16, 20])
def test_elements_by_hand(rounds: int, dim: int):
    state, rate, position = torch.randn(2, 3, dim, 16), torch.tensor([-0.5, 0.7, 2.0]), torch.tensor([7, 9])
    found = at_random(state, rate, position, rounds)
    for head, p, n in ((0, 0, 0), (1, 3, 13), (2, dim - 1, 15), (1, dim // 2, 4)):
        group = (head * ((dim + 7) // 8) + p // 8) * 16 + n
        word = drawn(group, int(rate[head].view(torch.int32)) % 2**32, 9, rounds)[p % 8 // 2]
        noise = word >> (16 if p % 2 else 0) & 0x1FFF
        bits = (int(state[1, head, p, n].view(torch.int32)) + noise) & ~0x1FFF
        assert found[1, head, p, n].float() == torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("rounds", [5, 10])
def test_on_average_nothing_is_lost(rounds: int):
    """To nearest, all of these would stay 1; at random they are 1 + 1 / 4096 on average, whatever the position."""
    state, rate = torch.full((64, 2, 32, 12), 1 + 2.0**-12), torch.tensor([0.1, -2.0])
    found = at_random(state, rate, torch.arange(64), rounds).double()
    assert set(found.unique().tolist()) == {1.0, 1 + 2.0**-10}
    up = (found > 1).double()
    assert abs(up.mean().item() - 0.25) < 5 * (0.25 * 0.75 / found.numel()) ** 0.5
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[:, 0], found[:, 1])
    # neighbours in position, head, row and column go their own ways, and so do rows of neighbouring calls
    off = (up - up.mean()) / up.std()
    for dim, apart in ((0, 1), (1, 1), (2, 1), (2, 2), (2, 8), (3, 1)):
        pairs = off.narrow(dim, apart, off.shape[dim] - apart) * off.narrow(dim, 0, off.shape[dim] - apart)
        assert abs(pairs.mean().item()) < 5 / pairs.numel() ** 0.5


@pytest.mark.parametrize("rounds", [5, 10])
def test_every_one_of_the_13_bits_is_fair(rounds: int):
    """1 + j / 2^23 goes up for j of the 2^13 values of the random bits, whatever j."""
    share = torch.arange(0, 8192, 256) / 8192
    state = (1 + share * 2.0**-10).view(1, 1, 1, -1).expand(256, 1, 64, 32).contiguous()
    up = (at_random(state, torch.tensor([0.3]), torch.arange(256), rounds).float() > 1).double().mean((0, 1, 2))
    assert up[0] == 0
    assert ((up - share).abs() < 5 * (share * (1 - share) / (256 * 64)).sqrt() + 1e-12).all()


def test_errors_of_many_steps_cancel_out():
    """A sum of 500 parts of a third of the last bit each, kept in fp16: to nearest it would stay where it is."""
    state, part = torch.ones(1, 4, 16, 16), 2.0**-10 / 3
    for position in range(500):
        state = at_random(state + part, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([position]), 5).float()
    wanted = 1 + 500 * part
    spread = 2.0**-10 * (500 * 2 / 9) ** 0.5  # of one element: a step's variance is 1/3 times 2/3 of the bit's square
    assert abs(state.mean().item() - wanted) < 5 * spread / state.numel() ** 0.5
    assert abs(state.std().item() / spread - 1) < 0.15


def test_it_is_the_same_wherever_a_row_stands():
    state, rate, position = torch.randn(3, 2, 16, 8), torch.tensor([0.1, 0.2]), torch.tensor([4, 17, 900_000])
    found, order = at_random(state, rate, position, 5), torch.tensor([2, 0, 1])
    assert torch.equal(at_random(state[order], rate, position[order], 5), found[order])
    assert not torch.equal(at_random(state, rate, position, 6), found)


def test_nothing_becomes_infinite_and_small_numbers_stay():
    state = torch.tensor([1e9, -1e9, 65504.0, 3e-6, 0.0, -0.0, 1.0, -1.0]).view(1, 1, 1, 8)
    found = at_random(state, torch.tensor([1.0]), torch.tensor([3]), 10)[0, 0, 0]
    assert found[:3].tolist() == [65504.0, -65504.0, 65504.0] and found[4:].tolist() == [0.0, 0.0, 1.0, -1.0]
    assert abs(found[3].item() - 3e-6) < 6e-8
