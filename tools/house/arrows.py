"""Who imports whom: the arrows between rooms, what crosses them that is private, and how many floors they make."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tools.house.sources import Module


@dataclass(frozen=True, order=True)
class Crossing:
    """A name that one room imports from another.

    Attributes:
        room: The room that imports.
        module: The module it is imported from.
        name: What is imported; empty for the module itself.
        home: The module's room.
    """

    room: str
    module: str
    name: str
    home: str

    def __str__(self) -> str:
        return f"{self.room} <- {self.module}" + (f".{self.name}" if self.name else "")


def crossings(modules: Mapping[str, Module]) -> Iterator[tuple[Module, Crossing]]:
    """Yield each import that crosses the walls of a room, with the module that does it.

    An import for types only and one inside a function count as any other: whoever changes the name meets them all.
    """
    for module in modules.values():
        for target, name in _imported(module, modules):
            home = modules[target].room
            if home != module.room:
                yield module, Crossing(module.room, target, name, home)


def arrows(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return for each room the rooms that it imports."""
    found: dict[str, set[str]] = {module.room: set() for module in modules.values()}
    for _, crossing in crossings(modules):
        found[crossing.room].add(crossing.home)
    return found


def private_crossings(modules: Mapping[str, Module]) -> set[Crossing]:
    """Return the imports of what a room does not show: a private module or name, or a name a package does not list."""
    return {crossing for _, crossing in crossings(modules) if not _is_shown(crossing, modules)}


def _is_shown(crossing: Crossing, modules: Mapping[str, Module]) -> bool:
    target = modules[crossing.module]
    if target.is_private or crossing.name.startswith("_"):
        return False
    return not crossing.name or not target.is_package or crossing.name in (target.listed or ())


def floors(graph: Mapping[str, set[str]]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the longest chain of rooms, from the top down, and the cycles.

    Rooms that import each other in a circle stand on one floor: each link of the chain is a room, or a cycle's rooms.
    """
    parts = _strongly_connected(graph)
    part_of = {room: part for part in parts for room in part}
    longest: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    # A part is complete when all it imports is: they come out from the ground upwards.
    for part in parts:
        below = {part_of[imported] for room in part for imported in graph[room]} - {part}
        longest[part] = [part, *max((longest[other] for other in sorted(below)), key=len, default=[])]
    return max(longest.values(), key=len, default=[]), [part for part in parts if len(part) > 1]


def _strongly_connected(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the sets of rooms that reach each other, the imported ones first (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(room: str) -> None:
        index[room] = low[room] = len(index)
        stack.append(room)
        for other in sorted(graph[room]):
            if other not in index:
                visit(other)
                low[room] = min(low[room], low[other])
            elif other in stack:
                low[room] = min(low[room], index[other])
        if low[room] == index[room]:
            at = stack.index(room)
            found.append(tuple(sorted(stack[at:])))
            del stack[at:]

    for room in sorted(graph):
        if room not in index:
            visit(room)
    return found


def _imported(module: Module, modules: Mapping[str, Module]) -> Iterator[tuple[str, str]]:
    """Yield (module of the product, name in it) for each import; the name is empty where the module itself is meant."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((name, "") for name in _known((alias.name for alias in node.names), modules))
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                # A name that the package lists is the package's, even where a module has the same.
                shown = base in modules and alias.name in (modules[base].listed or ())
                if inner in modules and not (shown and modules[base].name == modules[base].room != "relatum"):
                    yield inner, ""
                elif base in modules:
                    yield base, alias.name


def _known(names: Iterable[str], modules: Mapping[str, Module]) -> Iterator[str]:
    return (name for name in names if name in modules)


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def by_module(found: Iterable[Crossing]) -> dict[str, list[Crossing]]:
    """Return the crossings of each module that is imported."""
    grouped: dict[str, list[Crossing]] = defaultdict(list)
    for crossing in sorted(found):
        grouped[crossing.module].append(crossing)
    return dict(grouped)
