"""What a stream's coverage must be: beside the stream's ends, and beside what lies where it says that something lay.

No two ranges hold the same offsets for the same key, none ends behind the stream, no hole lies where messages are
retained, and one range is the tail: the one that ends last, where recording goes on.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from itertools import islice
from typing import Final

import sqlalchemy as sa

from relatum.reading import Agreement, Message, Position, StreamBounds, StreamReader, agreement, position_of
from relatum.recording._compare import Block, Difference, Expected, stored_of
from relatum.store.coverage import TIME, CoverageRow, Range, merged
from relatum.store.translation import translated_errors


def judged_to(recorded_to: int, stray: int | None, last: int | None) -> int:
    """Up to where messages are compared: the coverage's end, and what the table holds behind it."""
    end = recorded_to if last is None else min(recorded_to, last + 1)
    if stray is None or last is None:
        return end
    return max(end, min(stray, last) + 1)


def compare_coverage(
    rows: Sequence[CoverageRow], known_key_ids: Collection[int], first: int | None, last: int | None
) -> Iterator[Difference]:
    """Where a stream's ranges cannot be."""
    for row in rows:
        for key_id in sorted(set(row.key_ids) - set(known_key_ids)):
            yield _difference("unknown_key", row.from_offset, row.to_offset, f"#{key_id}")
    for start, end in overlaps(rows):
        yield _difference("coverage_overlap", start, end)
    for row in rows:
        if last is not None and row.to_offset > last + 1:
            yield _difference("coverage_past_end", max(row.from_offset, last + 1), row.to_offset)
        if first is not None and row.kind == "hole" and row.to_offset > first:
            yield _difference("coverage_hole", max(row.from_offset, first), row.to_offset)
    if rows and not _has_right_tail(rows):
        end = max(row.to_offset for row in rows)
        yield _difference("coverage_tail", end, None)


def _difference(kind: str, start: int, end: int | None, key: str = "") -> Difference:
    return Difference(kind, start, key, table="coverage", to_offset=end)


def _has_right_tail(rows: Sequence[CoverageRow]) -> bool:
    tails = [row for row in rows if row.is_tail]
    return len(tails) == 1 and tails[0].kind == "recorded" and tails[0].to_offset == max(row.to_offset for row in rows)


def overlaps(rows: Sequence[CoverageRow]) -> list[Range]:
    """The offsets that two ranges hold for the same key, or a hole and another range, joined."""
    claims: dict[int, list[Range]] = {}
    for row in rows:
        if row.from_offset >= row.to_offset:
            continue
        for key_id in {*row.key_ids, *([TIME] if row.with_time else [])} if row.kind == "recorded" else {-1}:
            claims.setdefault(key_id, []).append((row.from_offset, row.to_offset))
    holes = claims.pop(-1, [])
    filled = merged(claim for ranges in claims.values() for claim in ranges)
    found = [both for ranges in [*claims.values(), [*holes, *filled]] for both in _shared(ranges)]
    return merged(found)


def _shared(ranges: Iterable[Range]) -> Iterator[Range]:
    reach = -1
    for start, end in sorted(ranges):
        if start < reach:
            yield start, min(end, reach)
        reach = max(reach, end)


# --- mending ------------------------------------------------------------------------------------------------------


def mended(
    rows: Sequence[CoverageRow], known_key_ids: Collection[int], first: int | None, last: int | None
) -> list[CoverageRow]:
    """The ranges without what `compare_coverage` finds. What they held wrongly is a gap then, or held once."""
    result: list[CoverageRow] = []
    end = None if last is None else last + 1
    # What says most comes first, and keeps what two of them claim.
    for row in sorted(rows, key=lambda row: (row.kind == "hole", not row.is_tail, row.from_offset, row.coverage_id)):
        known = tuple(key_id for key_id in row.key_ids if key_id in known_key_ids)
        kept = [replace(row, coverage_id=0, key_ids=known) if known != row.key_ids else row]
        if end is not None:
            kept = [one for one in without(kept, (end, max(end, row.to_offset))) if one.from_offset <= end]
        if row.kind == "hole" and first is not None:
            kept = without(kept, (first, max(first, row.to_offset)))
        for start, stop in overlaps([*result, *kept]):
            kept = without(kept, (start, stop))
        result += kept
    return with_tail(joined(result))


