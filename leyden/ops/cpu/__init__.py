"""Kernels for the CPU, in C: small, portable, as fast as memory delivers the weights.

build.py compiles them, program.py calls them; the other files say how each op becomes kernels. Whatever a kernel does
not know (a type, an odd layout) the reference does. If they cannot be built, nothing is registered.
"""

from leyden import ops
from leyden.ops.cpu.program import available

if available:
    from leyden.ops.cpu import attention, linear, mamba, moe, norm, sample

    for _op, _kernel in (
        (ops.embed, linear.embed),
        (ops.rms_norm, norm.rms_norm),
        (ops.add_rms_norm, norm.add_rms_norm),
        (ops.linear, linear.linear),
        (ops.mlp, linear.mlp),
        (ops.route, moe.route),
        (ops.experts, moe.experts),
        (ops.moe, moe.moe),
        (ops.causal_conv, mamba.causal_conv),
        (ops.ssd_scan, mamba.ssd_scan),
        (ops.gated_norm, norm.gated_norm),
        (ops.mamba_step, mamba.mamba_step),
        (ops.kv_write, attention.kv_write),
        (ops.attention, attention.attention),
        (ops.attention_packed, attention.attention_packed),
        (ops.sample, sample.sample),
    ):
        _op.register("cpu", _kernel)
