import json

import pytest

from leyden.bench.middling import CONFIG, RELEASE
from leyden.cli import main
from leyden.testing.checkpoints import tiny

NANO = CONFIG | RELEASE | {"max_position_embeddings": 1048576}


@pytest.fixture
def nano(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(NANO))
    return str(tmp_path)


def test_the_published_sizes_of_the_30b_model(nano, capsys):
    assert main(["plan", nano, "--gpu", "h100-80gb", "--max-num-seqs", "8"]) == 0
    out = capsys.readouterr().out
    assert "58.83 GiB of 79.1 GiB, bfloat16" in out  # 31.6 billion parameters, the router in fp32
    assert "6,144 bytes a token, 46.8 MiB a state" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["262,144", "8", "1.55", "GiB"] in rows  # 256K in BF16 on one H100
    assert ["1,048,576", "2", "6.05", "GiB"] in rows


def test_what_does_not_fit_is_said_with_numbers(nano, capsys):
    assert main(["plan", nano, "--gpu", "rtx-4090"]) == 2
    assert "the weights alone need 58.8 GiB, and 92% of the memory" in capsys.readouterr().err
    assert main(["plan", nano, "--memory-gib", "80", "--max-model-len", "1M", "--max-num-seqs", "200"]) == 2
    assert "what would fit: --max-model-len" in capsys.readouterr().err
    assert main(["plan", nano, "--gpu", "gtx"]) == 2
    assert "known are a100-40gb" in capsys.readouterr().err


def test_a_small_model_fits_everywhere(tmp_path, capsys):
    tiny(tmp_path)
    assert main(["plan", str(tmp_path), "--memory-gib", "1"]) == 0
    assert "sequences at once" in capsys.readouterr().out
