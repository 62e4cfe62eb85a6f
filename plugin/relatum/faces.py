"""Packages whose names are imported when they are first used, so that unused ones do not slow the start."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def imported_later(room: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package.

    Args:
        room: The package's `__name__`.
        homes: The modules of the names that are imported later.

    Returns:
        A function that imports a name when it is first used, and keeps it.
    """

    def imported(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        setattr(sys.modules[room], name, value)
        return value

    return imported
