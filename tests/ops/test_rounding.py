"""States rounded at random: the rule by hand, its mean, and that the steps follow it."""

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


def test_one_element_by_hand():
    state, rate, position = torch.randn(2, 3, 4, 16), torch.tensor([-0.5, 0.7, 2.0]), torch.tensor([7, 9])
    head, p, n = 1, 2, 13

    def scattered(h: int) -> int:
        h = (h ^ h >> 16) * 0x7FEB352D % 2**32
        h = (h ^ h >> 15) * 0x846CA68B % 2**32
        return h ^ h >> 16

    key = scattered(int(rate[head].view(torch.int32)) % 2**32 ^ scattered(9))
    h = (((head * 4 + p) * 16 + n) * 0x9E3779B1 + key) % 2**32
    noise = (h ^ h >> 15) * 0x846CA68B % 2**32 >> 19
    bits = (int(state[1, head, p, n].view(torch.int32)) + noise) & ~0x1FFF
    wanted = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert at_random(state, rate, position)[1, head, p, n].float() == wanted


def test_on_average_nothing_is_lost():
    """To nearest, all of these would stay 1; at random they are 1 + 1 / 4096 on average, whatever the position."""
    state, rate = torch.full((64, 2, 8, 12), 1 + 2.0**-12), torch.tensor([0.1, -2.0])
    found = at_random(state, rate, torch.arange(64)).double()
    assert set(found.unique().tolist()) == {1.0, 1 + 2.0**-10}
    up = (found > 1).double()
    assert abs(up.mean().item() - 0.25) < 5 * (0.25 * 0.75 / found.numel()) ** 0.5
    assert not torch.equal(found[0], found[1]) and not torch.equal(found[:, 0], found[:, 1])
    # neighbours in position, head, row and column go their own ways
    off = (up - up.mean()) / up.std()
    for dim in range(4):
        pairs = off.narrow(dim, 1, off.shape[dim] - 1) * off.narrow(dim, 0, off.shape[dim] - 1)
        assert abs(pairs.mean().item()) < 5 / pairs.numel() ** 0.5


def test_nothing_becomes_infinite_and_small_numbers_stay():
    state = torch.tensor([1e9, -1e9, 65504.0, 3e-6, 0.0, -0.0, 1.0, -1.0]).view(1, 1, 1, 8)
    found = at_random(state, torch.tensor([1.0]), torch.tensor([3]))[0, 0, 0]
    assert found[:3].tolist() == [65504.0, -65504.0, 65504.0] and found[4:].tolist() == [0.0, 0.0, 1.0, -1.0]
    assert abs(found[3].item() - 3e-6) < 6e-8
