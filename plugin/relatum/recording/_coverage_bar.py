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
        return _drawn(within, _worst_of(within, covered, holes))
    kinds = [(_kind((a + b) // 2, covered, holes), a, b) for a, b in pairwise(cuts)]
    return _drawn(within, _joined(kinds))


Kinds = list[tuple[PieceKind, int, int]]


def _kind(offset: int, covered: Mapping[str, Sequence[Range]], holes: Sequence[Range]) -> PieceKind:
    if _holds(holes, offset):
        return "hole"
    have = sum(_holds(ranges, offset) for ranges in covered.values())
    if not have:
        return "unrecorded"
    return "recorded" if have == len(covered) else "partly"


def _holds(ranges: Sequence[Range], offset: int) -> bool:
    return any(start <= offset < end for start, end in ranges)


def _worst_of(within: Range, covered: Mapping[str, Sequence[Range]], holes: Sequence[Range]) -> Kinds:
    """The bar in equal parts, each with the worst that is in it."""
    first, end = within
    count = min(PIECES_MAX, end - first)
    cuts = [first + (end - first) * n // count for n in range(count + 1)]
    return _joined([(_worst(a, b, covered, holes), a, b) for a, b in pairwise(cuts)])


def _worst(start: int, end: int, covered: Mapping[str, Sequence[Range]], holes: Sequence[Range]) -> PieceKind:
    if any(a < end and start < b for a, b in holes):
        return "hole"
    whole = sum(any(a <= start and end <= b for a, b in ranges) for ranges in covered.values())
    if whole == len(covered):
        return "recorded"
    touched = any(a < end and start < b for ranges in covered.values() for a, b in ranges)
    return "partly" if touched and whole else "unrecorded"


def _joined(kinds: Kinds) -> Kinds:
    joined: Kinds = []
    for kind, start, end in kinds:
        if joined and joined[-1][0] == kind and joined[-1][2] == start:
            joined[-1] = (kind, joined[-1][1], end)
        else:
            joined.append((kind, start, end))
    return joined


def _drawn(within: Range, kinds: Kinds) -> tuple[CoveragePiece, ...]:
    first, end = within
    scale = 100.0 / (end - first)
    pieces = []
    for kind, start, stop in kinds:
        x, width = (start - first) * scale, (stop - start) * scale
        if width < _LEAST:
            x, width = min(x, 100.0 - _LEAST), _LEAST
        pieces.append(CoveragePiece(kind, start, stop, round(x, 3), round(width, 3)))
    # Drawn one upon the other: what is wrong comes last, so that its least width is seen.
    return tuple(sorted(pieces, key=lambda piece: (-_WORST.index(piece.kind), piece.start)))
