"""The kernels for CUDA, in Triton: importing this module registers them."""

from leyden import ops
from leyden.ops.eight import above
from leyden.ops.triton import attention, conv, draft, eight, linear, moe, norm, nvfp4, qkv, sample, scan, ssm, table

for _op, _kernel in (
    (ops.begin, table.begin),
    (ops.begin_drafts, draft.begin_drafts),
    (ops.accept, draft.accept),
    (ops.angles, draft.angles),
    (ops.rotate, draft.rotate),
    (ops.silu_times, draft.silu_times),
    (ops.take, table.take),
    (ops.put, table.put),
    (ops.clear, table.clear),
    (ops.embed, linear.embed),
    (ops.linear, linear.linear),
    (ops.add_linear, linear.add_linear),
    (ops.mlp, linear.mlp),
    (ops.rms_norm, norm.rms_norm),
    (ops.add_rms_norm, norm.add_rms_norm),
    (ops.gated_norm, norm.gated_norm),
    (ops.route, moe.route),
    (ops.add_norm_route, moe.add_norm_route),
    (ops.qkv_write, qkv.qkv_write),
    (ops.experts, moe.experts),
    (ops.moe, moe.moe),
    (ops.causal_conv, conv.causal_conv),
    (ops.ssd_scan, scan.ssd_scan),
    (ops.mamba_step, ssm.mamba_step),
    (ops.mamba_lazy_step, ssm.mamba_lazy_step),
    (ops.mamba_fold, ssm.mamba_fold),
    (ops.mamba_verify, ssm.mamba_verify),
    (ops.mamba_replay, ssm.mamba_replay),
    (ops.kv_write, attention.kv_write),
    (ops.attention, attention.attention),
    (ops.block_attention, attention.block_attention),
    (ops.sample, sample.sample),
):
    _op.register("cuda", _kernel)
ops.linear.register("cuda", linear.linear_fp8, "fp8")
for _op, _kernel in (
    (ops.linear, nvfp4.linear_nvfp4),
    (ops.mlp, nvfp4.mlp_nvfp4),
    (ops.experts, nvfp4.experts_nvfp4),
    (ops.moe, nvfp4.moe_nvfp4),
    (ops.add_linear, nvfp4.add_linear_nvfp4),
):
    _op.register("cuda", _kernel, "nvfp4")
    _op.register("cuda", _kernel, "nvfp4_tiled")
for _op, _kernel in (
    (ops.linear, eight.linear),
    (ops.mlp, eight.mlp),
    (ops.experts, eight.experts),
    (ops.moe, eight.moe),
):
    for _format in ("fp8", "fp8_channel", "nvfp4", "nvfp4_tiled"):
        _op.register("cuda", above(_op.kernel("cuda", _format), _kernel), _format)
