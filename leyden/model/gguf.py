"""Writes a model as a GGUF file, in the arrangement of llama.cpp's converter (conversion/nemotron.py).

Every matrix in one kind, as far as the kind can hold it; vectors, the router and the convolution in F32. NVFP4 matrices
of the source are copied, others rounded. Reading is the loader's business: leyden.model.stored.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from leyden.config import gguf
from leyden.config.folder import read_json
from leyden.config.model import ModelConfig
from leyden.errors import CheckpointError, ConfigError
from leyden.formats import Dense
from leyden.formats.gguf import Blocks, to_nvfp4_blocks
from leyden.formats.nvfp4 import NVFP4
from leyden.model.source import Source
from leyden.model.stored import FLOATS, rotate

KINDS = tuple(gguf.FILE_TYPES)


@dataclass(frozen=True)
class Entry:
    """One tensor of the file; `chunks` makes its bytes, piece by piece."""

    shape: tuple[int, ...]
    kind: str
    chunks: Callable[[], Iterator[Tensor]]


def write(source: Source, path: Path, kind: str, progress: bool = True) -> dict[str, Entry]:
    """Write the whole file; returns what is in it. With `progress`, a bar of bytes on stderr.

    It grows under the name PATH.part. A run that was cut off is taken up after the last tensor that was written, if the
    .part file begins as this one would. Beyond the largest matrix no memory is needed.
    """
    found = entries(source, kind)
    name = source.folder.name
    info = metadata(source.config, name, kind) | _sampling(source.folder)
    info |= _tokenizer(source.folder, source.config.vocab_size)
    head = BytesIO()
    starts = gguf.write(head, info, {name: (entry.shape, entry.kind) for name, entry in found.items()})
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        part.open("a+b") as file,
        tqdm(total=starts[-1], unit="B", unit_scale=True, desc=f"Writing {path.name}", disable=not progress) as bar,
    ):
        size = file.tell()
        file.seek(0)
        if file.read(len(head.getvalue())) != head.getvalue():
            file.truncate(0)
            file.write(head.getvalue())
            size = file.tell()
        for start, entry in zip(starts, found.values(), strict=True):
            end = start + gguf.tensor_bytes(entry.shape, entry.kind)
            if size < end:
                file.truncate(min(size, start))
                file.write(bytes(start - min(size, start)))  # up to the alignment
                for chunk in entry.chunks():
                    file.write(chunk.numpy())  # type: ignore[arg-type]
                size = end
            bar.update(start - bar.n)
    part.rename(path)
    return found


def entries(source: Source, kind: str) -> dict[str, Entry]:
    """The tensors of the file by their names, in the order in which they are written.

    ConfigError if the file cannot hold the model: a kind that is not written, or a dense layer beside MoE layers.
    """
    if kind not in KINDS:
        raise ConfigError(f"GGUF files can be written in {', '.join(KINDS)}; found {kind}")
    config = source.config
    table = {here: there for there, here in gguf.names(config.pattern, config.num_nextn_predict_layers > 0).items()}
    quantised = any(format != Dense() for format in source.formats.values())
    found: dict[str, Entry] = {}
    for unit, is_matrix in source.units():
        if not is_matrix:
            found[table[unit]] = _vector(source, unit)
            continue
        before, _, after = unit.partition(".experts.")
        if after and not after.startswith("0."):
            continue  # of a stack, which is written as a whole
        members = [unit]
        if after:
            members = [f"{before}.experts.{i}.{after[2:]}" for i in range(config.n_routed_experts)]
            unit = f"{before}.experts.{after[2:]}"
        there, held = table[f"{unit}.weight"], _kind(source, members[0], kind, quantised)
        stack = (len(members),) if after else ()
        shape = (*stack, *source.shapes[members[0]])
        found[there] = Entry(shape, held, partial(_all, members, partial(_matrix, source, held)))
        if held == "NVFP4":
            side = there.removesuffix("weight") + "scale"
            found[side] = Entry(stack or (1,), "F32", partial(_all, members, partial(_scale, source)))
    return found


def _kind(source: Source, matrix: str, kind: str, quantised: bool) -> str:
    """The kind of one matrix. Embeddings and head lose most by rounding, so they stay at 8 bits and more."""
    rows = source.shapes[matrix][1]
    if kind == "NVFP4":
        spared = matrix.startswith("mtp.") or matrix.endswith(("embeddings", "q_proj", "k_proj", "v_proj", "o_proj"))
        good = isinstance(source.formats[matrix], NVFP4) if quantised else not spared
        # llama.cpp takes no scales for projections into and out of a latent space
        kind = "NVFP4" if good and not matrix.endswith("latent_proj") else "BF16"
    elif kind == "Q4_0" and matrix in ("backbone.embeddings", "lm_head"):
        kind = "Q8_0"
    return kind if rows % gguf.KINDS[kind].size == 0 else "BF16"


def _vector(source: Source, name: str) -> Entry:
    """A tensor that is no matrix, in F32: A in place of its logarithm, the gated norm by groups."""
    shape, _ = source.spec(name)
    if name.endswith((".A_log", ".D")):
        shape = (*shape, 1)
    elif name.endswith(".mixer.norm.weight"):
        shape = (source.config.n_groups, shape[0] // source.config.n_groups)
    elif name.endswith(".conv1d.weight"):
        shape = (shape[0], shape[2])

    def chunks() -> Iterator[Tensor]:
        value = source.tensor(name).float()
        yield _bytes(-value.exp() if name.endswith(".A_log") else value)

    return Entry(shape, "F32", chunks)


def _all(names: list[str], make: Callable[[str], Tensor]) -> Iterator[Tensor]:
    return map(make, names)


def _matrix(source: Source, kind: str, name: str) -> Tensor:
    if kind == "NVFP4":
        stored = _nvfp4(source, name)
        return _bytes(_rows(source, name, to_nvfp4_blocks(stored["weight"], stored["weight_scale"])))
    values = _rows(source, name, source.values(name))
    if kind in gguf.FLOATS:
        return _bytes(values.to(FLOATS[kind]))
    return Blocks(kind).quantize(values)["weight"].flatten()


def _nvfp4(source: Source, name: str) -> dict[str, Tensor]:
    if isinstance(source.formats[name], NVFP4):
        return source.stored(name)
    return NVFP4(four_over_six=True).quantize(source.values(name))


def _scale(source: Source, name: str) -> Tensor:
    return _bytes(_nvfp4(source, name)["weight_scale_2"])


def _rows(source: Source, name: str, values: Tensor) -> Tensor:
    config = source.config
    if name.endswith("q_proj"):
        return rotate(values, config.num_attention_heads)
    return rotate(values, config.num_key_value_heads) if name.endswith("k_proj") else values


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().flatten().view(torch.uint8)


def metadata(config: ModelConfig, name: str, kind: str) -> dict[str, Any]:
    """The metadata of a file for a model of this config, as llama.cpp's converter writes it; nothing of a tokenizer."""
    letters = config.pattern + ("+" if config.num_nextn_predict_layers else "")  # + is the MTP block: both at once
    moe = "E" in config.pattern
    architecture = gguf.ARCHITECTURES[moe]
    dense = iter(config.intermediate_sizes)
    widths = [
        config.moe_intermediate_size if letter in "E+" else next(dense) if letter == "-" else 0 for letter in letters
    ]
    keys = {
        "block_count": len(letters),
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": widths,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads if letter in "*+" else 0 for letter in letters],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_inner,
        "ssm.time_step_rank": config.mamba_num_heads,
    }
    if moe:
        keys |= {
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_shared_count": int(config.shared_expert_width > 0),
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_width,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
        if config.moe_latent_size:
            keys["moe_latent_size"] = config.moe_latent_size
        if config.num_nextn_predict_layers:
            keys["nextn_predict_layers"] = config.num_nextn_predict_layers
    general = {"architecture": architecture, "type": "model", "name": name, "quantization_version": 2}
    general["file_type"] = gguf.FILE_TYPES[kind]
    return {f"general.{key}": value for key, value in general.items()} | {
        f"{architecture}.{key}": value for key, value in keys.items()
    }


def _tokenizer(folder: Path, vocab_size: int) -> dict[str, Any]:
    """What a file says about the tokenizer of a checkpoint folder: llama.cpp's view of it, and tokenizer.json whole."""
    tokenizer, config = read_json(folder / "tokenizer.json"), read_json(folder / "tokenizer_config.json")
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE":
        raise CheckpointError(f"{folder}: tokenizer.json must hold a BPE model, found {model.get('type')}")
    added = {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    tokens = {id: token for token, id in model["vocab"].items()} | {id: t["content"] for id, t in added.items()}
    if max(tokens) >= vocab_size:
        raise CheckpointError(f"{folder}: the tokenizer has {max(tokens) + 1} tokens, the model {vocab_size}")
    types = [gguf.NORMAL if id in tokens else gguf.UNUSED for id in range(vocab_size)]
    for id, token in added.items():
        types[id] = gguf.CONTROL if token["special"] else gguf.USER
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "pixtral",
        "tokenizer.ggml.tokens": [tokens.get(id, f"[PAD{id}]") for id in range(vocab_size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }
    ids = {token: id for id, token in tokens.items()}
    for role, name in gguf.ROLES.items():
        token = config.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            keys[f"tokenizer.ggml.{name}_token_id"] = ids[token]
    if (template := folder / "chat_template.jinja").exists():
        keys["tokenizer.chat_template"] = template.read_text(encoding="utf-8")
    elif isinstance(config.get("chat_template"), str):
        keys["tokenizer.chat_template"] = config["chat_template"]
    keys["tokenizer.huggingface.json"] = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    return {key: value for key, value in keys.items() if value != []}


def _sampling(folder: Path) -> dict[str, Any]:
    """What generation_config.json recommends, if there is one."""
    path = folder / "generation_config.json"
    found = read_json(path) if path.exists() else {}
    return {key: found[name] for key, name in gguf.SAMPLING.items() if found.get(name) is not None}
