"""The tensors of a checkpoint's files, as their headers list them: nothing is read until somebody asks.

    stored_tensors   all of a folder of safetensors files, under the files' names
    named            all of a folder of any kind, under the network's names
    read             one of them

Names differ in three things. Files may write the prefix `backbone.` as `model.`, and `language_model.` before
everything; stacked experts may lack `.weight`; compressed-tensors has names of its own for NVFP4, and divides by the
scale of the matrix. GGUF files have names and an arrangement of their own (leyden.config.gguf).
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from leyden.config import gguf
from leyden.config.folder import read_json
from leyden.errors import CheckpointError
from leyden.formats.gguf import Blocks, File, from_nvfp4_blocks

INDEX = "model.safetensors.index.json"
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
DTYPES = (
    FLOATS
    | {  # as safetensors calls them -> as they are kept
        "F8_E4M3": torch.float8_e4m3fn,
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E8M0": torch.uint8,
        "I32": torch.int32,
        "I64": torch.int64,
    }
    | dict.fromkeys(gguf.BLOCKS, torch.uint8)
)
_PACKED_NVFP4 = {  # compressed-tensors -> ModelOpt; the global scales are the reciprocals
    "weight_packed": "weight",
    "weight_global_scale": "weight_scale_2",
    "input_global_scale": "input_scale",
}


Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint's files; shape and dtype are those after `change`."""

    file: Path
    name: str  # as the file has it
    shape: tuple[int, ...]
    dtype: str
    change: Change | None = None  # what is done to it before it is used
    offset: int | None = None  # of its bytes in the file, where they lie there as they are

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def read(self, file: Any) -> Tensor:
        """The tensor, from its opened file."""
        if (
            self.change is None and self.offset is not None
        ):  # mapped memory would count as ours until the file is closed
            plain = torch.empty(self.shape, dtype=DTYPES[self.dtype])
            self.read_into(plain)
            return plain
        tensor: Tensor = file.get_tensor(self.name)
        return self.change(tensor) if self.change else tensor

    def fills(self, target: Tensor) -> bool:
        """Whether its bytes are those of `target`: then read_into() will do, which needs no memory on its way."""
        plain = self.change is None and self.offset is not None and DTYPES[self.dtype] == target.dtype
        return plain and target.device.type == "cpu" and target.is_contiguous()

    def read_into(self, target: Tensor) -> None:
        """The bytes, from the file into the memory of `target`."""
        memory = target.reshape(-1).view(torch.uint8).numpy().data
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset or 0)
            while memory:
                count = file.readinto(memory)
                if not count:
                    raise CheckpointError(f"{self.file}: ends within {self.name}; fetch it again")
                memory = memory[count:]


def opened(file: Path) -> Any:
    """A file that can be read from: an object with get_tensor(name), to be used as a context."""
    return File(file) if file.suffix == ".gguf" else safe_open(file, framework="pt")


def read(stored: Stored) -> Tensor:
    with opened(stored.file) as file:
        return stored.read(file)


def named(folder: Path) -> Iterator[tuple[str, Stored]]:
    """The tensors of `folder` under the names they have in the network; GGUF files count if there are no others."""
    files = sorted(folder.glob("*.gguf"))
    if files and not any(folder.glob("*.safetensors")):
        yield from _of_gguf(files)
        return
    for stored in stored_tensors(folder):
        name = stored.name.removeprefix("language_model.")
        if name.startswith("model."):
            name = "backbone." + name.removeprefix("model.")
        if name.endswith((".experts.up_proj", ".experts.down_proj")):
            name += ".weight"
        matrix, _, leaf = name.rpartition(".")
        if leaf in _PACKED_NVFP4 and stored.dtype != "I32":
            name = f"{matrix}.{_PACKED_NVFP4[leaf]}"
            stored = replace(stored, change=torch.reciprocal if leaf.endswith("global_scale") else None)
        elif stored.dtype == "F8_E8M0":
            stored = replace(stored, change=lambda tensor: tensor.view(torch.uint8))
        yield name, stored


