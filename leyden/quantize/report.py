"""What a conversion cost in accuracy: a table, a figure, and a model card. All from quantization.json."""

from collections.abc import Iterable, Mapping
from math import exp, log10
from pathlib import Path
from typing import Any

from leyden.config.model import ModelConfig
from leyden.log import get
from leyden.quantize.recipe import part_of

log = get(__name__)

_COLOURS = {"M": "tab:blue", "E": "tab:orange", "*": "tab:green", "-": "tab:purple"}
_KINDS = {"M": "Mamba", "E": "experts", "*": "attention", "-": "MLP"}


def parts(report: Mapping[str, Any], config: ModelConfig) -> list[dict[str, Any]]:
    """For each part of the model and format: how many matrices, and the share of their power that became error.

    output_error weighs every column by the inputs it meets; None where no texts were given.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for name, found in report["matrices"].items():
        part = part_of(name, config).removesuffix(" before attention")
        groups.setdefault((part, found["format"]), []).append(found)
    return [
        {
            "part": part,
            "format": format,
            "matrices": len(found),
            "error": _share(found, "error", "norm"),
            "output_error": _share(found, "output_error", "output_norm"),
        }
        for (part, format), found in groups.items()
    ]


def _share(found: Iterable[Mapping[str, Any]], error: str, norm: str) -> float | None:
    found = list(found)
    total = sum(one[norm] for one in found)
    return sum(one[error] for one in found) / total if total else None


def table(report: Mapping[str, Any], config: ModelConfig) -> str:
    """As Markdown. Errors are noise-to-signal ratios in dB: -20 dB is a hundredth of the power."""
    lines = ["| part | format | matrices | error of the weights | error of the outputs |", "|---|---|---|---|---|"]
    for row in parts(report, config):
        cells = [
            row["part"],
            row["format"],
            f"{row['matrices']:,}",
            _decibels(row["error"]),
            _decibels(row["output_error"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _decibels(share: float | None) -> str:
    return "-" if share is None else "0" if share == 0 else f"{10 * log10(share):.1f} dB"


def quality(report: Mapping[str, Any]) -> str:
    """As Markdown; empty without texts."""
    found = report.get("quality")
    if not found:
        return ""
    rows = [
        ("tokens", f"{found['tokens']:,}"),
        ("KL divergence of the next token, nats", f"{found['kl_divergence']:.4g}"),
        ("same most likely token", f"{found['same_top_token']:.2%}"),
        ("perplexity, original", f"{exp(min(found['loss'], 700)):.4g}"),
        ("perplexity, quantised", f"{exp(min(found['loss_quantised'], 700)):.4g}"),
    ]
    return "\n".join(["| on the texts | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def draw(report: Mapping[str, Any], config: ModelConfig, figure: Path) -> None:
    """How much each layer suffers, as a PNG: from its own rounding, and from all that came before.

    Without texts there is nothing to draw but the weights' errors. Without matplotlib a line in the log says so.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError:
        log.info("no figure: pip install matplotlib, then it is drawn again")
        return
    canvas = Figure(figsize=(11, 7), layout="constrained")
    upper, lower = canvas.subplots(2, 1)
    layers = [(int(name.rpartition(".")[2]), found) for name, found in report["layers"].items()]
    shown = [(i, found) for i, found in layers if found["own"] > 0]
    upper.bar([i for i, _ in shown], [f["own"] for _, f in shown], color=[_COLOURS[f["kind"]] for _, f in shown])
    upper.plot([i for i, _ in layers], [f["accumulated"] for _, f in layers], color="black", linewidth=1)
    marks = [Line2D([], [], color=_COLOURS[letter], lw=5, label=name) for letter, name in _KINDS.items()]
    marks.append(Line2D([], [], color="black", label="stream, all layers so far"))
    upper.legend(handles=marks, fontsize=8)
    upper.set_title(
        "relative error of each layer's contribution on the original's input (bars), and of the stream (line)"
    )
    upper.set_xlabel("layer")
    if shown:
        upper.set_yscale("log")

    rows = parts(report, config)
    labels = [f"{row['part']}\n{row['format']}" for row in rows]
    for offset, key in ((-0.2, "error"), (0.2, "output_error")):
        points = [(x + offset, 10 * log10(row[key])) for x, row in enumerate(rows) if row[key]]
        lower.bar([x for x, _ in points], [y for _, y in points], width=0.4, label=key.replace("_", " "))
    lower.set_xticks(range(len(rows)), labels, fontsize=8)
    lower.set_ylabel("dB of the signal")
    lower.set_title("errors of the weights, and of the outputs they give")
    lower.legend(fontsize=8)
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    canvas.savefig(figure, dpi=120)


def card(report: Mapping[str, Any], config: ModelConfig, command: str) -> str:
    """README.md of the new checkpoint."""
    options = report["options"]
    name = Path(options["source"]).name
    rounding = "GPTQ error compensation" if options["gptq"] else "rounding to nearest"
    if "nvfp4" in options["recipe"] and options["four_over_six"]:
        rounding += "; each NVFP4 block spread over +-6 or +-4, whichever errs less"
    texts = report.get("texts")
    given = (
        f"{texts['count']:,} texts, {texts['tokens']:,} tokens" if texts else "none: only the weights were looked at"
    )
    sections = [
        f"# {name}, {options['recipe']}",
        f"{name}, quantised by `leyden quantize`. The licence and the terms of the original apply.",
        f"    {command}",
        f"- size: {report['bytes'] / 1e9:.3g} GB of weights\n- method: {rounding}\n- calibration texts: {given}",
        "## What was lost",
        table(report, config),
        quality(report) or "No texts were given, so the effect on answers is not known.",
        "![errors of the layers](sensitivity.png)",
        "Not listed: matrices that stayed as they were. All numbers are in `quantization.json`.",
        "## Use",
        "    leyden serve <this folder>",
        "Other servers that read ModelOpt or compressed-tensors checkpoints read it too.",
    ]
    return "\n\n".join(sections) + "\n"
