"""Checkpoints: the safetensors files of a folder, and the parameters of a network.

    resolve   a name -> the folder (see leyden.config.folder)
    build     config -> network, with room for its parameters
    load      folder -> network
    save      network -> folder, in the layout of the releases (transformers reads it)
    dummy     random values by recipe, for measurements without weights

Names are the same on both sides, but for three things. Files may write the prefix `backbone.` as `model.` (and put
`language_model.` before everything); files hold every expert by itself, `experts.7.up_proj.weight`, or, as transformers
has them in memory, stacked under `experts.up_proj`; the network always stacks them, as `experts.up_proj.weight`.

Names and shapes are strict: whatever is missing, unexpected or of another shape is listed, before any weight is read.
Dtypes are not: BF16, F16 and F32 are converted to the parameter's own. Refused so far: quantised checkpoints.
"""

import re
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from json import dumps
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from leyden.config.folder import read_json, resolve
from leyden.config.model import ModelConfig
from leyden.errors import CheckpointError
from leyden.log import get
from leyden.model.nemotron import Nemotron

__all__ = ["build", "dummy", "load", "resolve", "save"]

log = get(__name__)

_INDEX = "model.safetensors.index.json"
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4}  # dtypes of plain tensors, as safetensors calls them -> bytes
_READERS = 8  # threads; one cannot keep a fast disk or a page cache busy
_CHUNK = 1 << 22  # random values made at a time

# tensors of real files that a network of plain weights has no use for
_UNUSED = re.compile(r"\.(input_scale|k_scale|v_scale|kv_scale|inv_freq)$")


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint's files."""

    file: Path
    name: str  # as the file has it
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return prod(self.shape) * _FLOATS[self.dtype]


def build(config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu", mtp: bool = False) -> Nemotron:
    """The network on `device`, its parameters allocated but not filled: load or dummy does that."""
    return Nemotron(config, dtype, device, mtp)


def load(model: Nemotron, folder: Path, device: torch.device | str = "cpu", progress: bool = True) -> None:
    """Fill every parameter of `model` from the files of `folder`; `device` is where a model built on meta goes.

    Shards are read side by side, each tensor straight into its parameter. With `progress`, a bar of bytes on stderr.
    Raises CheckpointError that lists what is missing, unexpected, of another shape or of a dtype that is no float.
    """
    started = time.monotonic()
    plan = _match(model, folder)
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
    targets = _addresses(model)
    shards = [list(group) for _, group in groupby(plan, key=lambda stored: stored.file)]
    total = sum(stored.bytes for stored in plan)
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar,
        ThreadPoolExecutor(_READERS) as readers,
    ):

        def read(shard: list[Stored]) -> None:
            with safe_open(shard[0].file, framework="pt") as file:
                for stored in shard:
                    targets[_canonical(stored.name)].copy_(file.get_tensor(stored.name))
                    bar.update(stored.bytes)

        list(readers.map(read, shards))
    log.info("loaded %.2f GiB of weights in %.1f s", total / 2**30, time.monotonic() - started)


def save(model: Nemotron, folder: Path, max_shard_bytes: int = 5 * 10**9) -> None:
    """Write config.json and the weights as the releases have them: `backbone.`, every expert by itself, shards.

    Parameters are written as they are in memory, so loading them again gives the same bits; A_log, D, dt_bias and the
    router are F32 there. Weights of an earlier save in `folder` are removed; other files stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    tensors = dict(_tensors(model))
    if model.config.tie_word_embeddings:  # transformers does not tie the embeddings of this family: it wants both
        tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"].clone()
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes

    count = len(shards)
    files = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    files = files if count > 1 else ["model.safetensors"]
    for stale in {*folder.glob("model*.safetensors"), folder / _INDEX}:
        stale.unlink(missing_ok=True)
    for file, shard in zip(files, shards, strict=True):
        save_file({name: tensor.cpu() for name, tensor in shard.items()}, folder / file, metadata={"format": "pt"})
    if count > 1:
        size = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        write_json(folder / _INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    dtype = str(model.backbone.embeddings.dtype).removeprefix("torch.")
    steps = int(model.mtp is not None)
    config = replace(model.config, dtype=dtype, num_nextn_predict_layers=steps, quantization=None)
    write_json(folder / "config.json", config.to_dict())


@torch.no_grad()
def dummy(model: Nemotron, seed: int = 0) -> None:
    """Fill `model` with random values under which routing is near uniform and tokens route independently.

    Embeddings U(-1.73, 1.73); projections back into the residual stream U(-0.0035, 0.0035); other matrices and the
    convolution U(-0.035, 0.035); A U(-16, -1); dt_bias U(-6, -2); norms and D 1; router bias 0. A token's own embedding
    so dominates its residual stream, and benchmarks of random weights load the experts as a trained model does.

    Every tensor has a seed of its own, from `seed` and its name. The same device gives the same values, in any dtype.
    """
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
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
            outward = module.endswith(("out_proj", "o_proj", "down_proj"))
            bound = 1.73 if module.endswith("embeddings") else 0.0035 if outward else 0.035
            _uniform(parameter, -bound, bound, random)


def _uniform(tensor: Tensor, low: float, high: float, random: torch.Generator) -> None:
    for part in tensor.view(-1).split(_CHUNK):
        values = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        part.copy_(values.uniform_(low, high, generator=random))


def _tensors(model: Nemotron) -> Iterator[tuple[str, Tensor]]:
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
    return whole | dict(_tensors(model))


def _canonical(name: str) -> str:
    """A file's name for a tensor as it is used here."""
    name = name.removeprefix("language_model.")
    if name.startswith("model."):
        name = "backbone." + name.removeprefix("model.")
    return name + ".weight" if name.endswith((".experts.up_proj", ".experts.down_proj")) else name


