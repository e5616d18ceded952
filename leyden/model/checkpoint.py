"""Checkpoints: the safetensors files of a folder, and the parameters of a network.

    resolve   a name -> the folder (see leyden.config.folder)
    build     config -> network, with room for its parameters
    load      folder -> network
    save      network -> folder, in the layout of the releases (transformers reads it)
    dummy     random values by recipe, for measurements without weights

adopt, misfits and fill are the steps of load, for networks that are no Nemotron (drafters).

Names are the same on both sides, as far as leyden.model.stored has not seen to it, but for the experts: files hold
every one by itself, `experts.7.up_proj.weight`, or stacked, and the network stacks them.

Names and shapes are strict: whatever is missing, unexpected or of another shape is listed, before any weight is read.
Dtypes are not: BF16, F16 and F32 are converted to the parameter's own. Matrices stay in the format in which the files
hold them, each its own; what config.json says about that is compared.
"""

import math
import re
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from json import dumps
from math import inf
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from leyden import ops
from leyden.config.folder import resolve
from leyden.config.model import ModelConfig
from leyden.errors import CheckpointError, ConfigError
from leyden.formats import Dense, Weight
from leyden.formats.nvfp4 import NVFP4, Tiled, restore
from leyden.formats.scheme import Scheme, describe, held_as
from leyden.log import get
from leyden.model.attention import Attention
from leyden.model.image import LEAST, Image
from leyden.model.nemotron import Nemotron
from leyden.model.rounded import Rounded, narrow
from leyden.model.stored import DTYPES, FLOATS, INDEX, Stored, named, opened, read, stored_tensors

__all__ = ["Stored", "build", "dummy", "load", "resolve", "save", "stored_tensors"]

log = get(__name__)

Network = TypeVar("Network", bound=nn.Module)

_READERS = 8  # threads; one cannot keep a fast disk or a page cache busy
_CHUNK = 1 << 22  # random values made at a time

_EXPERT = re.compile(r"\.experts\.\d+\.")
_CACHE_SCALE = re.compile(r"(?P<mixer>.*\.mixer)\.(k_proj\.|v_proj\.|attn\.)?(?P<which>k|v|kv)_scale")
_SCALES = (".weight_scale", ".weight_scale_2", ".input_scale")
# tensors of real files that have no place here: scales of activations where the format keeps none, rotary tables
_UNUSED = re.compile(r"\.(input_scale|inv_freq)$")


