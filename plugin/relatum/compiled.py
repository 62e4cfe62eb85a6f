"""Hot modules without input or output run compiled by mypyc, where just these sources were compiled; else as they are.

What is compiled lies in a package of its own, `relatum_compiled`, in a folder that is named by a sum of the sources. An
interpreter that finds no folder of the sources it sees, or none for itself, imports them as they are: so an edited
source is what runs, and nothing of it is ever stale. `RELATUM_PURE=1` has them as they are in any case. See
docs/adr/0024-compiled-where-it-counts.md.
"""

import os
import sys
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Final

PURE_VARIABLE: Final = "RELATUM_PURE"
"""Names the environment variable that, set to anything, has all modules run as they are."""

PACKAGE: Final = "relatum_compiled"
LIBRARY: Final = "relatum__mypyc"
"""What mypyc makes of all modules together; each module is a file that asks this one for itself."""

COMPILED: Final = (
    "relatum/headers.py",
    "relatum/limits.py",
    "relatum/reading/_message_parts.py",
    "relatum/reading/_message_time.py",
    "relatum/recording/_batch.py",
    "relatum/recording/_extract.py",
    "relatum/uuid7.py",
    "relatum/wire/_amqp10.py",
    "relatum/wire/_head.py",
    "relatum/wire/_plain_records.py",
    "relatum/wire/_scalars.py",
    "relatum_spark/source/_columns.py",
    "relatum_spark/source/_header_text.py",
    "relatum_spark/source/_records.py",
)
"""The modules that are compiled, as one: calls between them cost no more than in C."""

READ: Final = (
    "relatum/compiled.py",
    "relatum/errors/__init__.py",
    "relatum/errors/_findings.py",
    "relatum/errors/_root.py",
    "relatum/keys/__init__.py",
    "relatum/keys/_canonical.py",
    "relatum/reading/__init__.py",
    "relatum/reading/_message_values.py",
    "relatum/wire/__init__.py",
)
"""What mypyc reads beside them, for types and constants; of all else that they import it knows nothing."""


def module_of(source: str) -> str:
    """The name of the module in a source."""
    return source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def sum_of_sources() -> str:
    """A sum of all sources that what is compiled depends on.

    Raises:
        OSError: one of them is no file: in a zip there is nothing to compile.
    """
    found = sha256()
    for source in sorted(COMPILED + READ):
        package, _, inside = source.partition("/")
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(package)
        content = Path(spec.submodule_search_locations[0], inside).read_bytes()
        found.update(b"%b %d\n%b" % (source.encode(), len(content), content))
    return found.hexdigest()[:32]


@cache
def _folder() -> Path | None:
    """Where these very sources lie compiled for this interpreter; None where they don't."""
    try:
        spec = find_spec(PACKAGE)
        places = [] if spec is None else list(spec.submodule_search_locations or ())
        folders = [Path(place, sum_of_sources()) for place in places]
    except OSError:
        return None
    return next((folder for folder in folders if _file(folder, LIBRARY).is_file()), None)


def _file(folder: Path, name: str) -> Path:
    return folder / (name + EXTENSION_SUFFIXES[0])


class _Finder:
    """Finds compiled modules before Python finds their sources."""

    def __init__(self) -> None:
        self._names = {LIBRARY, *map(module_of, COMPILED)}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names or (folder := _folder()) is None:
            return None
        file = str(_file(folder, name))
        return spec_from_loader(name, ExtensionFileLoader(name, file), origin=file)


def is_compiled() -> bool:
    """Whether the hot modules run compiled in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path) and _folder() is not None


def prefer_compiled() -> None:
    """Have what is compiled imported from now on: called once, before any of it is."""
    if not os.environ.get(PURE_VARIABLE):
        sys.meta_path.insert(0, _Finder())
