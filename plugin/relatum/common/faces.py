"""Lazy imports of a package's names, so that unused modules do not slow the start."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def imported_later(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package.

    Args:
        package: The package's `__name__`.
        homes: The module that defines each name to import later.

    Returns:
        A function that imports a name at its first use and stores it in the package.
    """

    def imported(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return imported
