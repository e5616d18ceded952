"""Kernels of other packages: chosen by flags, for one engine, at its start."""

from dataclasses import replace

import pytest
import torch

from leyden import ops
from leyden.config.engine import EngineConfig
from leyden.engine import backends
from leyden.engine.engine import Engine
from leyden.errors import ConfigError
from leyden.formats.nvfp4 import NVFP4
from leyden.model.mamba import Mamba
from leyden.model.moe import MoE
from leyden.model.nemotron import Nemotron
from leyden.ops import flashinfer
from leyden.types import Request, SamplingParams
from tests import packages
from tests.engine.conftest import TINY, engine, oracle, run, tiny
from tests.engine.device import tokens_of

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
MAMBA = EngineConfig(model="m", mamba_backend="flashinfer", mamba_ssu_algorithm="simple")
PROMPTS = [[7], [3, 1, 4, 1, 5, 9, 2, 6]]  # one token: a step without a past


def on_the_cpu(monkeypatch: pytest.MonkeyPatch, op: ops.Op, format: str = "dense") -> None:
    """The kernel for CUDA there, too: what stands in for a package takes any tensors."""
    monkeypatch.setitem(op._kernels, ("cpu", format), op._kernels["cuda", format])


def answers(model: Nemotron) -> list[list[int]]:
    made = engine(model)
    params = SamplingParams(temperature=0, max_tokens=12)
    out = run(made, [(0, Request(id=str(i), prompt=p, params=params)) for i, p in enumerate(PROMPTS)])
    return [tokens_of(out[str(i)]) for i in range(len(PROMPTS))]


def mambas(model: Nemotron) -> list[Mamba]:
    return [layer for layer in model.modules() if isinstance(layer, Mamba)]


def test_nothing_named_changes_nothing() -> None:
    assert backends.named(EngineConfig(model="m"), CUDA) == {} == backends.named(EngineConfig(model="m"), CPU)
    other = EngineConfig(model="m", mamba_backend="cpu", moe_backend="marlin", linear_backend="torch")
    assert backends.named(other, CUDA) == {}


@pytest.mark.parametrize(
    ("given", "package"),
    [
        ({"mamba_backend": "flashinfer"}, "flashinfer-python"),
        ({"moe_backend": "flashinfer_cutlass"}, "flashinfer-python"),
        ({"moe_backend": "humming"}, "humming-kernels"),
        ({"linear_backend": "humming"}, "humming-kernels"),
    ],
    ids=str,
)
def test_without_a_package_our_kernels_run(
    given: dict[str, str], package: str, caplog: pytest.LogCaptureFixture
) -> None:
    ((field, value),) = given.items()
    flag = f"--{field.replace('_', '-')} {value}"
    config = EngineConfig(model="m", **given)  # type: ignore[arg-type]
    with caplog.at_level("WARNING", "leyden"):
        assert backends.named(config, CUDA) == {}
    assert f"{flag}: {package} is not installed, leyden's own kernels run" in caplog.text
    caplog.clear()
    assert backends.named(config, CPU) == {} and not caplog.text


def test_an_engine_stops_before_it_reads_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.engine.engine._device", lambda name: CUDA)
    with pytest.raises(ConfigError, match="^--mamba-ssu-algorithm simple is .* needs --mamba-backend flashinfer$"):
        Engine.load(EngineConfig(model="/nowhere", mamba_ssu_algorithm="simple"))


def test_steps_of_flashinfer_give_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = packages.flashinfer(monkeypatch)
    model, other = tiny(), tiny()
    wanted = [oracle(other, prompt, 12) for prompt in PROMPTS]
    changes = backends.named(MAMBA, CUDA)
    assert changes.keys() == {"--mamba-backend flashinfer"}
    backends.apply(changes, model)
    (step,) = {layer.step for layer in mambas(model)}
    assert isinstance(step, ops.Op)
    assert all(layer.step is ops.mamba_step for layer in mambas(other)), "another engine's model"
    on_the_cpu(monkeypatch, step)
    backends.try_out(changes, model, engine(model).runner.pool)
    assert len(calls) == len(mambas(model)) and calls[0]["algorithm"] == "simple"
    assert answers(model) == wanted
    assert len(calls) > 12 * len(mambas(model))
    before = len(calls)
    assert answers(other) == wanted and len(calls) == before


