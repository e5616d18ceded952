import pytest
import torch
from torch import Tensor, nn

from leyden.train.optim import Optimizer, cosine


class Two(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.norm = nn.ParameterDict({"weight": nn.Parameter(torch.rand(6, generator=draw).to(dtype))})
        self.up_proj = nn.ParameterDict({"weight": nn.Parameter(torch.randn(8, 6, generator=draw).to(dtype))})
        self.down_proj = nn.ParameterDict({"weight": nn.Parameter(torch.randn(3, 6, 8, generator=draw).to(dtype))})
        self.A_log = nn.Parameter(torch.rand(4, generator=draw))

    def backward(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        sum((p.float() * torch.randn(p.shape, generator=draw)).sum() for p in self.parameters()).backward()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_adamw_equals_pytorchs() -> None:
    ours, theirs = Two(), Two()
    optimizer = Optimizer(ours.named_parameters(), decay=0.1, muon=False)
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    other = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for step in range(1, 6):
        ours.backward(step)
        optimizer.accumulate()
        norm = optimizer.step(step, 0.01, clip=1.0)
        theirs.backward(step)
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)))
        other.step()
        other.zero_grad()
    torch.testing.assert_close(values(ours), values(theirs), atol=1e-6, rtol=1e-5)


def test_gradients_add_up_until_the_step() -> None:
    once, twice = Two(), Two()
    a = Optimizer(once.named_parameters(), decay=0.0, muon=False)
    b = Optimizer(twice.named_parameters(), decay=0.0, muon=False)
    once.backward(1)
    once.backward(2)
    a.accumulate()
    for seed in (1, 2):
        twice.backward(seed)
        b.accumulate()
    assert a.step(1, 0.1, 1.0) == pytest.approx(float(b.step(1, 0.1, 1.0)))
    torch.testing.assert_close(values(once), values(twice))


def test_muon_moves_projections_by_half_orthogonal_matrices() -> None:
    model = Two()
    before = values(model)
    optimizer = Optimizer(model.named_parameters(), decay=0.0, muon=True)
    model.backward(1)
    optimizer.accumulate()
    optimizer.step(1, 1.0, clip=1e9)
    moved = {n: new - old for (n, new), old in zip(model.named_parameters(), before, strict=True)}
    for name in ("up_proj.weight", "down_proj.weight"):
        update = moved[name].detach()
        values_of = torch.linalg.svdvals(update / (0.2 * max(update.shape[-2:]) ** 0.5))
        assert ((values_of > 0.6) & (values_of < 1.3)).all(), "Jordan's coefficients reach 0.7 to 1.2"
        assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.25), "like an update of Adam"
    torch.testing.assert_close(moved["norm.weight"].abs(), torch.ones(6), atol=1e-3, rtol=0)


def test_weights_are_kept_in_fp32_and_rounded_into_the_model() -> None:
    model = Two(torch.bfloat16)
    start = values(model)
    optimizer = Optimizer(model.named_parameters(), decay=0.0, muon=False)
    for step in range(1, 101):
        model.backward(1)
        optimizer.accumulate()
        optimizer.step(step, 1e-5, clip=1e9)
    for (name, parameter), old in zip(model.named_parameters(), start, strict=True):
        weight = optimizer.weights[name]
        assert weight.dtype == torch.float32
        assert torch.equal(parameter, weight.to(parameter.dtype))
        torch.testing.assert_close((weight - old.float()).abs(), torch.full_like(weight, 1e-3), rtol=0.05, atol=1e-5)


def test_frozen_parameters_stay() -> None:
    model = Two()
    model.A_log.requires_grad_(False)
    before = model.A_log.clone()
    optimizer = Optimizer(model.named_parameters(), decay=0.1, muon=False)
    model.backward(1)
    optimizer.accumulate()
    optimizer.step(1, 0.1, 1.0)
    assert torch.equal(model.A_log, before)
    assert not any("A_log" in name for name in optimizer.state())


def test_learning_rate_rises_in_a_line_and_falls_in_a_cosine() -> None:
    rates = [cosine(step, 110, 10, 0.1) for step in range(111)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1 and rates[60] == pytest.approx(0.55) and rates[110] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert cosine(0, 10, 0, 0.0) == 1
