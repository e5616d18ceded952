import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from leyden import ops
from leyden.errors import CheckpointError
from leyden.model.checkpoint import build, load
from leyden.model.context import Context
from leyden.model.source import Source
from leyden.quantize.calibrate import Texts, Watch, read
from leyden.testing.checkpoints import tiny
from leyden.text.template import ChatTemplate
from leyden.text.tokenizer import Tokenizer

CPU = torch.device("cpu")


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_texts_of_every_kind(tmp_path: Path) -> None:
    tiny(tmp_path)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    path = lines(tmp_path / "a.jsonl", {"messages": messages}, {"text": "The jar"}, {"token_ids": [5, 6, 7]}, {"x": 1})
    tokenizer = Tokenizer.from_folder(tmp_path)
    template = ChatTemplate.from_folder(tmp_path, tokenizer)
    expected = [
        template.encode(messages, add_generation_prompt=False),
        tokenizer.encode("The jar", add_special_tokens=True),
        [5, 6, 7],
    ]
    assert read(path, tmp_path, samples=3, length=100) == expected
    assert read(path, tmp_path, samples=3, length=2) == [ids[:2] for ids in expected]
    with pytest.raises(CheckpointError, match="a.jsonl, line 4: expected messages, text or token_ids"):
        read(path, tmp_path, samples=4, length=100)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "a.jsonl: no texts"),
        ('{"text": "a"}\n{"text', "a.jsonl, line 2: "),
        ('{"messages": [{"role": "wizard", "content": "a"}]}', "a.jsonl, line 1: .*wizard"),
        ('{"token_ids": ["a"]}', "a.jsonl, line 1: expected"),
    ],
)
def test_texts_that_cannot_be_used(content: str, message: str, tmp_path: Path) -> None:
    tiny(tmp_path)
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "a.jsonl", tmp_path, 10, 100)


SEQUENCES = [[1, 40, 300, 7] * 8, [9, 9, 100], [2]]


def test_layer_by_layer_is_the_network(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    model = build(config, torch.float32)
    load(model, tmp_path, progress=False)
    texts = Texts(SEQUENCES, CPU)
    assert (texts.sequences, texts.tokens) == (3, 36)
    with Source(tmp_path) as source:
        stream = texts.embed(source.module("backbone.embeddings", CPU, {}, {}))
        for i in range(config.num_hidden_layers):
            stream = texts.through(source.module(f"backbone.layers.{i}", CPU, {}, {}), stream)
        norm, head = (source.module(name, CPU, {}, {}) for name in ("backbone.norm_f", "lm_head"))
        logits, following = map(torch.cat, zip(*texts.logits(norm, head, stream), strict=True))
    with torch.no_grad():
        hidden, _ = model(torch.tensor(sum(SEQUENCES, [])), Context.packed([32, 3, 1]))
        assert torch.allclose(logits, model.logits(hidden), atol=1e-5)
    assert following.tolist() == [*SEQUENCES[0][1:], -1, 9, 100, -1, -1]


def test_what_the_matrices_are_multiplied_with(tmp_path: Path) -> None:
    tiny(tmp_path)
    random = torch.Generator().manual_seed(0)
    with Source(tmp_path) as source:
        layer = source.module("backbone.layers.3", CPU, {}, {})
        x = torch.randn(50, 64, generator=random)
        watch = Watch("backbone.layers.3", layer, lambda name: name.endswith("3.down_proj"))
        with ops.watching(watch), torch.no_grad():
            layer.mixer(x)
            ids, _ = layer.mixer.route(x)
        experts, shared = layer.mixer.experts, layer.mixer.shared_experts
        assert len(watch.moments) == 2 * 8 + 2
        for expert in range(8):
            mine = x[(ids == expert).any(-1)]
            up = watch.moments[f"backbone.layers.3.mixer.experts.{expert}.up_proj"]
            down = watch.moments[f"backbone.layers.3.mixer.experts.{expert}.down_proj"]
            inner = F.relu(mine @ experts.up_proj.weight[expert].T).square()
            assert up.tokens == down.tokens == len(mine)
            assert torch.allclose(up.squares, mine.square().sum(0))
            assert down.largest == pytest.approx(inner.max().item())
            assert (down.products is None) == (expert != 3) and up.products is None
            if down.products is not None:
                assert torch.allclose(down.products, inner.T @ inner, rtol=1e-4, atol=1e-4)
        inner = F.relu(x @ shared.up_proj.weight.T).square()
        assert torch.allclose(
            watch.moments["backbone.layers.3.mixer.shared_experts.down_proj"].squares, inner.square().sum(0), rtol=1e-4
        )


def test_outputs_of_keys_and_values(tmp_path: Path) -> None:
    tiny(tmp_path)
    texts = Texts(SEQUENCES, CPU)
    with Source(tmp_path) as source:
        layer = source.module("backbone.layers.1", CPU, {}, {})
        stream = texts.embed(source.module("backbone.embeddings", CPU, {}, {}))
        watch = Watch("backbone.layers.1", layer, lambda _: False, (".k_proj", ".v_proj"))
        with ops.watching(watch):
            texts.through(layer, stream)
        keys = layer.norm(stream[0]) @ layer.mixer.k_proj.weight.T
    assert watch.outputs.keys() == {f"backbone.layers.1.mixer.{which}_proj" for which in "kv"}
    assert watch.outputs["backbone.layers.1.mixer.k_proj"] == pytest.approx(keys.abs().max().item())
