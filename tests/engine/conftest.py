import math
from dataclasses import replace

import pytest
import torch

from leyden.cache.pool import DraftShape, PoolShape
from leyden.config.model import ModelConfig
from leyden.engine.engine import Engine
from leyden.engine.memory import Split
from leyden.model.context import Context
from leyden.model.nemotron import Nemotron
from leyden.types import Delta, Request

TINY = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    pattern="M*MEM*ME",
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    mamba_num_heads=4,
    mamba_head_dim=16,
    n_groups=2,
    ssm_state_size=16,
    conv_kernel=4,
    chunk_size=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=48,
    shared_expert_width=64,
    routed_scaling_factor=2.5,
    eos_token_ids=(),
)


def tiny(seed: int = 0, dtype: torch.dtype = torch.float32, mtp: bool = False) -> Nemotron:
    """TINY with random weights that make lively answers."""
    torch.manual_seed(seed)
    model = Nemotron(replace(TINY, num_nextn_predict_layers=int(mtp)), dtype, mtp=mtp)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.empty_like(p).uniform_(0, math.log(16)))
            elif name.endswith("dt_bias"):
                p.uniform_(-5, -1)
            elif name.endswith(("D", "norm.weight", "norm_f.weight")):
                p.copy_(1 + 0.1 * torch.randn_like(p))
            elif name.endswith("e_score_correction_bias"):
                p.normal_(0, 0.05)
            else:
                p.normal_(0, 1.5 / math.sqrt(p.shape[-1]) if p.dim() > 1 else 0.1)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def model() -> Nemotron:
    return tiny()


def engine(
    model: Nemotron,
    *,
    seqs=8,
    snapshots=0,
    pages=200,
    page=16,
    max_model_len=512,
    step_tokens=64,
    host=(0, 0),
    drafter=None,
    draft_layers=None,
    ssm_dtype=torch.float32,
    rounds=0,
    period=1,
    **options,
) -> Engine:
    draft = DraftShape()
    if drafter is not None:
        draft = DraftShape(drafter.width, drafter.lookahead, int(model.mtp is not None), draft_layers)
    shape = PoolShape(
        slots=seqs + snapshots + 1,
        pages=pages + 1,
        page=page,
        max_model_len=max_model_len,
        kv_dtype=torch.float32,
        conv_dtype=torch.float32,
        ssm_dtype=ssm_dtype,
        draft=draft,
        rounds=rounds,
        period=period,
    )
    split = Split(shape, seqs, step_tokens, 0, 0, host_slots=host[0], host_pages=host[1])
    return Engine(model, split, drafters=[drafter] if drafter else (), **options)


def oracle(model: Nemotron, prompt: list[int], n: int) -> list[int]:
    """n greedy tokens by running the whole sequence again for each of them: no cache, no batch."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            hidden, _ = model(torch.tensor(tokens), Context.packed([len(tokens)]))
            tokens.append(int(model.logits(hidden[-1]).argmax()))
    return tokens[len(prompt) :]


def run(engine: Engine, arrivals: list[tuple[int, Request]]) -> dict[str, list[Delta]]:
    """Submit each request before its step; run to the end; check the cache's sums after every step."""
    out: dict[str, list[Delta]] = {request.id: [] for _, request in arrivals}
    queue = sorted(arrivals, key=lambda item: item[0])
    step = 0
    while queue or engine.busy:
        while queue and queue[0][0] <= step:
            engine.submit(queue.pop(0)[1])
        for delta in engine.step():
            out[delta.request_id].append(delta)
        engine.check()
        step += 1
        assert step < 20_000
    return out
