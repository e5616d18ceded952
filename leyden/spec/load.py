"""From what --speculative-config came to, to a drafter for a model that is in place."""

from leyden.cache.pool import DraftShape
from leyden.config.speculative import SpeculativeConfig
from leyden.errors import ConfigError
from leyden.model import draft_checkpoint
from leyden.model.nemotron import Nemotron
from leyden.spec.dflash import DFlash
from leyden.spec.drafter import Drafter
from leyden.spec.mtp import MTP
from leyden.spec.ngram import NGram


def load(config: SpeculativeConfig, model: Nemotron) -> tuple[Drafter, DraftShape]:
    """The drafter of a settled `config`, in the model's dtype and on its device, and the room it needs in the pool.

    Networks are read from their files; a model for method mtp must have been built with its MTP module. Raises
    CheckpointError for files that do not fit the model.
    """
    width = config.num_speculative_tokens
    match config.method:
        case "mtp":
            mtp = MTP(model, width)
            return mtp, DraftShape(width, mtp.lookahead, mtp_layers=model.config.mtp_pattern.count("*"))
        case "dflash" | "dspark":
            network = draft_checkpoint.load(config.folder, model).eval().requires_grad_(False)
            dflash, made = DFlash(network, model, width, config.enable_adaptive_verification), network.config
            layers = (made.num_hidden_layers, made.num_key_value_heads, made.head_dim)
            return dflash, DraftShape(width, dflash.lookahead, layers=layers)
        case "ngram":
            ngram = NGram(width, config.prompt_lookup_min, config.prompt_lookup_max)
            return ngram, DraftShape(width, ngram.lookahead)
    raise ConfigError(f"--speculative-config.method {config.method}: not yet")
