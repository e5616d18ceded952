"""Packages that are missing, broken or of another version: one line that says so."""

import sys
from types import ModuleType

import pytest

from leyden.errors import ConfigError
from leyden.ops.foreign import find

FLAG = "--mamba-backend nothing"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("nothing")
    monkeypatch.setitem(sys.modules, "nothing", module)
    return module


def test_what_is_there_is_found(package: ModuleType) -> None:
    package.act = lambda x, y=1, z=2: x  # type: ignore[attr-defined]
    package.Layer = type("Layer", (), {"run": lambda self, x: x})  # type: ignore[attr-defined]
    assert find(FLAG, "nothing", "nothing", "act", ("x", "z")) is package.act
    assert find(FLAG, "nothing", "nothing", "Layer.run", ("self", "x")) is package.Layer.run
    assert find(FLAG, "nothing", "nothing", "Layer") is package.Layer


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(ConfigError) as caught:
        find(FLAG, "nothing-python", "nothing.deep", "act")
    assert str(caught.value) == f"{FLAG}: nothing-python is not installed; install it, or leave the flag away"


def test_a_package_without_what_it_needs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr("leyden.ops.foreign.import_module", load)
    with pytest.raises(ConfigError, match=f"^{FLAG}: nothing has no nothing.act that can be used .*'other'"):
        find(FLAG, "nothing", "nothing", "act")


def test_a_package_that_has_changed(package: ModuleType) -> None:
    with pytest.raises(ConfigError, match=f"^{FLAG}: nothing has no nothing.act that can be used"):
        find(FLAG, "nothing", "nothing", "act", ("x",))
    package.act = lambda x, w=0: x  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=f"^{FLAG}: nothing.act of nothing takes other .* argument '[yz]'.*; install another version"
    ):
        find(FLAG, "nothing", "nothing", "act", ("x", "z", "y"))
    package.act = lambda x, w: x  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=f"^{FLAG}: nothing.act of nothing takes other .*required argument: 'w'"):
        find(FLAG, "nothing", "nothing", "act", ("x",))


def test_the_version_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^--x: torch.nn.functional.relu of torch \d[\w.+]* takes other .*argument"):
        find("--x", "torch", "torch.nn.functional", "relu", ("nope",))
