"""Tables with a row per slot, and the batch's rows in them."""

from torch import Tensor


def begin(slots: Tensor, last: Tensor, committed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What rows of one token start from, for slots int32 [R] -> (tokens int64, past int32, positions int64), each [R].

    last int64 [S]: the token that each slot has sampled last, which is what its row feeds now; committed int32 [S]: the
    tokens before it. `positions` are those of the tokens that will be sampled.
    """
    past = committed[slots]
    return last[slots], past, past.long() + 1


def take(table: Tensor, slots: Tensor) -> Tensor:
    """Rows `slots` (int32 or int64 [R]) of table [S, ...] -> [R, ...]."""
    return table[slots]


def put(values: Tensor, table: Tensor, slots: Tensor) -> None:
    """Write values [R, ...] to rows `slots` of table [S, ...]."""
    table[slots] = values


def clear(table: Tensor, slots: Tensor, past: Tensor) -> None:
    """Zeros in those rows `slots` [R] of table [S, ...] whose past (int32 [R]) is 0."""
    table[slots[past == 0]] = 0
