"""The kernels' library: C sources, compiled by the system's compiler when they are first needed.

The result stays in the user's cache folder under a name that is a hash of everything it depends on: sources, flags,
compiler and processor. Without a compiler, or with one that fails, there is no library: the references run.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from leyden import log

logger = log.get(__name__)

SOURCES = Path(__file__).parent
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math"]
_NATIVE = {"aarch64": "-mcpu=native", "arm64": "-mcpu=native"}  # GCC on ARM calls it so; -march=native elsewhere


def library() -> ctypes.CDLL | None:
    """The library, compiled if it is not in the cache; None, and one line in the log, if that cannot be done.

    The compiler is $CC, which may carry flags of its own, or what the system calls cc.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        logger.info("no C compiler found: the CPU runs the reference kernels, many times slower; install gcc or clang")
        return None
    name, *own = shlex.split(compiler)
    command = [name, *FLAGS, _NATIVE.get(platform.machine(), "-march=native"), *own]
    try:
        version = subprocess.run([name, "--version"], capture_output=True, check=True).stdout
        file = _folder() / f"cpu-{_key(command, version)}.so"
        if not file.exists():
            _compile(command, file)
        return ctypes.CDLL(str(file))
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None)
        reason = said.decode(errors="replace").strip().splitlines()[:1] if said else [str(error)]
        logger.info("the CPU kernels could not be built, the reference kernels run: %s", "".join(reason))
        return None


def _compile(command: list[str], file: Path) -> None:
    """Into a file of another name first: another process may be doing the same."""
    started = time.monotonic()
    logger.info("compiling the CPU kernels (once for this machine)")
    sources = sorted(str(path) for path in SOURCES.glob("*.c"))
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        subprocess.run([*command, *sources, "-o", str(made), "-lm"], capture_output=True, check=True)
        os.replace(made, file)
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - started)


def _key(command: list[str], version: bytes) -> str:
    digest = hashlib.sha256(version + "\0".join([*command, _processor()]).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What decides which instructions -march=native means."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _folder() -> Path:
    """$XDG_CACHE_HOME/leyden, or a folder that lasts for this process if that cannot be written."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leyden"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="leyden-"))
