"""The formats' arithmetic a second time, in numpy and from the number formats' definitions: the oracle of the tests."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def e4m3_values() -> Array:
    """The values of bytes 0 to 126: exponent field 0 counts in steps of 2^-9, the others are (1 + m/8) 2^(e - 7)."""
    bytes_ = np.arange(127)
    exponent, mantissa = bytes_ >> 3, bytes_ & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return np.where(exponent == 0, mantissa * 2.0**-9, normal).astype(np.float32)


E4M3 = e4m3_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def nearest(x: Array, values: Array) -> NDArray[np.uint8]:
    """Index of the nearest of the non-negative ascending values, the even index where two are as near."""
    distance = np.abs(x[..., None].astype(np.float64) - values)
    best = distance.min(-1, keepdims=True)
    index = np.argmax(distance == best, -1)
    tied = (distance == best).sum(-1) > 1
    return (index + (tied & (index % 2 == 1))).astype(np.uint8)


def to_e4m3(x: Array) -> NDArray[np.uint8]:
    """Bytes; the sign of a zero is kept."""
    return nearest(np.abs(x), E4M3) | (np.signbit(x).astype(np.uint8) << 7)


def from_e4m3(bytes_: NDArray[np.uint8]) -> Array:
    return np.where(bytes_ & 128, -1, 1).astype(np.float32) * E4M3[bytes_ & 127]


def to_e2m1(x: Array) -> NDArray[np.uint8]:
    return nearest(np.abs(x), E2M1) | ((x < 0).astype(np.uint8) << 3)


def from_e2m1(codes: NDArray[np.uint8]) -> Array:
    return np.where(codes & 8, -1, 1).astype(np.float32) * E2M1[codes & 7]
