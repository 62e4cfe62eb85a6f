"""The table as pictures: how far each ratio is from its aim, and each figure beside what it is compared with.

Of a JSON file that `save` wrote, or of the tables that a document keeps: nothing is drawn that is not in there.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks._results import HEADINGS, Row, load

README: Final = Path(__file__).parents[1] / "README.md"
"""What the repository keeps of the last whole run."""

IMAGES: Final = README.parent / "docs" / "images"

_UNITS: Final = {"ms": ("s", 1e-3), "s": ("s", 1.0), "/s": ("messages/s", 1.0)}

_FIGURE: Final = re.compile(r"([\d,]+(?:\.\d+)?)\s?(ms|s|/s)(?=[:,]|$)")
_AIM: Final = re.compile(r"([≥≤]) ([\d,]+(?:\.\d+)?)(?: ×)?(?=;|$)")

_STYLE: Final = {
    "svg.fonttype": "none",  # Text stays text: small, and found by who searches.
    "svg.hashsalt": "relatum",  # The same picture for the same table.
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
}

_MET, _SHORT, _OTHER = "#0b5cad", "#b3261e", "#6b7280"

_ROW_IN: Final = 0.24
"""Inches of a row."""


@dataclass(frozen=True, slots=True)
class Margin:
    """A ratio beside its aim. `share` is above 1 where it is better than the aim, by as many times."""

    label: str
    ratio: float
    aim: str
    share: float


@dataclass(frozen=True, slots=True)
class Pair:
    """A figure and what it is compared with, in one unit."""

    label: str
    unit: str
    ours: float
    other: float


def rows_of(path: Path) -> list[Row]:
    """The rows of a JSON file, or of the tables of a document in Markdown that have the table's columns."""
    if path.suffix == ".json":
        return [replace(row, what=row.what.replace("`", "")) for row in load(path)]
    rows = []
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if len(cells) == len(HEADINGS) and (not cells[3] or _number(cells[3]) is not None):
            rows.append(Row("", cells[0].replace("`", ""), cells[1], cells[2], _number(cells[3]), cells[4]))
    return rows


def margins(rows: Iterable[Row]) -> list[Margin]:
    """Of the rows with a ratio and an aim for it."""
    found = []
    for row, label in _labelled(rows):
        if row.ratio and (aim := _AIM.match(row.aim)):
            wanted = _number(aim[2]) or 1.0
            share = row.ratio / wanted if aim[1] == "≥" else wanted / row.ratio
            found.append(Margin(label, row.ratio, f"{aim[1]} {aim[2]}", share))
    return found


def pairs(rows: Iterable[Row]) -> list[Pair]:
    """Of the rows whose figures are two times, or two rates."""
    found = []
    for row, label in _labelled(rows):
        ours, other = _FIGURE.match(row.ours), _FIGURE.match(row.other)
        if ours and other and _UNITS[ours[2]][0] == _UNITS[other[2]][0]:
            unit, _ = _UNITS[ours[2]]
            found.append(Pair(label, unit, *((_number(each[1]) or 0.0) * _UNITS[each[2]][1] for each in (ours, other))))
    return found


def _labelled(rows: Iterable[Row]) -> Iterable[tuple[Row, str]]:
    """Rows with what they are and what they are compared with; "the same" is what the row before is."""
    before = ""
    for row in rows:
        what = row.what.replace("the same", before, 1) if row.what.startswith("the same") else row.what
        before = before if row.what.startswith("the same") else row.what.split(", ")[0]
        against = row.other.partition(": ")[2]
        yield row, f"{what} / {against}" if against else what


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def draw(source: Path) -> list[Path]:
    """Draw a file's rows as SVG beside it, those of README.md where the documents have them; return the paths."""
    rows = rows_of(source)
    folder, stem = (IMAGES, "benchmarks") if source == README else (source.parent, source.stem)
    drawn = []
    with mpl.rc_context(_STYLE):
        for name, figure in (("aims", _aims(margins(rows))), ("figures", _figures(pairs(rows)))):
            if figure is not None:
                path = folder / f"{stem}-{name}.svg"
                folder.mkdir(exist_ok=True)
                figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
                drawn.append(path)
    return drawn


def _aims(found: Sequence[Margin]) -> Figure | None:
    if not found:
        return None
    figure = Figure(figsize=(9, 0.8 + _ROW_IN * len(found)))
    axes = figure.subplots()
    for place, each in enumerate(found):
        is_met = each.share >= 1
        colour = _MET if is_met else _SHORT
        axes.plot([1, each.share], [place, place], color=colour, linewidth=2)
        axes.plot(each.share, place, "o" if is_met else "X", color=colour, markersize=7)
        axes.annotate(
            f"{each.ratio:,g} ({each.aim})",
            (max(1, each.share), place),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    _rows_of_labels(axes, [each.label for each in found])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1, color=_OTHER, linewidth=1)
    axes.set_xlabel("times better than its aim: left of 1 (✕) it falls short")
    return figure


def _figures(found: Sequence[Pair]) -> Figure | None:
    units = [unit for unit in ("s", "messages/s") if any(each.unit == unit for each in found)]
    if not units:
        return None
    by_unit = [[each for each in found if each.unit == unit] for unit in units]
    heights = [len(some) + 3 for some in by_unit]
    figure = Figure(figsize=(9, _ROW_IN * (sum(heights) + 2)))
    panels = figure.subplots(len(units), 1, squeeze=False, height_ratios=heights, gridspec_kw={"hspace": 0.25})
    for axes, unit, some in zip(panels[:, 0], units, by_unit, strict=True):
        for place, each in enumerate(some):
            axes.plot([each.ours, each.other], [place, place], color="#c9ced6", linewidth=2, zorder=1)
            axes.plot(each.other, place, "D", color=_OTHER, markersize=5, label="compared with" if not place else None)
            axes.plot(each.ours, place, "o", color=_MET, markersize=7, label="Relatum" if not place else None)
        _rows_of_labels(axes, [each.label for each in some])
        is_time = unit == "s"
        axes.set_xlabel("seconds: less is better" if is_time else f"{unit}: more is better")
    panels[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    return figure


def _rows_of_labels(axes: Any, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="both", color="#e5e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
