"""Kernels for the CPU, in C: small, portable, as fast as memory delivers the weights.

build.py compiles them, program.py calls them; the other files say how each op becomes kernels. Whatever a kernel does
not know (a type, an odd layout) the reference does. If they cannot be built, nothing is registered.
"""

from collections.abc import Callable
from typing import Any

from leyden import ops
from leyden.ops.cpu.program import available, prepare

__all__ = ["prepare"]

if available:
    from leyden.ops.cpu import attention, draft, drafter, linear, mamba, moe, norm, sample, table
    from leyden.ops.cpu.matrix import FORMATS

    _kernels: dict[ops.Op, Callable[..., Any]] = {
        ops.begin: table.begin,
        ops.begin_drafts: draft.begin_drafts,
        ops.accept: draft.accept,
        ops.begin_block: draft.begin_block,
        ops.ahead: draft.ahead,
        ops.join: draft.join,
        ops.likeliest: draft.likeliest,
        ops.take: table.take,
        ops.put: table.put,
        ops.rms_norm: norm.rms_norm,
        ops.add_rms_norm: norm.add_rms_norm,
        ops.route: moe.route,
        ops.causal_conv: mamba.causal_conv,
        ops.ssd_scan: mamba.ssd_scan,
        ops.gated_norm: norm.gated_norm,
        ops.mamba_step: mamba.mamba_step,
        ops.mamba_verify: mamba.mamba_verify,
        ops.mamba_replay: mamba.mamba_replay,
        ops.kv_write: attention.kv_write,
        ops.attention: attention.attention,
        ops.attention_packed: attention.attention_packed,
        ops.angles: drafter.angles,
        ops.rotate: drafter.rotate,
        ops.silu_times: drafter.silu_times,
        ops.block_attention: attention.block_attention,
        ops.confidence: drafter.confidence,
        ops.sample: sample.sample,
        ops.certainty: sample.certainty,
        ops.expect: drafter.expect,
        ops.learn: drafter.learn,
    }
    _products: dict[ops.Op, Callable[..., Any]] = {
        ops.embed: linear.embed,
        ops.linear: linear.linear,
        ops.add_linear: linear.add_linear,
        ops.mlp: linear.mlp,
        ops.swiglu: drafter.swiglu,
        ops.experts: moe.experts,
        ops.moe: moe.moe,
    }
    for _op, _kernel in _kernels.items():
        _op.register("cpu", _kernel)
    for _op, _kernel in _products.items():
        for _format in FORMATS:
            _op.register("cpu", _kernel, _format)
