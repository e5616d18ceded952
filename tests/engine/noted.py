"""What test_compiling.py runs where Triton compiles: python noted.py FOLDER -> the kernels of a start, as JSON."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from leyden import ops
from leyden.config.engine import EngineConfig
from leyden.config.model import ModelConfig
from leyden.engine import compiling
from leyden.engine.compiling import Start
from leyden.testing import drafters
from leyden.testing.checkpoints import tiny
from leyden.types import Plan, Row

MEMORY = 1 << 30


def start(folder: Path, preset: str, **options: Any) -> Start:
    tiny(folder, preset, torch_dtype="bfloat16", tokenizer=False)
    config = EngineConfig(
        model=str(folder), device="cuda", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, **options
    )
    made = ModelConfig.from_folder(folder)
    drafting = config.speculative.settle(made, str(folder)) if config.speculative else None
    return Start(config, folder, made, torch.bfloat16, drafting, lambda model, split: None)


def of(start: Start) -> list[list[str]]:
    return [[job.name for job in jobs] for jobs in start.kernels(90, MEMORY, MEMORY)]


def launched(start: Start, plans: Iterator[Plan]) -> set[str]:
    """What steps of the whole model launch, as their names."""
    names = set()
    compiling._thin = lambda model: None
    _, runner = start._outline(MEMORY, MEMORY)
    JITFunction.run = lambda self, *args, **options: names.add(self.fn.__name__)
    with ops.standing_for("cuda"):
        for plan in plans:
            runner.run(plan)
    return names


def main(folder: Path) -> None:
    lazy = start(folder / "lazy", "tiny", use_replayssm=True)
    found = {"lazy": of(lazy)}
    mtp = {"method": "mtp", "num_speculative_tokens": 3}
    found["mtp"] = of(start(folder / "mtp", "mtp", speculative_config=mtp, quantization="nvfp4"))
    tiny(folder / "target", torch_dtype="bfloat16", tokenizer=False)
    drafters.tiny(folder / "drafter", ModelConfig.from_folder(folder / "target"), "dspark")
    dspark = {"method": "dspark", "model": str(folder / "drafter"), "num_speculative_tokens": 3}
    found["dspark"] = of(start(folder / "dspark", "tiny", speculative_config=dspark))
    steps = [Plan(rows=[Row(1 + i, 50, 1, [], True) for i in range(count)]) for count in (1, 3)]
    found["launched"] = [sorted(launched(lazy, iter(steps)))]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
