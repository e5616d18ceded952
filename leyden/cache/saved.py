"""The cache in a file: what the index knows and the bytes it speaks of, so that sessions outlive the process.

    "leyden cache 1" and a line end | length of the header, 8 bytes little-endian | header, JSON | pages | states
    | checksum, 16 bytes

The header holds the identity (of the model, its weights and the layout: a state means something to these alone), the
tree and the snapshots, the most valuable first. Then come the pages of the nodes and the partial pages of the
snapshots, in the header's order, then the states. The checksum (blake2b) is over everything before it.

save() writes a new file and puts it in the place of the old one when it is complete: whoever is killed leaves the old
one. load() believes nothing: a file that is damaged, cut off, foreign or of another version is left alone, with one
log line. The file holds token ids and salts of the requests as they are; only its owner may read it.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from leyden import log
from leyden.cache.pool import Pool
from leyden.cache.prefix import PrefixCache
from leyden.cache.store import Store, page_bytes, put_pages, put_states, state_bytes, take_pages, take_states
from leyden.errors import ConfigError

logger = log.get(__name__)

NAME = "cache.leyden"
_MAGIC = b"leyden cache 1\n"
_BLOCK = 256  # pages or states that are copied at once
_CHECKSUM = 16
_TELL = 5.0  # seconds between two lines about how far it is


def identity(model: nn.Module, pool: Pool) -> dict[str, Any]:
    """What a file must have been made with: the model's configuration, some of each weight's bytes, and the layout."""
    config = hashlib.blake2b(repr(getattr(model, "config", "")).encode(), digest_size=16).hexdigest()
    weights = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        values = tensor.detach().reshape(-1)
        some = values[:: max(1, len(values) // 61)].contiguous().cpu().view(torch.uint8).numpy().tobytes()
        weights.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + some)
    arrays = [(str(a.dtype), a.shape[0], *a.shape[2:]) for a in pool.states]
    arrays += [(str(a.dtype), a.shape[0], *a.shape[3:]) for a in pool.paged]
    weights.update(str([(m.k_scale, m.v_scale) for m in model.modules() if hasattr(m, "k_scale")]).encode())
    if any(getattr(module, "eight_above", inf) < inf for module in model.modules()):
        weights.update(b"prompts with activations in 8 bits")
    return {"config": config, "weights": weights.hexdigest(), "arrays": [list(array) for array in arrays]}


def check_folder(folder: Path) -> None:
    """Whether save() can write there: better known at the start than at the end. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"--cache-dir {folder} cannot be written ({error.strerror}); name a folder that can be"
        raise ConfigError(message) from None


def save(folder: Path, made_with: dict[str, Any], cache: PrefixCache, pool: Pool, store: Store | None) -> None:
    """Write what `cache` holds, with a line now and then. Nothing may be under way on the device. Raises OSError."""
    started = told = time.monotonic()
    if store is not None:
        store.synchronize()
    nodes, snapshots = cache.contents()
    numbers = {id(node): number for number, node in enumerate(nodes)}
    header = {
        "identity": made_with,
        "page": cache.page,
        "nodes": [[numbers.get(id(node.parent), -1), list(node.tokens)] for node in nodes],
        "snapshots": [[numbers[id(s.node)], list(s.tail), s.length, s.hits] for s in snapshots],
    }
    pages = [(node.page, node.far) for node in nodes if node.page or node.far]
    pages += [(s.page, s.far_page) for s in snapshots if s.tail]
    states = [(s.slot, s.far_slot) for s in snapshots]
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / NAME
    new = folder / f".{NAME}.{os.getpid()}"
    far_pages, far_states = (None, None) if store is None else (store.pages, store.states)
    digest = hashlib.blake2b(digest_size=_CHECKSUM)
    size = len(pages) * sum(page_bytes(pool)) + len(states) * sum(state_bytes(pool))
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:

            def write(data: bytes | memoryview) -> None:
                nonlocal told
                digest.update(data)
                file.write(data)
                if time.monotonic() - told > _TELL:
                    told = time.monotonic()
                    logger.info("saving the cache: %.1f of %.1f GiB", file.tell() / 2**30, size / 2**30)

            text = json.dumps(header, separators=(",", ":")).encode()
            write(_MAGIC + len(text).to_bytes(8, "little") + text)
            for block in _blocks(pages):
                write(_bytes(_gather(block, partial(take_pages, pool), far_pages)))
            for block in _blocks(states):
                write(_bytes(_gather(block, partial(take_states, pool), far_states)))
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, target)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    logger.info("cache saved to %s: %d states, %d pages, %.1f s", target, len(states), len(pages), _since(started))


