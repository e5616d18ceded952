"""From what --speculative-config came to, to a drafter for a model that is in place."""

from leyden.config.speculative import SpeculativeConfig
from leyden.errors import ConfigError
from leyden.model import draft_checkpoint
from leyden.model.nemotron import Nemotron
from leyden.spec.dflash import DFlash
from leyden.spec.drafter import Drafter
from leyden.spec.mtp import MTP
from leyden.spec.ngram import NGram


def load(config: SpeculativeConfig, model: Nemotron) -> Drafter:
    """The drafter of a settled `config`, in the model's dtype and on its device. Networks are read from their files.

    Raises ConfigError for a method that the model is not built for, CheckpointError for files that do not fit it.
    """
    width = config.num_speculative_tokens
    match config.method:
        case "mtp":
            return MTP(model, width)
        case "dflash" | "dspark":
            network = draft_checkpoint.load(config.folder, model).eval().requires_grad_(False)
            return DFlash(network, model, width, config.enable_adaptive_verification)
        case "ngram":
            return NGram(width, config.prompt_lookup_min, config.prompt_lookup_max)
    raise ConfigError(f"--speculative-config.method {config.method}: not yet")
