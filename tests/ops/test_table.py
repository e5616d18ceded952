import torch

from leyden import ops
from leyden.ops import using


def test_rows_of_tables_go_both_ways() -> None:
    for slots in (torch.tensor([4, 1, 2], dtype=torch.int32), torch.tensor([4, 1, 2])):
        for table in (torch.arange(12).view(6, 2), torch.arange(6.0), torch.arange(6, dtype=torch.int32)):
            taken = ops.take(table, slots)
            assert torch.equal(taken, table[[4, 1, 2]])
            kept = table.clone()
            ops.put(taken * 10, kept, slots)
            assert torch.equal(kept[[4, 1, 2]], table[[4, 1, 2]] * 10)
            assert torch.equal(kept[[0, 3, 5]], table[[0, 3, 5]])


def test_begin_says_where_rows_of_one_token_stand() -> None:
    slots, last = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([7, 8, 9, 10])
    committed = torch.tensor([0, 5, 6, 2**31 - 2], dtype=torch.int32)
    for version in (None, "reference"):
        if version:
            with using(version):
                tokens, past, positions = ops.begin(slots, last, committed)
        else:
            tokens, past, positions = ops.begin(slots, last, committed)
        assert (tokens.tolist(), past.tolist(), positions.tolist()) == ([10, 8], [2**31 - 2, 5], [2**31 - 1, 6])
        assert (tokens.dtype, past.dtype, positions.dtype) == (torch.int64, torch.int32, torch.int64)
