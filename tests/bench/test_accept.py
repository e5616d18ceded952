"""`leyden bench accept` on a random model: whole, and its judgement of texts that part."""

import json
from pathlib import Path

import pytest

from leyden.bench import accept
from leyden.config.engine import EngineConfig
from leyden.errors import ConfigError
from leyden.testing import checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("accept")
    checkpoints.tiny(made, "mtp")
    return made


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = ["--device", "cpu", "--max-model-len", "900", "--max-num-seqs", "2", "--kv-cache-memory-bytes", "32m"]
    own = ["--prompts", "3", "--tokens", "12", "--streams", "1", "2", "--out", str(tmp_path / "told.json")]
    assert accept.main([str(folder), "--speculative-config.num_speculative_tokens", "2", *sizes, *own]) == 0
    lines = capsys.readouterr().out
    assert "drafts: mtp, 2 per step" in lines and lines.count("3 of 3 texts are the same") == 2
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["different"] == [] and told["texts"] == 6 and len(told["by_place"]) == 2
    assert 1 <= told["tokens_per_step"] <= 3 and not told["synthetic"]
    assert {streams: len(speeds) for streams, speeds in told["speeds"].items()} == {"1": 3, "2": 2}


def test_where_texts_part_the_model_is_asked(folder: Path):
    config = EngineConfig(
        model=str(folder), device="cpu", max_model_len=64, max_num_seqs=1, kv_cache_memory_bytes=2**24
    )
    engine = accept.Engine.load(config)
    (text,), _ = accept.answer(engine, [[3, 4, 5]], 6)
    apart = accept.gap(engine, [3, 4, 5], text, [*text[:3], text[3] + 1])
    assert apart > 0
    turns = accept.Turns(1, [text], [text[:2]], [(10.0, 20.0), (10.0, 40.0), (10.0, 30.0)])
    assert turns.different == [0] and turns.ratio == 3.0


def test_a_drafter_is_expected(folder: Path):
    with pytest.raises(ConfigError, match="speculative-config"):
        accept.engines(EngineConfig(model=str(folder)))
