import numpy as np
import pytest
import torch
import torch.nn.functional as F

from leyden import ops
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.train import losses
from leyden.train.batches import Batch
from leyden.train.losses import scores
from tests.train.examples import corpus, model


def naive(net: Nemotron, batch: Batch, ahead: int) -> tuple[float, float, float]:
    """(loss, correct, weight) of predicting `ahead` tokens in advance, each example alone."""
    loss = correct = weight = 0.0
    start = 0
    for n in batch.lens:
        tokens = torch.from_numpy(batch.tokens[start : start + n])
        ctx = Context.packed([n])
        hidden, _ = net(tokens, ctx)
        for depth in range(1, ahead):
            following = [int(tokens[i + depth]) if i + depth < n else 0 for i in range(n)]
            hidden = net.mtp(hidden, net.embed(torch.tensor(following)), ctx)
        for i in range(n - ahead):
            w = float(batch.weights[start + i + ahead])
            logits, wanted = net.logits(hidden[i]), int(tokens[i + ahead])
            loss -= w * float(F.log_softmax(logits, -1)[wanted])
            correct += w * (int(logits.argmax()) == wanted)
            weight += w
        start += n
    return loss, correct, weight


@pytest.mark.parametrize("version", ["training", "reference"])
@torch.no_grad()
def test_scores_equal_each_example_alone(version: str) -> None:
    net, data = model(), corpus(12)
    batch = data.batch(np.arange(12), prompt_weight=0.25)
    with ops.using(version):
        found = scores(net, batch, depths=3)
    assert len(found) == 4
    for ahead, score in enumerate(found, 1):
        loss, correct, weight = naive(net, batch, ahead)
        assert float(score.loss) == pytest.approx(loss, rel=1e-5)
        assert float(score.correct) == pytest.approx(correct, abs=1e-4)
        assert score.weight == pytest.approx(weight)


def test_logits_in_parts_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    net, batch = model(), corpus(12).batch(range(12))
    results = []
    for limit in (2**28, 64 * 7):
        monkeypatch.setattr(losses, "_LOGITS", limit)
        net.zero_grad()
        found = scores(net, batch, depths=2)
        torch.stack([score.loss for score in found]).sum().backward()
        results.append([found[0].loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)])
    assert len(results[0]) > 30
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)
