"""Runs texts through a model one layer at a time, and looks at what its matrices are multiplied with.

Only one layer's weights are in memory, and the residual streams of all texts. Texts come as JSON lines, each a
conversation ({"messages": [...], "tools": [...]}), a plain text ({"text": ...}) or token ids ({"token_ids": [...]}).
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leyden import ops
from leyden.errors import CheckpointError, LeydenError
from leyden.formats import Weight
from leyden.model.context import Context
from leyden.ops.registry import Op
from leyden.text.template import ChatTemplate, normalise
from leyden.text.tokenizer import Tokenizer

_BATCH = 8192  # tokens that go through a layer together, at least one text
_ROWS = 512  # of logits in memory


def read(path: Path, folder: Path, samples: int, length: int) -> list[list[int]]:
    """Token ids of the first `samples` texts of a file, cut after `length` tokens.

    CheckpointError names the line that cannot be used. `folder` gives the tokenizer and the chat template.
    """
    tokenizer = Tokenizer.from_folder(folder)
    template: ChatTemplate | None = None
    found: list[list[int]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if len(found) == samples:
            break
        if not line.strip():
            continue
        try:
            match json.loads(line):
                case {"messages": list(messages), **rest}:
                    tools: Any = rest.get("tools")
                    template = template or ChatTemplate.from_folder(folder, tokenizer)
                    ids = template.encode(normalise(messages), tools, add_generation_prompt=False)
                case {"text": str(text)}:
                    ids = tokenizer.encode(text, add_special_tokens=True)
                case {"token_ids": [int(), *_] as ids}:
                    pass
                case _:
                    raise ValueError("expected messages, text or token_ids")
        except (ValueError, LeydenError) as error:
            raise CheckpointError(f"{path}, line {number}: {error}") from None
        if ids:
            found.append(ids[:length])
    if not found:
        raise CheckpointError(f"{path}: no texts")
    return found


@dataclass
class Moments:
    """Of the inputs of one matrix [N, K], over all tokens that it saw.

    largest   the largest magnitude
    squares   fp32 [K]: the sum of x^2
    products  fp32 [K, K]: the sum of x x^T, if it was asked for
    """

    squares: Tensor
    products: Tensor | None
    tokens: int = 0
    largest: float = 0.0

    def add(self, inputs: Tensor) -> None:
        """inputs [T, K]"""
        if not len(inputs):
            return
        inputs = inputs.float()
        self.tokens += len(inputs)
        self.largest = max(self.largest, inputs.abs().max().item())
        self.squares += inputs.square().sum(0)
        if self.products is not None:
            self.products += inputs.T @ inputs


class Watch:
    """Collects the moments of every matrix below `module`, while ops run under ops.watching(watch).

    moments   name (the checkpoint's: each expert by itself) -> Moments
    outputs   name -> largest magnitude of what came out, of those in `outputs_of`
    """

    def __init__(self, prefix: str, module: nn.Module, products: Callable[[str], bool], outputs_of: Iterable[str] = ()):
        names = {id(part): name for name, part in module.named_modules() if isinstance(part, Weight)}
        self._names = {key: f"{prefix}.{name}" if name else prefix for key, name in names.items()}
        self._products = products
        self._outputs_of = tuple(outputs_of)
        self.moments: dict[str, Moments] = {}
        self.outputs: dict[str, float] = {}

    def __call__(self, op: Op, args: tuple[Any, ...]) -> None:
        for weight, expert, inputs in _products(op.name, args):
            if (name := self._names.get(id(weight))) is None:
                continue
            name = name if expert is None else name.replace(".experts.", f".experts.{expert}.")
            if name not in self.moments:
                k, device = inputs.shape[-1], inputs.device
                products = torch.zeros(k, k, device=device) if self._products(name) else None
                self.moments[name] = Moments(torch.zeros(k, device=device), products)
            self.moments[name].add(inputs)
            if name.endswith(self._outputs_of or ("\0",)):
                largest = F.linear(inputs, weight.dense()).abs().max().item()
                self.outputs[name] = max(self.outputs.get(name, 0.0), largest)


def _products(op: str, args: tuple[Any, ...]) -> Iterator[tuple[Weight, int | None, Tensor]]:
    """(weight, which of its stack, what it is multiplied with [T, K]) of the products in one op."""
    match op, args:
        case "linear", (x, weight):
            yield weight, None, x.flatten(0, -2)
        case "mlp", (x, up, down):
            yield up, None, x
            yield down, None, F.relu(F.linear(x, up.dense())).square()
        case "experts", (x, ids, _, up, down):
            for expert, matrix in enumerate(up.dense()):
                inputs = x[(ids == expert).any(-1)]
                yield up, expert, inputs
                yield down, expert, F.relu(F.linear(inputs, matrix)).square()
        case "moe", (x, ids, weights, up, down, shared_up, shared_down):
            yield from _products("experts", (x, ids, weights, up, down))
            yield from _products("mlp", (x, shared_up, shared_down))


Stream = list[Tensor]  # residual streams, a tensor [T, H] for each batch of texts


class Texts:
    """Texts in batches, as contexts of the network."""

    def __init__(self, sequences: list[list[int]], device: torch.device):
        self.ids: list[Tensor] = []
        self.contexts: list[Context] = []
        self.sequences, self.tokens = len(sequences), sum(map(len, sequences))
        batch: list[list[int]] = []
        for sequence in [*sequences, None]:
            if batch and (sequence is None or sum(map(len, batch)) + len(sequence) > _BATCH):
                self.ids.append(torch.tensor([id for one in batch for id in one], device=device))
                self.contexts.append(Context.packed([len(one) for one in batch], device))
                batch = []
            if sequence is not None:
                batch.append(sequence)

    @torch.no_grad()
    def embed(self, embeddings: Weight) -> Stream:
        return [ops.embed(ids, embeddings) for ids in self.ids]

    @torch.no_grad()
    def through(self, layer: Any, stream: Stream) -> Stream:
        """The streams after a layer of the network."""
        return [x + layer.mixer(layer.norm(x), ctx) for x, ctx in zip(stream, self.contexts, strict=True)]

    @torch.no_grad()
    def logits(self, norm: Any, head: Weight, stream: Stream) -> Iterator[tuple[Tensor, Tensor]]:
        """(fp32 logits [T, V], ids of the tokens that come next [T], -1 at the ends), a few hundred rows at a time."""
        for x, ctx, ids in zip(stream, self.contexts, self.ids, strict=True):
            following = ids.roll(-1)
            following[(ctx.wide.starts[1:] - 1).long()] = -1
            for rows, targets in zip(x.split(_ROWS), following.split(_ROWS), strict=True):
                yield ops.linear(norm(rows), head).float(), targets
