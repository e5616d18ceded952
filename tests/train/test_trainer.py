from collections import Counter

import pytest
import torch

from leyden.errors import ConfigError
from leyden.model.moe import MoE
from leyden.train.batches import Corpus
from leyden.train.trainer import Options, Trainer, evaluate
from tests.train.examples import corpus, model

SHORT = {"steps": 30, "batch_tokens": 100, "lr": 1e-2, "warmup": 2}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_learns_a_handful_of_examples_by_heart(optimizer: str) -> None:
    data = corpus(4, longest=16)
    trainer = Trainer(model(), data, Options(optimizer=optimizer, steps=80, batch_tokens=100, lr=1e-2, warmup=5))
    before = evaluate(trainer.model, data, 100, 3)
    assert before["loss"] > 3.5
    for _ in range(trainer.steps):
        trainer.step()
    after = evaluate(trainer.model, data, 100, 3)
    assert after["accuracy"] == 1 and after["loss"] < 0.1
    assert all(after[f"mtp{depth}_accuracy"] > 0.9 for depth in (1, 2, 3))


def test_accumulated_batches_count_as_one() -> None:
    """Two batches in two passes move the weights as one pass with both: sums over tokens, not means of means."""
    data = Corpus.collect([([1, 2, 3, 4, 5], [False] + [True] * 4), ([6, 7, 8], [False, False, True])])
    # Loads of experts count rows past the end of an example too, which are not scored and depend on the neighbour.
    options = SHORT | {"seed": 1, "bias_rate": 0.0}
    together = Trainer(model(), data, Options(**options | {"batch_tokens": 8}))
    apart = Trainer(model(), data, Options(**options | {"batch_tokens": 5}, accumulate=2))
    measured = [trainer.step()[:-1] for trainer in (together, apart)]
    torch.testing.assert_close(*measured, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weights(together), weights(apart), atol=2e-5, rtol=1e-4)
    assert together.tokens == apart.tokens == 8


def test_measures_have_names_and_sense() -> None:
    trainer = Trainer(model(), corpus(10), Options(**SHORT))
    found = dict(zip(trainer.measures, trainer.step().tolist(), strict=True))
    assert list(found) == [
        *("loss", "mtp1_loss", "mtp2_loss", "mtp3_loss"),
        *("accuracy", "mtp1_accuracy", "mtp2_accuracy", "mtp3_accuracy", "grad_norm", "router_entropy"),
    ]
    assert all(3 < found[name] < 6 for name in found if name.endswith("loss"))
    assert 0 < found["router_entropy"] <= 1 and found["grad_norm"] > 0


def test_selection_bias_evens_out_the_experts() -> None:
    """Without it the router stays as uneven as it began."""
    entropies = {}
    for rate in (0.0, 0.03):
        net = model()
        for layer in (m for m in net.modules() if isinstance(m, MoE)):
            layer.gate.e_score_correction_bias.data[:3] = 1.0  # always the same three experts of eight
        trainer = Trainer(net, corpus(30), Options(steps=40, batch_tokens=100, lr=1e-3, mtp_depths=0, bias_rate=rate))
        entropies[rate] = [float(trainer.step()[-1]) for _ in range(40)]
    assert entropies[0.0][-1] < 0.6
    assert entropies[0.03][0] < 0.6 and entropies[0.03][-1] > 0.95


def test_without_mtp_the_module_is_left_alone() -> None:
    trainer = Trainer(model(), corpus(10), Options(**SHORT, mtp_depths=0))
    before = weights(trainer)
    trainer.step()
    changed = Counter(name.split(".")[0] for name, w in weights(trainer).items() if not torch.equal(w, before[name]))
    assert changed["mtp"] == 0 and changed["backbone"] > 20


def test_epochs_become_steps() -> None:
    data = corpus(20)
    passes = [len(Trainer(model(), data, Options(batch_tokens=64)).packing.epoch(i)) for i in range(2)]
    assert Trainer(model(), data, Options(batch_tokens=64)).steps == passes[0]
    assert Trainer(model(), data, Options(batch_tokens=64, epochs=2, accumulate=3)).steps == -(-sum(passes) // 3)


def test_bad_options_are_refused_by_name() -> None:
    for name, value in {
        "epochs": 0,
        "batch_tokens": 0,
        "accumulate": 0,
        "steps": -1,
        "lr": 0.0,
        "clip": -1.0,
        "warmup": -1,
        "mtp_weight": -0.1,
        "lr_floor": 1.5,
        "optimizer": "sgd",
    }.items():
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be .*, got {value}"):
            Options(**{name: value})
    with pytest.raises(ConfigError, match="--mtp-depths 0"):
        Trainer(model(mtp=False), corpus(3), Options())
