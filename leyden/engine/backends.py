"""Kernels of other packages that flags name: --mamba-backend, --moe-backend and --linear-backend.

They are chosen here, once, at the start, for one model: its Mamba layers get another step, its matrices a format that
has kernels of the package. What no flag names runs as it does otherwise, and so does another engine beside this one.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec

import torch

from leyden import log
from leyden.cache.pool import Pool
from leyden.config.engine import EngineConfig
from leyden.errors import ConfigError
from leyden.formats import Dense, Weight
from leyden.model.context import Context
from leyden.model.mamba import Mamba
from leyden.model.nemotron import Nemotron
from leyden.ops import flashinfer
from leyden.ops.rows import Rows

Change = Callable[[Nemotron], None]

logger = log.get(__name__)


def named(config: EngineConfig, device: torch.device) -> dict[str, Change]:
    """What the flags that name kernels do to a model once it is loaded, by flag. Elsewhere than on CUDA it is nothing:
    the packages have no kernels there. Where a package is missing it is a line in the log: published commands run
    everywhere, and leyden's own kernels do the same.

    ConfigError if a package cannot be used that is there.
    """
    found: dict[str, Change] = {}
    if config.mamba_ssu_algorithm is not None and config.mamba_backend != "flashinfer":
        flag = f"--mamba-ssu-algorithm {config.mamba_ssu_algorithm}"
        raise ConfigError(f"{flag} is a variant of flashinfer's kernel: it needs --mamba-backend flashinfer")
    if device.type != "cuda":
        return found
    for (field, value), (package, module, prepare) in _KNOWN.items():
        if getattr(config, field) == value:
            flag = f"--{field.replace('_', '-')} {value}"
            if module not in sys.modules and find_spec(module) is None:
                logger.warning("%s: %s is not installed, leyden's own kernels run", flag, package)
            else:
                found[flag] = prepare(flag, config)
    return found


def apply(changes: Mapping[str, Change], model: Nemotron) -> None:
    """ConfigError if there is nothing in the model that the kernels of a flag could do."""
    for change in changes.values():
        change(model)
    if changes and torch.cuda.is_available():
        torch.cuda.empty_cache()  # what matrices took before they were laid out anew is room for the cache


@torch.inference_mode()
def try_out(changes: Mapping[str, Change], model: Nemotron, pool: Pool) -> None:
    """One step of a row of padding: kernels are compiled now, not when the first request waits.

    ConfigError if that fails.
    """
    if not changes:
        return
    flags, device = " ".join(changes), pool.committed.device
    logger.info("trying %s; a package that compiles its kernels may take minutes", flags)
    zeros = torch.zeros(1, dtype=torch.int32, device=device)
    starts = torch.arange(2, dtype=torch.int32, device=device)
    wide = Rows((), starts[:1], zeros[:0], zeros[:0], pool.tables[:0])
    ctx = Context(Rows((1,), starts, zeros, zeros, pool.tables[:1]), wide, zeros, pool)
    try:
        model.logits(model(zeros.long(), ctx)[0]).cpu()
    except Exception as error:
        message = f"{flags}: a step fails ({type(error).__name__}: {str(error).strip()}); leave the flags away"
        raise ConfigError(message) from error


def _flashinfer_step(flag: str, config: EngineConfig) -> Change:
    return partial(_take_step, flag, flashinfer.step(flag, config.mamba_ssu_algorithm or "auto"))


def _take_step(flag: str, step: Callable[..., torch.Tensor], model: Nemotron) -> None:
    flashinfer.check_limit(flag, model.config.time_step_limit)
    for layer in model.modules():
        if isinstance(layer, Mamba):
            layer.step = step


def _flashinfer_experts(flag: str, config: EngineConfig) -> Change:
    flashinfer.register_experts(flag)
    return partial(_mark, flag)


def _mark(flag: str, model: Nemotron) -> None:
    dense = [weight for group in _groups(model, 3) for weight in group if weight.format == Dense()]
    if not all(weight.dtype in (torch.bfloat16, torch.float16) for weight in dense) or not dense:
        raise ConfigError(f"{flag} is for experts in 16 bits, and those of this model are {_stored(model, 3)}")
    for weight in dense:
        weight.format = flashinfer.Cutlass()


def _humming(dimensions: int, flag: str, config: EngineConfig) -> Change:
    from leyden.ops import humming  # needs Triton, which CPUs do without

    make = humming.find_layer(flag)
    humming.register()

    def change(model: Nemotron) -> None:
        fitting = [group for group in _groups(model, dimensions) if all(map(humming.fits, group))]
        if not fitting:
            kind = f"nvfp4 for 16-bit activations, of a multiple of {humming.COLUMNS} columns"
            raise ConfigError(f"{flag} is for matrices in {kind}; this model's are {_stored(model, dimensions)}")
        for weight in (weight for group in fitting for weight in group):
            humming.lay(weight, make)

    return change


def _groups(model: Nemotron, dimensions: int) -> Iterator[list[Weight]]:
    """The matrices (2 dimensions) or stacks of experts (3), those of one module together: ops take them together."""
    for module in model.modules():
        children = (child for child in module.children() if isinstance(child, Weight))
        group = [child for child in children if len(child.shape) == dimensions]
        if group and model.backbone.embeddings not in group:
            yield group


def _stored(model: Nemotron, dimensions: int) -> str:
    kinds = {
        f"{w.format.name} ({w.dtype})".replace("torch.", "") for group in _groups(model, dimensions) for w in group
    }
    return ", ".join(sorted(kinds)) or "none"


# by field and value: the package, its module, and what makes the change
_KNOWN: dict[tuple[str, str], tuple[str, str, Callable[[str, EngineConfig], Change]]] = {
    ("mamba_backend", "flashinfer"): ("flashinfer-python", "flashinfer", _flashinfer_step),
    ("moe_backend", "flashinfer_cutlass"): ("flashinfer-python", "flashinfer", _flashinfer_experts),
    ("moe_backend", "humming"): ("humming-kernels", "humming", partial(_humming, 3)),
    ("linear_backend", "humming"): ("humming-kernels", "humming", partial(_humming, 2)),
}
