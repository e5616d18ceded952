"""Sampling behind drafts is distributed as sampling without, whatever is drafted (pitfalls 20, 21, 24, 43)."""

import pytest
import torch

from leyden.engine.sampler import Sampler
from leyden.types import Admit, Row, SamplingParams

V, ROWS, START, SEEDS = 6, 1000, 5, 20
PARAMETERS = {
    "T=0.3": {"temperature": 0.3},
    "T=1": {"temperature": 1.0},
    "T=2": {"temperature": 2.0},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.3},
    "all": {"temperature": 1.3, "min_p": 0.1, "top_k": 4, "top_p": 0.8},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
}
DRAFTS = ["likeliest", "own", "coupled"]


def distribution(logits, params, generated):
    """softmax of one row as SamplingParams describes it; `generated` are the tokens before."""
    logits = logits.clone()
    for token in set(generated):
        value = logits[token]
        logits[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        logits[token] -= params.presence_penalty + params.frequency_penalty * generated.count(token)
    p = (logits / params.temperature).softmax(-1)
    p[p < params.min_p * p.max()] = 0
    order = p.argsort(descending=True)
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = p[order].cumsum(0) - p[order]
    p[order[before >= params.top_p]] = 0
    return p / p.sum()


def chi_square(counts, p):
    """(x, degrees of freedom), with cells of small expectation joined."""
    want = p * counts.sum()
    small = want < 5
    cells = [(counts[~small], want[~small]), (counts[small].sum()[None], want[small].sum()[None])]
    x = sum(float(((got - wanted) ** 2 / wanted)[wanted > 0].sum()) for got, wanted in cells)
    assert not counts[p == 0].any(), "a token came that cannot"
    return x, int((~small).sum()) - 1 + int(want[small].sum() > 0)


def likelihood(x, freedom):
    """Of a chi-square this large or larger."""
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(x / 2)))


@pytest.mark.parametrize("what", PARAMETERS)
def test_p20_three_tokens_in_a_row_are_distributed_as_without_drafts(what):
    """20 seeds, the kinds of drafts by turns: each seed, and all of them together."""
    params = SamplingParams(**({"max_tokens": 3} | PARAMETERS[what]))
    found = []
    for seed in range(SEEDS):
        draw = torch.Generator().manual_seed(seed)
        table = 1.5 * torch.randn(V + 1, V, generator=draw)  # logits after each token; the last row: after the prompt
        found.append(chi_square(*observed(table, params, DRAFTS[seed % len(DRAFTS)], seed)))
    assert min(likelihood(*one) for one in found) > 1e-4
    assert likelihood(*map(sum, zip(*found, strict=True))) > 1e-3


def observed(table, params, drafts, seed):
    """How often each triple of tokens came, and how likely it is; both [V^3]."""
    sampler = Sampler(ROWS + 1, V, "cpu", width=2)
    slots = torch.arange(1, ROWS + 1)
    sampler.admit(
        [Admit(int(slot), "", params, seed * ROWS + int(slot), START, (), tokens=[0] * START) for slot in slots]
    )
    if sampler._seen is not None:
        sampler._seen.zero_()  # as if the prompt were of other tokens
    draw = torch.Generator().manual_seed(1000 + seed)
    last = torch.full((ROWS,), V)
    texts = torch.full((ROWS, 0), -1)
    drawn = [[] for _ in range(ROWS)]
    while open_rows := [i for i, tokens in enumerate(drawn) if len(tokens) < 3]:
        at = torch.tensor(open_rows)
        positions = START + torch.tensor([len(drawn[i]) for i in open_rows])
        guesses, before = [], last[at]
        for i in range(2):
            if drafts == "likeliest":
                guesses.append(table[before].argmax(-1))
            elif drafts == "own":  # q: colder than the target, and cut off
                q = (table[before] / 0.7).softmax(-1)
                guesses.append(torch.multinomial(q, 1, generator=draw)[:, 0])
            else:
                guesses.append(sampler.draw(slots[at], positions + i, table[before]))
            before = guesses[-1]
        sampler.drafts[slots[at]] = torch.stack(guesses, 1)
        rows = [Row(i + 1, START, 3, [], True, drafts=2) for i in open_rows]
        inputs = torch.stack([last[at], *guesses], 1)
        places = positions[:, None] + torch.arange(3)
        out = sampler.sample(rows, slots[at], places.flatten(), table[inputs].flatten(0, 1))
        for i, sampled in zip(open_rows, out.read(), strict=True):
            drawn[i] += sampled.tokens
            last[i] = sampled.tokens[-1]
    texts = torch.tensor([tokens[:3] for tokens in drawn])
    counts = (texts * torch.tensor([V * V, V, 1])).sum(1).bincount(minlength=V**3).float()
    p = torch.zeros(V, V, V)
    for a, pa in enumerate(distribution(table[V], params, [])):
        for b, pb in enumerate(distribution(table[a], params, [a]) if pa else ()):
            if pb:
                p[a, b] = pa * pb * distribution(table[b], params, [a, b])
    return counts, p.flatten()


def test_p24_top_k_1_is_greedy_behind_drafts():
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(0))
    answers = []
    for params in (SamplingParams(temperature=1.5, top_k=1), SamplingParams(temperature=0)):
        sampler = Sampler(2, V, "cpu", width=2)
        sampler.admit([Admit(1, "", params, 0, START, (), [])])
        sampler.drafts[1] = torch.tensor([int(table[0].argmax()), 3])
        logits = table[[0, int(table[0].argmax()), 3]]
        positions = START + torch.arange(3)
        (sampled,) = sampler.sample([Row(1, START, 3, [], True, drafts=2)], torch.tensor([1]), positions, logits).read()
        answers.append(sampled.tokens)
    assert answers[0] == answers[1] and len(answers[0]) >= 2
