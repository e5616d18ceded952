"""Where a checkpoint lies, and its JSON files. No torch: the API process reads them too."""

import json
from pathlib import Path
from typing import Any

from leyden.config import gguf
from leyden.errors import CheckpointError

_FILES = ["*.json", "*.jinja", "*.safetensors"]
_SHIPPED = Path(__file__).parent.parent / "pocket"
# What the package brings along, by the name it is asked for.
SHIPPED = {"pocket": "model", "pocket-nvfp4": "nvfp4", "pocket-dflash": "dflash", "pocket-dspark": "dspark"}


def resolve(model: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint: `model` itself, what a GGUF file amounts to, what the package ships under that name,
    or the local copy of a Hugging Face repository, fetched if needed.

    Raises CheckpointError if there is no such folder and nothing by that name can be had from the hub.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf":
        return gguf.unpack(folder)
    if str(model) in SHIPPED:
        return _SHIPPED / SHIPPED[str(model)]
    if folder.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") != 1:
        raise CheckpointError(
            f"model {str(model)!r}: no such folder (a Hugging Face id has the form owner/name; "
            f"with the package come {', '.join(SHIPPED)})"
        )

    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), revision=revision, allow_patterns=_FILES))
    except Exception as error:  # of the hub, of HTTP, of the disk: whatever it was, the answer is the same
        at = f" (revision {revision})" if revision else ""
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(
            f"model {str(model)!r}{at} is no folder here, and the Hugging Face hub did not give it: {reason}\n"
            f"Check the name, the network, HF_TOKEN and HF_HUB_OFFLINE; or run `hf download {model}` where there is"
            " access and pass the folder that it prints"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; `Infinity` and `NaN` are read as Python's json reads them.

    Raises CheckpointError if the file is missing, is not JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint folder must hold {path.name}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, found {type(value).__name__}")
    return value
