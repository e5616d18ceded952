import pytest
import torch

from leyden.cache import pool as module
from leyden.cache.pool import DraftShape, Pool, PoolShape
from tests.engine.conftest import TINY

FLOAT = {"kv_dtype": torch.float32, "conv_dtype": torch.float32, "ssm_dtype": torch.float32}


def made(draft: DraftShape, **dtypes: torch.dtype) -> Pool:
    return Pool(TINY, PoolShape(slots=3, pages=6, page=4, max_model_len=16, draft=draft, **FLOAT | dtypes), "cpu")


def test_a_drafter_has_layers_behind_those_of_the_model_or_its_own() -> None:
    assert made(DraftShape()).kv.shape[0] == 2
    assert made(DraftShape(width=2, mtp_layers=1)).kv.shape[0] == 3
    pool = made(DraftShape(width=2, layers=(5, 1, 8)))
    assert pool.draft.shape == (5, 2, 6, 4, 1, 8)
    assert pool.ring.shape == (4, 3, 3, TINY.conv_dim + TINY.mamba_num_heads)


def test_without_a_drafter_nothing_is_set_aside() -> None:
    pool = made(DraftShape())
    assert not pool.draft.numel() and not pool.ring.numel()


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
def test_pages_are_copied_with_what_the_drafter_keeps_in_them(kv_dtype: torch.dtype) -> None:
    pool = made(DraftShape(width=2, mtp_layers=1, layers=(1, 1, 8)), kv_dtype=kv_dtype)
    for cache in (pool.kv, pool.draft):
        cache.copy_(torch.arange(6.0).view(6, 1, 1, 1).expand_as(cache))
    pool.copy_pages(torch.tensor([1, 2]), torch.tensor([2, 4]))  # read before anything is written
    for cache in (pool.kv, pool.draft):
        assert cache[:, :, :, 0, 0, 0].float().unique(dim=0).tolist() == [[[0, 1, 1, 3, 2, 5]] * 2]


@pytest.mark.parametrize("at_once", [1, 2**28])
def test_states_are_copied_layer_by_layer_or_together(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    one = made(DraftShape())
    for states in one.states:
        states.copy_(torch.arange(states.numel()).view_as(states))
    before = [states.clone() for states in one.states]
    one.copy_states(torch.tensor([1, 2]), torch.tensor([2, 0]))  # read before anything is written
    for states, old in zip(one.states, before, strict=True):
        assert torch.equal(states, old[:, [2, 1, 1]])


def test_page_tables_reach_behind_the_end_as_far_as_a_drafter_writes() -> None:
    assert made(DraftShape()).tables.shape == (3, 4)
    assert made(DraftShape(width=3, lookahead=2)).tables.shape == (3, 5)
