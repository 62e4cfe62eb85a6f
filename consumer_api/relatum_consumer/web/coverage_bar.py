"""Coverage as a bar: which retained offsets of a stream are recorded, lost before recording, or unrecorded. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from relatum.store.coverage import Range

PieceKind = Literal["recorded", "partly", "hole", "unrecorded"]

_WORST: Final[tuple[PieceKind, ...]] = ("hole", "unrecorded", "partly", "recorded")
"""The order in which kinds win if a piece has several: faults must stay visible."""

PIECES_MAX: Final = 200
"""The most pieces of a bar. If there are more, the bar is cut evenly, and each piece shows the worst kind in it."""

_LEAST: Final = 0.6
"""The smallest width of a piece, in per cent of the bar, so that it can be seen."""


@dataclass(frozen=True, slots=True)
class CoveragePiece:
    """A part of a bar: offsets [start, end), and its position and width, in per cent of the bar."""

    kind: PieceKind
    start: int
    end: int
    x: float
    width: float


def coverage_bar(
    within: Range, covered: Mapping[str, Sequence[Range]], holes: Sequence[Range]
) -> tuple[CoveragePiece, ...]:
    """Return the pieces of a bar, in the order in which they are drawn.

    Args:
        within: The offsets that the stream retains, [first, end).
        covered: The recorded ranges, by key. A piece that all keys cover is `recorded`; that some cover, `partly`.
        holes: The ranges that retention dropped before they were recorded.
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
    # Pieces overlap: faults are drawn last, so that their minimum width stays visible.
    pieces.sort(key=lambda piece: (-_WORST.index(piece[0]), piece[1]))
    return tuple(_drawn(within, *piece) for piece in pieces)


def _worst(start: int, end: int, covered: Mapping[str, Sequence[Range]], holes: Sequence[Range]) -> PieceKind:
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