def build(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu", mtp: bool = False) -> Nemotron:
    """The network on `device`, its parameters allocated but not filled: load or dummy does that.

    Matrices have the formats that config.quantization names; load changes what the files hold otherwise.
    """
    model = Nemotron(config, dtype, "meta", mtp)
    scheme = Scheme(config.quantization)
    for name, weight in matrices(model):
        if (format := scheme.format_of(each(name, weight)[0])) != Dense():
            try:
                weight.allot(format, torch.device("meta"))
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
    return allocate(model, device)


def allocate(network: Network, device: torch.device | str) -> Network:
    """Give the parameters of a network on meta their memory. Module.to_empty does the same, but it imports sympy first,
    which takes as long as mapping all the weights of a small model."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in network.modules():
        for name, old in module._parameters.items():
            if old is not None and old not in made:
                room = torch.empty(old.shape, dtype=old.dtype, device=device)
                made[old] = nn.Parameter(room, requires_grad=old.requires_grad)
            module._parameters[name] = None if old is None else made[old]
    return network


def load(
    model: Nemotron,
    folder: Path,
    device: torch.device | str = "cpu",
    progress: bool = True,
    quantization: str | None = None,
    keep: bool = False,
) -> None:
    """Fill every parameter of `model` from the files of `folder`; `device` is where a model built on meta goes.

    Shards are read side by side, each tensor straight into its parameter. With `progress`, a bar of bytes on stderr.
    With `quantization`, one of rounded.QUANTIZATIONS, matrices that the files hold dense are quantised on their way.
    With `keep`, a CPU maps what an earlier call kept (leyden.model.image), or keeps it for the next one.
    Raises CheckpointError that lists what is missing, unexpected, of another shape or of a dtype that does not fit.
    """
    started = time.monotonic()
    plan = match(model, folder)
    _compare(model, folder)
    changed = narrow(model, quantization) if quantization else {}
    if any(parameter.is_meta for parameter in model.parameters()):
        allocate(model, device)
    image = Image(model, [stored.file for stored in plan.values()], quantization or "")
    keep = keep and image.bytes >= LEAST and next(model.parameters()).device.type == "cpu"
    if keep and image.map():
        log.info("mapped %.2f GiB of weights in %.1f s", image.bytes / 2**30, time.monotonic() - started)
        return
    ops.prepare(model.parameters())
    targets: dict[str, Tensor | Rounded] = {**_addresses(model)}
    for name, weight in changed.items():
        targets[f"{name}.weight"] = Rounded.of(weight)
        if len(weight.shape) == 3:
            targets |= {f"{one}.weight": Rounded.of(weight, i) for i, one in enumerate(each(name, weight))}
    total = fill(targets, plan, progress)
    log.info("loaded %.2f GiB of weights in %.1f s", total / 2**30, time.monotonic() - started)
    if keep:
        image.write()


def fill(targets: Mapping[str, Tensor | Rounded], files: Mapping[str, Stored], progress: bool = True) -> int:
    """Read `files` into the `targets` of the same names; returns the bytes. Files, and parts of one, are read side by
    side, by threads that compute alone: teams of them would wait for each other."""
    by_file = [list(group) for _, group in groupby(files.items(), key=lambda entry: entry[1].file)]
    parts = math.ceil(_READERS / max(1, len(by_file)))
    groups = [entries[i::parts] for entries in by_file for i in range(min(parts, len(entries)))]
    total = sum(stored.bytes for stored in files.values())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar,
        ThreadPoolExecutor(_READERS) as readers,
    ):

        def read_all(group: Sequence[tuple[str, Stored]]) -> None:
            with opened(group[0][1].file) as file:
                for name, stored in group:
                    target = targets[name]
                    if isinstance(target, Tensor) and stored.fills(target):
                        stored.read_into(target)
                    else:
                        target.copy_(stored.read(file).reshape(target.shape))
                    if name.endswith(_SCALES) and isinstance(target, Tensor):
                        _check_scales(stored, target)
                    bar.update(stored.bytes)

        try:
            list(readers.map(read_all, groups))
        finally:
            torch.set_num_threads(threads)
    return total


def _check_scales(stored: Stored, scales: Tensor) -> None:
    """A broken scale makes a whole matrix NaN, and answers that nobody can explain."""
    least, most = (scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales).aminmax()
    nan = {torch.uint8: 255, torch.float8_e4m3fn: 127}.get(scales.dtype)  # of E8M0; of E4M3, beyond it all is negative
    if most < nan if nan else least.isfinite() & most.isfinite():
        return  # quickly: there may be a gigabyte of them
    broken = scales == 255 if scales.dtype == torch.uint8 else ~scales.float().isfinite()
    if broken.any():
        raise CheckpointError(
            f"{stored.file}: {stored.name} has {int(broken.sum()):,} scales of {scales.numel():,} that are not finite;"
            " the file is damaged, or its quantisation failed"
        )


def adopt(network: nn.Module, files: Mapping[str, Stored]) -> None:
    """Give every matrix of `network` the format in which `files` hold it; they go by the names of the parameters."""
    weights = dict(matrices(network))
    held: dict[str, dict[str, dict[str, Stored]]] = defaultdict(lambda: defaultdict(dict))
    for name, stored in files.items():
        matrix, _, leaf = name.rpartition(".")
        owner = _EXPERT.sub(".experts.", matrix)
        if owner in weights:
            held[owner][matrix][leaf] = stored
    for owner, members in held.items():
        weight = weights[owner]
        one, *others = members.values()
        shared = {leaf: stored for leaf, stored in one.items() if all(leaf in other for other in others)}
        format = held_as(shared, weight.shape)
        if format != weight.format:
            weight.allot(format, next(weight.parameters()).device)


def save(model: Nemotron, folder: Path, max_shard_bytes: int = 5 * 10**9) -> None:
    """Write config.json and the weights as the releases have them: `backbone.`, every expert by itself, shards.

    Parameters are written as they are in memory, so loading them again gives the same bits; A_log, D, dt_bias and the
    router are F32 there. Weights of an earlier save in `folder` are removed; other files stay. ConfigError if a
    matrix is in a format that such files do not have.
    """
    for _, weight in matrices(model):
        if isinstance(weight.format, Tiled):
            restore(weight)
    scales = dict(cache_scales(model))
    held = {matrix: weight.format for name, weight in matrices(model) for matrix in each(name, weight)}
    quantization = describe(held, fp8_cache=bool(scales) or Scheme(model.config.quantization).fp8_cache)
    tensors = dict(tensors_of(model)) | scales
    if model.config.tie_word_embeddings:  # transformers does not tie the embeddings of this family: it wants both
        tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"].clone()
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}

    folder.mkdir(parents=True, exist_ok=True)
    remove_weights(folder)
    files = shards([[name] for name in tensors], sizes, max_shard_bytes)
    for file, names in files.items():
        save_file({name: tensors[name].cpu() for name in names}, folder / file, metadata={"format": "pt"})
    write_index(folder, files, sizes)
    dtype = str(model.backbone.embeddings.dtype).removeprefix("torch.")
    steps = int(model.mtp is not None)
    config = replace(model.config, dtype=dtype, num_nextn_predict_layers=steps, quantization=quantization)
    write_json(folder / "config.json", config.to_dict())


def shards(groups: Iterable[Sequence[str]], sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """File -> the tensors that go into it, in their order: as many as fit into `limit` bytes, and no group in two."""
    parts: list[list[str]] = [[]]
    room = limit
    for group in groups:
        size = sum(sizes[name] for name in group)
        if size > room and parts[-1]:
            parts.append([])
            room = limit
        parts[-1] += group
        room -= size
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, 1)}


def write_index(folder: Path, files: Mapping[str, Sequence[str]], sizes: Mapping[str, int]) -> None:
    """The index of several shards; nothing for a single one."""
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def remove_weights(folder: Path) -> None:
    for stale in {*folder.glob("model*.safetensors"), folder / INDEX}:
        stale.unlink(missing_ok=True)


@torch.no_grad()
def dummy(model: nn.Module, seed: int = 0) -> None:
    """Fill `model`, or a drafter network, with random values under which routing is near uniform and tokens route
    independently.

    Embeddings U(-1.73, 1.73); projections back into the residual stream U(-0.0035, 0.0035); other matrices and the
    convolution U(-0.035, 0.035); A U(-16, -1); dt_bias U(-6, -2); norms and D 1; router bias 0. A token's own embedding
    so dominates its residual stream, and benchmarks of random weights load the experts as a trained model does.
    NVFP4: random codes, block scales U(0.25, 1), scale of the matrix 0.01, and 0.001 for those back into the stream.
    Other formats hold the rounded values.

    Every tensor has a seed of its own, from `seed` and its name. The same device gives the same values, in any dtype.
    """
    ops.prepare(model.parameters())
    quantised = {name: weight for name, weight in matrices(model) if weight.format != Dense()}
    for name, weight in quantised.items():
        first = next(weight.parameters())
        _dummy_quantised(
            weight, _bound(name), torch.Generator(first.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        )
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        if module in quantised:
            continue
        random = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if leaf == "A_log":
            _uniform(parameter, 1, 16, random)
            parameter.log_()
        elif leaf == "dt_bias":
            _uniform(parameter, -6, -2, random)
        elif leaf == "D" or module.endswith(("norm", "norm_f")):
            parameter.fill_(1)
        elif leaf == "e_score_correction_bias":
            parameter.zero_()
        else:
            _uniform(parameter, -_bound(module), _bound(module), random)


def _bound(module: str) -> float:
    outward = module.endswith(("out_proj", "o_proj", "down_proj"))
    return 1.73 if module.endswith("embeddings") else 0.0035 if outward else 0.035


def _dummy_quantised(weight: Weight, bound: float, random: torch.Generator) -> None:
    tensors = dict(weight.named_parameters())
    if isinstance(weight.format, NVFP4):
        tensors["weight"].random_(0, 256, generator=random)
        _uniform(tensors["weight_scale"], 0.25, 1, random)
        tensors["weight_scale_2"].fill_(bound / 3.5)
        if "input_scale" in tensors:
            tensors["input_scale"].fill_(1)
        return
    matrices = weight.shape[0] if len(weight.shape) == 3 else 1
    for i in range(matrices):
        values = torch.empty(weight.shape[-2:], device=random.device).uniform_(-bound, bound, generator=random)
        for name, tensor in weight.format.quantize(values).items():
            (tensors[name][i] if len(weight.shape) == 3 else tensors[name]).copy_(tensor)


def _uniform(tensor: Tensor, low: float, high: float, random: torch.Generator) -> None:
    for part in tensor.view(-1).split(_CHUNK):
        values = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        part.copy_(values.uniform_(low, high, generator=random))


def matrices(network: nn.Module) -> Iterator[tuple[str, Weight]]:
    return ((name, module) for name, module in network.named_modules() if isinstance(module, Weight))


def each(name: str, weight: Weight) -> list[str]:
    """The names in files of a matrix, or of those of a stack."""
    if len(weight.shape) == 2:
        return [name]
    return [name.replace(".experts.", f".experts.{i}.") for i in range(weight.shape[0])]


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name in a file, the memory behind it) of everything in `model`; experts one by one."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            before, after = name.split("experts.")
            yield from ((f"{before}experts.{i}.{after}", tensor) for i, tensor in enumerate(parameter.detach()))
        else:
            yield name, parameter.detach()


def _addresses(model: Nemotron) -> dict[str, Tensor]:
    """What a file's tensor fills, by its canonical name: every tensor, and the stacks of experts as a whole."""
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return whole | dict(tensors_of(model))


def cache_scales(model: Nemotron) -> Iterator[tuple[str, Tensor]]:
    """Those of an fp8 cache, if the checkpoint had any."""
    for name, module in model.named_modules():
        if isinstance(module, Attention) and (module.k_scale, module.v_scale) != (1.0, 1.0):
            yield f"{name}.k_proj.k_scale", torch.tensor([module.k_scale])
            yield f"{name}.v_proj.v_scale", torch.tensor([module.v_scale])


def match(model: Nemotron, folder: Path) -> dict[str, Stored]:
    """Name here -> tensor of `folder`, of all that fill `model`, file by file; they are known to fit it exactly.

    The matrices get the formats of the files, and attention layers their scales of the cache.
    """
    problems: dict[str, list[str]] = defaultdict(list)
    files: dict[str, Stored] = {}
    for name, stored in named(folder):
        if name.startswith("mtp.") and model.mtp is None:
            continue
        if name in files:
            problems["twice"].append(f"{stored.name} in {files[name].file.name} and {stored.file.name}")
        files[name] = stored
    adopt(model, files)
    addresses = _addresses(model)
    attention = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    plan: dict[str, Stored] = {}
    for name, stored in files.items():
        if (target := addresses.get(name)) is not None:
            plan[name] = stored
            for kind, problem in misfits(name, stored, target):
                problems[kind].append(problem)
        elif (scale := _CACHE_SCALE.fullmatch(name)) and scale["mixer"] in attention:
            value = float(read(stored))
            if not 0 < value < inf:
                problems["not positive and finite"].append(f"{stored.name} {value:g}")
            for which in scale["which"]:
                setattr(attention[scale["mixer"]], f"{which}_scale", value)
        elif not (_UNUSED.search(name) or (name == "lm_head.weight" and model.config.tie_word_embeddings)):
            problems["unexpected"].append(stored.name)
    problems["missing"] = [n for n, _ in tensors_of(model) if not {n, _EXPERT.sub(".experts.", n)} & plan.keys()]
    if any(problems.values()):
        lines = [f"  {kind} ({len(names)}): {some(names)}" for kind, names in problems.items() if names]
        raise CheckpointError("\n".join([f"{folder}: the weights do not fit config.json", *lines]))
    head = files.get("lm_head.weight") if model.config.tie_word_embeddings else None
    if head and not torch.equal(read(head), read(plan["backbone.embeddings.weight"])):
        raise CheckpointError(
            f"{folder}: tie_word_embeddings is true, but {head.name} is not equal to the embeddings; set it false"
            " in config.json to use both, or remove the tensor"
        )
    return plan


def misfits(name: str, stored: Stored, target: Tensor) -> Iterator[tuple[str, str]]:
    """("wrong shape" or "wrong dtype", how) of a file's tensor for a parameter. Floats are as good as each other."""
    if _trimmed(name, stored.shape) != _trimmed(name, target.shape):
        yield "wrong shape", f"{stored.name} {list(stored.shape)}, expected {list(target.shape)}"
    floats = target.dtype in FLOATS.values()
    if DTYPES.get(stored.dtype) not in (FLOATS.values() if floats else [target.dtype]):
        accepted = ", ".join(FLOATS) if floats else next(d for d in DTYPES if DTYPES[d] == target.dtype)
        yield "wrong dtype", f"{stored.name} {stored.dtype}, expected {accepted}"


def _trimmed(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape as it is compared: scales may be [] or [1], [N] or [N, 1], and have ones between their dimensions."""
    return tuple(size for size in shape if size != 1) if name.endswith(("scale", "scale_2")) else tuple(shape)


def _compare(model: Nemotron, folder: Path) -> None:
    """Say where the files differ from what config.json says of their formats; the files count."""
    scheme = Scheme(model.config.quantization)
    odd = [
        f"{name} is {weight.format.name}, not {promised}"
        for name, weight in matrices(model)
        if (promised := scheme.format_of(each(name, weight)[0]).name) != weight.format.name
    ]
    if odd:
        log.warning("%s: %d matrices are not stored as config.json says: %s", folder, len(odd), some(odd, 3))


def some(names: list[str], limit: int = 10) -> str:
    rest = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(dumps(content, indent=2) + "\n", encoding="utf-8")