def without(rows: Iterable[CoverageRow], gone: Range) -> list[CoverageRow]:
    """The ranges without some offsets; those that end before or begin behind are as they were."""
    start, end = gone
    result: list[CoverageRow] = []
    for row in rows:
        if start >= end or row.to_offset <= start or row.from_offset >= end:
            result.append(row)
            continue
        if row.from_offset < start:
            result.append(_part(row, row.from_offset, start, is_tail=row.is_tail and row.to_offset <= end))
        if row.to_offset > end:
            result.append(_part(row, end, row.to_offset, is_tail=row.is_tail))
    return result


def _part(row: CoverageRow, start: int, end: int, *, is_tail: bool) -> CoverageRow:
    """A part of a range. What lay last is known of the part that it lay in, where no message followed it there."""
    part = replace(row, coverage_id=0, from_offset=start, to_offset=end, is_tail=is_tail)
    if row.to_offset == end and row.last_offset is not None and row.last_offset < end:
        return part
    return replace(part, last_offset=None, last_fingerprint=None, last_chunk_ms=None)


def painted(rows: Sequence[CoverageRow], new: CoverageRow) -> list[CoverageRow]:
    """The ranges with a new one in place of whatever they said of its offsets."""
    return with_tail(joined([*without(rows, (new.from_offset, new.to_offset)), new]))


def joined(rows: Iterable[CoverageRow]) -> list[CoverageRow]:
    """Ranges that touch and say the same, as one; empty ones but the tail are left out."""
    result: list[CoverageRow] = []
    kept = (row for row in rows if row.is_tail or row.from_offset < row.to_offset)
    for row in sorted(kept, key=lambda row: (row.from_offset, row.to_offset)):
        place = next((n for n, one in enumerate(result) if one.to_offset == row.from_offset and _alike(one, row)), None)
        if place is None:
            result.append(row)
            continue
        before = result[place]
        position = row.position or before.position
        result[place] = _known_by(
            replace(row, coverage_id=0, from_offset=before.from_offset, is_tail=row.is_tail or before.is_tail), position
        )
    return result


def _alike(one: CoverageRow, other: CoverageRow) -> bool:
    if one.is_tail and one.to_offset != other.from_offset:
        return False
    said = [(row.kind, row.key_ids, row.with_time, row.over_amqp) for row in (one, other)]
    return said[0] == said[1]


def _known_by(row: CoverageRow, position: Position | None) -> CoverageRow:
    if position is None:
        return replace(row, last_offset=None, last_fingerprint=None, last_chunk_ms=None)
    offset, last, chunk_ms = position.offset, position.fingerprint, position.chunk_ms
    return replace(row, last_offset=offset, last_fingerprint=last, last_chunk_ms=chunk_ms)


def known_by(row: CoverageRow, position: Position | None) -> CoverageRow:
    """A range that remembers what lay last in it; None for nothing."""
    return row if row.position == position else replace(_known_by(row, position), coverage_id=0)


def with_tail(rows: Sequence[CoverageRow]) -> list[CoverageRow]:
    """The ranges with the one that ends last as their tail."""
    if not rows or _has_right_tail(rows):
        return list(rows)
    result = [replace(row, coverage_id=0, is_tail=False) if row.is_tail else row for row in rows]
    result = [row for row in result if row.from_offset < row.to_offset]
    recorded = [row for row in result if row.kind == "recorded"]
    if not recorded:
        return result
    end = max(row.to_offset for row in result)
    last = max(recorded, key=lambda row: (row.to_offset, row.from_offset))
    if last.to_offset < end:
        return [*result, _known_by(replace(last, coverage_id=0, from_offset=end, to_offset=end, is_tail=True), None)]
    result[result.index(last)] = replace(last, coverage_id=0, is_tail=True)
    return result


EVIDENCE_MESSAGES: Final = 16
"""Messages before a place that differs, whose rows decide whether the stream differs or the place is wrong."""


class Verdict(Enum):
    """What lies where a position says that something lay."""

    RIGHT = "right"
    """The same message, and none follows it in its range."""
    UNKNOWN = "unknown"
    """Nobody can tell: retention took it, or nothing is remembered."""
    WRONG = "wrong"
    """What is remembered contradicts the range itself: no stream can be like that."""
    OTHER = "other"
    """Another message lies there, or none."""
    BEYOND = "beyond"
    """The stream's proven end lies before it."""


