"""The op table: every numerical step of the network and of the sampler.

T tokens of a ragged batch, R rows (see rows.Rows), H hidden size, V vocabulary. "state" arguments are one layer's slice
of the pool and are written in place at rows.slots; with rows.slots None nothing is read or written. Each op's reference
(ops/reference) states the formula and its source; kernels (ops/triton, ops/cpu) must agree with it.

    rms_norm(x[T,H], weight[H], eps) -> [T,H]                        fp32 inside, weight in fp32, rounded once
    add_rms_norm(x[T,H], residual[T,H], weight, eps) -> ([T,H], [T,H])   (norm of the sum, the sum)
    linear(x[T,K], weight: Weight[N,K]) -> [T,N]
    mlp(x[T,K], up: Weight[I,K], down: Weight[N,I]) -> [T,N]         down(relu(up x)^2)
    route(x[T,H], gate[E,H], bias[E], k, ...) -> (ids[T,k], weights[T,k])
    experts(x[T,K], ids, weights, up: Weight[E,I,K], down: Weight[E,N,I]) -> [T,N]
    causal_conv(x[T,C], weight[C,K], bias[C]|None, state[S,K-1,C], rows) -> [T,C]     SiLU included
    ssd_scan(x, dt, B, C, A, D, dt_bias, dt_limit, chunk, state, rows) -> y           prefill, any row lengths
    gated_norm(y[T,I], z[T,I], weight[I], groups, eps) -> [T,I]      gate first, then group RMSNorm
    mamba_step(...)  one-token rows: conv, dt, state update, gate and norm in one
    kv_write(k, v, cache, rows) ; attention(q, cache, rows) -> [T,heads,dim] ; attention_packed(q, k, v, rows)
    adjust_logits, sample, logprobs: the sampler
"""

from leyden.ops.reference import sample as _sample
from leyden.ops.registry import Op, using

penalize = Op(_sample.penalize)
sample = Op(_sample.sample)
logprobs = Op(_sample.logprobs)

__all__ = ["Op", "logprobs", "penalize", "sample", "using"]
