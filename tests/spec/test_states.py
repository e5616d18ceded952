"""States that wait in a ring against copies of them: any number of drafts may be right, step after step.

The copies are the plain way: the state after each token of a step is kept, and the step's outcome says which counts.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from leyden.cache.pool import DraftShape, Pool
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from tests import batches

WIDTH, SLOTS = 4, (3, 1, 4)
# Rounding to bf16 or fp16 comes once a token with copies, and once a step with the ring.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}


def pool(model: Nemotron, dtype: torch.dtype) -> Pool:
    made = batches.pool(model.config, slots=5, tokens=80, page=4)
    shape = replace(made.shape, ssm_dtype=dtype, draft=DraftShape(WIDTH))
    tables, made = made.tables, Pool(model.config, shape, "cpu")
    for array in (made.kv, made.conv, made.ring, made.ssm):
        array.fill_(7.0)
    made.tables.copy_(tables)
    return made


@torch.no_grad()
def forward(model: Nemotron, pool: Pool, fed: dict[int, list[int]]) -> tuple[torch.Tensor, Context]:
    rows = batches.rows(pool, [(slot, int(pool.committed[slot]), len(tokens)) for slot, tokens in fed.items()])
    none = batches.rows(pool, [])
    positions = torch.cat([past + torch.arange(n) for past, n in zip(rows.past, rows.lens, strict=True)])
    ctx = Context(rows, none, positions.int(), pool)
    return model(torch.tensor([token for tokens in fed.values() for token in tokens]), ctx)[0], ctx


@torch.no_grad()
def by_copies(model: Nemotron, pool: Pool, fed: dict[int, list[int]], counts: dict[int, int]) -> torch.Tensor:
    """A token of every row at a time; each row goes back to the copy that its outcome says."""
    copies, outputs = [], []
    begin = pool.committed.clone()
    for i in range(max(map(len, fed.values()))):
        some = {slot: tokens[i : i + 1] for slot, tokens in fed.items() if i < len(tokens)}
        hidden, ctx = forward(model, pool, some)
        outputs.append(dict(zip(some, hidden, strict=True)))
        model.commit(ctx, torch.tensor(list(some)), torch.ones(len(some), dtype=torch.int32))
        copies.append((pool.conv.clone(), pool.ssm.clone()))
    for slot, count in counts.items():
        conv, ssm = copies[count - 1]
        pool.conv[:, slot], pool.ssm[:, slot] = conv[:, slot], ssm[:, slot]
        pool.committed[slot] = begin[slot] + count
    return torch.stack([outputs[i][slot] for slot, tokens in fed.items() for i in range(len(tokens))])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("seed", range(3))
def test_p15_ring_and_replay_are_copies_of_the_state(dtype: torch.dtype, seed: int):
    model = Nemotron(batches.SMALL, torch.float32).eval().requires_grad_(False)
    batches.fill(model)
    draw = np.random.default_rng(seed)
    ring, copies = pool(model, dtype), pool(model, dtype)
    for _ in range(12):
        lens = {slot: int(draw.integers(1, WIDTH + 2)) for slot in SLOTS}
        lens[SLOTS[0]] = max(2, lens[SLOTS[0]])  # a step without guesses moves the states itself
        fed = {slot: draw.integers(0, 64, n).tolist() for slot, n in lens.items()}
        counts = {slot: int(draw.integers(1, n + 1)) for slot, n in lens.items()}
        hidden, ctx = forward(model, ring, fed)
        model.commit(ctx, torch.tensor(SLOTS), torch.tensor(list(counts.values()), dtype=torch.int32))
        expected = by_copies(model, copies, fed, counts)
        tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(hidden, expected, **tolerance)
        at = list(SLOTS)
        assert torch.equal(ring.committed, copies.committed)
        torch.testing.assert_close(ring.conv[:, at], copies.conv[:, at], **tolerance)
        torch.testing.assert_close(ring.ssm[:, at].float(), copies.ssm[:, at].float(), **tolerance)
