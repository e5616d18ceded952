"""Functions of packages that leyden does without: looked for when a flag names their kernels, and never before.

What cannot be used is a ConfigError: what was asked for, what was found, what to do.
"""

import inspect
from collections.abc import Collection
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any

from leyden.errors import ConfigError


def find(flag: str, package: str, module: str, name: str, parameters: Collection[str] = ()) -> Any:
    """What `module` calls `name`, which may have dots. If there are `parameters`, it is called with just those.

    `flag` is what asks for it, `package` what one installs to have it. A package that has changed since is noticed
    here, by the names of the parameters, not when the first request comes.
    """
    root = module.partition(".")[0]
    try:
        found = attrgetter(name)(import_module(module))
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == root:
            raise ConfigError(f"{flag}: {package} is not installed; install it, or leave the flag away") from None
        raise ConfigError(
            f"{flag}: {installed(package)} has no {module}.{name} that can be used ({error}); install what is missing"
            " or another version, or leave the flag away"
        ) from None
    if parameters:
        try:
            inspect.signature(found).bind(**dict.fromkeys(parameters))
        except TypeError as error:
            raise ConfigError(
                f"{flag}: {module}.{name} of {installed(package)} takes other parameters than those known here"
                f" ({error}); install another version, or leave the flag away"
            ) from None
    return found


def installed(package: str) -> str:
    """Name and version."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package
