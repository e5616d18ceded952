"""`leyden plan`: what a model needs and what a device of some size would hold of it, without the device."""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from leyden.config.folder import resolve
from leyden.config.launch import Launch
from leyden.config.model import ModelConfig
from leyden.errors import ConfigError

GIB = 2**30
# Memory that programs see, in GiB; vendors' names count in powers of ten.
GPUS = {
    "a100-40gb": 39.4,
    "a100-80gb": 79.2,
    "h100-80gb": 79.1,
    "h100-nvl": 93.1,
    "h200": 139.8,
    "b200": 178.4,
    "gh200-96gb": 94.5,
    "l40s": 44.4,
    "rtx-4090": 23.5,
    "rtx-5090": 31.4,
    "rtx-pro-6000": 94.9,
    "dgx-spark": 119.6,
}
CONTEXTS = (8_192, 32_768, 131_072, 262_144, 1_048_576)


def main(argv: Sequence[str]) -> int:
    """Print the split for `leyden serve` with the same flags on the named GPU (or `--memory-gib`)."""
    parser = argparse.ArgumentParser(
        "leyden plan",
        usage="leyden plan MODEL [--gpu NAME | --memory-gib N] [FLAGS of leyden serve]",
        description=__doc__,
        epilog=f"GPUs: {', '.join(f'{name} ({size:g} GiB)' for name, size in GPUS.items())}",
    )
    parser.add_argument("--gpu", default="h200", help="whose memory to divide (default h200)")
    parser.add_argument("--memory-gib", type=float, help="memory of a device that is not listed")
    own, rest = parser.parse_known_args(argv)
    if own.memory_gib is None and own.gpu not in GPUS:
        raise ConfigError(f"--gpu {own.gpu}: known are {', '.join(GPUS)}; for another one give --memory-gib")
    total = int((own.memory_gib or GPUS[own.gpu]) * GIB)
    name = own.gpu if own.memory_gib is None else f"{own.memory_gib:g} GiB"
    _report(Launch.from_argv(rest), total, name)
    return 0


def _report(launch: Launch, total: int, name: str) -> None:
    import torch

    from leyden.cache.pool import NO_DRAFTER
    from leyden.engine.memory import divide, dtype_of
    from leyden.model import checkpoint
    from leyden.spec.load import room

    config = launch.engine
    folder = resolve(config.model, config.revision)
    model = ModelConfig.from_folder(folder, config.hf_overrides)
    dtype = dtype_of(config.dtype, getattr(torch, model.dtype), "--dtype")
    drafting = config.speculative.settle(model, str(folder)) if config.speculative else None
    network = checkpoint.build(model, dtype, "meta", drafting is not None and "mtp" in drafting.methods(model))
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    if drafting is not None and drafting.model:
        weights += sum(file.stat().st_size for file in drafting.folder.glob("*.safetensors"))
    free = int(total * config.gpu_memory_utilization) - weights
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{config.model}[/] on {name}")
    console.print(f"  weights   {weights / GIB:.2f} GiB of {total / GIB:.1f} GiB, {dtype}".replace("torch.", ""))
    if free <= 0:
        raise ConfigError(
            f"the weights alone need {weights / GIB:.1f} GiB, and {config.gpu_memory_utilization:.0%} of the memory "
            f"(--gpu-memory-utilization) are {total * config.gpu_memory_utilization / GIB:.1f} GiB; "
            "a quantised checkpoint or a larger device would fit"
        )
    split = divide(config, model, dtype, "cuda", free, room(drafting, model) if drafting else NO_DRAFTER)
    if drafting is not None:
        console.print(f"  drafts    {drafting}; counted above and below")
    console.print(f"  cache     {split}")
    per_token = split.page_bytes / split.shape.page
    console.print(f"  costs     {per_token:,.0f} bytes a token, {split.slot_bytes / 2**20:.1f} MiB a state")
    table = Table("context", "sequences at once", "cache of one", box=None, pad_edge=False, padding=(0, 2))
    for context in CONTEXTS:
        if context <= split.shape.max_model_len:
            one = int(context * per_token) + split.slot_bytes
            table.add_row(f"{context:,}", str(min(free // one, split.seqs)), f"{one / GIB:.2f} GiB")
    console.print(table)
