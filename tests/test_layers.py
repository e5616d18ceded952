"""The layers of docs/architecture.md, enforced by reading the imports of every file."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "leyden").rglob("*.py"))

# From the left to the right: a file imports from the right of its own group, and from its own folder.
LAYERS = [
    {"__main__"},
    {"cli", "testing"},
    {"server", "quantize", "train", "bench"},
    {"llm"},
    {"engine"},
    {"spec"},
    {"model"},
    {"cache"},
    {"ops"},
    {"formats"},
    {"synthetic"},
    {"text"},
    {"types", "config", "errors", "log"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
GROUND = len(LAYERS) - 1  # the modules of the last group may import each other: none of them imports anything else

OPS_ONLY = {"triton", "ctypes"}
WITHOUT_TORCH = [
    "cli",
    "config",
    "errors",
    "log",
    "types",
    "text",
    "synthetic",
    "server",
    "engine.scheduler",
    "cache.prefix",
]
WITHOUT_TORCH_EXCEPT = {"leyden.server.process"}
WITHOUT_OPTIONAL = ["engine", "spec", "model", "cache", "formats", "llm", "bench"]


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything the file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)


def layer(name: str) -> str:
    return name.split(".")[1]


def test_files_import_only_from_layers_to_their_right():
    wrong = []
    for path in FILES:
        here = module(path)
        if here == "leyden":
            continue
        for line, name in imports(path):
            if not name.startswith("leyden.") or name == "leyden.__version__":
                continue
            mine, other = layer(here), layer(name)
            if mine == other or RANK[mine] < RANK[other] or RANK[mine] == RANK[other] == GROUND:
                continue
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {mine} must not import {name}")
    assert not wrong, "\n".join(wrong)


def test_every_folder_has_a_layer():
    unknown = {layer(module(path)) for path in FILES if module(path) != "leyden"} - RANK.keys()
    assert not unknown, f"add to LAYERS: {unknown}"


def test_imports_are_absolute_and_unconditional():
    wrong = [f"{p.relative_to(ROOT)}:{line}: {name}" for p in FILES for line, name in imports(p) if name[0] == "."]
    wrong += [f"{p.relative_to(ROOT)}: TYPE_CHECKING" for p in FILES if "TYPE_CHECKING" in p.read_text("utf-8")]
    assert not wrong, "\n".join(wrong)


def test_only_ops_imports_triton_and_ctypes():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        for line, name in imports(path)
        if name.split(".")[0] in OPS_ONLY and layer(module(path) + ".") != "ops"
    ]
    assert not wrong, "\n".join(wrong)


def modules_under(prefixes: list[str]) -> list[str]:
    names = [module(path) for path in FILES if path.name != "__main__.py"]
    return [name for name in names if any(f"{name}.".startswith(f"leyden.{prefix}.") for prefix in prefixes)]


@pytest.mark.parametrize(
    ("blocked", "prefixes"),
    [(["torch"], WITHOUT_TORCH), (["fastapi", "zmq", "xgrammar", "uvicorn"], WITHOUT_OPTIONAL)],
    ids=["without torch", "without the server's packages"],
)
def test_modules_import_without(blocked: list[str], prefixes: list[str]):
    names = [name for name in modules_under(prefixes) if name not in WITHOUT_TORCH_EXCEPT]
    assert names
    code = f"""
import importlib, sys
for name in {blocked}:
    sys.modules[name] = None
for name in {names}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{{name}}: {{error}}")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout + done.stderr == "" and done.returncode == 0, done.stdout + done.stderr
