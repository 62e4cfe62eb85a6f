"""The tests' imports of private modules of the product, which break with the next redesign."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TESTS: Final = "tests"

CORES: Final = (
    "relatum.wire",
    "relatum.keys",
    "relatum.reading._plan",
    "relatum.collecting._collector_core",
    "relatum.contexts._partition_log",
    "relatum.contexts._placement_cache",
    "relatum.contexts._publication",
    "relatum.contexts._order",
    "relatum.contexts._partition_log",
    "relatum.contexts._mover",
    "relatum_consumer._known_spans",
    "relatum_consumer.groups._assembly",
)
"""Pure code that tests may import from its module: wire, keys, read plan, publication, moves, order, groups' assembly,
the collector's core, and the spans of an expectation."""


def private_imports(checkout: Path) -> list[str]:
    """Return `file <- module` for each import of a private module or name in the tests, except the cores."""
    return sorted(
        f"{path.relative_to(checkout)} <- {name}"
        for path in (checkout / TESTS).rglob("*.py")
        for name in set(_private(ast.parse(path.read_text(), str(path))))
    )


def _private(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = [f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_")]
            names = [node.module] if _is_private(node.module) else inside
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if _is_private(name) and not _is_core(name))


def _is_private(name: str) -> bool:
    package, *inside = name.split(".")
    return package.startswith("relatum") and any(part.startswith("_") for part in inside)


def _is_core(name: str) -> bool:
    return any(name == core or name.startswith(f"{core}.") for core in CORES)
