"""From what --speculative-config came to, to drafters for a model that is in place."""

from collections.abc import Sequence

from leyden.cache.pool import DraftShape
from leyden.config.model import ModelConfig
from leyden.config.speculative import SpeculativeConfig
from leyden.model import draft_checkpoint
from leyden.model.drafters import DrafterNetwork
from leyden.model.nemotron import Nemotron
from leyden.spec.dflash import DFlash
from leyden.spec.drafter import Drafter
from leyden.spec.mtp import MTP
from leyden.spec.ngram import NGram


def load(config: SpeculativeConfig, model: Nemotron) -> list[Drafter]:
    """The drafters of a settled `config`, in the model's dtype and on its device: one, but for method auto.

    Networks are read from their files; a model for method mtp must have been built with its MTP module. Raises
    CheckpointError for files that do not fit the model.
    """
    return [_load(method, config, model) for method in config.methods(model.config)]


def networks(drafters: Sequence[Drafter]) -> list[DrafterNetwork]:
    """Those that have weights of their own."""
    return [drafter.network for drafter in drafters if isinstance(drafter, DFlash)]


def _load(method: str, config: SpeculativeConfig, model: Nemotron) -> Drafter:
    width = config.num_speculative_tokens
    if method == "mtp":
        return MTP(model, width)
    if method == "ngram":
        return NGram(width, config.prompt_lookup_min, config.prompt_lookup_max)
    network = draft_checkpoint.load(config.folder, model).eval().requires_grad_(False)
    return DFlash(network, model, width, config.enable_adaptive_verification)


def room(config: SpeculativeConfig, target: ModelConfig) -> DraftShape:
    """What those drafters need of the pool."""
    width, methods, layers = config.num_speculative_tokens, config.methods(target), None
    if "dflash" in methods or "dspark" in methods:
        made = config.network()
        layers = made.num_hidden_layers, made.num_key_value_heads, made.head_dim
    mtp_layers = target.mtp_pattern.count("*") if "mtp" in methods else 0
    lookahead = max({"mtp": width - 1, "ngram": 1}.get(method, 0) for method in methods)
    return DraftShape(width, lookahead, mtp_layers, layers)