def _match(model: Nemotron, folder: Path) -> list[Stored]:
    """The tensors of `folder` that fill `model`, file by file, after checking that they fit it exactly."""
    addresses = _addresses(model)
    fit: dict[str, Stored] = {}
    heads: list[Stored] = []
    problems: dict[str, list[str]] = defaultdict(list)
    for stored in stored_tensors(folder):
        name = _canonical(stored.name)
        if name not in addresses:
            if name == "lm_head.weight":  # tied
                heads.append(stored)
            elif not (_UNUSED.search(name) or (name.startswith("mtp.") and model.mtp is None)):
                problems["unexpected"].append(stored.name)
            continue
        if name in fit:
            problems["twice"].append(f"{stored.name} in {fit[name].file.name} and {stored.file.name}")
        fit[name] = stored
        shape = tuple(addresses[name].shape)
        if stored.shape != shape:
            problems["wrong shape"].append(f"{stored.name} {list(stored.shape)}, expected {list(shape)}")
        if stored.dtype not in _FLOATS:
            problems["wrong dtype"].append(f"{stored.name} {stored.dtype}, expected {', '.join(_FLOATS)}")
    stacked = re.compile(r"\.experts\.\d+\.")
    problems["missing"] = [n for n, _ in _tensors(model) if n not in fit and stacked.sub(".experts.", n) not in fit]
    if any(problems.values()):
        lines = [f"  {kind} ({len(names)}): {some(names)}" for kind, names in problems.items() if names]
        raise CheckpointError("\n".join([f"{folder}: the weights do not fit config.json", *lines]))
    for head in heads:
        if not torch.equal(_read(head), _read(fit["backbone.embeddings.weight"])):
            raise CheckpointError(
                f"{folder}: tie_word_embeddings is true, but {head.name} is not equal to the embeddings; set it false"
                " in config.json to use both, or remove the tensor"
            )
    return list(fit.values())


def _read(stored: Stored) -> Tensor:
    with safe_open(stored.file, framework="pt") as file:
        tensor: Tensor = file.get_tensor(stored.name)
    return tensor


def stored_tensors(folder: Path) -> list[Stored]:
    """What the headers of the files of `folder` say, file by file; no weight is read."""
    index = folder / _INDEX
    if index.exists():
        files = sorted({folder / str(file) for file in read_json(index).get("weight_map", {}).values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no {_INDEX} and no *.safetensors files; other weight formats are not read")
    found = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as header:
                for name in header.keys():  # noqa: SIM118 (not a dict)
                    tensor = header.get_slice(name)
                    found.append(Stored(file, name, tuple(tensor.get_shape()), tensor.get_dtype()))
        except FileNotFoundError:
            raise CheckpointError(
                f"{file}: no such file, but {_INDEX} names it; the download is not complete"
            ) from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: damaged, or no safetensors file ({error}); fetch it again") from error
    _refuse_quantised(folder, found)
    return found


def _refuse_quantised(folder: Path, found: Iterable[Stored]) -> None:
    dtypes = {stored.name: stored.dtype for stored in found}
    for name, dtype in dtypes.items():
        match name.rpartition(".")[2], dtype:
            case "weight_packed", _:
                kind = "compressed-tensors"
            case "weight", "U8":
                kind = "NVFP4"
            case "weight", "F8_E4M3":
                kind = "MXFP8" if dtypes.get(f"{name}_scale") == "U8" else "FP8"
            case _:
                continue
        raise CheckpointError(f"{folder}: quantised checkpoints of kind {kind} are not supported yet (found {name})")


def some(names: list[str], limit: int = 10) -> str:
    rest = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(dumps(content, indent=2) + "\n", encoding="utf-8")