def verdict_of(reader: StreamReader, stream: str, row: CoverageRow) -> Verdict:
    """Compare what a range says lay last in it with what does."""
    position = row.position
    holds = row.from_offset < row.to_offset
    if position is None:
        is_half = row.last_offset is not None or row.last_fingerprint is not None
        return Verdict.WRONG if is_half or (row.is_tail and holds) else Verdict.UNKNOWN
    if position.offset >= row.to_offset or (row.with_time and holds and position.chunk_ms is None):
        return Verdict.WRONG
    verdict = _VERDICTS[agreement(reader, stream, position)]
    # Equal messages of one chunk look the same: what lies last is told by nothing following it.
    may_be_followed = holds and row.from_offset <= position.offset < row.to_offset - 1 and not row.over_amqp
    if verdict is Verdict.RIGHT and may_be_followed:
        following = reader.iterate(stream, position.offset + 1, stop=row.to_offset)
        verdict = Verdict.RIGHT if next(iter(following), None) is None else Verdict.WRONG
    return verdict


_VERDICTS: Final = {
    Agreement.SAME: Verdict.RIGHT,
    Agreement.EXPIRED: Verdict.UNKNOWN,
    Agreement.UNKNOWN: Verdict.UNKNOWN,
    Agreement.OTHER: Verdict.OTHER,
    Agreement.ENDS_BEFORE: Verdict.BEYOND,
}


def compare_positions(rows: Sequence[CoverageRow], verdicts: Sequence[Verdict]) -> Iterator[Difference]:
    """The ranges that remember wrongly what lay last in them."""
    for row, verdict in zip(rows, verdicts, strict=True):
        if verdict in (Verdict.WRONG, Verdict.OTHER, Verdict.BEYOND):
            at = row.last_offset if row.last_offset is not None else row.to_offset
            yield Difference("coverage_position", at, table="coverage", to_offset=row.to_offset, detail=verdict.value)


def is_replaced(
    engine: sa.Engine,
    reader: StreamReader,
    stream: str,
    rows: Sequence[CoverageRow],
    verdicts: Sequence[Verdict],
    bounds: StreamBounds,
) -> bool:
    """Whether the stream itself is another one, or lost its tail; not only what is remembered of it wrong.

    A log grows at its end only: where its last position agrees, all before it does. Where that does not, the rows of
    the messages before it decide: those of another stream have other values and times.
    """
    judged = [(row, verdict) for row, verdict in zip(rows, verdicts, strict=True) if row.position is not None]
    if not judged:
        return False
    row, verdict = max(judged, key=lambda each: (each[0].to_offset, each[0].last_offset or 0))
    if verdict is Verdict.BEYOND:
        return True
    if verdict is not Verdict.OTHER:
        return False
    position = row.position
    assert position is not None, "it was judged"
    return not _is_known(engine, reader, stream, row.stream_id, position, bounds)


def _is_known(
    engine: sa.Engine, reader: StreamReader, stream: str, stream_id: int, position: Position, bounds: StreamBounds
) -> bool:
    """Whether most of the messages before a position are those whose rows the table holds."""
    start = max(bounds.first or 0, position.offset + 1 - EVIDENCE_MESSAGES)
    messages = list(islice(reader.iterate(stream, start, stop=position.offset + 1), EVIDENCE_MESSAGES))
    with translated_errors(), engine.connect() as connection:
        stored = stored_of(connection, stream_id, (start, position.offset + 1))
    expected = Expected(stored.definitions, stored.covering, (start, position.offset + 1))
    have = {row for row, _ in stored.rows}
    hits = misses = 0
    for message in messages:
        facts = [row in have for row in expected.rows(message)]
        if expected.covers(message.offset, TIME):
            facts.append(_is_in_block(message, stored.blocks))
        hits += bool(facts) and all(facts)
        misses += bool(facts) and not all(facts)
    return hits > misses


def _is_in_block(message: Message, blocks: Sequence[Block]) -> bool:
    time_us = message.time_us
    return time_us is not None and any(
        first <= message.offset <= last and low <= time_us <= high for first, last, low, high, _ in blocks
    )


def last_position_in(reader: StreamReader, stream: str, row: CoverageRow, first: int | None) -> Position | None:
    """What lies last in a range now; None where nothing retained does. Reads back in growing steps."""
    step = 1
    while row.from_offset < row.to_offset:
        start = max(row.from_offset, row.to_offset - step, first or 0)
        last = None
        for message in reader.iterate(stream, start, stop=row.to_offset) if start < row.to_offset else ():
            last = message
        if last is not None:
            return position_of(last)
        if start <= max(row.from_offset, first or 0):
            return None
        step *= 100
    return None
