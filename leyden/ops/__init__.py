"""The op table: every numerical step of the network and of the sampler.

T tokens of a ragged batch, R rows (see rows.Rows), H hidden size, V vocabulary, G groups, N state size. Each op's
reference (ops/reference) states the formula and its source; kernels (ops/triton, ops/cpu) must agree with it. `state`
and `cache` arguments are one layer's slice of the pool, written in place at rows.slots and rows.pages; a state of None
means zeros before and nothing after. A cache of 8-bit floats holds k / k_scale and v / v_scale, saturated; the scales
are Python floats, and count for nothing in other caches. Rows with slot 0 are padding: their results mean nothing,
their writes do no harm.

    begin(slots[R], last[S], committed[S]) -> (tokens[R], past[R], positions[R])     of rows of one token
    begin_drafts(slots[R], last[S], drafts[S,W], committed[S], count) -> (tokens[T], past[R], positions[T], places[T])
                                                                    of rows of one token and `count` drafts
    accept(drawn[R,W+1], guesses[R,W], before[R], positions[R], stops[R,E], open_at[R]) -> (kept[R,W+1], counts[R],
           newest[R], ends[R], at[R])    as far as guesses are what was drawn
    begin_block(anchors[R], places[R], rows, mask) -> (tokens[R*rows], positions[R*rows], starts[R+1])
    ahead(places[R], count, dtype=int32) -> [count,R]
    join(parts[T,...]...) -> [T,sum]
    likeliest(logits[R,V] fp32) -> ids[R] int64
    take(table[S,...], slots[R]) -> [R,...]
    put(values[R,...], table[S,...], slots[R])
    clear(table[S,...], slots[R], past[R])                          zeros where nothing is past
    embed(tokens[T], weight: Weight[V,H]) -> [T,H]
    rms_norm(x[T,H], weight[H], eps) -> [T,H]                        fp32 inside, weight in fp32, rounded once
    add_rms_norm(x[T,H], residual[T,H], weight[H], eps) -> ([T,H], [T,H])    (norm of the sum, the sum)
    linear(x[T,K], weight: Weight[N,K], dtype=None) -> [T,N]         in dtype, if not that of x
    add_linear(x[T,K], weight: Weight[N,K], to[T,N]) -> [T,N]        to + x W^T, in the dtype of `to`
    mlp(x[T,K], up: Weight[I,K], down: Weight[N,I]) -> [T,N]         down(relu(up x)^2)
    route(x[T,H], gate[E,H], bias[E], k, groups, kept, normalize, scale) -> (ids[T,k] int64, weights[T,k] fp32)
    add_norm_route(x[T,H], residual[T,H], weight[H], eps, gate, bias, k, ...) -> ([T,H], [T,H], ids, weights)
                                                                    add_rms_norm, then route of its first result
    experts(x[T,K], ids[T,k], weights[T,k], up: Weight[E,I,K], down: Weight[E,N,I]) -> [T,N]
    moe(x[T,K], ids, weights, up, down, shared_up: Weight[S,K], shared_down: Weight[N,S]) -> [T,N]
                                                                    experts(x, ...) + mlp(x, shared_up, shared_down)
    causal_conv(x[T,C], weight[C,K], bias[C]|None, state[S,K-1,C]|None, rows) -> [T,C]    SiLU included
    ssd_scan(x[T,heads,dim], dt[T,heads], B[T,G,N], C[T,G,N], A_log[heads], D[heads], dt_bias[heads], dt_limit, chunk,
             state[S,heads,dim,N]|None, rows) -> y[T,heads,dim]      rows of any length
    gated_norm(y[T,I], z[T,I], weight[I], groups, eps) -> [T,I]      gate first, then RMSNorm of each group
    mamba_step(projected[R,I+C+heads], conv_weight[C,K], conv_bias[C]|None, A_log, D, dt_bias, dt_limit, norm_weight[I],
               groups, eps, conv_state, ssm_state, rows, rounds=0) -> [R,I]    rows of one token: the four steps in
               one; rounds: those of the random bits by which an fp16 state is rounded; 0: to nearest
    mamba_verify(as mamba_step without rounds, but ring[S,W,C+heads] before rows) -> [T,I]    rows of up to W tokens;
                 states untouched
    mamba_replay(conv_weight, conv_bias, A_log, D, dt_bias, dt_limit, groups, conv_state, ssm_state, ring, slots[R],
                 past[R], counts[R], rounds=0)    states move over the first tokens in the ring
    mamba_lazy_step(as mamba_step, but recent[S,L-1,I+G*N+heads], began[S] before rows) -> [R,I]    writes ssm_state at
                    every L-th position only; the tokens between wait in `recent`
    mamba_fold(A_log, dt_bias, dt_limit, groups, ssm_state, recent, slots[R], held[R], counts[R], rounds=0)
               states move over the first tokens in `recent`
    kv_write(k[T,kv,dim], v[T,kv,dim], cache[2,pages,page,kv,dim], rows, k_scale=1.0, v_scale=1.0)
    qkv_write(x[T,H], q: Weight[heads*dim,H], k: Weight[kv*dim,H], v: Weight[kv*dim,H], cache[2,pages,page,kv,dim],
              rows, k_scale=1.0, v_scale=1.0) -> [T,heads,dim]     linear of each, kv_write of k and v
    attention(q[T,heads,dim], cache[2,pages,page,kv,dim], rows, k_scale=1.0, v_scale=1.0) -> [T,heads,dim]
                                                                    causal, the rows' own keys included
    attention_packed(q[T,heads,dim], k[T,kv,dim], v[T,kv,dim], rows) -> [T,heads,dim]    the same without a cache
    angles(positions[...], frequencies[dim/2] fp32, scale) -> (cos[...,dim/2], sin[...,dim/2])
    rotate(x[...,heads,dim], cos[...,dim/2], sin[...,dim/2]) -> [...,heads,dim]    rotary embedding in halves
    silu_times(gate[...,I], up[...,I]) -> [...,I]                    silu(gate) * up
    swiglu(x[...,K], gate: Weight[I,K], up: Weight[I,K], down: Weight[N,I]) -> [...,N]    down(silu(gate x) * up x)
    block_attention(q[T,heads,dim], k[T,kv,dim], v[T,kv,dim], cache[2,pages,page,kv,dim], rows, causal, window,
                    sinks[heads]|None) -> [T,heads,dim]    a drafter's blocks over the cache before them and themselves
    block_attention_packed(q[S,M,W,heads,dim], k[S,M,W,kv,dim], v[S,M,W,kv,dim], context_k[S,L,kv,dim],
                           context_v[S,L,kv,dim], anchors[S,M], causal, window, sinks) -> [S,M,W,heads,dim]    the same
                           without a cache
    confidence(hidden[...,H], also[...,K]|None, weight[1,H+K] fp32, bias[1] fp32) -> [...]    log-odds of drafts
    certainty(logits[R,V] fp32) -> [R]    log-odds of the most likely token
    expect(scores[R,count], weights[1+W] fp64, open[S,W], made_at[S], slots[R], places[R]) -> [R,count]
                                                                    log-odds of drafts, which are remembered as open
    learn(tokens[T], following[T], rows, open[S,W], made_at[S], memory[3,M,W] fp64, at[1])    what became of them
    penalize(logits[R,V] fp32, counts[R,V], seen[R,V], presence[R], frequency[R], repetition[R]) -> [R,V]
    sample(logits[R,V] fp32, temperature[R], top_k[R], top_p[R], min_p[R], seed[R], position[R]) -> ids[R] int64
    logprobs(logits[R,V] fp32, ids[R], k) -> (own[R], rank[R], top ids[R,k], top[R,k])

With states and caches left out every op is differentiable (training runs the same ops).
"""

