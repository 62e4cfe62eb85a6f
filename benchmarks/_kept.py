"""The ratios of the last run, kept in the repository by kind of machine, and the regressions since.

Only ratios are kept. Both sides of a ratio are measured in the same run, so ratios can be compared with those of
another day or of a machine of the same kind; absolute figures cannot.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks._results import Row

FOLDER: Final = Path(__file__).with_name("kept")

FELL: Final = 0.1
"""A ratio that fell by more than this share counts as a regression."""

MACHINE: Final = ("architecture", "cores", "rabbitmq", "postgresql", "python", "compiled", "messages", "quick")
"""The facts that are kept with ratios."""


@dataclass(frozen=True, slots=True)
class Fallen:
    """A ratio that is worse than the kept one.

    Attributes:
        what: The row's group, and what it measures.
        before: The kept ratio.
        now: The ratio of this run.
        share: The share by which the ratio fell: 0.25 if it is three quarters as good.
    """

    what: str
    before: float
    now: float
    share: float

    def __str__(self) -> str:
        return f"{self.what}: {self.now:,.2f}, was {self.before:,.2f} ({-self.share:.0%})"


def kind_of(facts: Mapping[str, Any]) -> str:
    """Return the kind of machine and run: architecture, cores, broker, compiled or not, messages, quick or not."""
    broker = ".".join(str(facts["rabbitmq"]).split(".")[:2])
    form = "compiled" if facts["compiled"] else "pure"
    rounds = "-quick" if facts["quick"] else ""
    return f"{facts['architecture']}-{facts['cores']}-cores-rabbitmq-{broker}-{form}-{facts['messages']}{rounds}"


def path_of(folder: Path, facts: Mapping[str, Any]) -> Path:
    """Return the path of this kind's ratios."""
    return folder / f"{kind_of(facts)}.json"


def compared(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the rows whose ratio has an aim, by group and measurement; repeated names are numbered."""
    names: Counter[str] = Counter()
    found = {}
    for row in rows:
        name = f"{row.group}: {row.what}"
        names[name] += 1
        if row.ratio and row.aim[:1] in ("≥", "≤") and not row.error:
            found[name if names[name] == 1 else f"{name} ({names[name]})"] = row
    return found


def kept_in(path: Path) -> dict[str, float]:
    """Return the ratios in a file; empty if there is no file."""
    ratios: dict[str, float] = json.loads(path.read_text())["ratios"] if path.exists() else {}
    return ratios


def keep(path: Path, facts: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Store the ratios of these rows; ratios of groups that were not measured stay."""
    ratios = kept_in(path) | {name: round(row.ratio or 0.0, 3) for name, row in compared(rows).items()}
    machine = {name: facts[name] for name in MACHINE}
    path.parent.mkdir(exist_ok=True)
    found = {"machine": machine, "ratios": dict(sorted(ratios.items()))}
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def fallen(rows: Iterable[Row], kept: Mapping[str, float]) -> list[Fallen]:
    """Return the ratios that fell by more than `FELL`. A ratio that should be small falls when it grows."""
    found = []
    for name, row in compared(rows).items():
        now, before = row.ratio or 0.0, kept.get(name, 0.0)
        if before:
            share = 1 - (before / now if row.aim.startswith("≤") else now / before)
            if share > FELL:
                found.append(Fallen(name, before, now, share))
    return found
