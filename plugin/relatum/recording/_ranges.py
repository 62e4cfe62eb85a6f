"""What of a stream is not recorded yet, for which keys. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from relatum.store.coverage import CoverageRow, Range, covered, merged, missing


@dataclass(frozen=True, slots=True)
class Segment:
    """Offsets [from_offset, to_offset) for which the same keys are missing; ids as in coverage, `TIME` among them."""

    from_offset: int
    to_offset: int
    key_ids: frozenset[int]


def unrecorded(rows: Sequence[CoverageRow], within: Range, key_ids: Iterable[int]) -> list[Segment]:
    """The parts of a range in which some of the keys are not recorded, in order, as long as they can be."""
    gaps = {key_id: missing(within, covered(rows, key_id)) for key_id in key_ids}
    cuts = sorted({edge for ranges in gaps.values() for gap in ranges for edge in gap})
    segments: list[Segment] = []
    for start, end in pairwise(cuts):
        lacking = frozenset(
            key_id for key_id, ranges in gaps.items() if any(a <= start and end <= b for a, b in ranges)
        )
        if not lacking:
            continue
        if segments and segments[-1].to_offset == start and segments[-1].key_ids == lacking:
            segments[-1] = Segment(segments[-1].from_offset, end, lacking)
        else:
            segments.append(Segment(start, end, lacking))
    return segments


def gaps(rows: Sequence[CoverageRow], first: int) -> list[Range]:
    """The offsets before the tail's end, from the first that is retained, of which nothing at all is recorded.

    A key that was defined later leaves none: what it lacks is a back-fill's work. Holes are none either: what retention
    took cannot be recorded.
    """
    ends = [row.to_offset for row in rows if row.is_tail]
    if not ends or first >= ends[0]:
        return []
    return missing((first, ends[0]), merged((row.from_offset, row.to_offset) for row in rows))
