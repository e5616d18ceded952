import json

from leyden.synthetic import generate
from leyden.synthetic.__main__ import main


def test_writes_the_examples_of_generate(tmp_path, capsys):
    file = tmp_path / "train.jsonl"
    assert main(["--seed", "3", "--n", "20", "--out", str(file)]) == 0
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == list(generate(3, 20))
    assert capsys.readouterr().out == ""


def test_shows_examples_and_statistics(capsys):
    assert main(["--n", "50", "--show", "2", "--split", "heldout", "--families", "parallel,chat"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n===") + shown.startswith("===") == 2
    assert "check " in shown
    assert [line.split()[0] for line in shown.splitlines()[-6:]][:3] == [
        "family",
        *sorted({"parallel", "chat"}, reverse=True),
    ]
    assert "50" in shown.splitlines()[-3]


def test_an_unknown_family_is_an_error(capsys):
    assert main(["--n", "1", "--families", "poetry"]) == 2
    assert "unknown family 'poetry'" in capsys.readouterr().err
