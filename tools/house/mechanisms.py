"""Mechanisms that should exist once: drivers of steps, ways to run SQL, leases, followers, twins kept by hand.

They are recognised by syntax, not by a list of names, so that new code counts as soon as it is written.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from tools.house.sources import Module

FOLLOWING: Final = "relatum.reading.following"
"""The package that follows streams forever."""

_LEASE_ENDS: Final = "lease_expires_at"
_NULLS: Final = ("_NULL", "sa.null()")

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def step_drivers(modules: Mapping[str, Module]) -> list[str]:
    """Return the modules that drive generators: a function sends or throws into one and catches StopIteration."""
    return _where(modules, lambda module: any(_drives(node) for node in module.nodes if isinstance(node, _FUNCTIONS)))


def sql_runners(modules: Mapping[str, Module]) -> list[str]:
    """Return the modules outside the store that run SQL: they call `execute` or `cursor`."""
    return _where(modules, lambda each: each.subsystem != "relatum.store" and bool(_calls(each, "execute", "cursor")))


def leases(modules: Mapping[str, Module]) -> list[str]:
    """Return the modules that take or renew a lease: they write its expiry time."""
    return _where(modules, lambda module: any(_is_lease(node) for node in module.nodes))


def followers(modules: Mapping[str, Module]) -> list[str]:
    """Return the package that follows streams forever, and the other modules that read with `follow=True`.

    The subsystem of reading does not count: it offers the option, but does not follow streams itself.
    """
    own = [FOLLOWING] if FOLLOWING in modules else []
    return own + _where(modules, lambda each: each.subsystem != "relatum.reading" and any(map(_follows, each.nodes)))


def rebuilt_functions(modules: Mapping[str, Module]) -> list[str]:
    """Return the modules that build functions from other functions' code: they call `FunctionType`."""
    return _where(modules, lambda module: bool(_calls(module, "FunctionType")))


def long_functions(modules: Mapping[str, Module], most: int) -> list[str]:
    """Return the functions of more than `most` lines, including docstrings, with their lines."""
    return [
        f"{module.name}.{node.name} {length}"
        for module in modules.values()
        for node in module.nodes
        if isinstance(node, _FUNCTIONS) and (length := (node.end_lineno or 0) - node.lineno + 1) > most
    ]


def shared_names(modules: Mapping[str, Module]) -> list[str]:
    """Return the modules that share their file's name with another, except `__init__`."""
    files = Counter(module.path.name for module in modules.values() if not module.is_package)
    return [module.name for module in modules.values() if not module.is_package and files[module.path.name] > 1]


def twins(modules: Mapping[str, Module]) -> list[str]:
    """Return the pairs of blocking and asyncio modules of a subsystem that are both written by hand.

    The names of a pair differ only in a word such as `async`, or one module has a class and the other its `Async…`. A
    façade, which imports the blocking module, does not count.
    """
    by_hand = [module for module in modules.values() if not module.is_package]
    found = set()
    for module in by_hand:
        for other in by_hand:
            if module is not other and module.subsystem == other.subsystem and _is_twin(module, other):
                found.add(f"{module.name} | {other.name}")
    return sorted(found)


def _is_twin(blocking: Module, asyncio: Module) -> bool:
    if any(isinstance(node, ast.ImportFrom) and node.module == blocking.name for node in asyncio.nodes):
        return False
    names = (blocking.path.stem, asyncio.path.stem)
    folder = blocking.path.parent == asyncio.path.parent
    if folder and not _is_asyncio(names[0]) and _is_asyncio(names[1]) and _plain(names[0]) == _plain(names[1]):
        return True
    faces = {f"Async{name}" for name in _classes(blocking)}
    return bool(faces & _classes(asyncio))


def _is_asyncio(stem: str) -> bool:
    return bool(re.search(r"(^|_)(async|asyncio|aio)(_|$)", stem))


def _plain(stem: str) -> str:
    return "_".join(part for part in stem.split("_") if part not in ("", "async", "asyncio", "aio", "blocking"))


def _classes(module: Module) -> set[str]:
    return {node.name for node in module.tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def _drives(function: ast.AST) -> bool:
    """Whether a function drives a generator: it sends or throws, and catches StopIteration."""
    nodes = list(ast.walk(function))
    catches = any(isinstance(node, ast.ExceptHandler) and "StopIteration" in _caught(node) for node in nodes)
    return catches and any(isinstance(node, ast.Call) and _last(node.func) in ("send", "throw") for node in nodes)


def _caught(handler: ast.ExceptHandler) -> Iterable[str]:
    kinds: Sequence[ast.AST] = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type or handler]
    return [_last(kind) for kind in kinds]


def _is_lease(node: ast.AST) -> bool:
    """Whether a node sets a lease's expiry time, by keyword or in a mapping of columns."""
    values = []
    if isinstance(node, ast.keyword) and node.arg == _LEASE_ENDS:
        values = [node.value]
    elif isinstance(node, ast.Dict):
        values = [
            value
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant) and key.value == _LEASE_ENDS
        ]
    return any(not isinstance(value, ast.Constant) and ast.unparse(value) not in _NULLS for value in values)


def _follows(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and _last(node.func) == "batches"
        and any(
            word.arg == "follow" and isinstance(word.value, ast.Constant) and word.value.value is True
            for word in node.keywords
        )
    )


def _calls(module: Module, *names: str) -> list[ast.Call]:
    return [node for node in module.nodes if isinstance(node, ast.Call) and _last(node.func) in names]


def _last(node: ast.AST) -> str:
    """Return the last part of a dotted name; empty for other nodes."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _where(modules: Mapping[str, Module], holds: Callable[[Module], bool]) -> list[str]:
    return [module.name for module in modules.values() if holds(module)]
