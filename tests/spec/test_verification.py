"""What rejection sampling promises, and that drawing the target's own tokens keeps the promise.

The engine knows one rule: at every place it draws the target's token with the noise of the place, and keeps drafts as
long as they equal it. The text is then the same with and without drafts, which no rejection sampler can say. Here that
rule is compared with the textbook's: how often a draft is kept.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from leyden import ops

FILE = json.loads((Path(__file__).parent.parent / "data/spec/rejection_and_schedule.json").read_text())
N = 40_000


def rejection(case: dict) -> tuple[int, np.ndarray]:
    """(drafts kept, distribution of the token behind them) by the textbook (Leviathan et al., 2023)."""
    p, q = np.array(case["p"]), case["q"]
    for i, (draft, u) in enumerate(zip(case["drafts"], case["u"], strict=True)):
        if draft < 0:
            return i, p[i]
        proposed = np.eye(FILE["vocab"])[draft] if q is None else np.array(q[i])
        # the same as u < p / q, without a division
        if p[i, draft] > u * proposed[draft]:
            continue
        residual = np.maximum(p[i] - proposed, 0)
        return i, residual / residual.sum() if residual.sum() > 0 else p[i]
    return len(case["drafts"]), p[len(case["drafts"])]


@pytest.mark.parametrize("case", FILE["cases"])
def test_vectors_of_rejection_sampling(case: dict):
    kept, final = rejection(case)
    assert kept == case["num_accepted"]
    assert final == pytest.approx(case["final_distribution"], abs=1e-6)


@pytest.mark.parametrize("case", FILE["cases"])
def test_a_draft_is_kept_as_often_as_the_target_says_it(case: dict):
    """With probability p(d), as rejection sampling keeps drafts that come without a distribution: the engine's own op
    gives every token of the first place its p, for every temperature, top_k and top_p.
    """
    expected = torch.tensor(case["p"][0])
    found = drawn(case["target_logits"][0], case, torch.arange(N)).bincount(minlength=FILE["vocab"]) / N
    assert found[expected == 0].sum() == 0
    torch.testing.assert_close(found, expected, atol=5 * 0.5 / N**0.5, rtol=0)


def drawn(logits: list[float], case: dict, seeds: torch.Tensor) -> torch.Tensor:
    """Tokens at one place, one for each seed."""
    n = len(seeds)
    row = torch.tensor(logits).nan_to_num(neginf=-1e30).expand(n, -1)
    options = (torch.full((n,), value) for value in (case["temperature"], case["top_k"], case["top_p"], 0.0))
    return ops.sample(row, *options, seeds, torch.full((n,), 17))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("distance", [0.05, 0.5, 3.0])
def test_drafts_that_share_the_noise_are_kept_nearly_as_often_as_can_be(temperature: float, distance: float):
    """sum min(p, q) is the most that any rule reaches; sharing Gumbel noise gives at least (1 - TV) / (1 + TV), and
    exactly the sum over x of 1 / sum over y of max(p(y) / p(x), q(y) / q(x)). (Daliri et al., 2024.)
    """
    torch.manual_seed(0)
    target = torch.randn(12)
    draft = target + distance * torch.randn(12)
    case = {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    seeds = torch.arange(N)
    same = drawn(target.tolist(), case, seeds) == drawn(draft.tolist(), case, seeds)
    p, q = (target / temperature).softmax(-1), (draft / temperature).softmax(-1)
    overlap = torch.minimum(p, q).sum().item()
    exact = (1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(1)).sum().item()
    assert overlap / (2 - overlap) <= exact <= overlap
    assert same.float().mean().item() == pytest.approx(exact, abs=5 * 0.5 / N**0.5)


def test_pitfall_24_one_candidate_leaves_no_choice():
    """top_k 1 at temperature 1 is greedy."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3))
    found = drawn(logits.tolist(), {"temperature": 1.0, "top_k": 1, "top_p": 1.0}, torch.arange(50))
    assert (found == logits.argmax()).all()
