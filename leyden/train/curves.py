"""The figure of a run, from its log."""

import json
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

from leyden.log import get

log = get(__name__)


def draw(logged: Path, figure: Path) -> None:
    """Loss, accuracy, learning rate with gradient norm, and speed over the steps of log.jsonl, as a PNG.

    Without matplotlib a line in the log says so, and nothing is drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.info("no figure: pip install matplotlib, then it is drawn from %s", logged)
        return
    records = [json.loads(line) for line in logged.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "loss" in record]
    heldout = [(record["step"], record["heldout"]) for record in records if "heldout" in record]
    if not steps:
        return
    x = [record["step"] for record in steps]
    canvas = Figure(figsize=(11, 7), layout="constrained")
    (losses, accuracies), (rates, speed) = canvas.subplots(2, 2)
    for axes, measure in ((losses, "loss"), (accuracies, "accuracy")):
        for name in (name for name in steps[0] if name.endswith(measure)):
            label = name.removesuffix(measure).rstrip("_") or "next token"  # mtp1, mtp2, ...: further ahead
            (line,) = axes.plot(x, list(_smooth(record[name] for record in steps)), label=label, linewidth=1)
            points = [(step, found[name]) for step, found in heldout if name in found]
            axes.plot(*zip(*points, strict=True) if points else ((), ()), "o", color=line.get_color(), markersize=3)
        axes.set_title(f"{measure} (dots: held out)")
        axes.legend(fontsize=8)
    losses.set_yscale("log")
    rates.plot(x, [record["lr"] for record in steps], label="learning rate", linewidth=1)
    rates.set_title("learning rate and gradient norm")
    norms = rates.twinx()
    norms.plot(
        x, [record["grad_norm"] for record in steps], color="grey", alpha=0.6, label="gradient norm", linewidth=0.7
    )
    norms.set_yscale("log")
    speed.plot(x, [record["tokens_per_s"] for record in steps], label="tokens per second", linewidth=1)
    beside = speed.twinx()
    if "router_entropy" in steps[0]:
        speed.set_title("tokens per second, and evenness of the experts")
        beside.plot(x, [record["router_entropy"] for record in steps], color="grey", alpha=0.6, linewidth=0.7)
        beside.set_ylim(0, 1.05)
    else:
        speed.set_title("tokens per second, and per step of decoding (dots)")
        judged = [(step, found["tokens_per_step"]) for step, found in heldout]
        beside.plot(*zip(*judged, strict=True) if judged else ((), ()), "o", color="grey", markersize=3)
    for axes in (losses, accuracies, rates, speed):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    canvas.savefig(figure, dpi=120)


def _smooth(values: Iterable[Any], keep: float = 0.9) -> Iterable[float]:
    return accumulate(values, lambda mean, value: keep * mean + (1 - keep) * value)
