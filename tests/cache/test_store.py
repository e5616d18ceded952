import errno
import os

import pytest
import torch
from torch import Tensor

from leyden.cache.pool import Pool, PoolShape
from leyden.cache.store import Store
from leyden.errors import ConfigError
from leyden.types import Moves
from tests.engine.conftest import TINY

DEVICES = ["cpu", *["cuda"] * torch.cuda.is_available()]


def pool(dtype: torch.dtype, device: str) -> Pool:
    conv = torch.bfloat16 if dtype.itemsize == 1 else dtype
    made = Pool(TINY, PoolShape(6, 9, 4, 32, dtype, conv, torch.float32), device)
    for array in (*made.paged, *made.states):
        array.copy_(torch.randn(array.shape))
    return made


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)  # torch compares no 8-bit floats


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_went_out_comes_back_to_the_bit(dtype, device):
    made = pool(dtype, device)
    store = Store(made, 3, 5)
    before = made.kv.clone(), made.conv.clone(), made.ssm.clone()
    moves = Moves(pages_out=[(7, 1), (2, 2), (3, 4)], states_out=[(5, 2), (1, 3)])
    store.write(store.read(moves))
    for array in (*made.paged, *made.states):
        array.fill_(float("nan"))
    store.write(store.read(Moves(pages_in=[(4, 8), (1, 1), (2, 2)], states_in=[(3, 1), (2, 4)])))
    for page, was in ((8, 3), (1, 7), (2, 2)):
        assert torch.equal(bits(made.kv[:, :, page]), bits(before[0][:, :, was]))
    for slot, was in ((1, 1), (4, 5)):
        assert torch.equal(made.conv[:, slot], before[1][:, was])
        assert torch.equal(made.ssm[:, slot], before[2][:, was])
    assert made.kv[:, :, 3].isnan().all() and made.ssm[:, 2].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_all_is_read_before_anything_is_written(device):
    made = pool(torch.float32, device)
    store = Store(made, 2, 2)
    first, second = made.kv[:, :, 1].clone(), made.kv[:, :, 2].clone()
    state = made.ssm[:, 1].clone()
    store.write(store.read(Moves(pages_out=[(1, 1)], states_out=[(1, 1)])))
    arriving = store.read(Moves(pages_out=[(2, 1)], pages_in=[(1, 2)], states_out=[(2, 1)], states_in=[(1, 2)]))
    made.kv.zero_(), made.ssm.zero_()  # the step's other writes come in between
    store.write(arriving)
    assert torch.equal(made.kv[:, :, 2], first) and torch.equal(made.ssm[:, 2], state)
    store.write(store.read(Moves(pages_in=[(1, 5)])))
    assert torch.equal(made.kv[:, :, 5], second)


@pytest.mark.parametrize("device", DEVICES)
def test_step_after_step_through_the_same_places(device):
    made = pool(torch.bfloat16, device)
    store = Store(made, 2, 2)
    for i in range(50):
        page = made.kv[:, :, 1].fill_(i).clone()
        store.write(store.read(Moves(pages_out=[(1, 1 + i % 2)])))
        made.kv[:, :, 1].fill_(-1)
        store.write(store.read(Moves(pages_in=[(1 + i % 2, 3)])))
        assert torch.equal(made.kv[:, :, 3], page)


def test_no_room_for_the_file(monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="--kv-offloading-size: no room for a file of .*TMPDIR"):
        Store(pool(torch.float32, "cpu"), 2, 2)
