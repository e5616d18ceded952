"""The parameters of a loaded network as one file, which the next start maps instead of reading the checkpoint again.

Nothing is copied then: memory is filled when a kernel first touches it, processes on one machine share it, and the
system takes it back when it needs room. Weights that are quantised while they are loaded, or put together from many
tensors, are so prepared once. Written in large pieces, the file lies in large pages of memory, which kernels read
fastest.

Images are for the CPU, and for networks of some size. They live in the user's cache folder under a name that is a hash
of what they depend on: the files of the checkpoint, their sizes and times, and what became of them. A new image of a
checkpoint replaces the old one, and of all images the latest few that were used are kept. Refused, with a line in the
log, where it would take more than half of the free disk. `--safetensors-load-strategy eager` does without.
"""

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from leyden import ops
from leyden.log import get

log = get(__name__)

LEAST = 64 * 2**20  # bytes of parameters: smaller ones load in no time
MOST = 4  # images; the one that was not used for the longest time goes
_LAYOUT = 1  # of the file; a new number makes old images useless
_ALIGNMENT = 64  # bytes
_PIECE = 32 * 2**20  # bytes that are written at a time


class Image:
    """The image of `model`, whose parameters come from `files`, after `change` (say, a quantisation)."""

    def __init__(self, model: nn.Module, files: Iterable[Path], change: str):
        self._model = model
        self._offsets: dict[str, int] = {}
        self.bytes = 0
        digest = hashlib.sha256(f"{_LAYOUT} {change}".encode())
        for name, parameter in model.named_parameters():
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
            self._offsets[name] = self.bytes
            self.bytes += math.ceil(parameter.nbytes / _ALIGNMENT) * _ALIGNMENT
        paths = sorted(path.resolve() for path in set(files))
        for path in paths:
            status = path.stat()
            digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
        self._of = hashlib.sha256("\n".join(map(str, [change, *paths])).encode()).hexdigest()[:12]
        self.file = _folder() / f"{self._of}-{digest.hexdigest()[:16]}.weights"

    def map(self) -> bool:
        """Make the parameters views of the file. False: there is none."""
        try:
            if self.file.stat().st_size != self.bytes:
                return False
            # Private: what is written into a parameter later stays in this process.
            whole = torch.from_file(str(self.file), shared=False, size=self.bytes, dtype=torch.uint8)
            os.utime(self.file)  # used now
        except (OSError, RuntimeError):
            return False
        ops.prepare([whole])
        for name, parameter in self._model.named_parameters():
            at = self._offsets[name]
            parameter.data = whole[at : at + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        return True

    def write(self) -> None:
        """Write the file, or say why not: loading worked without it."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if 2 * self.bytes > (free := shutil.disk_usage(self.file.parent).free):
                log.info(
                    "the weights are not kept for the next start: %s has %.1f GiB left", self.file.parent, free / 2**30
                )
                return
            for stale in self.file.parent.glob(f"{self._of}-*.weights"):
                stale.unlink(missing_ok=True)
            self._drop_old()
            with tempfile.NamedTemporaryFile(dir=self.file.parent, delete=False, buffering=0) as file:
                try:
                    for piece in _pieces(self._model.parameters()):
                        file.write(piece)
                    os.fsync(file.fileno())
                    os.replace(file.name, self.file)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            log.info("the weights are not kept for the next start: %s", error)
            return
        log.info("kept the weights for the next start: %s, %.2f GiB", self.file, self.bytes / 2**30)

    def _drop_old(self) -> None:
        """Make room for one more. Whoever has mapped an image keeps it: only its name goes."""
        kept = sorted(self.file.parent.glob("*.weights"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in kept[MOST - 1 :]:
            file.unlink(missing_ok=True)
            log.info("removed weights that were kept for a start that did not come: %s", file)


def _pieces(parameters: Iterable[Tensor]) -> Iterator[memoryview]:
    """All bytes, padding included, in pieces of one size."""
    piece, filled = torch.zeros(_PIECE, dtype=torch.uint8), 0
    for parameter in parameters:
        flat = parameter.detach().reshape(-1).view(torch.uint8)
        padding = torch.zeros(-len(flat) % _ALIGNMENT, dtype=torch.uint8)
        for part in (flat, padding):
            while len(part):
                count = min(len(part), _PIECE - filled)
                piece[filled : filled + count] = part[:count]
                part, filled = part[count:], filled + count
                if filled == _PIECE:
                    yield piece.numpy().data
                    filled = 0
    if filled:
        yield piece[:filled].numpy().data


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leyden" / "weights"
