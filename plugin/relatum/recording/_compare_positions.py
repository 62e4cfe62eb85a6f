"""Whether the stream is the one that was recorded, or only what the table says of it is wrong."""

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import Final

import sqlalchemy as sa

from relatum.reading import Agreement, Message, StreamBounds, StreamReader, agreement, position_of
from relatum.recording._compare import Block, Difference, Expected
from relatum.recording._stored import stored_of
from relatum.store import TIME, CoverageRow, Position, translated_errors

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
