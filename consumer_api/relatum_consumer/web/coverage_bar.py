"""Coverage as a bar: which part of what a stream retains is recorded, lost before it was, or not recorded. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from relatum.store.coverage import Range

PieceKind = Literal["recorded", "partly", "hole", "unrecorded"]

_WORST: Final[tuple[PieceKind, ...]] = ("hole", "unrecorded", "partly", "recorded")
"""What a place of several kinds is drawn as: what is wrong with it must not vanish in what is right."""

PIECES_MAX: Final = 200
"""Pieces of a bar; where there are more, each piece stands for a part of the bar, and shows the worst of it."""

_LEAST: Final = 0.6
"""Per cent of the bar that a piece takes at least, so that it can be seen."""


@dataclass(frozen=True, slots=True)
class CoveragePiece:
    """A part of a bar: offsets [start, end), and where it lies, in per cent of the width."""

    kind: PieceKind
    start: int
    end: int
    x: float
    width: float


def coverage_bar(
    within: Range, covered: Mapping[str, Sequence[Range]], holes: Sequence[Range]
) -> tuple[CoveragePiece, ...]:
    """The pieces of a bar, in order, without what nothing is to be seen of.

    Args:
        within: The offsets that the stream retains, [first, end).
        covered: By key, the ranges that are recorded; `recorded` are those of all keys, `partly` those of some.
        holes: The ranges that retention took before they were recorded.
    """
    first, end = within
    if end <= first:
        return ()
    edges = {first, end}
    for ranges in (*covered.values(), holes):
        edges.update(edge for each in ranges for edge in each if first < edge < end)
    cuts = sorted(edges)
    if len(cuts) > PIECES_MAX:
        count = min(PIECES_MAX, end - first)
        cuts = [first + (end - first) * n // count for n in range(count + 1)]
    pieces: list[tuple[PieceKind, int, int]] = []
    for start, stop in pairwise(cuts):
        kind = _worst(start, stop, covered, holes)
        begun = pieces.pop()[1] if pieces and pieces[-1][0] == kind else start
        pieces.append((kind, begun, stop))
    # Drawn one upon the other: what is wrong comes last, so that its least width is seen.
    pieces.sort(key=lambda piece: (-_WORST.index(piece[0]), piece[1]))
    return tuple(_drawn(within, *piece) for piece in pieces)


def _worst(start: int, end: int, covered: Mapping[str, Sequence[Range]], holes: Sequence[Range]) -> PieceKind:
    """The worst that some offsets have in them; of a piece between two edges, what all of it is."""
    if any(a < end and start < b for a, b in holes):
        return "hole"
    whole = sum(any(a <= start and end <= b for a, b in ranges) for ranges in covered.values())
    if not whole:
        return "unrecorded"
    return "recorded" if whole == len(covered) else "partly"


def _drawn(within: Range, kind: PieceKind, start: int, end: int) -> CoveragePiece:
    scale = 100.0 / (within[1] - within[0])
    x, width = (start - within[0]) * scale, (end - start) * scale
    if width < _LEAST:
        x, width = min(x, 100.0 - _LEAST), _LEAST
    return CoveragePiece(kind, start, end, round(x, 3), round(width, 3))
