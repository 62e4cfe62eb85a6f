"""The ratios of the last run, kept in the repository by kind of machine; and what fell since.

Ratios only: both sides of one were measured in the same run, so that they bear another day, and a machine of the same
kind, where figures do not.
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
"""What fell by more than this share of what it was is marked."""

MACHINE: Final = ("architecture", "cores", "rabbitmq", "postgresql", "python", "compiled", "messages", "quick")
"""The facts that are kept with ratios."""


@dataclass(frozen=True, slots=True)
class Fallen:
    """A ratio that is worse than it was.

    Attributes:
        what: The row's group, and what it measures.
        before: The ratio that is kept.
        now: The ratio of this run.
        share: By which share of what it was it fell: 0.25 where it is three quarters as good.
    """

    what: str
    before: float
    now: float
    share: float

    def __str__(self) -> str:
        return f"{self.what}: {self.now:,.2f}, was {self.before:,.2f} ({-self.share:.0%})"


def kind_of(facts: Mapping[str, Any]) -> str:
    """The kind of machine and run that ratios are compared within: processor, cores, broker, sizes, compiled or not."""
    broker = ".".join(str(facts["rabbitmq"]).split(".")[:2])
    form = "compiled" if facts["compiled"] else "pure"
    rounds = "-quick" if facts["quick"] else ""
    return f"{facts['architecture']}-{facts['cores']}-cores-rabbitmq-{broker}-{form}-{facts['messages']}{rounds}"


def path_of(folder: Path, facts: Mapping[str, Any]) -> Path:
    """Where the ratios of this kind are kept."""
    return folder / f"{kind_of(facts)}.json"


def compared(rows: Iterable[Row]) -> dict[str, Row]:
    """The rows with a ratio that is to be large or small, by group and what is measured; of one name, numbered."""
    names: Counter[str] = Counter()
    found = {}
    for row in rows:
        name = f"{row.group}: {row.what}"
        names[name] += 1
        if row.ratio and row.aim[:1] in ("≥", "≤") and not row.error:
            found[name if names[name] == 1 else f"{name} ({names[name]})"] = row
    return found


def kept_in(path: Path) -> dict[str, float]:
    """The ratios that are kept in a file; none where there is no file."""
    ratios: dict[str, float] = json.loads(path.read_text())["ratios"] if path.exists() else {}
    return ratios


def keep(path: Path, facts: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Keep the ratios of these rows; those of groups that were not measured stay as they are."""
    ratios = kept_in(path) | {name: round(row.ratio or 0.0, 3) for name, row in compared(rows).items()}
    machine = {name: facts[name] for name in MACHINE}
    path.parent.mkdir(exist_ok=True)
    found = {"machine": machine, "ratios": dict(sorted(ratios.items()))}
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def fallen(rows: Iterable[Row], kept: Mapping[str, float]) -> list[Fallen]:
    """What fell by more than `FELL` since it was kept; a ratio that is to be small falls as it grows."""
    found = []
    for name, row in compared(rows).items():
        now, before = row.ratio or 0.0, kept.get(name, 0.0)
        if before:
            share = 1 - (before / now if row.aim.startswith("≤") else now / before)
            if share > FELL:
                found.append(Fallen(name, before, now, share))
    return found