from leyden.ops.reference import attention as _attention
from leyden.ops.reference import draft as _draft
from leyden.ops.reference import linear as _linear
from leyden.ops.reference import mamba as _mamba
from leyden.ops.reference import moe as _moe
from leyden.ops.reference import norm as _norm
from leyden.ops.reference import sample as _sample
from leyden.ops.reference import table as _table
from leyden.ops.registry import Op, forced, prepare, standing_for, using, watching

__all__ = ["Op", "forced", "prepare", "standing_for", "using", "watching"]

begin = Op(_table.begin)
begin_drafts = Op(_draft.begin_drafts)
accept = Op(_draft.accept)
begin_block = Op(_draft.begin_block)
ahead = Op(_draft.ahead)
join = Op(_draft.join)
likeliest = Op(_draft.likeliest)
take = Op(_table.take)
put = Op(_table.put)
clear = Op(_table.clear)
embed = Op(_linear.embed)
rms_norm = Op(_norm.rms_norm)
add_rms_norm = Op(_norm.add_rms_norm)
linear = Op(_linear.linear)
mlp = Op(_linear.mlp)
route = Op(_moe.route)
experts = Op(_moe.experts)
moe = Op(_moe.moe)
causal_conv = Op(_mamba.causal_conv)
ssd_scan = Op(_mamba.ssd_scan)
gated_norm = Op(_norm.gated_norm)
mamba_step = Op(_mamba.mamba_step)
mamba_lazy_step = Op(_mamba.mamba_lazy_step)
mamba_fold = Op(_mamba.mamba_fold)
mamba_verify = Op(_mamba.mamba_verify)
mamba_replay = Op(_mamba.mamba_replay)
kv_write = Op(_attention.kv_write)
attention = Op(_attention.attention)
attention_packed = Op(_attention.attention_packed)
angles = Op(_draft.angles)
rotate = Op(_draft.rotate)
silu_times = Op(_draft.silu_times)
block_attention = Op(_draft.block_attention)
block_attention_packed = Op(_draft.block_attention_packed)
confidence = Op(_draft.confidence)
certainty = Op(_draft.certainty)
expect = Op(_draft.expect)
learn = Op(_draft.learn)
penalize = Op(_sample.penalize)
sample = Op(_sample.sample)
logprobs = Op(_sample.logprobs)

from leyden.ops import fused as _fused  # noqa: E402, it is made of the ops above

qkv_write = Op(_fused.qkv_write)
add_norm_route = Op(_fused.add_norm_route)
add_linear = Op(_fused.add_linear)
swiglu = Op(_fused.swiglu)
