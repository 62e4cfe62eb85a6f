"""Coverage drawn in the terminal: a bar, and under it what its signs stand for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

from relatum.recording import CoveragePiece, PieceKind

CELLS_MAX: Final = 60
"""The bar's width; it is as narrow as the terminal needs."""

CELLS_MIN: Final = 10


@dataclass(frozen=True, slots=True)
class _Kind:
    """How a kind of piece looks: a sign of its own each, so that none is told by its colour alone."""

    sign: str
    ascii: str
    style: Style
    words: str


_KINDS: Final[dict[PieceKind, _Kind]] = {
    "recorded": _Kind("█", "#", Style(color="green"), "recorded"),
    "partly": _Kind("▒", "+", Style(color="yellow"), "recorded for some keys"),
    "unrecorded": _Kind("·", ".", Style(color="cyan"), "not recorded"),
    "hole": _Kind("X", "X", Style(color="red", bold=True), "lost to retention"),
}


@dataclass(frozen=True, slots=True)
class CoverageDrawn:
    """A bar, as wide as there is room, and its legend. For `rich`; in ASCII where the terminal has no UTF-8."""

    pieces: Sequence[CoveragePiece]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(CELLS_MIN, options.max_width), min(CELLS_MAX, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(CELLS_MAX, options.max_width)
        cells = cells_of(self.pieces, width)
        shown = {name: kind.ascii if options.ascii_only else kind.sign for name, kind in _KINDS.items()}
        yield from (Segment(shown[kind] * len(list(run)), _KINDS[kind].style) for kind, run in groupby(cells))
        yield Segment.line()
        for line in _legend([name for name in _KINDS if name in cells], shown, options.max_width):
            yield from line
            yield Segment.line()


def cells_of(pieces: Sequence[CoveragePiece], width: int) -> list[PieceKind]:
    """What each cell of a bar shows: the worst of what lies in it, so that a hole of one offset is seen."""
    first, end = min(each.start for each in pieces), max(each.end for each in pieces)
    cells: list[PieceKind] = ["recorded"] * width
    # The worst comes last among the pieces.
    for each in pieces:
        left = (each.start - first) * width // (end - first)
        right = -((first - each.end) * width // (end - first))
        cells[left:right] = [each.kind] * (right - left)
    return cells


def _legend(kinds: Sequence[PieceKind], shown: dict[PieceKind, str], width: int) -> Iterator[list[Segment]]:
    """The kinds that are drawn, as many in a line as fit."""
    line: list[Segment] = []
    used = 0
    for name in kinds:
        words = f" {_KINDS[name].words}"
        if line and used + 3 + len(words) > width:
            yield line
            line, used = [], 0
        if line:
            line.append(Segment("  "))
            used += 2
        line += [Segment(shown[name], _KINDS[name].style), Segment(words)]
        used += 1 + len(words)
    if line:
        yield line
