"""Random words that depend on nothing but a key and a counter."""

from torch import Tensor

_MASK = 0xFFFFFFFF


def philox(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: Tensor, rounds: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four words of 32 bits.

    Words and counters are int64 tensors that hold 32 bits without sign; all 64 bits of the key count.
    """
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(rounds):
        # int64 products wrap, which leaves the low 64 bits right; the mask takes the sign off the high half
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3
