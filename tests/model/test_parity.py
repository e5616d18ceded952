"""Against the public implementation, transformers' NemotronHForCausalLM, on small random models.

time_step_min must be next to nothing there: its chunked scan clamps dt to it, which neither its own decode nor the
training kernels do.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NemotronHConfig, NemotronHForCausalLM

from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from tests.batches import SMALL, context, fill, pool

SHARED = [  # fields of the same name and meaning
    *("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias", "chunk_size"),
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size", "n_group", "topk_group"),
    *("norm_topk_prob", "routed_scaling_factor", "layer_norm_epsilon"),
]
LENGTHS = [1, 7, 128, 300, 1000]
PLAIN = replace(
    SMALL,
    vocab_size=256,
    hidden_size=48,
    pattern="MEM*EM",
    intermediate_sizes=(),
    num_attention_heads=4,
    mamba_num_heads=8,
)
CONFIGS = {
    "plain": PLAIN,
    "latent": replace(PLAIN, moe_latent_size=20, n_group=4, topk_group=2, routed_scaling_factor=5.0),
    "dense": replace(PLAIN, pattern="M-*-M", intermediate_sizes=(56, 56), n_groups=1, use_conv_bias=False),
    "groups4": replace(PLAIN, n_groups=4, num_key_value_heads=4, norm_topk_prob=False),
    "groups8": replace(PLAIN, n_groups=8, conv_kernel=3, chunk_size=64, num_key_value_heads=1),
}


def tokens(n: int) -> Tensor:
    return torch.randint(PLAIN.vocab_size, (n,), generator=torch.Generator().manual_seed(n))


@cache
def ours(name: str, dtype: torch.dtype = torch.float32) -> Nemotron:
    network = Nemotron(CONFIGS[name], dtype).requires_grad_(False)
    fill(network)
    for mixer in (layer.mixer for layer in network.backbone.layers):
        if hasattr(mixer, "gate"):
            mixer.gate.weight.mul_(4)  # scores far enough apart that rounding does not change the choice
    return network


@cache
def theirs(name: str, dtype: torch.dtype = torch.float32) -> NemotronHForCausalLM:
    """transformers' fp32 model with the weights that ours has in `dtype`."""
    config = CONFIGS[name]
    mixers = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    same: dict[str, Any] = {field: getattr(config, field) for field in SHARED}
    raw = NemotronHConfig(
        **same,
        layers_block_type=[mixers[letter] for letter in config.pattern],
        intermediate_size=max(config.intermediate_sizes, default=1),
        moe_shared_expert_intermediate_size=config.shared_expert_width,
        time_step_min=1e-30,
        eos_token_id=None,
    )
    network = NemotronHForCausalLM(raw).eval().requires_grad_(False)
    weights = {}
    for key, value in ours(name, dtype).state_dict().items():
        key = key.replace("backbone.", "model.")
        weights[key.removesuffix(".weight") if ".experts." in key else key] = value.float()
    network.load_state_dict(weights)
    return network


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name: str) -> None:
    """All prompts packed into one call, against each of them alone."""
    network = ours(name)
    hidden, _ = network(torch.cat([tokens(n) for n in LENGTHS]), Context.packed(LENGTHS))
    found = network.logits(hidden).split(LENGTHS)
    for n, logits in zip(LENGTHS, found, strict=True):
        expected = theirs(name)(tokens(n)[None]).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["plain", "latent"])
def test_greedy_with_a_cache(name: str) -> None:
    prompt, new, network = tokens(45), 64, ours(name)
    expected = theirs(name).generate(
        prompt[None], attention_mask=torch.ones(1, 45, dtype=torch.int64), max_new_tokens=new, do_sample=False
    )[0, 45:]
    held = pool(CONFIGS[name], slots=3, tokens=45 + new, page=16)
    # Chunks of a prompt, then one token at a time.
    found: list[int] = []
    for past, ids in [(0, prompt[:20]), (20, prompt[20:])]:
        hidden, _ = network(ids, context(held, [(2, past, len(ids))]))
    for past in range(45, 45 + new):
        found.append(int(network.logits(hidden[-1]).argmax()))
        hidden, _ = network(torch.tensor(found[-1:]), context(held, [(2, past, 1)]))
    assert found == expected.tolist()
    assert len(set(found)) > 8, "a model that repeats itself proves little"


def mixers(name: str) -> list[tuple[Any, Any]]:
    pairs = zip(ours(name, torch.bfloat16).backbone.layers, theirs(name, torch.bfloat16).model.layers, strict=True)
    return [(layer.mixer, block.mixer) for layer, block in pairs]


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_mixers_are_near_their_fp32_twins(name: str) -> None:
    """Both read the same bf16 numbers, so only roundings inside the mixer separate them: about 2^-9 each, relative."""
    x = torch.randn(300, PLAIN.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    position = torch.arange(300)[None]
    for letter, (mixer, twin) in zip(CONFIGS[name].pattern, mixers(name), strict=True):
        found = mixer(x, Context.packed([300])).float()
        wide = x.float()[None]
        match letter:
            case "M":
                expected = twin(wide)
            case "*":
                mask = torch.full((300, 300), float("-inf")).triu(1)[None, None]
                expected, _ = twin(wide, attention_mask=mask, position_ids=position)
            case _:
                expected = twin(wide)
        error = (found - expected[0]).norm(dim=-1) / expected[0].norm(dim=-1)
        assert error.max() < 2**-6, letter
        assert error.median() < 2**-7, letter


def test_bf16_logits_are_mostly_near() -> None:
    """The whole model: rounding may flip a choice of experts now and then, so the medians count."""
    network, ids = ours("plain", torch.bfloat16), tokens(300)
    found = network.logits(network(ids, Context.packed([300]))[0])
    expected = theirs("plain", torch.bfloat16)(ids[None]).logits[0]
    worst = (found - expected).abs().amax(-1)
    same = (found.argmax(-1) == expected.argmax(-1)).float().mean()
    print(f"bf16 logits of size {expected.abs().max():.1f}: median {worst.median():.3f}, argmax equal {same:.0%}")
    assert worst.median() < 0.03 * expected.abs().max()
    assert same > 0.8
