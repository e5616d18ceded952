"""How a ragged batch is cut into sequences: the only batch metadata an op ever sees."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class Rows:
    """R sequences whose tokens lie one after the other in a [T, ...] tensor.

    Without a cache (training, tests) `slots` and `pages` are None, `past` is zero and every row starts from nothing.

    In a recorded step only the device knows how long rows are. There is a `total` then, and `lens` are the most that
    rows can have, two or more: kernels take them for the sizes of grids and all else from `starts`; references cannot.
    """

    lens: tuple[int, ...]  # tokens of each row: known to the host, so shapes never wait for the device
    starts: Tensor  # int32 [R + 1]: token offsets, starts[r + 1] - starts[r] == lens[r], or less with a total
    past: Tensor  # int32 [R]: tokens of the sequence before this call, i.e. the position of the row's first token
    slots: Tensor | None = None  # int32 [R]: index into the state arrays; 0 is the padding slot
    pages: Tensor | None = None  # int32 [R, P]: page table, entry i holds positions i*page .. i*page + page - 1
    total: int | None = None  # tokens of all rows together, where lens say only how many each can have

    @property
    def tokens(self) -> int:
        return sum(self.lens) if self.total is None else self.total
