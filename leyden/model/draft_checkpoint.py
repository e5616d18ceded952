"""Checkpoints of drafter networks: the layout of NVIDIA's releases, and what other exporters make of it.

Names may have the prefix `model.`; the parts of the Markov head may stand without `markov_head.` before them, and the
confidence head may be called `confidence_proj`. The files, not config.json, tell whether there is a confidence head and
an embedding table of the drafter's own. Names and shapes are strict otherwise; matrices stay in the format in which the
files hold them (the releases: NVFP4 for the large ones).
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from leyden.config.drafter import DrafterConfig
from leyden.errors import CheckpointError
from leyden.formats import Dense
from leyden.formats.scheme import describe
from leyden.log import get
from leyden.model.checkpoint import adopt, fill, matrices, misfits, some, write_json
from leyden.model.drafters import DrafterNetwork
from leyden.model.nemotron import Nemotron
from leyden.model.stored import Stored, named

log = get(__name__)

_FLAT = {  # prefix in a file -> prefix here
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "confidence_proj.": "confidence_head.proj.",
}


def load(folder: Path, target: Nemotron) -> DrafterNetwork:
    """The drafter of `folder` for `target`, in the target's dtype and on its device.

    It uses the target's embeddings if its files hold none. For a target on meta it has formats, but no values. Raises
    ConfigError for a config that cannot be drafted from, and CheckpointError for files that do not hold what it says or
    that belong to another target.
    """
    config, embeddings = DrafterConfig.from_folder(folder), target.backbone.embeddings
    needs = {"vocabulary": config.vocab_size, "hidden size": config.hidden_size}
    has = {"vocabulary": target.config.vocab_size, "hidden size": target.config.hidden_size}
    layers = len(target.config.pattern)
    if needs != has or config.target_layer_ids[-1] >= layers:
        raise CheckpointError(
            f"{folder} is a drafter for another target: it needs {needs} and the layers {config.target_layer_ids};"
            f" the target has {has} and {layers} layers, the first of them 0"
        )
    files = _named(folder)
    config = replace(config, confidence=None)
    if head := files.get("confidence_head.proj.weight"):
        config = replace(config, confidence="hidden" if head.shape[-1] == config.hidden_size else "markov")
    network = DrafterNetwork(config, embeddings.dtype, next(target.parameters()).device)
    shared = "embed_tokens.weight" not in files
    if shared:
        del network.embed_tokens
    adopt(network, files)
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
    _check(folder, parameters, files)
    if shared:
        network.embed_tokens = embeddings
    if embeddings.parts["weight"].is_meta:
        return network
    fill(parameters, {name: files[name] for name in parameters}, progress=False)
    # The one kind of damage that verification hides: drafts would be noise, and answers right but slow.
    if not network.fc.dense().any():
        raise CheckpointError(f"{folder}: fc.weight is all zeros; the file was not written properly")
    return network


def save(network: DrafterNetwork, folder: Path) -> None:
    """Write config.json and model.safetensors as the releases have them: names, BF16 for what is not quantised."""
    folder.mkdir(parents=True, exist_ok=True)
    formats = {name: weight.format for name, weight in matrices(network)}
    tensors = {}
    for name, parameter in network.named_parameters():
        plain = formats.get(name.rpartition(".")[0], Dense()) == Dense()
        tensors[name] = parameter.detach().to("cpu", torch.bfloat16 if plain else None).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = describe(formats)
    config = network.config.to_dict() | ({"quantization_config": quantization} if quantization else {})
    write_json(folder / "config.json", config)


def _named(folder: Path) -> dict[str, Stored]:
    """The tensors of the files, by the names they have here."""
    found: dict[str, Stored] = {}
    flat = set()
    for name, stored in named(folder):
        name = name.removeprefix("backbone.")  # what named() makes of `model.`
        prefix = next((prefix for prefix in _FLAT if name.startswith(prefix)), "")
        name = _FLAT.get(prefix, "") + name.removeprefix(prefix)
        if name in found:
            log.warning("%s: %s is there under two names; the flat one is used", folder, name)
        if name not in flat:
            found[name] = stored
        if prefix:
            flat.add(name)
    return found


def _check(folder: Path, parameters: Mapping[str, Tensor], files: Mapping[str, Stored]) -> None:
    problems: dict[str, list[str]] = defaultdict(list)
    problems["missing"] = [name for name in parameters if name not in files]
    problems["unexpected"] = [stored.name for name, stored in files.items() if name not in parameters]
    for name in parameters.keys() & files.keys():
        for kind, problem in misfits(name, files[name], parameters[name]):
            problems[kind].append(problem)
    if any(problems.values()):
        lines = [f"  {kind} ({len(names)}): {some(names)}" for kind, names in problems.items() if names]
        raise CheckpointError("\n".join([f"{folder}: the weights do not fit config.json", *lines]))
