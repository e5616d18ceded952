"""Images: the second start has the same bits, and nothing stale is ever mapped."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from leyden.config.engine import EngineConfig
from leyden.config.model import ModelConfig
from leyden.engine.engine import Engine
from leyden.model import checkpoint, image
from leyden.model.checkpoint import build, load
from leyden.model.nemotron import Nemotron
from leyden.testing.checkpoints import tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint, "LEAST", 1)
    return tmp_path / "cache" / "leyden" / "weights"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny(tmp_path / "model")
    return tmp_path / "model"


def loaded(folder: Path, quantization: str | None = None, keep: bool = True) -> Nemotron:
    model = build(ModelConfig.from_folder(folder), torch.bfloat16)
    load(model, folder, progress=False, quantization=quantization, keep=keep)
    return model


def mapped(model: Nemotron) -> bool:
    """Whether all parameters are views of one memory."""
    return len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == 1


def same_bits(a: Nemotron, b: Nemotron) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_second_load_maps_the_same_bits(folder: Path, cache: Path, quantization: str | None) -> None:
    first, second = loaded(folder, quantization), loaded(folder, quantization)
    assert not mapped(first) and mapped(second) and same_bits(first, second)
    assert all(parameter.data_ptr() % 64 == 0 for parameter in second.parameters())
    assert len(list(cache.iterdir())) == 1


def test_the_file_is_written_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_PIECE", 1000)
    assert same_bits(loaded(folder), loaded(folder))


def test_what_a_process_writes_into_its_weights_stays_there(folder: Path) -> None:
    loaded(folder)
    with torch.no_grad():
        for parameter in loaded(folder).parameters():
            parameter.zero_()
    assert same_bits(loaded(folder), loaded(folder, keep=False))


def test_another_checkpoint_in_its_place_is_read(folder: Path, cache: Path) -> None:
    loaded(folder)
    tiny(folder, seed=1)
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))  # clocks of file systems are coarse
    changed = loaded(folder)
    assert not mapped(changed) and same_bits(changed, loaded(folder, keep=False))
    assert len(list(cache.iterdir())) == 1, "the old image is gone"


def test_a_file_of_another_size_is_not_mapped(folder: Path, cache: Path) -> None:
    loaded(folder)
    (kept,) = cache.iterdir()
    os.truncate(kept, kept.stat().st_size - 64)
    assert not mapped(loaded(folder)) and mapped(loaded(folder))


def test_nothing_is_kept_of_small_networks_nor_unasked(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded(folder, keep=False)
    monkeypatch.setattr(checkpoint, "LEAST", 2**40)
    loaded(folder)
    assert not cache.exists()


def test_loading_works_without_room_and_without_a_folder(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2, 1, 1))
        loaded(folder)
    assert not list(cache.iterdir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "config.json"))
    assert not mapped(loaded(folder))


def test_only_the_latest_images_are_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "MOST", 2)
    folders = [tmp_path / name for name in ("one", "two", "three")]
    files = []
    for i, folder in enumerate(folders):
        tiny(folder)
        before = set(cache.glob("*")) if cache.exists() else set()
        loaded(folder)
        (made,) = set(cache.iterdir()) - before
        files.append(made)
        os.utime(made, (i + 1, i + 1))
        if i == 1:
            assert mapped(loaded(folders[0])), "being used makes it the latest"
    assert set(cache.iterdir()) == {files[0], files[2]}


def test_the_engine_keeps_none_with_eager(folder: Path, cache: Path) -> None:
    options = {"model": str(folder), "device": "cpu", "max_model_len": 64, "kv_cache_memory_bytes": 2**24}
    Engine.load(EngineConfig(**options, safetensors_load_strategy="eager"))
    assert not cache.exists()
    Engine.load(EngineConfig(**options))
    assert len(list(cache.iterdir())) == 1
