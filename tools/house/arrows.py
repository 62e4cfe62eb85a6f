"""The imports between subsystems: the arrows, the private imports, and the longest chain (its links are floors)."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tools.house.sources import Module


@dataclass(frozen=True, order=True)
class Crossing:
    """A name that one subsystem imports from another.

    Attributes:
        subsystem: The importing subsystem.
        module: The imported module, or the module of the name.
        name: The imported name; empty for the module itself.
        exporter: The module's subsystem.
    """

    subsystem: str
    module: str
    name: str
    exporter: str

    def __str__(self) -> str:
        return f"{self.subsystem} <- {self.module}" + (f".{self.name}" if self.name else "")


def crossings(modules: Mapping[str, Module]) -> Iterator[tuple[Module, Crossing]]:
    """Yield each import from another subsystem, with the importing module.

    Imports for types only and imports in functions count too: a change of the name affects them all.
    """
    for module in modules.values():
        for target, name in _imported(module, modules):
            exporter = modules[target].subsystem
            if exporter != module.subsystem:
                yield module, Crossing(module.subsystem, target, name, exporter)


def arrows(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return the subsystems that each subsystem imports."""
    found: dict[str, set[str]] = {module.subsystem: set() for module in modules.values()}
    for _, crossing in crossings(modules):
        found[crossing.subsystem].add(crossing.exporter)
    return found


def private_crossings(modules: Mapping[str, Module]) -> set[Crossing]:
    """Return the imports of private modules and names, and of names that a package's `__all__` does not list."""
    return {crossing for _, crossing in crossings(modules) if not _is_public(crossing, modules)}


def _is_public(crossing: Crossing, modules: Mapping[str, Module]) -> bool:
    target = modules[crossing.module]
    if target.is_private or crossing.name.startswith("_"):
        return False
    return not crossing.name or not target.is_package or crossing.name in (target.listed or ())


def floors(graph: Mapping[str, set[str]]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the longest chain of subsystems, from the top down, and the cycles.

    Each link of the chain is a subsystem, or all subsystems of a cycle.
    """
    parts = _strongly_connected(graph)
    part_of = {subsystem: part for part in parts for subsystem in part}
    longest: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    # Imported parts come before the parts that import them.
    for part in parts:
        below = {part_of[imported] for subsystem in part for imported in graph[subsystem]} - {part}
        longest[part] = [part, *max((longest[other] for other in sorted(below)), key=len, default=[])]
    return max(longest.values(), key=len, default=[]), [part for part in parts if len(part) > 1]


def _strongly_connected(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the sets of subsystems that reach each other, imported ones first (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(subsystem: str) -> None:
        index[subsystem] = low[subsystem] = len(index)
        stack.append(subsystem)
        for other in sorted(graph[subsystem]):
            if other not in index:
                visit(other)
                low[subsystem] = min(low[subsystem], low[other])
            elif other in stack:
                low[subsystem] = min(low[subsystem], index[other])
        if low[subsystem] == index[subsystem]:
            at = stack.index(subsystem)
            found.append(tuple(sorted(stack[at:])))
            del stack[at:]

    for subsystem in sorted(graph):
        if subsystem not in index:
            visit(subsystem)
    return found


def _imported(module: Module, modules: Mapping[str, Module]) -> Iterator[tuple[str, str]]:
    """Yield (module of the product, name in it) for each import; the name is empty for the module itself."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((name, "") for name in _known((alias.name for alias in node.names), modules))
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                # A name that the package lists belongs to the package, even if a module has the same name.
                shown = base in modules and alias.name in (modules[base].listed or ())
                if inner in modules and not (shown and modules[base].name == modules[base].subsystem != "relatum"):
                    yield inner, ""
                elif base in modules:
                    yield base, alias.name


def _known(names: Iterable[str], modules: Mapping[str, Module]) -> Iterator[str]:
    return (name for name in names if name in modules)


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    parents = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def by_module(found: Iterable[Crossing]) -> dict[str, list[Crossing]]:
    """Return the crossings of each imported module."""
    grouped: dict[str, list[Crossing]] = defaultdict(list)
    for crossing in sorted(found):
        grouped[crossing.module].append(crossing)
    return dict(grouped)
