from dataclasses import replace

import pytest
import torch
from torch import Tensor

from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.model.context import Context
from leyden.model.nemotron import Layer, Nemotron
from tests.batches import CLOSE, SMALL, context, fill, pool

LATENT = replace(SMALL, moe_latent_size=20, n_group=4, topk_group=2)


def model(config: ModelConfig = SMALL, dtype: torch.dtype = torch.float32) -> Nemotron:
    made = Nemotron(config, dtype).requires_grad_(False)
    fill(made)
    return made


def tokens(n: int, seed: int = 0) -> Tensor:
    return torch.randint(SMALL.vocab_size, (n,), generator=torch.Generator().manual_seed(seed))


def test_names_and_dtypes_are_those_of_the_checkpoint() -> None:
    config = replace(LATENT, num_nextn_predict_layers=1)
    network = Nemotron(config, torch.bfloat16, "meta", mtp=True)
    mamba = "A_log D conv1d.bias conv1d.weight dt_bias in_proj.weight norm.weight out_proj.weight"
    attention = "k_proj.weight o_proj.weight q_proj.weight v_proj.weight"
    moe = (
        "experts.down_proj.weight experts.up_proj.weight fc1_latent_proj.weight fc2_latent_proj.weight "
        "gate.e_score_correction_bias gate.weight shared_experts.down_proj.weight shared_experts.up_proj.weight"
    )
    expected = {"backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"}
    expected |= {f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj")}
    expected |= {"mtp.layers.1.final_layernorm.weight"}
    stacks = ("backbone", [mamba, moe, attention, mamba, "up_proj.weight down_proj.weight"]), ("mtp", [attention, moe])
    for stack, mixers in stacks:
        for i, names in enumerate(mixers):
            expected |= {f"{stack}.layers.{i}.norm.weight"}
            expected |= {f"{stack}.layers.{i}.mixer.{name}" for name in names.split()}
    found = dict(network.named_parameters())
    assert set(found) == expected == set(network.state_dict())
    full = ("gate.weight", "e_score_correction_bias", "A_log", ".D", "dt_bias")
    for name, parameter in found.items():
        assert parameter.is_meta
        assert parameter.dtype == (torch.float32 if name.endswith(full) else torch.bfloat16), name
    assert found["backbone.layers.0.mixer.in_proj.weight"].shape == (48 + 96 + 6, 32)
    assert found["backbone.layers.0.mixer.conv1d.weight"].shape == (96, 1, 4)
    assert found["backbone.layers.1.mixer.experts.up_proj.weight"].shape == (8, 24, 20)
    assert found["backbone.layers.1.mixer.experts.down_proj.weight"].shape == (8, 20, 24)
    assert found["mtp.layers.0.eh_proj.weight"].shape == (32, 64)


def test_optional_parts_can_be_absent() -> None:
    bare = replace(SMALL, use_conv_bias=False, shared_expert_width=0)
    names = dict(Nemotron(bare, torch.float32, "meta").named_parameters())
    assert not [
        name for name in names if "conv1d.bias" in name or "shared" in name or "latent" in name or "mtp" in name
    ]
    network = model(bare)
    hidden, _ = network(tokens(5), Context.packed([5]))
    assert hidden.isfinite().all()


def test_tied_embeddings_are_one_parameter() -> None:
    network = model(replace(SMALL, tie_word_embeddings=True))
    assert "lm_head.weight" not in dict(network.named_parameters())
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network.logits(hidden), hidden @ network.backbone.embeddings.weight.T)


def test_what_cannot_be_built_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'X'"):
        Layer("X", "", SMALL, torch.float32)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        Nemotron(SMALL, torch.float32, "meta", mtp=True)


