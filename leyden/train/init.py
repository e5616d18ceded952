"""Initial weights of a model that is trained from nothing."""

from math import log

import torch
from torch import nn

from leyden.errors import ConfigError
from leyden.model.nemotron import Nemotron

_OUT = ("out_proj.weight", "o_proj.weight", "down_proj.weight", "fc2_latent_proj.weight")  # they write to the residual


@torch.no_grad()
def initialize(model: Nemotron, seed: int) -> None:
    """Fill every parameter, the same way on every device.

    Matrices normal with variance 1 / fan-in (for the released models about their initializer_range of 0.02), those that
    write to the residual stream divided by the root of the number of layers; dt log-uniform in [1e-3, 1e-1] and
    A uniform in [1, 16] as in Mamba-2 (state-spaces/mamba).
    """
    draw = torch.Generator().manual_seed(seed)
    layers = len(model.config.pattern)
    for name, parameter in model.named_parameters():
        parameter.copy_(_values(name, parameter, layers, draw))


def _values(name: str, like: nn.Parameter, layers: int, draw: torch.Generator) -> torch.Tensor:
    shape = like.shape
    last = name.rpartition(".")[2]
    if last == "A_log":
        return torch.empty(shape).uniform_(1, 16, generator=draw).log()
    if last == "dt_bias":
        dt = torch.empty(shape).uniform_(log(1e-3), log(1e-1), generator=draw).exp()
        return dt.expm1().log()  # inverse of softplus
    if last == "D" or name.endswith(("norm.weight", "norm_f.weight", "layernorm.weight")):
        return torch.ones(shape)
    if last in ("bias", "e_score_correction_bias"):
        return torch.zeros(shape)
    if name.endswith("conv1d.weight"):
        reach = shape[-1] ** -0.5
        return torch.empty(shape).uniform_(-reach, reach, generator=draw)
    if name.endswith(("embeddings.weight", "lm_head.weight")):
        return torch.empty(shape).normal_(0, 0.02, generator=draw)
    if name.endswith(("_proj.weight", "gate.weight")):
        scale = layers**-0.5 if name.endswith(_OUT) else 1.0
        return torch.empty(shape).normal_(0, scale * shape[-1] ** -0.5, generator=draw)
    raise ConfigError(f"no initial values are known for {name}: can a quantised model be trained?")
