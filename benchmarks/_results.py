"""Results: rows, their verdicts, and the ways to show them."""

import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table

Verdict = Literal["pass", "falls short", "measured", "not measured", "failed"]

_COLOURS: Final = {
    "pass": "green",
    "falls short": "red",
    "measured": "",
    "not measured": "yellow",
    "failed": "bold red",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        group: The row's group of benchmarks, for `--only`.
        what: The measurement.
        ours: Relatum's figure with its unit. Empty if there is none; `note` then gives the reason.
        other: The baseline's figure with its unit. Empty if there is none.
        ratio: The ratio of the two figures, in the aim's direction. None if there is none.
        aim: The aim. Empty if the row is only measured.
        is_met: Whether the aim is met. None if there is no aim.
        note: An explanation of the figures.
        figures: All figures by name, in seconds, bytes and messages, for programs.
        error: The error that ended the measurement, including wrong answers. Empty if there was none.
    """

    group: str
    what: str
    ours: str
    other: str = ""
    ratio: float | None = None
    aim: str = ""
    is_met: bool | None = None
    note: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def verdict(self) -> Verdict:
        """The verdict on the aim, in one word."""
        if self.error:
            return "failed"
        if not self.ours:
            return "not measured"
        return "measured" if self.is_met is None else "pass" if self.is_met else "falls short"

    @property
    def cells(self) -> list[str]:
        """The row's cells in the table."""
        ratio = "" if self.ratio is None else f"{self.ratio:,.0f}" if self.ratio >= 100 else f"{self.ratio:.2f}"
        return [self.what, self.ours or self.error or self.note, self.other, ratio, self.aim, self.verdict]


def attempted(group: str, what: str, rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Yield rows, and after an error a row with the error, so that other groups can still be measured."""
    try:
        yield from rows()
    except Exception as error:  # noqa: BLE001 - shown, and the run fails
        traceback.print_exc()
        yield Row(group, what, "", error=f"{type(error).__name__}: {error}")


SHORT: Final = frozenset({"falls short", "failed"})

HEADINGS: Final = ("what", "Relatum", "compared with", "ratio", "aim", "")


def show(rows: Iterable[Row], console: Console) -> None:
    """Print the table on a terminal."""
    table = Table(show_lines=False, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading == "ratio" else "left")
    for row in rows:
        *cells, verdict = row.cells
        colour = _COLOURS[verdict]
        table.add_row(*cells, f"[{colour}]{verdict}[/]" if colour else verdict)
    console.print(table)


def markdown(rows: Iterable[Row]) -> str:
    """Return the table in Markdown, with missed aims in bold."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "| --- | --- | --- | ---: | --- | --- |"]
    for row in rows:
        *cells, verdict = row.cells
        lines.append("| " + " | ".join([*cells, f"**{verdict}**" if verdict in SHORT else verdict]) + " |")
    return "\n".join(lines)


def save(path: Path, facts: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Write the machine's facts and all rows as JSON."""
    found = {"machine": dict(facts), "rows": [asdict(row) | {"verdict": row.verdict} for row in rows]}
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def load(path: Path) -> list[Row]:
    """Read the rows of a file that `save` wrote."""
    rows = json.loads(path.read_text())["rows"]
    return [Row(**{name: value for name, value in row.items() if name != "verdict"}) for row in rows]
