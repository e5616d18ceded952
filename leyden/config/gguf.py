"""GGUF files but for their numbers: what the header says, and the checkpoint folder that it amounts to.

    read     file -> header: metadata, and a table of tensors
    write    the other way round
    names    tensors of this family as GGUF calls them -> as a checkpoint calls them
    unpack   file -> folder with config.json, tokenizer.json, chat_template.jinja and a link to the file

Read is version 2 and 3, little-endian, split files too. Refused are other architectures than `nemotron_h` and
`nemotron_h_moe`, and vocabularies that are no byte-level BPE. The layout is that of ggml-org/llama.cpp (docs/gguf.md
and the converter's conversion/nemotron.py). No torch: the API process opens models too.
"""

import hashlib
import json
import mmap
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from leyden.errors import CheckpointError

MAGIC = b"GGUF"
ALIGNMENT = 32
ARCHITECTURES = ("nemotron_h", "nemotron_h_moe")


@dataclass(frozen=True)
class Kind:
    """A way of storing numbers: `size` of them in `bytes`, known in files by `id`."""

    id: int
    size: int = 1
    bytes: int = 1


KINDS = {
    "F32": Kind(0, 1, 4),
    "F16": Kind(1, 1, 2),
    "BF16": Kind(30, 1, 2),
    "Q4_0": Kind(2, 32, 18),
    "Q4_1": Kind(3, 32, 20),
    "Q5_0": Kind(6, 32, 22),
    "Q5_1": Kind(7, 32, 24),
    "Q8_0": Kind(8, 32, 34),
    "Q4_K": Kind(12, 256, 144),
    "Q5_K": Kind(13, 256, 176),
    "Q6_K": Kind(14, 256, 210),
    "IQ4_NL": Kind(20, 32, 18),
    "MXFP4": Kind(39, 32, 17),
    "NVFP4": Kind(40, 64, 36),
}
FLOATS = ("F32", "F16", "BF16")
BLOCKS = tuple(kind for kind in KINDS if kind not in (*FLOATS, "NVFP4"))  # kept as they are
# Dense in memory, whatever a file has: embeddings are looked up row by row, and the router is computed in fp32
# (the converter quantises that of the MTP block).
DENSE = ("embeddings", "mixer.gate")
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32, "NVFP4": 39}  # general.file_type
SAMPLING = {  # metadata -> generation_config.json
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
}
_BY_ID = {kind.id: name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies. `shape` as torch counts, outermost first (GGUF writes it the other way round)."""

    shape: tuple[int, ...]
    kind: str
    file: Path
    offset: int  # in the file

    @property
    def bytes(self) -> int:
        return tensor_bytes(self.shape, self.kind)


def tensor_bytes(shape: Sequence[int], kind: str) -> int:
    return prod(shape) // KINDS[kind].size * KINDS[kind].bytes


@dataclass(frozen=True)
class Header:
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def get(self, key: str, default: Any = None) -> Any:
        """Of the keys that begin with the architecture's name."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}", default)


# Values of the metadata: code -> struct letter; 8 is a string, 9 an array.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read(path: Path) -> Header:
    """CheckpointError if the file is damaged, or holds tensors of a kind that is not read."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content, path).header()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: damaged, or no GGUF file ({error})") from error


class _Reader:
    def __init__(self, content: mmap.mmap, path: Path):
        self.content, self.path, self.at = content, path, 0

    def header(self) -> Header:
        if self.content[:4] != MAGIC:
            raise CheckpointError(f"{self.path}: no GGUF file: it begins with {self.content[:4]!r}")
        self.at = 4
        version, tensors, entries = self.unpack("I"), self.unpack("Q"), self.unpack("Q")
        if version not in (2, 3):
            raise CheckpointError(f"{self.path}: GGUF version must be 2 or 3 (little-endian), found {version}")
        metadata = {self.string(): self.value(self.unpack("I")) for _ in range(entries)}
        infos = {}
        for _ in range(tensors):
            name = self.string()
            shape = tuple(reversed([self.unpack("Q") for _ in range(self.unpack("I"))]))
            infos[name] = shape, self.unpack("I"), self.unpack("Q")
        alignment = metadata.get("general.alignment", ALIGNMENT)
        data = -(-self.at // alignment) * alignment
        table = {name: self.tensor(name, shape, kind, data + offset) for name, (shape, kind, offset) in infos.items()}
        return Header(metadata, table)

    def tensor(self, name: str, shape: tuple[int, ...], id: int, offset: int) -> Tensor:
        kind = _BY_ID.get(id)
        if kind is None:
            raise CheckpointError(f"{self.path}: {name} is stored as type {id}; read are {', '.join(KINDS)}")
        if shape[-1] % KINDS[kind].size:
            raise CheckpointError(f"{self.path}: {name} has rows of {shape[-1]}, which {kind} cannot hold")
        found = Tensor(shape, kind, self.path, offset)
        if offset + found.bytes > len(self.content):
            raise CheckpointError(
                f"{self.path}: {name} ends at {offset + found.bytes}, the file at {len(self.content)}"
            )
        return found

    def unpack(self, letter: str) -> Any:
        (value,) = struct.unpack_from("<" + letter, self.content, self.at)
        self.at += struct.calcsize("<" + letter)
        return value

    def string(self) -> str:
        size = self.unpack("Q")
        self.at += size
        return self.content[self.at - size : self.at].decode()

    def value(self, code: int) -> Any:
        if code == _STRING:
            return self.string()
        if code == _ARRAY:
            code, count = self.unpack("I"), self.unpack("Q")
            if code in _SCALARS:
                values = struct.unpack_from(f"<{count}{_SCALARS[code]}", self.content, self.at)
                self.at += struct.calcsize(f"<{count}{_SCALARS[code]}")
                return list(values)
            return [self.value(code) for _ in range(count)]
        if code not in _SCALARS:
            raise CheckpointError(f"{self.path}: metadata of type {code}, which GGUF does not have")
        return self.unpack(_SCALARS[code])


def write(file: BinaryIO, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> list[int]:
    """The header of a file with these tensors (shape, kind); returns where each of them has to be written.

    Whole numbers are stored as u32, or i32 in lists; floats as f32.
    """
    parts = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), _value(value)]
    offset, offsets = 0, []
    for name, (shape, kind) in tensors.items():
        offsets.append(offset)
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts += [_string(name), dimensions, struct.pack("<IQ", KINDS[kind].id, offset)]
        offset += -(-tensor_bytes(shape, kind) // ALIGNMENT) * ALIGNMENT
    head = b"".join(parts)
    head += bytes(-len(head) % ALIGNMENT)
    file.write(head)
    return [len(head) + offset for offset in offsets]


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", _STRING) + _string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(value)}i", _ARRAY, 5, len(value), *value)
    raise ValueError(f"GGUF metadata cannot hold {value!r}")


# Tensors of a layer, by what kind of layer it is; experts are stacked in GGUF as they are in memory.
_LAYERS = {
    "M": {
        "ssm_in.weight": "mixer.in_proj.weight",
        "ssm_conv1d.weight": "mixer.conv1d.weight",
        "ssm_conv1d.bias": "mixer.conv1d.bias",
        "ssm_dt.bias": "mixer.dt_bias",
        "ssm_a": "mixer.A_log",
        "ssm_d": "mixer.D",
        "ssm_norm.weight": "mixer.norm.weight",
        "ssm_out.weight": "mixer.out_proj.weight",
    },
    "*": {
        "attn_q.weight": "mixer.q_proj.weight",
        "attn_k.weight": "mixer.k_proj.weight",
        "attn_v.weight": "mixer.v_proj.weight",
        "attn_output.weight": "mixer.o_proj.weight",
    },
    "E": {
        "ffn_gate_inp.weight": "mixer.gate.weight",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_exps.weight": "mixer.experts.up_proj.weight",
        "ffn_down_exps.weight": "mixer.experts.down_proj.weight",
        "ffn_up_shexp.weight": "mixer.shared_experts.up_proj.weight",
        "ffn_down_shexp.weight": "mixer.shared_experts.down_proj.weight",
        "ffn_latent_down.weight": "mixer.fc1_latent_proj.weight",
        "ffn_latent_up.weight": "mixer.fc2_latent_proj.weight",
    },
    "-": {"ffn_up.weight": "mixer.up_proj.weight", "ffn_down.weight": "mixer.down_proj.weight"},
}
_TELLS = {"ssm_in.weight": "M", "attn_q.weight": "*", "ffn_up_exps.weight": "E", "ffn_up.weight": "-"}
_OUTSIDE = {
    "token_embd.weight": "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
# The two layers of the MTP module are one block here, after those of the backbone.
_MTP = {
    "nextn.enorm.weight": "0.enorm.weight",
    "nextn.hnorm.weight": "0.hnorm.weight",
    "nextn.eh_proj.weight": "0.eh_proj.weight",
    "attn_norm.weight": "0.norm.weight",
    "post_attention_norm.weight": "1.norm.weight",
    "nextn.shared_head_norm.weight": "1.final_layernorm.weight",
}


def names(pattern: str, mtp: bool) -> dict[str, str]:
    """Name in a GGUF file -> name in a checkpoint, of everything that a model may have; no model has all of it."""
    table = dict(_OUTSIDE)
    for i, letter in enumerate(pattern):
        table[f"blk.{i}.attn_norm.weight"] = f"backbone.layers.{i}.norm.weight"
        table |= {f"blk.{i}.{there}": f"backbone.layers.{i}.{here}" for there, here in _LAYERS[letter].items()}
    if mtp:
        layers = _MTP | {there: f"0.{here}" for there, here in _LAYERS["*"].items()}
        layers |= {there: f"1.{here}" for there, here in _LAYERS["E"].items()}
        table |= {f"blk.{len(pattern)}.{there}": f"mtp.layers.{here}" for there, here in layers.items()}
    return table


def pattern_of(header: Header) -> tuple[str, bool]:
    """(letters of the layers, whether there is an MTP block), by the tensors of each block."""
    blocks, mtp = header.get("block_count", 0), header.get("nextn_predict_layers", 0)
    letters = ""
    for i in range(blocks - mtp):
        kinds = [letter for tell, letter in _TELLS.items() if f"blk.{i}.{tell}" in header.tensors]
        if len(kinds) != 1:
            raise CheckpointError(f"blk.{i} must hold one of {', '.join(_TELLS)}; found {len(kinds)} of them")
        letters += kinds[0]
    return letters, mtp > 0


def files(path: Path) -> list[Path]:
    """`path`, and its companions if the file is split (`name-00001-of-00003.gguf`)."""
    split = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if not split:
        return [path]
    return [path.with_name(f"{split[1]}-{i:05}-of-{split[3]}.gguf") for i in range(1, int(split[3]) + 1)]


def read_all(paths: Sequence[Path]) -> Header:
    """The header of a model in one or several files; the metadata is that of the first."""
    headers = [read(path) for path in paths]
    return Header(headers[0].metadata, {name: info for header in headers for name, info in header.tensors.items()})


def unpack(path: Path) -> Path:
    """The folder for a GGUF file, in the user's cache; made once, and again when the file has changed.

    CheckpointError if the file is damaged, of another architecture, or has a vocabulary of another kind.
    """
    path = path.absolute()
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    stat = path.stat()
    key = hashlib.sha256(f"1 {path} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leyden" / "gguf"
    folder = cache / f"{path.stem}-{key}"
    if folder.is_dir():
        return folder
    header = read_all(files(path))
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{path}: architecture must be {' or '.join(ARCHITECTURES)}, found {architecture}")
    cache.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=cache))
    try:
        contents = tokenizer_files(header) | {"config.json": config_of(header)}
        if sampling := {SAMPLING[key]: header.metadata[key] for key in SAMPLING if key in header.metadata}:
            contents["generation_config.json"] = {"do_sample": True} | sampling
        for name, content in contents.items():
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            (making / name).write_text(text, encoding="utf-8")
        for part in files(path):
            (making / part.name).symlink_to(part)
        making.rename(folder)
    except OSError:
        if not folder.is_dir():  # somebody else was faster
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def config_of(header: Header) -> dict[str, Any]:
    """The config.json that a file amounts to; how its matrices are stored goes into quantization_config."""
    pattern, mtp = pattern_of(header)
    table, tensors = names(pattern, mtp), header.tensors
    shapes = {table[name]: info.shape for name, info in tensors.items() if name in table}
    kv_heads = header.get("attention.head_count_kv", 0)
    eps = header.get("attention.layer_norm_rms_epsilon", header.get("attention.layer_norm_epsilon"))
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "torch_dtype": "float32" if tensors["token_embd.weight"].kind == "F32" else "bfloat16",
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "vocab_size": shapes["backbone.embeddings.weight"][0],
        "hidden_size": header.get("embedding_length"),
        "max_position_embeddings": header.get("context_length"),
        "layer_norm_epsilon": None if eps is None else float(f"{eps:.6g}"),  # stored in 32 bits
        "tie_word_embeddings": "output.weight" not in tensors,
        "num_attention_heads": header.get("attention.head_count"),
        "num_key_value_heads": max(kv_heads) if isinstance(kv_heads, list) else kv_heads,
        "head_dim": header.get("attention.key_length"),
        "mamba_num_heads": header.get("ssm.time_step_rank"),
        "mamba_head_dim": header.get("ssm.inner_size", 0) // header.get("ssm.time_step_rank", 1),
        "n_groups": header.get("ssm.group_count"),
        "ssm_state_size": header.get("ssm.state_size"),
        "conv_kernel": header.get("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith("conv1d.bias") for name in shapes),
        "intermediate_size": [shapes[f"backbone.layers.{i}.mixer.up_proj.weight"][0] for i in _positions(pattern, "-")],
        "n_routed_experts": header.get("expert_count"),
        "num_experts_per_tok": header.get("expert_used_count"),
        "moe_intermediate_size": header.get("expert_feed_forward_length"),
        "moe_latent_size": header.get("moe_latent_size"),
        "norm_topk_prob": header.get("expert_weights_norm"),
        "routed_scaling_factor": header.get("expert_weights_scale"),
        "n_group": header.get("expert_group_count"),
        "topk_group": header.get("expert_group_used_count"),
        "num_nextn_predict_layers": int(mtp),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": header.metadata.get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": _ends(header),
        "quantization_config": {"quant_method": "gguf", "kinds": _kinds(header, table)},
    }
    if "E" in pattern:
        shared = shapes.get(f"backbone.layers.{pattern.index('E')}.mixer.shared_experts.up_proj.weight", (0,))[0]
        config |= {"n_shared_experts": int(shared > 0), "moe_shared_expert_intermediate_size": shared}
    return {key: value for key, value in config.items() if value not in (None, [])}


def _positions(pattern: str, letter: str) -> list[int]:
    return [i for i, other in enumerate(pattern) if other == letter]


def _kinds(header: Header, table: Mapping[str, str]) -> dict[str, str]:
    """Matrix, as the checkpoint calls it (the first of a stack) -> kind, of those that are quantised in memory."""
    kinds = {}
    for name, info in header.tensors.items():
        here = table.get(name, "").removesuffix(".weight")
        if info.kind not in FLOATS and here and not here.endswith(DENSE):
            kinds[here.replace(".experts.", ".experts.0.")] = info.kind
    return kinds


def _ends(header: Header) -> list[int]:
    """The tokens that end a turn: those that the file names, and </s>."""
    found = [header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    tokens = header.metadata.get("tokenizer.ggml.tokens", ())
    found += [id for id, token in enumerate(tokens[:1000]) if token == "</s>"]
    return list(dict.fromkeys(id for id in found if id is not None))


# How llama.cpp splits text before merging, by tokenizer.ggml.pre. Nemotron 3 files say "pixtral", and llama.cpp splits
# for that as LLaMA 3 does.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = dict.fromkeys(("pixtral", "llama-bpe", "llama3", "llama-v3"), _LLAMA_3)
NORMAL, UNKNOWN, CONTROL, USER, UNUSED = 1, 2, 3, 4, 5
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_files(header: Header) -> dict[str, Any]:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, by name.

    A file may carry a whole tokenizer.json (ours do); otherwise it is put together from tokens and merges.
    """
    metadata = header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or not tokens:
        raise CheckpointError(
            f"the vocabulary must be a byte-level BPE (tokenizer.ggml.model gpt2), found"
            f" {metadata.get('tokenizer.ggml.model')}"
        )
    ids = {role: metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in ROLES.items()}
    special = {role: tokens[id] for role, id in ids.items() if id is not None}
    found = {"tokenizer_config.json": special | {"tokenizer_class": "PreTrainedTokenizerFast"}}
    found["tokenizer.json"] = metadata.get("tokenizer.huggingface.json") or _tokenizer(metadata, special)
    if template := metadata.get("tokenizer.chat_template"):
        found["chat_template.jinja"] = template
    return found


def _tokenizer(metadata: Mapping[str, Any], special: Mapping[str, str]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    split = metadata.get("tokenizer.ggml.pre", "")
    if split not in _SPLITS:
        raise CheckpointError(f"tokenizer.ggml.pre must be one of {', '.join(_SPLITS)}; found {split!r}")
    added = [
        {"id": id, "content": token, "special": type != USER, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for id, (token, type) in enumerate(zip(tokens, types, strict=True))
        if type in (UNKNOWN, CONTROL, USER)
    ]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _SPLITS[split]}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {token: id for id, token in enumerate(tokens) if types[id] != UNUSED},
            "merges": [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges", ())],
            "ignore_merges": True,
        },
    }
    if metadata.get("tokenizer.ggml.add_bos_token", True) and (bos := special.get("bos_token")):
        id = metadata["tokenizer.ggml.bos_token_id"]
        start, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        second = {"Sequence": {"id": "B", "type_id": 0}}
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [start, text],
            "pair": [start, text, second],
            "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
        }
    return tokenizer
