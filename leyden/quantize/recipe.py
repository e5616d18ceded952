"""Which matrix of a model gets which format.

    nvfp4             as NVIDIA's Nano NVFP4: experts, shared experts, Mamba projections that are not next to attention
    lightning-nvfp4   as NVIDIA's Lightning NVFP4: experts, shared experts and head NVFP4, Mamba projections FP8
    fp8               as NVIDIA's Nano FP8: FP8 where nvfp4 has NVFP4
    w4a16             4-bit integers where nvfp4 has NVFP4

Embeddings, router, attention and the MTP module stay as they are in all of them: they are small, and errors there cost
most. Activations stay BF16, but for the FP8 matrices, which get a scale for their inputs if texts were given.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from leyden.config.model import ModelConfig
from leyden.errors import ConfigError
from leyden.formats import Dense, Format
from leyden.formats.fp8 import FP8
from leyden.formats.int4 import Int4
from leyden.formats.nvfp4 import NVFP4


@dataclass(frozen=True)
class Recipe:
    """format   (part of the model, shape) -> format; parts are those of `part_of`
    fp8_cache   keys and values are meant to be kept in FP8
    """

    name: str
    format: Callable[[str, tuple[int, ...]], Format]
    fp8_cache: bool = False

    def choose(self, matrix: str, shape: tuple[int, ...], config: ModelConfig) -> Format:
        """Dense where the recipe leaves a matrix alone, or where the format cannot hold its shape."""
        format = self.format(part_of(matrix, config), shape)
        try:
            format.tensors(shape, torch.bfloat16)
        except ConfigError:
            return Dense()
        return format


def part_of(matrix: str, config: ModelConfig) -> str:
    """experts, shared, latent, dense, mamba, "mamba before attention", attention, head, embeddings or mtp."""
    if matrix.startswith("mtp."):
        return "mtp"
    if matrix in ("lm_head", "backbone.embeddings"):
        return {"lm_head": "head"}.get(matrix, "embeddings")
    layer, name = int(matrix.split(".")[2]), matrix.rpartition(".")[2]
    match config.pattern[layer]:
        case "M":
            return "mamba before attention" if config.pattern[layer + 1 : layer + 2] == "*" else "mamba"
        case "*":
            return "attention"
        case "-":
            return "dense"
    if "latent" in name:
        return "latent"
    return "experts" if ".experts." in matrix else "shared"


_COMMON = ("experts", "shared", "latent", "dense", "mamba")


def recipe(name: str, four_over_six: bool = True, group: int = 64, static: bool = False) -> Recipe:
    """The recipe of that name; ConfigError if there is none.

    four_over_six   how NVFP4 chooses its scales: see leyden.formats.nvfp4
    group           columns of w4a16 that share a scale; fewer where rows do not divide into groups
    static          whether scales of the inputs of FP8 matrices will be known
    """
    nvfp4, fp8 = NVFP4(four_over_six=four_over_six), FP8(input_scale=static)

    def uniform(format: Format) -> Callable[[str, tuple[int, ...]], Format]:
        return lambda part, shape: format if part in _COMMON else Dense()

    def lightning(part: str, shape: tuple[int, ...]) -> Format:
        if part.startswith("mamba"):
            return fp8
        return nvfp4 if part in (*_COMMON, "head") else Dense()

    def integers(part: str, shape: tuple[int, ...]) -> Format:
        size = next((size for size in (group, 32) if shape[-1] % size == 0), None)
        return Int4(size) if part in _COMMON else Dense()

    recipes = {
        "nvfp4": Recipe("nvfp4", uniform(nvfp4), fp8_cache=True),
        "lightning-nvfp4": Recipe("lightning-nvfp4", lightning, fp8_cache=True),
        "fp8": Recipe("fp8", uniform(fp8), fp8_cache=True),
        "w4a16": Recipe("w4a16", integers),
    }
    if name not in recipes:
        raise ConfigError(f"--recipe must be one of {', '.join(RECIPES)}; found {name}")
    return recipes[name]


NAMES = ("nvfp4", "lightning-nvfp4", "fp8", "w4a16")
GGUF = ("gguf-f32", "gguf-f16", "gguf-bf16", "gguf-q8_0", "gguf-q4_0", "gguf-nvfp4")
RECIPES = (*NAMES, *GGUF)
