import itertools
import logging
import re
import stat
import time
from math import inf

import pytest

from leyden.cache.saved import NAME, check_folder
from leyden.errors import ConfigError
from tests.engine.conftest import engine, oracle, run, tiny
from tests.engine.device import tokens_of
from tests.engine.test_engine import greedy, prompt_of

PROMPTS = {f"c{i}": prompt_of(40 + 7 * i, 60) for i in range(4)}
N = 9


def fill(made, salt="") -> dict[str, list[int]]:
    """Run the first turn of some conversations -> their second prompts."""
    requests = [greedy(name, prompt, N) for name, prompt in PROMPTS.items()]
    for request in requests:
        request.cache_salt = salt
    out = run(made, [(0, request) for request in requests])
    return {name: prompt + tokens_of(out[name]) + prompt_of(10, 7) for name, prompt in PROMPTS.items()}


def go_on(made, prompts: dict[str, list[int]], model, salt="") -> list[int]:
    """Run the second turns -> how many tokens of each were cached; answers must be those of the model alone."""
    cached = []
    for name, prompt in prompts.items():
        request = greedy(name, prompt, N)
        request.cache_salt = salt
        deltas = run(made, [(0, request)])[name]
        assert tokens_of(deltas) == oracle(model, prompt, N)
        cached.append(deltas[0].cached_tokens)
    return cached


ALL = [len(prompt) + N - 1 for prompt in PROMPTS.values()]


@pytest.mark.parametrize("host_before", [(0, 0), (8, 60)])
@pytest.mark.parametrize("host_after", [(0, 0), (8, 60)])
def test_conversations_go_on_in_the_next_process(model, tmp_path, host_before, host_after):
    sizes = {"seqs": 2, "snapshots": 1 if host_before[0] else 8, "pages": 12 if host_before[0] else 60}
    made = engine(model, **sizes, max_model_len=128, host=host_before, cache_dir=str(tmp_path))
    assert bool(made.scheduler.cache.far_snapshots) is False
    prompts = fill(made, salt="s")
    made.close()
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    sizes = {"seqs": 2, "snapshots": 1 if host_after[0] else 8, "pages": 14 if host_after[0] else 60}
    again = engine(model, **sizes, max_model_len=128, host=host_after, cache_dir=str(tmp_path))
    again.check()
    assert again.scheduler.cache.snapshots + again.scheduler.cache.far_snapshots >= 4
    assert go_on(again, prompts, model, salt="s") == ALL
    assert go_on(again, prompts, model)[0] == 0  # the salt was saved, too


def test_what_has_no_room_is_left_out_and_the_best_comes_first(model, tmp_path):
    made = engine(model, snapshots=8, cache_dir=str(tmp_path))
    prompts = fill(made)
    made.close()
    again = engine(model, seqs=1, snapshots=1, pages=12, max_model_len=128, cache_dir=str(tmp_path))
    again.check()
    assert again.scheduler.cache.snapshots == 2
    # the two states that save most over the next shorter one: those at the end of the two longest prompts
    assert [again.scheduler.cache.match(prompt).length for prompt in prompts.values()] == [0, 0, 48, 48]
    assert go_on(again, {"c3": prompts["c3"]}, model) == [48]


def test_a_running_request_is_saved_as_far_as_it_got(model, tmp_path):
    made = engine(model, snapshots=8, overlap=True, cache_dir=str(tmp_path))
    made.submit(greedy("a", PROMPTS["c0"], 100))
    answer = []
    while len(answer) < 20:
        answer += tokens_of(made.step())
    made.close()
    again = engine(model, snapshots=8, cache_dir=str(tmp_path))
    prompt = PROMPTS["c0"] + answer + [5]
    deltas = run(again, [(0, greedy("b", prompt, N))])["b"]
    assert deltas[0].cached_tokens >= len(prompt) - 2 and tokens_of(deltas) == oracle(model, prompt, N)


@pytest.mark.parametrize("what", ["byte", "end", "magic", "empty", "header"])
def test_a_damaged_file_is_ignored_with_one_line(model, tmp_path, what, caplog):
    made = engine(model, snapshots=8, cache_dir=str(tmp_path))
    prompts = fill(made)
    made.close()
    path = tmp_path / NAME
    data = bytearray(path.read_bytes())
    match what:
        case "byte":
            data[len(data) // 2] ^= 1
        case "header":
            data[40] ^= 1
        case "end":
            del data[-1000:]
        case "magic":
            data[13:14] = b"2"
        case "empty":
            data.clear()
    path.write_bytes(data)
    with caplog.at_level(logging.INFO, "leyden"):
        again = engine(model, snapshots=8, cache_dir=str(tmp_path))
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "is ignored" in caplog.text
    assert go_on(again, prompts, model) == [0] * 4


@pytest.mark.parametrize("change", ["weights", "page", "dtype"])
def test_a_foreign_file_is_ignored_with_one_line(model, tmp_path, change, caplog):
    import torch

    made = engine(model, snapshots=8, cache_dir=str(tmp_path))
    fill(made)
    made.close()
    with caplog.at_level(logging.INFO, "leyden"):
        if change == "weights":
            engine(tiny(seed=1), snapshots=8, cache_dir=str(tmp_path))
        elif change == "page":
            engine(model, snapshots=8, page=8, cache_dir=str(tmp_path))
        else:
            engine(tiny(dtype=torch.bfloat16), snapshots=8, cache_dir=str(tmp_path))
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "is ignored" in caplog.text


def test_between_requests_it_is_saved_and_among_them_only_after_two_intervals(model, tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    made = engine(model, snapshots=8, cache_dir=str(tmp_path), cache_save_interval=10)
    made.submit(greedy("a", PROMPTS["c0"], 4))
    now = 15
    made.step()
    assert not (tmp_path / NAME).exists()
    now = 21
    made.step()
    assert (tmp_path / NAME).exists()
    (tmp_path / NAME).unlink()
    now = 25
    while made.busy:
        assert made.rest == 0
        made.step()
    assert not (tmp_path / NAME).exists() and made.rest == 6  # 31 is the next time, whether somebody comes or not
    now = 32
    assert made.busy and made.rest == 0
    made.step()
    assert (tmp_path / NAME).exists()
    now = 100
    assert not made.busy and made.rest == inf  # nothing has changed since


def test_saving_never_takes_more_than_a_tenth_of_the_time(model, tmp_path, monkeypatch, caplog):
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 6.0 * next(clock))
    with caplog.at_level(logging.INFO, "leyden"):
        made = engine(model, snapshots=8, cache_dir=str(tmp_path), cache_save_interval=1)
        fill(made)
    took = float(re.findall(r"cache saved to .*, ([\d.]+) s", caplog.text)[-1])
    assert took > 5 and made._save_pause >= 9 * took
    assert re.search(r"saving the cache: 0.0 of 0.0 GiB", caplog.text)


def test_a_folder_that_cannot_be_written_is_refused_before_loading(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--cache-dir .*file cannot be written .*name a folder"):
        check_folder(tmp_path / "file")
    check_folder(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_intervals_and_folders_that_cannot_be_written(model, tmp_path, caplog):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / f".{NAME}.1").write_text("of a process that was killed")
    made = engine(model, snapshots=8, cache_dir=str(tmp_path / "new"), cache_save_interval=1e-9)
    fill(made)
    assert (tmp_path / "new" / NAME).exists() and len(list((tmp_path / "new").iterdir())) == 1
    (tmp_path / "file").write_text("")
    made = engine(model, snapshots=8, cache_dir=str(tmp_path / "file"))
    fill(made)
    made.close()
    assert "could not be saved" in caplog.text
