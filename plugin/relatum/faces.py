"""Faces of rooms whose names are imported when they are first used: what is not asked for costs no start."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def imported_later(room: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the `__getattr__` of a room's face.

    Args:
        room: The room: its `__name__`.
        homes: The modules of names, as far as they are imported later.

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
