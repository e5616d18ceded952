"""Checks every CUDA kernel against its reference, then times kernels and whole decode steps on real shapes.

usage: python3 runs/h200/check_and_time.py [SECTION ...]      (without arguments those of USUAL; some seven minutes)

Fresh random inputs each time; weights of 23 layers in rotation, so that nothing is measured out of the L2 cache; each
figure is a CUDA graph replayed. A section that fails prints its error and the next one runs. With $OUT set, the results
also go to $OUT/results.json. The sections are in checks.py, steps.py, prompts.py, ops_alone.py, speculation.py and
chunks.py, what they share in gpu.py.
"""

import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import chunks
import speculation
import torch
from checks import check
from gpu import MODEL, START, VERDICTS, build, info, record, say, show, verdict
from ops_alone import narrow, router, time_attention, time_linear, time_mamba, time_moe, time_sample, time_small
from prompts import prefill, prefill_eight, time_prefill, time_wide
from steps import ahead, bisect, engine, four, guesses, halves, kernels, time_long, tune, whole, without_pdl


def speculate() -> None:
    """Steps with drafts as graphs: see speculation.py. The model of the other sections makes room."""
    MODEL.clear()
    speculation.products("cuda", verdict)
    speculation.texts("cuda", say, verdict)
    speculation.speeds("cuda", say, record, ("nvfp4", "bf16"), True, show)


def chunked() -> None:
    """Chunks of prompts as graphs: see chunks.py. Most of the time goes into compiling kernels for fp32."""
    chunks.texts("cuda", say, verdict)


def turns() -> None:
    """What chunks of prompts take by graphs and without."""
    chunks.times(MODEL[0], "cuda", say, record, show)


SECTIONS = {
    "info": (info, 30), "check": (check, 80), "build": (build, 30), "bisect": (bisect, 40), "whole": (whole, 40),
    "halves": (halves, 60), "prefill": (prefill, 50), "parts": (time_prefill, 40), "kernels": (kernels, 60),
    "engine": (engine, 80), "guesses": (guesses, 30), "sample": (time_sample, 40),
    "router": (router, 40),
    "mamba": (time_mamba, 80), "moe": (time_moe, 100), "linear": (time_linear, 80), "pdl": (without_pdl, 30),
    "small": (time_small, 40), "narrow": (narrow, 50), "attention": (time_attention, 100), "long": (time_long, 40),
    "four": (four, 160), "tune": (tune, 150),
    "wide": (time_wide, 90), "ahead": (ahead, 240), "prefill8": (prefill_eight, 120),
    "chunks": (chunked, 120), "turns": (turns, 100), "speculation": (speculate, 150),
}  # fmt: skip
USUAL = (
    "info", "check", "build", "whole", "halves", "prefill", "parts", "kernels", "engine", "guesses", "sample", "mamba",
    "moe", "four", "tune", "speculation",
)  # fmt: skip


def late(*_: object) -> None:
    raise TimeoutError("the section's time is up")


def main(names: list[str]) -> None:
    signal.signal(signal.SIGALRM, late)
    for name, (section, limit) in SECTIONS.items():
        if name not in (*(names or USUAL), "info", "build"):
            continue
        left = 540 - (time.monotonic() - START)
        if left < 10:
            say(f"== {name}: no time left")
            continue
        say(f"== {name} ({time.monotonic() - START:.0f} s)")
        VERDICTS.clear()
        signal.alarm(int(min(limit, left)))
        try:
            with torch.inference_mode():
                section()
        except Exception:
            say(traceback.format_exc(limit=-4))
            record(f"failed {name}", traceback.format_exc(limit=-4))
        finally:
            signal.alarm(0)
        if VERDICTS:
            say(f"  {VERDICTS.count(True)} checks passed, {VERDICTS.count(False)} failed")
    say(f"== done after {time.monotonic() - START:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
