"""`leyden bench WHAT`: finds the measurement and runs it."""

import importlib
from collections.abc import Sequence

from leyden.errors import ConfigError

# what -> (module with main(argv) -> exit code, what it measures)
BENCHES = {
    "ladder": ("leyden.bench.ladder", "how fast the engine decodes and reads, and how far from the floor"),
    "kernels": ("leyden.bench.kernels", "how fast each op runs, and how far from what the device allows"),
    "peers": ("leyden.bench.peers", "the same weights through transformers and llama.cpp"),
    "api": ("leyden.bench.api", "what the HTTP server costs per request and per token"),
    "evals": ("leyden.bench.evals", "how often a served model is right, on held-out examples"),
    "agents": ("leyden.bench.agents", "how much of what agents send again is computed again"),
    "hit": ("leyden.bench.hit", "what a long prompt costs that is cached, on the device or in host memory"),
    "pace": ("leyden.bench.pace", "what a long prompt does to the others' times between tokens"),
    "accept": ("leyden.bench.accept", "what drafts bring: tokens per step, tokens per second, the same text"),
    "soak": ("leyden.bench.soak", "whether an engine at full load leaks anything"),
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("--help", "-h"):
        print("\n".join(["usage:", *(f"  leyden bench {name:<10} {about}" for name, (_, about) in BENCHES.items())]))
        return 0
    if argv[0] not in BENCHES:
        raise ConfigError(f"unknown measurement {argv[0]!r}, expected one of {', '.join(BENCHES)}")
    return int(importlib.import_module(BENCHES[argv[0]][0]).main(argv[1:]))