def test_a_limit_of_time_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packages.flashinfer(monkeypatch)
    model = Nemotron(replace(TINY, time_step_limit=(0.0, 0.1)), torch.float32)
    with pytest.raises(ConfigError, match="^--mamba-backend flashinfer: .*time_step_limit"):
        backends.apply(backends.named(MAMBA, CUDA), model)


def test_experts_of_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = packages.flashinfer(monkeypatch)
    monkeypatch.setattr(ops.experts, "_kernels", dict(ops.experts._kernels))
    changes = backends.named(EngineConfig(model="m", moe_backend="flashinfer_cutlass"), CUDA)
    with pytest.raises(ConfigError, match=r"is for experts in 16 bits, and those of this model are dense \(float32\)$"):
        backends.apply(changes, tiny())
    model = tiny(dtype=torch.bfloat16)
    backends.apply(changes, model)
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    assert {layer.experts.up_proj.format for layer in layers} == {flashinfer.Cutlass()}
    assert {layer.shared_experts.up_proj.format.name for layer in layers} == {"dense"}
    x = torch.randn(3, TINY.hidden_size).bfloat16()
    with ops.using("reference"):
        wanted = [layer(x) for layer in layers]
    on_the_cpu(monkeypatch, ops.experts, flashinfer.Cutlass.name)
    for layer, value in zip(layers, wanted, strict=True):
        packages.assert_near(layer(x), value)
    assert len(calls) == len(layers)


@pytest.mark.parametrize(("field", "wanted"), [("moe_backend", 3), ("linear_backend", 2)])
def test_matrices_of_humming(monkeypatch: pytest.MonkeyPatch, field: str, wanted: int) -> None:
    pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")
    packages.humming(monkeypatch)
    for op in (ops.linear, ops.mlp, ops.experts, ops.moe):
        monkeypatch.setattr(op, "_kernels", dict(op._kernels))
    changes = backends.named(EngineConfig(model="m", **{field: "humming"}), CUDA)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"is for matrices in nvfp4 .*; this model's are dense \(float32\)$"):
        backends.apply(changes, tiny())
    model = Nemotron(replace(TINY, moe_intermediate_size=64), torch.bfloat16).requires_grad_(False)
    for layer in (layer for layer in model.modules() if isinstance(layer, MoE)):
        assert layer.shared_experts is not None
        for module in (layer.experts, layer.shared_experts):
            for weight in (module.up_proj, module.down_proj):
                values = torch.randn(weight.shape)
                weight.allot(NVFP4())
                for name, part in weight.format.quantize(values).items():
                    weight.parts[name].data.copy_(part)
    backends.apply(changes, model)
    changed = {
        name: len(w.shape) for name, w in model.named_modules() if getattr(w, "format", None) and "hum" in w.format.name
    }
    assert set(changed.values()) == {wanted} and len(changed) == 2 * TINY.pattern.count("E")


def test_a_step_that_fails_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    packages.flashinfer(monkeypatch)
    model, changes = tiny(), backends.named(MAMBA, CUDA)
    backends.apply(changes, model)

    def fail(*arguments: object) -> None:
        raise RuntimeError("no compiler")

    for layer in mambas(model):
        layer.step = fail  # type: ignore[assignment]
    with pytest.raises(ConfigError) as caught:
        backends.try_out(changes, model, engine(model).runner.pool)
    expected = "--mamba-backend flashinfer: a step fails (RuntimeError: no compiler); leave the flags away"
    assert str(caught.value) == expected
