"""`leyden bench latency` and `leyden bench throughput` on a random model."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest

from leyden.bench import latency, middling, offline, throughput
from leyden.errors import ConfigError
from leyden.testing.checkpoints import TINY, tiny

ENGINE = ["--device", "cpu", "--max-model-len", "128", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "16m"]


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """The commands log to this test's stderr, which is gone after it."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("offline")
    tiny(made)
    return made


def test_latency(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = ["--input_len", "9", "--output-len=5", "--batch-size", "3", "--num-iters", "4", "--num-iters-warmup", "1"]
    file = tmp_path / "told.json"
    assert latency.main(["--model", str(folder), *ENGINE, *sizes, "--n", "2", "--output-json", str(file)]) == 0
    told = json.loads(file.read_text())
    taken = told["latencies"]
    assert len(taken) == 4 and min(taken) > 0
    assert told["avg_latency"] == pytest.approx(sum(taken) / 4) and told["std_latency"] == pytest.approx(
        numpy.std(taken)
    )
    assert list(told["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert told["percentiles"]["50"] == pytest.approx(numpy.median(taken))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Avg latency: {told['avg_latency']} seconds" and len(lines) == 8
    assert lines[-1] == f"99% percentile latency: {told['percentiles']['99']} seconds"


def test_throughput_counts_every_token(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = ["--random-input-len", "8", "--output-len", "6", "--prefix-len", "16", "--num-prompts", "5"]
    file = tmp_path / "told.json"
    more = ["--n", "2", "--num-warmups", "2", "--output-json", str(file)]
    assert throughput.main([str(folder), *ENGINE, *sizes, *more]) == 0
    told = json.loads(file.read_text())
    assert told["num_requests"] == 5 and told["total_num_tokens"] == 5 * (24 + 2 * 6)
    assert told["requests_per_second"] == pytest.approx(5 / told["elapsed_time"])
    assert told["tokens_per_second"] == pytest.approx(180 / told["elapsed_time"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"Throughput: {told['requests_per_second']:.2f} requests/s, {told['tokens_per_second']:.2f} total tokens/s, "
        f"{60 / told['elapsed_time']:.2f} output tokens/s"
    )
    assert lines[1:] == ["Total num prompt tokens:  120", "Total num output tokens:  60"]


def test_a_config_is_enough_for_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    middling.describe(tmp_path, **TINY)
    dummy = [str(tmp_path), "--load-format", "dummy", *ENGINE, "--input-len", "9", "--output-len", "3"]
    assert throughput.main([*dummy, "--num-prompts", "3", "--random-range-ratio", "0.5"]) == 0
    assert latency.main([*dummy, "--num-iters", "1", "--num-iters-warmup", "0"]) == 0
    out, err = capsys.readouterr()
    assert "Total num output tokens" in out and "Avg latency" in out and "there is no tokenizer.json" in err


def test_prompts_of_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one two"}\n\n{"prompt": [4, 5, 6], "more": 1}\n{"prompt": "never"}\n')
    prompts = throughput.read(file, 2, folder)
    assert len(prompts) == 2 and prompts[1] == [4, 5, 6]
    more = ["--num-prompts", "2", "--output-len", "4", "--disable-detokenize"]
    assert throughput.main([str(folder), *ENGINE, "--dataset-path", str(file), *more]) == 0
    assert f"prompt tokens:  {len(prompts[0]) + 3}\nTotal num output tokens:  8" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["", "no JSON", "[1]", '{"text": "a"}', '{"prompt": ""}', '{"prompt": ["a"]}'])
def test_files_that_hold_no_prompts(line: str, folder: Path, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ConfigError, match="--dataset-path .*expected"):
        throughput.read(file, 1, folder)


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--dataset-name sharegpt", "there are random, and custom"),
        ("--dataset-name custom", "--dataset-path FILE and"),
        ("--dataset-name random --dataset-path FILE", "--dataset-path FILE and"),
        ("--dataset-path FILE --prefix-len 3", "--prefix-len is about random tokens"),
        ("--dataset-path FILE --num-warmups 1", "leaves none of 1 prompts"),
        ("--dataset-path /nowhere", "cannot be read"),
        ("--random-range-ratio 1", r"must be in \[0, 1\)"),
        ("--input-len 100 --output-len 29", "up to 129 tokens, and the longest context is 128"),
        ("--output-json /nowhere/told.json", "no such folder"),
        ("--profile", "there is no profiler"),
        ("--input-length 3", "unrecognised argument --input-length"),
    ],
)
def test_what_cannot_be_meant(flags: str, said: str, folder: Path, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": [7]}\n')
    with pytest.raises(ConfigError, match=said):
        throughput.main([str(folder), *ENGINE, *flags.replace("FILE", str(file)).split()])


def test_numbers_that_are_none(folder: Path, capsys: pytest.CaptureFixture[str]):
    for flags in (["--num-iters", "0"], ["--batch-size", "few"]):
        with pytest.raises(SystemExit):
            latency.main([str(folder), *flags])
        assert "expected a whole number from 1 on" in capsys.readouterr().err


def test_lengths_lie_about_what_was_asked(folder: Path):
    parser = offline.parser("throughput", "")
    given, launch = offline.parse(parser, [str(folder), "--seed", "7"])
    given.__dict__ |= dict(dataset_name=None, dataset_path=None, num_prompts=60, num_warmups=0)
    given.__dict__ |= dict(input_len=8, output_len=4, prefix_len=3, random_range_ratio=0.5)
    asked = throughput.requests(given, launch)
    assert {len(prompt) - 3 for prompt, _ in asked} == set(range(4, 13)) and {n for _, n in asked} == set(range(2, 7))
    assert len({tuple(prompt[:3]) for prompt, _ in asked}) == 1 and len({tuple(prompt) for prompt, _ in asked}) == 60
    assert asked == throughput.requests(given, launch)