def test_taps_are_the_residual_stream_after_a_layer() -> None:
    network, ids = model(), tokens(9)
    ctx = Context.packed([9])
    hidden, taps = network(ids, ctx, taps=(4, 1))
    assert [t.shape for t in taps] == [(9, 32)] * 2
    torch.testing.assert_close(network.backbone.norm_f(taps[1]), hidden)
    shorter = Nemotron(replace(SMALL, pattern="ME", intermediate_sizes=()), torch.float32).requires_grad_(False)
    names = shorter.state_dict()
    shorter.load_state_dict({name: value for name, value in network.state_dict().items() if name in names})
    torch.testing.assert_close(network.backbone.norm_f(taps[0]), shorter(ids, ctx)[0], **CLOSE)
    assert network(ids, ctx)[1] == []


def test_logits_are_fp32() -> None:
    network = model(dtype=torch.bfloat16)
    hidden, _ = network(tokens(4), Context.packed([4]))
    assert hidden.dtype == torch.bfloat16
    assert network.logits(hidden).dtype == torch.float32
    assert network.logits(hidden).shape == (4, 64)


@pytest.mark.parametrize("config", [SMALL, LATENT], ids=["plain", "latent"])
@pytest.mark.parametrize("cuts", [[50], [1] * 50, [1, 16, 17, 1, 15], [7, 7, 7, 7, 7, 7, 7, 1], [3, 47]], ids=str)
def test_d26_chunks_change_nothing(config: ModelConfig, cuts: list[int]) -> None:
    network, ids = model(config), tokens(50)
    expected, _ = network(ids, Context.packed([50]))
    cache, past, parts = pool(config), 0, []
    for n in cuts:
        parts.append(network(ids[past : past + n], context(cache, [(3, past, n)]))[0])
        past += n
    torch.testing.assert_close(torch.cat(parts), expected, **CLOSE)


def test_d26_the_batch_changes_nothing() -> None:
    network = model()
    lens = [1, 2, 3, 4, 5, 15, 16, 17, 23, 50, 160]
    prompts = [tokens(n, seed=n) for n in lens]
    expected = [network(ids, Context.packed([len(ids)]))[0] for ids in prompts]
    found, _ = network(torch.cat(prompts), Context.packed(lens))
    torch.testing.assert_close(found, torch.cat(expected), **CLOSE)

    # Every sequence advances by its own stride, one-token rows first, two padding rows among them.
    cache = pool(SMALL, slots=len(lens) + 1, tokens=160)
    done = [0] * len(lens)
    outputs: list[list[Tensor]] = [[] for _ in lens]
    while any(done[i] < n for i, n in enumerate(lens)):
        batch = [(i, min(n - done[i], (1, 3, 7, 16)[i % 4])) for i, n in enumerate(lens) if done[i] < n]
        batch.sort(key=lambda row: row[1] > 1)
        ids = torch.cat([torch.zeros(2, dtype=torch.int64), *(prompts[i][done[i] : done[i] + n] for i, n in batch)])
        ctx = context(cache, [(0, 0, 1), (0, 0, 1), *((i + 1, done[i], n) for i, n in batch)])
        hidden, _ = network(ids, ctx)
        for (i, n), part in zip(batch, hidden[2:].split([n for _, n in batch]), strict=True):
            outputs[i].append(part)
            done[i] += n
    for parts, alone in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), alone, **CLOSE)


def test_gradients_reach_every_parameter() -> None:
    network = Nemotron(replace(LATENT, num_nextn_predict_layers=1), torch.float32, mtp=True)
    fill(network)
    ids, ctx = tokens(40), Context.packed([25, 15])
    hidden, _ = network(ids, ctx)
    second = network.mtp(hidden, network.embed(ids.roll(-1)), ctx)
    (network.logits(hidden).logsumexp(-1).sum() + network.logits(second).logsumexp(-1).sum()).backward()
    for name, parameter in network.named_parameters():
        if name.endswith("e_score_correction_bias"):
            assert parameter.grad is None, "the bias takes part in the choice only"
        else:
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().sum() > 0, name
