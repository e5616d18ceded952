"""A checkpoint read matrix by matrix, for conversions: a weight is read when somebody asks for it.

Strict like leyden.model.checkpoint.load, and for the same files.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leyden.config.folder import resolve
from leyden.config.model import ModelConfig
from leyden.formats import Dense, Format
from leyden.model.checkpoint import build, cache_scales, each, match, matrices, tensors_of
from leyden.model.stored import opened


class Source:
    """folder     where the files are
    config     what config.json says
    model      the network on meta, every matrix in the format in which the files hold it
    shapes     matrix -> shape, each expert by itself, in the order of the network
    formats    matrix -> format
    """

    def __init__(self, name: str | Path):
        """ConfigError or CheckpointError if the files are not a whole model of this family."""
        self.folder = resolve(name)
        self.config = ModelConfig.from_folder(self.folder)
        self.dtype: torch.dtype = getattr(torch, self.config.dtype)
        self.model = build(self.config, self.dtype, "meta", self.config.num_nextn_predict_layers > 0)
        self._stored = match(self.model, self.folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.formats: dict[str, Format] = {}
        for name, weight in matrices(self.model):
            for matrix in each(name, weight):
                self.shapes[matrix], self.formats[matrix] = weight.shape[-2:], weight.format
        self._targets = dict(tensors_of(self.model))
        self._open = ExitStack()
        self._files: dict[Path, Any] = {}
        self._stack: tuple[str, Tensor] | None = None  # the last stack of experts that was read

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def units(self) -> Iterator[tuple[str, bool]]:
        """(name, whether it is a matrix) of everything in the model, in the order of the network."""
        seen = set()
        for name in self._targets:
            matrix = name.rpartition(".")[0]
            unit = matrix if matrix in self.shapes else name
            if unit not in seen:
                seen.add(unit)
                yield unit, unit in self.shapes

    def spec(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a tensor that is no matrix, as the network has it."""
        return tuple(self._targets[name].shape), self._targets[name].dtype

    def tensor(self, name: str) -> Tensor:
        """One tensor of the network, in the dtype of the file."""
        target = self._targets[name]
        if name in self._stored:
            return self._read(name).reshape(target.shape)
        before, _, after = name.partition(".experts.")
        index, _, leaf = after.partition(".")
        whole = f"{before}.experts.{leaf}"
        if self._stack is None or self._stack[0] != whole:
            self._stack = whole, self._read(whole)
        return self._stack[1][int(index)].reshape(target.shape)

    def stored(self, matrix: str) -> dict[str, Tensor]:
        """The tensors of a matrix, in its format."""
        leaves = self.formats[matrix].tensors(self.shapes[matrix], self.dtype)
        return {leaf: self.tensor(f"{matrix}.{leaf}") for leaf in leaves}

    def values(self, matrix: str) -> Tensor:
        """A matrix in the dtype of the file if it is dense, in fp32 if it is quantised."""
        tensors = self.stored(matrix)
        if self.formats[matrix] == Dense():
            return tensors["weight"]
        return self.formats[matrix].dequantize(tensors, torch.float32)

    def module(self, name: str, device: torch.device, formats: Mapping[str, Format], made: Mapping[str, Tensor]) -> Any:
        """A part of the network, such as `backbone.layers.3`, on a device: with the tensors of `made`, in `formats`,
        and those of the files for what is not in them."""
        module = copy.deepcopy(self.model.get_submodule(name))
        for inner, weight in matrices(module):
            first = each(f"{name}.{inner}".removesuffix("."), weight)[0]
            if first in formats and formats[first] != weight.format:
                weight.allot(formats[first], torch.device("meta"))
        module.to_empty(device=device)
        for inner, target in tensors_of(module):
            full = f"{name}.{inner}"
            target.copy_(made[full] if full in made else self.tensor(full))
        return module.requires_grad_(False)

    def cache_scales(self) -> dict[str, Tensor]:
        return dict(cache_scales(self.model))

    def _read(self, name: str) -> Tensor:
        stored = self._stored[name]
        if stored.file not in self._files:
            self._files[stored.file] = self._open.enter_context(opened(stored.file))
        return stored.read(self._files[stored.file])
