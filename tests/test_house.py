"""Rules for names, files and the package that no linter knows."""

import ast
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "leyden").rglob("*.py"))
VAGUE = {"manager", "handler", "helper", "helpers", "base", "v2", "util", "utils"}
# Written in pieces, so that this file passes its own test.
FOREIGN = ["/" + "work/", "/" + "root/", "/" + "opt/", "pypi" + ".org", "python" + "hosted"]
FOREIGN += ["download.pytorch" + ".org", "index" + "-url", "find" + "-links"]


def words(name: str) -> set[str]:
    """The words of a CamelCase or snake_case name, lower-case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)} | set(
        name.lower().split("_")
    )


def test_names_say_what_a_thing_is():
    wrong = [str(path.relative_to(ROOT)) for path in FILES if VAGUE & set(path.relative_to(ROOT).with_suffix("").parts)]
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        heirs = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.bases]
        given = {id(method) for heir in heirs for method in heir.body}  # methods of theirs may have names of a library
        for node in ast.walk(tree):
            named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if named and id(node) not in given and VAGUE & words(node.name):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is_for():
    wrong = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if text and not ast.get_docstring(ast.parse(text)):
            wrong.append(str(path.relative_to(ROOT)))
    assert not wrong, f"no module docstring: {wrong}"


def test_no_environment_variables_of_our_own():
    assert [str(path) for path in FILES if "LEYDEN" + "_" in path.read_text(encoding="utf-8")] == []


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout: the list of the project's files is not known")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine_or_a_registry():
    wrong = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a binary file
        wrong += [f"{path.relative_to(ROOT)}: {word}" for word in FOREIGN if word in text]
    assert not wrong, "\n".join(wrong)


def test_lock_pins_every_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    names = {re.split(r"[<>=\[;]", need)[0].lower().replace("_", "-") for need in wanted}
    assert names <= pins.keys()
    assert pins["torch"] == "2.13.0"


def test_size_meter_counts_code_only():
    size = runpy.run_path(str(ROOT / "scripts/size"))
    text = (
        '"""Doc."""\n\n# comment\nx = """a\n\nb"""  # three lines of a value\n\n\ndef f():\n    "doc"\n    return x\n'
    )
    assert size["python_lines"](text) == 5
    assert size["c_lines"]("/* a\n b */\nint x; // y\n\n// z\n") == 1
    assert size["count"](ROOT / "leyden").total() > 0