def stored_tensors(folder: Path) -> list[Stored]:
    """What the headers of the safetensors files of `folder` say, file by file; no weight is read."""
    index = folder / INDEX
    if index.exists():
        files = sorted({folder / str(file) for file in read_json(index).get("weight_map", {}).values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no {INDEX}, no *.safetensors and no *.gguf files; nothing else is read")
    found = []
    for file in files:
        try:
            offsets = _offsets(file)
            with safe_open(file, framework="pt") as header:
                for name in header.keys():  # noqa: SIM118 (not a dict)
                    tensor = header.get_slice(name)
                    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
                    found.append(Stored(file, name, shape, dtype, offset=offsets[name]))
        except FileNotFoundError:
            raise CheckpointError(f"{file}: no such file, but {INDEX} names it; the download is not complete") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{file}: damaged, or no safetensors file ({error}); fetch it again") from error
    return found


def _offsets(file: Path) -> dict[str, int]:
    """Where the bytes of each tensor begin: after 8 bytes with the length of a JSON header, and that header."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > file.stat().st_size:
            return {}  # damaged: safe_open says how
        header = json.loads(opened.read(size))
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    there = file.stat().st_size - 8 - size
    if cut := [name for name, (_, end) in spans.items() if end > there]:
        first = min(cut, key=lambda name: spans[name][0])
        missing = max(end for _, end in spans.values()) - there
        raise CheckpointError(
            f"{file}: damaged, ends within {first}: {missing:,} bytes and {len(cut) - 1} more tensors are missing;"
            " fetch it again"
        )
    return {name: 8 + size + start for name, (start, _) in spans.items()}


def _of_gguf(files: list[Path]) -> Iterator[tuple[str, Stored]]:
    """Of a model in one or several GGUF files.

    NVFP4 becomes the format of that name; other blocks stay as they are where the network can use them. Side tensors of
    a matrix are read together with it.
    """
    header = gguf.read_all(files)
    table = gguf.names(*gguf.pattern_of(header))
    heads = {"q_proj": header.get("attention.head_count"), "k_proj": header.get("attention.head_count_kv")}
    for there, info in header.tensors.items():
        name = table.get(there, there)
        matrix = name.removesuffix(".weight")
        rows: Change | None = None
        if matrix.endswith(("q_proj", "k_proj")):
            count = heads[matrix.rpartition(".")[2]]
            rows = partial(unrotate, heads=max(count) if isinstance(count, list) else count)
        match info.kind:
            case "F32" | "F16" | "BF16" if there.endswith((".scale", ".input_scale")) and _weight_of(there) in table:
                pass
            case "F32" | "F16" | "BF16":
                change = _from_a if name.endswith(".A_log") else rows
                yield name, Stored(info.file, there, _shape(name, info.shape), info.kind, change)
            case "NVFP4":
                *stack, n, k = info.shape
                weight, scale = (_after(from_nvfp4_blocks, itemgetter(i), rows) for i in (0, 1))
                yield name, Stored(info.file, there, (*stack, n, k // 2), "U8", weight)
                yield f"{matrix}.weight_scale", Stored(info.file, there, (*stack, n, k // 16), "F8_E4M3", scale)
                if side := header.tensors.get(there.removesuffix("weight") + "scale"):
                    global_scale = Stored(side.file, there.removesuffix("weight") + "scale", side.shape, side.kind)
                else:
                    global_scale = Stored(info.file, there, tuple(stack), "F32", partial(_ones, shape=tuple(stack)))
                yield f"{matrix}.weight_scale_2", global_scale
            case kind if matrix.endswith(gguf.DENSE):
                yield name, Stored(info.file, there, info.shape, "F32", partial(_values, format=Blocks(kind)))
            case kind:
                shape, _ = Blocks(kind).tensors(info.shape, torch.float32)["weight"]
                yield name, Stored(info.file, there, shape, kind, rows)


def rotate(rows: Tensor, heads: int) -> Tensor:
    """Rows of q_proj or k_proj in the order in which GGUF has them: pairs that a rotary embedding would turn together
    side by side. The model has no such embedding; the order is an inheritance."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def unrotate(rows: Tensor, heads: int) -> Tensor:
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _weight_of(side: str) -> str:
    return side.rpartition(".")[0] + ".weight"


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """GGUF has A_log and D as columns, the gated norm by groups, and no middle dimension in the convolution."""
    if name.endswith((".A_log", ".D", ".mixer.norm.weight")):
        return (prod(shape),)
    return (shape[0], 1, *shape[1:]) if name.endswith(".conv1d.weight") else shape


def _from_a(a: Tensor) -> Tensor:
    return (-a.float()).log()


def _ones(_: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.ones(shape)


def _values(blocks: Tensor, format: Blocks) -> Tensor:
    return format.dequantize({"weight": blocks}, torch.float32)


def _after(*changes: Callable[[Any], Any] | None) -> Change:
    def change(tensor: Any) -> Any:
        return reduce(lambda value, step: step(value), filter(None, changes), tensor)

    return change
