"""The product's parsed modules, and their subsystems."""

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

ROOTS: Final = ("plugin", "consumer_api", "migrations", "spark_connectors")
"""The source roots in the distribution."""

DIVIDED: Final = frozenset({"relatum", "relatum_consumer"})
"""Packages whose folders are subsystems. Any other package is a single subsystem."""

MODULES_ARE_SUBSYSTEMS: Final = frozenset({"relatum"})
"""Packages whose top-level modules are subsystems too: errors, limits, checks, …"""


@dataclass(frozen=True)
class Module:
    """One file of the product.

    Attributes:
        name: The name in imports, such as `relatum.reading._many`.
        path: The path.
        is_package: Whether the file is an `__init__.py`.
        text: The source text.
    """

    name: str
    path: Path
    is_package: bool
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> Sequence[ast.AST]:
        """All nodes of the tree."""
        return tuple(ast.walk(self.tree))

    @property
    def lines(self) -> int:
        """The number of lines."""
        return self.text.count("\n")

    @property
    def package(self) -> str:
        """The module's top-level package."""
        return self.name.partition(".")[0]

    @property
    def subsystem(self) -> str:
        """The module's subsystem."""
        return subsystem_of(self.name, is_package=self.is_package)

    @property
    def is_private(self) -> bool:
        """Whether a part of the name begins with an underscore."""
        return any(part.startswith("_") for part in self.name.split("."))

    @cached_property
    def listed(self) -> frozenset[str] | None:
        """The names in `__all__`; None if the module has none."""
        for node in self.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                    return frozenset(ast.literal_eval(node.value)) if node.value else frozenset()
        return None


def subsystem_of(name: str, *, is_package: bool) -> str:
    """Return a module's subsystem: a folder or module of the kernel, a folder of the consumer, or the whole package.

    Other modules directly in a package (`relatum/__init__.py`, `relatum_consumer/_relations.py`) belong to the
    subsystem with the package's name.
    """
    package, *inner = name.split(".")
    if not inner or package not in DIVIDED:
        return "relatum_spark" if package == "pyspark_relatum" else package
    if len(inner) == 1 and not is_package and package not in MODULES_ARE_SUBSYSTEMS:
        return package
    return f"{package}.{inner[0]}"


def read_product(checkout: Path) -> dict[str, Module]:
    """Return every module of the product by its name.

    Args:
        checkout: The checkout's directory.
    """
    return {module.name: module for root in ROOTS for module in _under(checkout / root)}


def _under(root: Path) -> Iterable[Module]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        if name:
            yield Module(name, path, is_package, path.read_text())
