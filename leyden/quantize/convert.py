"""Checkpoint -> quantised checkpoint, layer by layer: in memory are a layer, a shard, and the streams of the texts.

A run that was cut off is taken up: shards that are there are not made again. What a run leaves in its folder is a
checkpoint (config.json, hf_quant_config.json, shards, tokenizer), and quantization.json with all that was measured.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from leyden import ops
from leyden.config.folder import read_json
from leyden.errors import ConfigError
from leyden.formats import Dense, Format, Grid
from leyden.formats.fp8 import E4M3_MAX
from leyden.formats.scheme import describe
from leyden.log import get
from leyden.model.checkpoint import shards, write_index, write_json
from leyden.model.source import Source
from leyden.quantize.calibrate import Moments, Stream, Texts, Watch
from leyden.quantize.compensate import compensate
from leyden.quantize.recipe import Recipe

log = get(__name__)

REPORT = "quantization.json"
SUMS = ("error", "norm", "output_error", "output_norm")  # sums of squares, of a matrix and of what it puts out
_OWN = ("config.json", "hf_quant_config.json", "model.safetensors.index.json", REPORT)


@dataclass(frozen=True)
class Options:
    """What decides about the bits of the result."""

    recipe: str
    four_over_six: bool = True
    group: int = 64
    gptq: bool = False
    shard_bytes: int = 5 * 10**9


class Conversion:
    """One run. `report` is what quantization.json holds: options, matrices, layers and, in the end, quality."""

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        options: Options,
        out: Path,
        sequences: list[list[int]] | None = None,
        device: torch.device | None = None,
    ):
        """ConfigError if `out` holds another run, or the source itself."""
        self.source, self.recipe, self.options, self.out = source, recipe, options, out
        self.device = device or torch.device("cpu")
        self.texts = Texts(sequences, self.device) if sequences else None
        if out.resolve() == source.folder.resolve():
            raise ConfigError(f"--out must be another folder than the model's, {out}")
        config = source.config
        self.formats = {m: recipe.choose(m, shape, config) for m, shape in source.shapes.items()}
        if any(format != Dense() for format in source.formats.values()):
            log.warning("%s is quantised already: what changes its format is rounded a second time", source.folder)
        self._plan()
        digest = hashlib.sha256(json.dumps(sequences).encode()).hexdigest()[:16] if sequences else None
        identity = asdict(options) | {"source": str(source.folder), "texts": digest}
        self.report: dict[str, Any] = {"options": identity, "matrices": {}, "layers": {}}
        if (out / REPORT).exists():
            before = read_json(out / REPORT)
            if before.get("options") != identity:
                raise ConfigError(f"{out} holds another conversion ({before.get('options')}); choose another --out")
            self.report = before
        elif any(out.glob("*.safetensors")):
            raise ConfigError(f"{out} holds a checkpoint already; choose another --out")

    def _plan(self) -> None:
        """Names and sizes of all tensors, and the files that they go into."""
        self.groups: dict[str, list[str]] = {}  # unit -> names of its tensors
        sizes: dict[str, int] = {}
        self.scales = scales = self.source.cache_scales()
        for unit, is_matrix in self.source.units():
            if not is_matrix:
                specs = {unit: self.source.spec(unit)}
            else:
                tensors = self.formats[unit].tensors(self.source.shapes[unit], self.source.dtype)
                specs = {f"{unit}.{leaf}": spec for leaf, spec in tensors.items()}
                which = f"{unit}.{unit.rpartition('.')[2][0]}_scale"
                if which in scales or (self._measures_cache and _is_cached(unit)):
                    specs[which] = (1,), torch.float32
            self.groups[unit] = list(specs)
            sizes |= {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in specs.items()}
        self.sizes = sizes
        self.files = shards(self.groups.values(), sizes, self.options.shard_bytes)
        self._file_of = {name: file for file, names in self.files.items() for name in names}

    @property
    def _measures_cache(self) -> bool:
        return self.recipe.fp8_cache and self.texts is not None

    def run(self, progress: bool = True) -> dict[str, Any]:
        """Convert everything that is not there yet; returns the report."""
        if "bytes" in self.report:  # noted last
            log.info("%s is complete already", self.out)
            return self.report
        self.out.mkdir(parents=True, exist_ok=True)
        finished = {name for file, names in self.files.items() if (self.out / file).exists() for name in names}
        waiting = {file: names for file, names in self.files.items() if not (self.out / file).exists()}
        pending: dict[str, Tensor] = {}
        with tqdm(total=sum(self.sizes.values()), unit="B", unit_scale=True, disable=not progress) as bar:
            bar.set_description("Quantising")
            bar.update(sum(self.sizes[name] for name in finished))
            for made in self._stages(finished):
                new = {name: tensor for name, tensor in made.items() if name not in finished}
                bar.update(sum(self.sizes[name] for name in new))
                pending |= new
                for file in [file for file, names in waiting.items() if pending.keys() >= set(names)]:
                    part = self.out / f"{file}.part"
                    save_file({name: pending.pop(name).cpu().contiguous() for name in waiting.pop(file)}, part)
                    write_json(self.out / REPORT, self.report)
                    part.rename(self.out / file)
        self._finish()
        return self.report

    def _stages(self, finished: set[str]) -> Iterator[dict[str, Tensor]]:
        """The tensors of one stage after the other: embeddings, each layer, norm, head, MTP layers."""
        texts, streams = self.texts, None
        for stage, group in groupby(self.groups, key=_stage):
            units = list(group)
            if not texts:
                yield self._made([unit for unit in units if not finished.issuperset(self.groups[unit])], {}, finished)
            elif stage == "backbone.embeddings":
                made = self._made(units, {}, finished)
                embeddings = self.source.module(stage, self.device, self.formats, made)
                before = texts.embed(embeddings)
                streams = before, before
                yield made
            elif stage.startswith("backbone.layers."):
                assert streams is not None
                made, streams = self._layer(stage, units, streams, finished)
                yield made
            elif stage == "lm_head":
                assert streams is not None
                yield self._head(texts, units, streams, finished)
            else:
                yield self._made(units, {}, finished)
        if texts and streams and self.source.config.tie_word_embeddings:
            self._quality(texts, "backbone.embeddings", {}, streams)

    def _layer(
        self, stage: str, units: list[str], streams: tuple[Stream, Stream], finished: set[str]
    ) -> tuple[dict[str, Tensor], tuple[Stream, Stream]]:
        """Make a layer, and take both streams through it: the original's, and that of the layers made so far."""
        texts = self.texts
        assert texts is not None
        layer = self.source.module(stage, self.device, {}, {})
        watch = Watch(stage, layer, self._wants_products, (".k_proj", ".v_proj") if self._measures_cache else ())
        with ops.watching(watch):
            after = texts.through(layer, streams[0])
        made = self._made(units, watch.moments, finished)
        for name, largest in watch.outputs.items():
            made.setdefault(f"{name}.{name.rpartition('.')[2][0]}_scale", torch.tensor([largest / E4M3_MAX or 1.0]))
        del layer
        quantised = self.source.module(stage, self.device, self.formats, made)
        alone, other = texts.through(quantised, streams[0]), texts.through(quantised, streams[1])
        self.report["layers"][stage] = {
            "kind": self.source.config.pattern[int(stage.rpartition(".")[2])],
            "own": _distance(alone, after) / max(_distance(after, streams[0]), 1e-30),
            "accumulated": _distance(other, after) / max(_norm(after), 1e-30),
        }
        return made, (after, other)

    def _head(
        self, texts: Texts, units: list[str], streams: tuple[Stream, Stream], finished: set[str]
    ) -> dict[str, Tensor]:
        norm = self.source.module("backbone.norm_f", self.device, {}, {})
        head = self.source.module("lm_head", self.device, {}, {})
        watch = Watch("lm_head", head, self._wants_products)
        with ops.watching(watch):
            for _ in texts.logits(norm, head, streams[0]):
                pass
        made = self._made(units, watch.moments, finished)
        self._quality(texts, "lm_head", made, streams)
        return made

    def _quality(self, texts: Texts, name: str, made: dict[str, Tensor], streams: tuple[Stream, Stream]) -> None:
        """How far the answers are from the original's, on the texts."""
        norm = self.source.module("backbone.norm_f", self.device, {}, {})
        heads = [
            self.source.module(name, self.device, {}, {}),
            self.source.module(name, self.device, self.formats, made),
        ]
        divergence = agreement = losses = other_losses = 0.0
        tokens = 0
        pairs = zip(*(texts.logits(norm, head, s) for head, s in zip(heads, streams, strict=True)), strict=True)
        for (logits, targets), (other, _) in pairs:
            kept = targets >= 0
            logp, logq = logits[kept].log_softmax(-1), other[kept].log_softmax(-1)
            divergence += F.kl_div(logq, logp, log_target=True, reduction="sum").item()
            agreement += (logp.argmax(-1) == logq.argmax(-1)).sum().item()
            losses += F.nll_loss(logp, targets[kept], reduction="sum").item()
            other_losses += F.nll_loss(logq, targets[kept], reduction="sum").item()
            tokens += int(kept.sum())
        if tokens:
            self.report["quality"] = {
                "tokens": tokens,
                "kl_divergence": divergence / tokens,
                "same_top_token": agreement / tokens,
                "loss": losses / tokens,
                "loss_quantised": other_losses / tokens,
            }

    def _wants_products(self, matrix: str) -> bool:
        return self.options.gptq and isinstance(self.formats[matrix], Grid) and self._changes(matrix)

    def _changes(self, matrix: str) -> bool:
        return self.formats[matrix] != self.source.formats[matrix]

    def _made(self, units: list[str], moments: dict[str, Moments], finished: set[str]) -> dict[str, Tensor]:
        """The tensors of some units: from the shards that are finished, else made now."""
        made: dict[str, Tensor] = {}
        for unit in units:
            names = [name for name in self.groups[unit] if not name.endswith(("k_scale", "v_scale"))]
            if finished.issuperset(self.groups[unit]):
                made |= {name: self._finished(name) for name in self.groups[unit]}
            elif unit not in self.formats:
                made[unit] = self.source.tensor(unit)
            else:
                tensors = self._matrix(unit, moments.get(unit))
                made |= {name: tensors[name.rpartition(".")[2]] for name in names}
                made |= {name: self.scales[name] for name in self.groups[unit] if name in self.scales}
        return made

    def _matrix(self, matrix: str, moments: Moments | None) -> dict[str, Tensor]:
        format = self.formats[matrix]
        if not self._changes(matrix):
            return self.source.stored(matrix)
        values = self.source.values(matrix).to(self.device)
        if format == Dense():
            return {"weight": values.to(self.source.dtype)}
        if isinstance(format, Grid) and moments and moments.products is not None:
            tensors = compensate(format, values.float(), moments.products)
        else:
            tensors = format.quantize(values)
        if "input_scale" in tensors and moments and moments.largest:
            tensors["input_scale"] = torch.tensor(moments.largest / E4M3_MAX)
        self._note(matrix, format, values.float(), format.dequantize(tensors, torch.float32), moments)
        return tensors

    def _note(self, matrix: str, format: Format, values: Tensor, rounded: Tensor, moments: Moments | None) -> None:
        """Errors of a matrix and, where its inputs are known, of what it puts out."""
        difference = rounded - values
        sums = [difference.square().sum().item(), values.square().sum().item()]
        if moments is None:
            sums += [0.0, 0.0]
        elif moments.products is None:  # as if the columns' inputs were independent of each other
            sums += [(part.square() * moments.squares).sum().item() for part in (difference, values)]
        else:
            sums += [(part @ moments.products * part).sum().item() for part in (difference, values)]
        self.report["matrices"][matrix] = {"format": format.name} | dict(zip(SUMS, sums, strict=True))

    def _finished(self, name: str) -> Tensor:
        with safe_open(self.out / self._file_of[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def _finish(self) -> None:
        folder = self.source.folder
        write_index(self.out, self.files, self.sizes)
        quantization = describe(self.formats, self.recipe.fp8_cache)
        config = read_json(folder / "config.json") | {"quantization_config": quantization}
        write_json(self.out / "config.json", {key: value for key, value in config.items() if value is not None})
        if quantization and quantization["quant_method"] == "modelopt":
            keys = ("quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules", "quantized_layers")
            described = {key: quantization[key] for key in keys if key in quantization}
            write_json(
                self.out / "hf_quant_config.json", {"producer": quantization["producer"], "quantization": described}
            )
        for pattern in ("*.json", "*.jinja"):
            for path in folder.glob(pattern):
                if path.name not in _OWN:
                    shutil.copyfile(path, self.out / path.name)
        self.report["bytes"] = sum(self.sizes.values())
        if self.texts:
            self.report["texts"] = {"count": self.texts.sequences, "tokens": self.texts.tokens}
        write_json(self.out / REPORT, self.report)


def _stage(unit: str) -> str:
    """backbone.layers.3 of what belongs to a layer, the module of anything else."""
    parts = unit.split(".")
    if "layers" in parts:
        return ".".join(parts[: parts.index("layers") + 2])
    return unit.removesuffix(".weight")


def _is_cached(matrix: str) -> bool:
    return matrix.startswith("backbone.") and matrix.endswith((".k_proj", ".v_proj"))


def _norm(stream: Stream) -> float:
    return sum(x.float().square().sum().item() for x in stream) ** 0.5


def _distance(stream: Stream, other: Stream) -> float:
    return sum((x.float() - y.float()).square().sum().item() for x, y in zip(stream, other, strict=True)) ** 0.5