def load(folder: Path, made_with: dict[str, Any], cache: PrefixCache, pool: Pool, store: Store | None) -> bool:
    """Take in what a file holds, as far as there is room, into a cache that is empty; False: nothing was taken."""
    started = time.monotonic()
    path = folder / NAME
    for left in folder.glob(f".{NAME}.*"):  # of a process that was killed while it saved
        left.unlink(missing_ok=True)
    try:
        header, begin = _checked(path)
        if header["identity"] != made_with:
            raise ValueError("it was made with another model, or with other settings of the cache")
        if header["page"] != cache.page:
            raise ValueError(f"its pages have {header['page']} tokens, --block-size says {cache.page}")
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the saved cache %s is ignored: %s", path, error)
        return False
    width = sum(page_bytes(pool))
    tails = sum(bool(tail) for _, tail, *_ in header["snapshots"])
    count = sum(parent >= 0 for parent, _ in header["nodes"]) + tails
    pages = np.memmap(path, np.uint8, "r", begin, (count, width)) if count else np.empty((0, width), np.uint8)
    shape = (len(header["snapshots"]), sum(state_bytes(pool)))
    states = np.memmap(path, np.uint8, "r", begin + pages.size, shape) if shape[0] else np.empty(shape, np.uint8)

    placed_pages, placed_states = cache.insert(header["nodes"], header["snapshots"])
    far_pages, far_states = (None, None) if store is None else (store.pages, store.states)
    for saved, placed, put, far_rows in (
        (pages, placed_pages, put_pages, far_pages),
        (states, placed_states, put_states, far_states),
    ):
        for block in _blocks(placed):
            rows = torch.from_numpy(saved[[row for row, _, _ in block]])
            near = [i for i, (_, place, _) in enumerate(block) if place]
            put(pool, [block[i][1] for i in near], rows[near].to(pool.kv.device))
            for i, (_, _, far) in enumerate(block):
                if far and far_rows is not None:
                    far_rows[far] = rows[i]
    taken = len(placed_states)
    logger.info("cache read from %s: %d of %d states, %.1f s", path, taken, shape[0], _since(started))
    return taken > 0


def _checked(path: Path) -> tuple[dict[str, Any], int]:
    """(header, where the data begins) of a file whose checksum is right."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest, left = hashlib.blake2b(digest_size=_CHECKSUM), size - _CHECKSUM
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it is not a cache of this version of leyden")
        file.seek(0)
        for block in _stream(file, left):
            digest.update(block)
        if left < 0 or file.read(_CHECKSUM) != digest.digest():
            raise ValueError("it is damaged: the checksum is wrong")
        file.seek(len(_MAGIC))
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), len(_MAGIC) + 8 + length


def _stream(file: BinaryIO, left: int) -> Iterator[bytes]:
    while left > 0 and (block := file.read(min(left, 1 << 22))):
        left -= len(block)
        yield block


def _blocks(entries: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(entries), _BLOCK):
        yield entries[start : start + _BLOCK]


def _gather(block: list[tuple[int, int]], take: Callable[[list[int]], Tensor], far_rows: Tensor | None) -> Tensor:
    """Rows of (place on the device, place in the tier): one of the two is 0."""
    near = [i for i, (place, _) in enumerate(block) if place]
    taken = take([block[i][0] for i in near]).cpu()
    rows = torch.empty(len(block), taken.shape[1], dtype=torch.uint8)
    rows[near] = taken
    for i, (_, far) in enumerate(block):
        if far and far_rows is not None:
            rows[i] = far_rows[far]
    return rows


def _bytes(rows: Tensor) -> memoryview:
    return rows.numpy().data.cast("B")


def _since(started: float) -> float:
    return time.monotonic() - started
