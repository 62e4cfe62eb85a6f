"""The table of figures with their aims, and the complaints of `--check`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.house import arrows, mechanisms, picture, seams, words
from tools.house.sources import Module

EXCEPTIONS: Final = Path("tools/house/exceptions.txt")
"""The list of allowed imports of private names between subsystems, one per line: `subsystem <- module.name`."""

SEAMS: Final = Path("tools/house/seams.txt")
"""The list of allowed imports of private modules in tests, one per line: `file <- module`. It only gets shorter."""

WORDS: Final = Path("tools/house/words.txt")
"""The list of allowed habits of speech, one per line: `place <- habit number`. It only gets shorter."""

MODULE_LINES_MAX: Final = 400
FUNCTION_LINES_MAX: Final = 70

COUNTED: Final = frozenset({"relatum", "relatum_consumer", "relatum_cli"})
"""The packages to which the aims apply: the kernel, the consumer and the command."""


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        name: The figure's name.
        value: The number.
        aim: The maximum. None means no aim.
        found: The counted items.
    """

    name: str
    value: int
    aim: int | None
    found: Sequence[str]

    @property
    def is_reached(self) -> bool:
        """Whether the figure is within its aim, or has none."""
        return self.aim is None or self.value <= self.aim


def figures(modules: Mapping[str, Module], checkout: Path) -> list[Figure]:
    """Return the table's figures."""
    counted = {name: module for name, module in modules.items() if module.package in COUNTED}
    other_modules = [module for module in modules.values() if module.package not in COUNTED]
    private = arrows.private_crossings(modules)
    graph = arrows.arrows(modules)
    chain, cycles = arrows.floors(graph)
    long = [f"{module.name} {module.lines}" for module in modules.values() if module.lines > MODULE_LINES_MAX]
    return [
        _lines("lines: kernel and consumer", list(counted.values()), 48_000),
        _lines("lines: migrations, Spark", other_modules),
        _all("modules: kernel and consumer", list(counted)),
        _all("modules: migrations, Spark", [module.name for module in other_modules]),
        _all(f"modules over {MODULE_LINES_MAX} lines", long, 0),
        _all(f"functions over {FUNCTION_LINES_MAX} lines", mechanisms.long_functions(modules, FUNCTION_LINES_MAX), 0),
        _all("private modules", [name for name, module in counted.items() if module.is_private]),
        _all("of all: imported by other subsystems", sorted(arrows.by_module(private)), 10),
        _all("names they import", list(map(str, sorted(private))), 10),
        _all("modules that share a file name", mechanisms.shared_names(counted)),
        _all("subsystems", sorted(graph)),
        _all("floors: the longest chain of subsystems", [" + ".join(link) for link in chain], 12),
        _all("cycles of subsystems", [" <-> ".join(cycle) for cycle in cycles], 0),
        _all("modules that drive steps", mechanisms.step_drivers(modules), 2),
        _all("modules that run SQL outside the store", mechanisms.sql_runners(modules)),
        _all("modules that write a lease", mechanisms.leases(modules), 1),
        _all("modules that follow streams", mechanisms.followers(modules), 1),
        _all("functions rebuilt of others' code", mechanisms.rebuilt_functions(modules), 0),
        _all("twins kept by hand", mechanisms.twins(modules), 0),
        _all("private modules that tests import", seams.private_imports(checkout), 150),
        _all("habits of speech in docs and help", words.habits(modules, checkout), 0),
    ]


def table(found: Sequence[Figure]) -> Iterator[str]:
    """Yield the table's lines of text."""
    width = max(len(figure.name) for figure in found)
    yield f"{'':{width}}  {'now':>7}  {'aim':>8}"
    for figure in found:
        aim = "" if figure.aim is None else f"<= {figure.aim:,}"
        yield f"{figure.name:{width}}  {figure.value:>7,}  {aim:>8}{'' if figure.is_reached else '  not yet'}"


def complaints(modules: Mapping[str, Module], checkout: Path) -> Iterator[str]:
    """Yield a line for each finding that the lists do not allow, stale exception, and error in the picture."""
    for file, what, found in _listed(modules, checkout):
        allowed = set(exceptions(checkout, file))
        yield from (f"{what}: {line}" for line in sorted(found - allowed))
        yield from (
            f"{file} still allows a removed item (tools/measure-house --shorten): {line}"
            for line in sorted(allowed - found)
        )
    page = checkout / picture.PAGE
    if page.exists():
        yield from picture.differences(page.read_text(), arrows.arrows(modules))


def exceptions(checkout: Path, file: Path) -> list[str]:
    """Return the exceptions in a list."""
    if not (checkout / file).exists():
        return []
    lines = (checkout / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def shorten(modules: Mapping[str, Module], checkout: Path) -> int:
    """Remove stale exceptions from the lists, and return the number of the rest."""
    for file, _, found in _listed(modules, checkout):
        if not (checkout / file).exists():
            continue
        lines_left = [
            line for line in (checkout / file).read_text().splitlines() if not line or line[0] == "#" or line in found
        ]
        (checkout / file).write_text("\n".join(lines_left) + "\n")
    return sum(len(exceptions(checkout, file)) for file in (EXCEPTIONS, SEAMS, WORDS))


def _listed(modules: Mapping[str, Module], checkout: Path) -> Iterator[tuple[Path, str, set[str]]]:
    """Yield each list of exceptions, its complaint, and the findings."""
    yield EXCEPTIONS, "imported past a subsystem's face", set(map(str, arrows.private_crossings(modules)))
    yield SEAMS, "a test imports a private module", set(seams.private_imports(checkout))
    yield WORDS, "a habit that tools/house/words.py has plain words for", set(words.habits(modules, checkout))


def _all(name: str, found: Sequence[str], aim: int | None = None) -> Figure:
    return Figure(name, len(found), aim, found)


def _lines(name: str, modules: Sequence[Module], aim: int | None = None) -> Figure:
    return Figure(name, sum(module.lines for module in modules), aim, [f"{m.name} {m.lines}" for m in modules])
