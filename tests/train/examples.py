"""A tiny model and tiny examples for the tests of training."""

from dataclasses import replace

import numpy as np
import torch

from leyden.model.nemotron import Nemotron
from leyden.train.batches import Corpus
from leyden.train.init import initialize
from tests.batches import SMALL

CONFIG = replace(SMALL, num_nextn_predict_layers=1, mtp_pattern="*E")


def corpus(count: int, seed: int = 0, shortest: int = 5, longest: int = 40) -> Corpus:
    """Random walks over ids with a random prompt part: something that can be learned by heart."""
    draw = np.random.default_rng(seed)
    examples = []
    for _ in range(count):
        length = int(draw.integers(shortest, longest))
        tokens = draw.integers(0, CONFIG.vocab_size, length)
        examples.append((tokens.tolist(), (np.arange(length) >= draw.integers(1, length)).tolist()))
    return Corpus.collect(examples)


def model(seed: int = 0, dtype: torch.dtype = torch.float32, mtp: bool = True) -> Nemotron:
    made = Nemotron(CONFIG, dtype, mtp=mtp)
    initialize(made, seed)
    return made
