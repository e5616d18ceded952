"""One layer of each kind against vectors that two independent implementations agree on (fp32)."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from leyden.model.context import Context
from leyden.model.nemotron import MTP, Layer
from tests.batches import CLOSE, context, load, pool, vectors


def built(name: str, letter: str, **changes: int) -> tuple[Layer, dict[str, Tensor]]:
    config, weights, data = vectors(name, letter)
    layer = Layer(letter, "", replace(config, **changes), torch.float32).requires_grad_(False)
    load(layer, weights)
    return layer, data


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.view_as(found), **CLOSE)


@pytest.mark.parametrize(("name", "letter"), [("moe", "E"), ("moe_latent", "E"), ("mlp", "-")])
def test_tokens_alone(name: str, letter: str) -> None:
    layer, data = built(name, letter)
    normed = layer.norm(data["x"])
    out = layer.mixer(normed, Context.packed([len(normed)]))
    check(out, data["mixer_out"])
    check(data["x"] + out, data["out"])
    if letter == "E":
        ids, weights = layer.mixer.route(normed)
        ids, order = ids.sort()
        assert torch.equal(ids, data["topk_idx"].long())
        check(weights.gather(1, order), data["topk_weight"])
        check(layer.mixer.shared_experts(normed), data["shared_out"])


def test_attention() -> None:
    layer, data = built("attention", "*")
    cache = pool(vectors("attention", "*")[0], tokens=24)
    n = data["cu_seqlens"].diff().tolist()
    past = len(data["k_past_seq0"])
    for kind, name in enumerate(("k_past_seq0", "v_past_seq0")):
        for position in range(past):
            page = cache.tables[2, position // cache.shape.page]
            cache.kv[0, kind, page, position % cache.shape.page] = data[name][position]
    out = layer.mixer(layer.norm(data["x"]), context(cache, [(2, past, n[0]), (1, 0, n[1])]))
    check(out, data["mixer_out"])
    check(data["x"] + out, data["out"])
    keys, values = cache.kv[0][:, cache.tables[2].long()].flatten(1, 2)[:, : past + n[0]]
    check(keys, data["k_seq0"])
    check(values, data["v_seq0"])


@pytest.mark.parametrize("chunk_size", [8, 3, 128])
@pytest.mark.parametrize("fresh", [False, True], ids=["states", "zero_state"])
def test_mamba(chunk_size: int, fresh: bool) -> None:
    layer, data = built("mamba", "M", chunk_size=chunk_size)
    cache = pool(vectors("mamba", "M")[0], tokens=24)
    lens = data["cu_seqlens"].diff().tolist()
    slots, past = [3, 1], 0 if fresh else 5
    if not fresh:
        cache.conv[0, slots], cache.ssm[0, slots] = data["conv_state_in"], data["ssm_state_in"]
    batch = [(slot, past, n) for slot, n in zip(slots, lens, strict=True)]
    x = data["x"]
    suffix = "_zero_state" if fresh else ""
    check(x + layer.mixer(layer.norm(x), context(cache, batch)), data["out" + suffix])
    check(cache.conv[0, slots], data["conv_state_out" + suffix])
    check(cache.ssm[0, slots], data["ssm_state_out" + suffix])


@pytest.mark.parametrize("fresh", [False, True], ids=["states", "zero_state"])
def test_mamba_token_by_token(fresh: bool) -> None:
    layer, data = built("mamba", "M")
    cache = pool(vectors("mamba", "M")[0], tokens=24)
    starts = data["cu_seqlens"].tolist()
    slots, past = [3, 1], 0 if fresh else 5
    if not fresh:
        cache.conv[0, slots], cache.ssm[0, slots] = data["conv_state_in"], data["ssm_state_in"]
    out = torch.empty_like(data["x"])
    for step in range(21):
        running = [i for i in range(2) if starts[i] + step < starts[i + 1]]
        tokens = [starts[i] + step for i in running]
        ctx = context(cache, [(slots[i], past + step, 1) for i in running])
        out[tokens] = data["x"][tokens] + layer.mixer(layer.norm(data["x"][tokens]), ctx)
    suffix = "_zero_state" if fresh else ""
    check(out, data["out" + suffix])
    check(cache.conv[0, slots], data["conv_state_out" + suffix])
    check(cache.ssm[0, slots], data["ssm_state_out" + suffix])


@pytest.mark.parametrize("cuts", [[7], [1] * 7, [3, 1, 3]], ids=str)
def test_mtp(cuts: list[int]) -> None:
    config, weights, data = vectors("mtp", "M")
    mtp = MTP(config, torch.float32).requires_grad_(False)
    load(mtp, weights)
    cache = pool(replace(config, pattern="*"), slots=3, tokens=12)
    out, past = [], 0
    for n in cuts:
        span = slice(past, past + n)
        out.append(mtp(data["h"][span], data["embedding_rows"][span], context(cache, [(2, past, n)])))
        past += n
    check(torch.cat(out), data["m"])
    keys, values = cache.kv[0][:, cache.tables[2].long()].flatten(1, 2)[:, :past]
    check(keys, data["k_after_prefill"])
    check(values, data["v_after_prefill"])
    second = mtp(out[-1][-1:], data["embedding_rows"][7:], context(cache, [(2, past, 1)]))
    check(second, data["m_second_step"])


def test_mtp_packed() -> None:
    config, weights, data = vectors("mtp", "M")
    mtp = MTP(config, torch.float32).requires_grad_(False)
    load(mtp, weights)
    twice = [data[name][:7].repeat(2, 1) for name in ("h", "embedding_rows")]
    check(mtp(*twice, Context.packed([7, 7])), data["m"].repeat(2, 1))
