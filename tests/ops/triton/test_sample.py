"""The sampler's kernels against its reference: same filters, same noise, so the same tokens."""

import pytest
import torch

from leyden.ops.reference import sample as reference

pytest.importorskip("triton", reason="Triton comes with PyTorch on CUDA; elsewhere install the dev extra")

from leyden.ops.triton import sample  # noqa: E402


def check(device: str, logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    count = len(logits)
    values = (float(temperature), int(top_k), float(top_p), float(min_p))
    columns = [torch.full((count,), value, device=device) for value in values]
    seed = torch.arange(count, device=device) * 0x1234567890 + 5
    position = torch.arange(count, device=device) * 7 + 3
    arguments = (logits.to(device), *columns, seed, position)
    assert sample.sample(*arguments).tolist() == reference.sample(*arguments).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.3, 50, 0.8, 0.02),
     (1.0, 0, 1.0, 0.3), (1.0, 100_000, 0.5, 0.0), (2.0, 1, 1.0, 0.0)],
)  # fmt: skip
def test_tokens(device: str, temperature: float, top_k: int, top_p: float, min_p: float):
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(1)) * 3
    check(device, logits, temperature, top_k, top_p, min_p)


@pytest.mark.parametrize(("top_k", "top_p"), [(7, 1.0), (0, 0.6), (30, 0.7)])
def test_ties_go_to_the_lower_id(device: str, top_k: int, top_p: float, monkeypatch):
    monkeypatch.setattr(sample, "_tile", lambda count, vocabulary: 64)  # ties in many tiles
    logits = (torch.randn(3, 260, generator=torch.Generator().manual_seed(2)) * 1.5).round()
    check(device, logits, 1.0, top_k, top_p, 0.0)


def test_masked_tokens_are_never_taken(device: str):
    logits = torch.full((3, 200), float("-inf"))
    logits[:, 150:153] = torch.tensor([1.0, 0.5, 1.0])
    check(device, logits, 1.0, 50, 0.99, 0.0)
    check(device, logits, 1.0, 0, 1.0, 0.0)


def test_a_slow_search_is_finished_by_one_program(device: str, monkeypatch):
    monkeypatch.setattr(sample, "_TURNS", (1, 1))
    logits = torch.randn(2, 500, generator=torch.Generator().manual_seed(3))
    check(device, logits, 1.0, 40, 0.9, 0.0)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.05), (5, 0.3), (400, 0.2)])
def test_what_is_left_of_a_flat_distribution(device: str, top_k: int, top_p: float):
    """Most first picks are not kept here; the columns are those of a table, as the engine's are."""
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(4), dtype=torch.float32).to(device) * 0.1
    floats = torch.tensor([[1.0, top_p, 0.0, 0.0]] * 4, device=device)
    ints = torch.tensor([[top_k, seed] for seed in range(4)], device=device)
    arguments = (logits, floats[:, 0], ints[:, 0], floats[:, 1], floats[:, 2], ints[:, 1])
    for position in range(3):
        at = torch.full((4,), position, device=device)
        assert sample.sample(*arguments, at).tolist() == reference.sample(*arguments, at).tolist()


@pytest.mark.parametrize(("count", "vocabulary", "likely"), [(64, 16, 16), (12, 2100, 4)])
def test_where_a_bound_on_the_noise_does_not_decide(device: str, count: int, vocabulary: int, likely: int, monkeypatch):
    """Few likely tokens side by side or a block apart: the best by the bound is not always the best."""
    monkeypatch.setattr(sample, "_tile", lambda count, vocabulary: min(vocabulary, 2048))
    draw = torch.Generator().manual_seed(5)
    logits = torch.full((count, vocabulary), -20.0)
    for first in range(0, vocabulary, 1024):
        logits[:, first : first + likely] = torch.rand(count, likely, generator=draw) * 3
    check(device, logits, 1.0, 0, 1.0, 0.0)
