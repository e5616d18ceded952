"""Training of drafters: what they come to know, what stays as it was, and going on after an interruption."""

import json
from pathlib import Path

import pytest
import torch

from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.model.draft_checkpoint import load
from leyden.model.nemotron import Nemotron
from leyden.synthetic import generate
from leyden.testing.checkpoints import tiny
from leyden.text.tokenizer import Tokenizer
from leyden.train.blocks import Blocks
from leyden.train.command import main
from leyden.train.data import write
from leyden.train.drafter import DrafterOptions, design, judge, table
from leyden.train.drafting import draft_hidden, view
from tests.train.examples import CONFIG
from tests.train.test_drafting import METHODS, examples, trainer

LIGHTNING = ModelConfig(
    vocab_size=131072,
    hidden_size=2688,
    pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    num_attention_heads=32,
    num_key_value_heads=2,
)


@pytest.mark.parametrize("method", METHODS)
def test_learns_a_few_examples_by_heart_and_leaves_the_target_alone(method: str) -> None:
    data = examples(6)
    made = trainer(method, data)
    embeddings = made.target.backbone.embeddings.weight
    before = {name: parameter.clone() for name, parameter in made.target.named_parameters()}
    start = made.evaluate(data)
    for _ in range(40):
        made.step()
    end = made.evaluate(data)
    assert start["tokens_per_step"] < 1.3 and end["tokens_per_step"] > 2.5
    assert end["loss"] < start["loss"]
    assert all(torch.equal(before[name], parameter) for name, parameter in made.target.named_parameters())
    table, mask = made.network.embed_tokens.weight, made.options.mask_token_id
    changed = (table != embeddings).any(dim=1).nonzero().flatten().tolist()
    assert changed == [mask], "of the embeddings only the mask token's row is trained"


@pytest.mark.parametrize("method", METHODS)
def test_going_on_gives_the_same_bits(method: str) -> None:
    data = examples(6)
    whole, first = trainer(method, data, steps=6), trainer(method, data, steps=6)
    expected = [whole.step() for _ in range(6)]
    for _ in range(3):
        first.step()
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    second = trainer(method, data, steps=6)
    second.load(state, first.step_number, first.tokens)
    for measured in expected[3:]:
        assert torch.equal(second.step(), measured)
    for name, parameter in whole.network.named_parameters():
        assert torch.equal(parameter, second.network.get_parameter(name)), name
    assert second.tokens == whole.tokens


def test_drafter_for_lightning_is_of_the_released_kind() -> None:
    options = {"mask_token_id": 990, "layers": 6, "taps": 6, "intermediate_size": 6144, "markov_rank": 512}
    dspark = design(DrafterOptions(method="dspark", **options), LIGHTNING)
    dflash = design(DrafterOptions(method="dflash", **options), LIGHTNING)
    assert dspark.target_layer_ids == (1, 11, 21, 31, 41, 51) and dspark.width == 7
    assert (dspark.causal[0], dspark.windows[0], dspark.attention_sinks, dspark.markov_rank) == (True, 1024, True, 512)
    assert (dflash.causal[0], dflash.windows[0], dflash.attention_sinks, dflash.markov_rank) == (False, None, False, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "eagle"}, "--method must be dflash or dspark, got eagle"),
        ({"block_size": 1}, "--block-size must be at least 2"),
        ({"lr": 0.0}, "--lr must be above 0"),
        ({"distance": 1.5}, r"--distance must be in \[0, 1\]"),
        ({"optimizer": "sgd"}, "--optimizer must be adamw or muon"),
    ],
)
def test_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrafterOptions(**options)


def test_more_taps_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="--taps must be at most the target's 4 layers after the first, got 9"):
        design(DrafterOptions(mask_token_id=3, taps=9), CONFIG)


def test_the_mask_token_must_not_occur_in_the_data() -> None:
    data = examples(6)
    with pytest.raises(ConfigError, match="--mask-token-id must be a token that no text contains; 5 occurs"):
        trainer("dspark", data, mask_token_id=5)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint, and data.jsonl beside it."""
    made = tmp_path_factory.mktemp("start") / "checkpoint"
    tiny(made, "mtp")
    write(made.parent / "data.jsonl", generate(0, 6, families=["shift", "chat"]))
    return made


@pytest.mark.parametrize("method", METHODS)
def test_command_writes_a_drafter_and_its_acceptance(
    method: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(target.parent / "data.jsonl")
    words = ["drafter", "--method", method, "--target", str(target), "--data", data, "--out", str(tmp_path)]
    words += ["--batch-tokens", "1500", "--steps", "3", "--warmup", "1", "--anchors", "4", "--taps", "2"]
    assert main([*words, "--time-limit", "0"]) == 130
    assert main([*words, "--resume", "--heldout", data]) == 0
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 3]
    assert records[-1]["heldout"].keys() >= {"loss", "tokens_per_step", "draft1_accuracy"}
    assert (tmp_path / "curves.png").stat().st_size > 0

    network = load(tmp_path / "model", Nemotron(ModelConfig.from_folder(target), torch.float32))
    assert network.config.method == method and network.config.width == 7
    assert network.config.mask_token_id == Tokenizer.from_folder(target).id_of("<SPECIAL_31>")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
    found = json.loads((tmp_path / "acceptance.json").read_text())
    assert found.keys() == {"1", "3", "5", "7"} and len(found["5"]["accepted"]) == 5
    assert "drafts  tokens/step" in capsys.readouterr().out


def test_judging_is_of_the_saved_drafter(tmp_path: Path) -> None:
    data = examples(6)
    made = trainer("dspark", data)
    for _ in range(20):
        made.step()
    made.save(tmp_path, 10**9)
    found = judge(tmp_path, made.target, data, 100)
    assert list(found) == [1, 3] and found[1].tokens_per_step <= found[3].tokens_per_step
    assert found[3].tokens_per_step == pytest.approx(made.evaluate(data)["tokens_per_step"], abs=0.1)
    assert table(found).splitlines()[1].split() == [
        "1",
        f"{found[1].tokens_per_step:.3f}",
        f"{found[1].accepted[0]:.2f}",
    ]


def test_the_confidence_head_comes_to_know_what_will_be_accepted() -> None:
    made = trainer("dspark", examples(20), steps=150)
    made.target.lm_head.weight.data *= 30  # an untrained target is sure of nothing, and every draft would do
    for _ in range(150):
        made.step()
    network, target, batch = made.network, made.target, made.packing.corpus.batch(range(20))
    seen, blocks = view(target, network.config.target_layer_ids, batch), Blocks.all(batch)
    which, depths, places = (torch.from_numpy(array) for array in blocks.answers(made.drafts))
    hidden, previous = draft_hidden(network, seen, blocks, made.drafts)[which, depths - 1], seen.tokens[places - 1]
    drafted = network.correct(target.logits(hidden), previous).softmax(-1)
    wanted = target.logits(seen.hidden[places - 1]).softmax(-1)
    accepted = torch.minimum(drafted, wanted).sum(-1)  # the probability of acceptance, which is 1 - distance / 2
    said = network.confidence(hidden, previous).sigmoid()
    assert accepted.std() > 0.05, "all drafts alike would tell nothing"
    assert torch.corrcoef(torch.stack([accepted, said]))[0, 1] > 0.5
