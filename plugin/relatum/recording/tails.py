"""Opens the tail of a stream, where recording continues; moves it past a hole, or cuts it back to the stream's end.

RabbitMQ does not fsync streams, silently moves a reader that fell behind retention forward, and starts a stream that is
declared again at offset 0. So offsets alone prove nothing: a stream is the recorded one if the message at the last
recorded position is unchanged. The follower reads that message first.
"""

import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from relatum.common.limits import INTEGER_MAX
from relatum.errors import CoverageConflict, StreamUnavailable
from relatum.reading import Agreement, Position, StreamReader, agreement, bounds_of_known
from relatum.reading.extractor import Extractor
from relatum.recording.ranges import lock_ranges, position_before, uncover, widened
from relatum.store.catalog import StreamRow, key_definitions, present_streams
from relatum.store.coverage import (
    CoverageRow,
    add_ranges,
    close_tails,
    coverage_by_stream,
    coverage_of,
    last_position,
    new_tail,
    tail_of,
)
from relatum.store.database import sql, transaction

logger = logging.getLogger("relatum.recorder")

# --- opened -----------------------------------------------------------------------------------------------------------

_BEGIN: Final = sql("""
    UPDATE relatum.streams SET state = 'recording'
    WHERE stream_id = ANY (:stream_ids::integer[]) AND state <> 'recording' AND replaced_at IS NULL""")


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream ready to be recorded from `tail.to_offset` on."""

    stream: StreamRow
    tail: CoverageRow
    extractor: Extractor
    known: Position | None


def open_streams(engine: sa.Engine, rows: Sequence[StreamRow]) -> list[Opened]:
    """Find where each stream's recording continues: at its tail, or at a new tail if other keys are in force now.

    Streams that another recorder opens, or that were replaced or forgotten, are left out.
    """
    ids = [row.stream_id for row in rows]
    with transaction(engine) as connection:
        # Before the tails: repairs lock in this order. It may wait for a `forget`.
        connection.execute(_BEGIN, {"stream_ids": ids})
        # Again: the rows may have changed since the caller read them.
        by_id = present_streams(connection, ids)
        ids = sorted(by_id)
        ranges = coverage_by_stream(connection, ids)
        extractor = Extractor(key_definitions(connection))
        key_ids = tuple(sorted(key.key_id for key in extractor.definitions))
        tails = {row.stream_id: row for of_stream in ranges.values() for row in of_stream if row.is_tail}
        current = {
            stream_id: tail
            for stream_id, tail in tails.items()
            if (tail.key_ids, tail.with_time, tail.over_amqp) == (key_ids, by_id[stream_id].record_time, False)
        }
        closed = close_tails(connection, [tail for stream_id, tail in tails.items() if stream_id not in current])
        starts = {stream_id: (tails[stream_id].to_offset, tails[stream_id].position) for stream_id in closed}
        starts |= {stream_id: (0, None) for stream_id in ids if stream_id not in tails}
        new = [
            new_tail(stream_id, at, key_ids, with_time=by_id[stream_id].record_time, position=position)
            for stream_id, (at, position) in starts.items()
        ]
        current |= {row.stream_id: row for row in add_ranges(connection, new)}
    # The last position of all ranges: the tail of a stream that was only back-filled has none.
    return [Opened(by_id[id_], tail, extractor, last_position(ranges[id_])) for id_, tail in current.items()]


def set_tail(
    connection: sa.Connection, stream: StreamRow, tail: CoverageRow | None, at: int, known: Position | None
) -> None:
    """Replace the tail with a new one at an offset, for the keys in force. `known` is the last position before it."""
    is_closed = tail is None or close_tails(connection, [tail])
    key_ids = [definition.key_id for definition in key_definitions(connection)]
    new = new_tail(stream.stream_id, at, key_ids, with_time=stream.record_time, position=known)
    if not is_closed or not add_ranges(connection, [new]):
        text = f"another process moved the tail of stream {stream.name!r} first; nothing was written: retry"
        raise CoverageConflict(text, stream=stream.name)


# --- lost tails and new generations -----------------------------------------------------------------------------------

_CHECKPOINTS: Final = sql("""
    SELECT last_offset, fingerprint, chunk_ms FROM relatum.checkpoints
    WHERE stream_id = :stream_id::integer""")

_RETIRE: Final = sql("""
    UPDATE relatum.streams SET replaced_at = now(), state = 'replaced', lease_holder = NULL
    WHERE stream_id = :stream_id::integer AND replaced_at IS NULL""")

_NEW_GENERATION: Final = sql("""
    INSERT INTO relatum.streams (vhost, name, super_stream, generation, record_time)
    SELECT vhost, name, super_stream, generation + 1, record_time FROM relatum.streams
    WHERE stream_id = :stream_id::integer
    RETURNING stream_id, generation""")

_DELETE_BEHIND: Final = [
    sql(f"DELETE FROM relatum.{table} WHERE stream_id = :stream_id::integer AND {offset} >= :cut::bigint")
    for table, offset in (("receipts", "stream_offset"), ("checkpoints", "last_offset"))
]
"""Deletes rows about messages that other messages have replaced."""


def is_same(reader: StreamReader, stream: str, position: Position) -> bool:
    """Return whether a stream still holds the same message at a position; True if retention dropped the message."""
    found = agreement(reader, stream, position)
    if found is Agreement.UNKNOWN:
        raise StreamUnavailable(
            f"it is unknown whether the stream {stream!r} is unchanged at offset {position.offset}: no node that has "
            "the stream answers; retry later",
            stream=stream,
        )
    return found in (Agreement.SAME, Agreement.EXPIRED)


def cut_back_or_replace(engine: sa.Engine, reader: StreamReader, stream: StreamRow) -> bool:
    """Remove what the table has after the last agreement; for another stream, begin a generation, and return False."""
    first = bounds_of_known(reader, stream.name).first
    if first is not None and _cut_back(engine, reader, stream, first):
        return True
    extra = {"stream": stream.name, "generation": stream.generation + 1}
    logger.warning("stream %r was deleted and declared again: recording it from the start", stream.name, extra=extra)
    with transaction(engine) as connection:
        # No lookup in the new stream may use a row of the old generation.
        if connection.execute(_RETIRE, {"stream_id": stream.stream_id}).rowcount != 1:
            raise CoverageConflict("another recorder began the stream's new generation", stream=stream.name)
        stream_id, generation = connection.execute(_NEW_GENERATION, {"stream_id": stream.stream_id}).one()
        add_event(connection, stream_id, "replaced", detail=f"generation {generation} begins")
    return False


def _last_agreement(reader: StreamReader, stream: str, known: Iterable[Position]) -> Position | None:
    """Find the last position that the stream agrees with. Bisects: agreement is a prefix."""
    positions = sorted(known, key=lambda each: each.offset)
    agreed = bisect_left(positions, True, key=lambda each: not is_same(reader, stream, each))
    return positions[agreed - 1] if agreed else None


def _cut_back(engine: sa.Engine, reader: StreamReader, stream: StreamRow, first: int) -> bool:
    """Remove everything after the last agreement, so that it is recorded again from the stream as it is now.

    Returns False, without a change, if no retained position would remain that identifies the stream.
    """
    with transaction(engine) as connection:
        ranges = coverage_of(connection, [stream.stream_id])
        checkpoints = [Position(*row) for row in connection.execute(_CHECKPOINTS, {"stream_id": stream.stream_id})]
    tail = next((row for row in ranges if row.is_tail), None)
    known_positions = [*checkpoints, *(row.position for row in ranges if row.position is not None)]
    agreed = _last_agreement(reader, stream.name, (each for each in known_positions if each.offset >= first))
    if tail is None or agreed is None:
        return False
    with transaction(engine) as connection:
        lock_ranges(connection, stream.stream_id, (0, INTEGER_MAX))
        now = tail_of(connection, stream.stream_id)
        if now is None or (now.coverage_id, now.to_offset, now.mark) != (tail.coverage_id, tail.to_offset, tail.mark):
            raise CoverageConflict("another recorder moved the tail", stream=stream.name)
        cut, _ = widened(connection, stream.stream_id, (agreed.offset + 1, INTEGER_MAX), first)
        known = agreed if cut == agreed.offset + 1 else position_before(reader, stream.name, cut, first)
        if known is None and cut > 0:
            return False
        uncover(connection, reader, stream, (cut, INTEGER_MAX), first)
        if not is_same(reader, stream.name, agreed):
            raise CoverageConflict(
                f"stream {stream.name!r} changed again; nothing was written: the recorder retries", stream=stream.name
            )
        for statement in _DELETE_BEHIND:
            connection.execute(statement, {"stream_id": stream.stream_id, "cut": cut})
        set_tail(connection, stream, tail_of(connection, stream.stream_id), cut, known)
        lost = cut, tail.to_offset
        add_event(connection, stream.stream_id, "tail_lost", lost, "recorded again from the present stream")
    extra = {"stream": stream.name, "from": cut, "to": tail.to_offset}
    logger.warning("stream %r has lost its end: recording it again from offset %d on", stream.name, cut, extra=extra)
    return True


# --- holes, unreadable messages and events ----------------------------------------------------------------------------

_SET_FIRST: Final = sql(
    "UPDATE relatum.streams SET first_offset = :first::bigint WHERE stream_id = :stream_id::integer"
)

_GROW_UNREADABLE: Final = sql("""
    UPDATE relatum.events SET to_offset = :to_offset::bigint
    WHERE event_id = (SELECT max(event_id) FROM relatum.events WHERE stream_id = :stream_id::integer)
        AND kind = 'unreadable' AND to_offset = :end::bigint""")

_SET_MISSING: Final = sql("""
    UPDATE relatum.streams SET state = 'missing' WHERE stream_id = :stream_id::integer AND state <> 'missing'""")

_ADD_EVENT: Final = sql("""
    INSERT INTO relatum.events (stream_id, kind, from_offset, to_offset, detail)
    VALUES (:stream_id::integer, :kind::text, :start::bigint, :end::bigint, :detail::text)""")


def skip_hole(engine: sa.Engine, stream: StreamRow, to_offset: int) -> int:
    """Continue after offsets that retention dropped, and return how many were lost.

    The offsets become a hole, unless no message was recorded before them.
    """
    with transaction(engine) as connection:
        # Repairs lock the stream before its tail, too.
        connection.execute(_SET_FIRST, {"stream_id": stream.stream_id, "first": to_offset})
        tail = _advance_tail(connection, stream, to_offset)
        # The tail of a stream that was only back-filled has no position.
        if last_position(coverage_of(connection, [stream.stream_id])) is None:
            return 0
        hole = (tail.to_offset, to_offset)
        add_ranges(connection, [CoverageRow(stream.stream_id, *hole, kind="hole")])
        add_event(connection, stream.stream_id, "hole", hole, "retention was faster than recording")
    extra = {"stream": stream.name, "from": hole[0], "to": hole[1]}
    text = "retention dropped offsets %d to %d of stream %r before they were recorded"
    logger.warning(text, hole[0], hole[1] - 1, stream.name, extra=extra)
    return hole[1] - hole[0]


def skip_unreadable(engine: sa.Engine, stream: StreamRow, to_offset: int, reason: str) -> None:
    """Continue after messages that cannot be unpacked here. Their offsets become a gap, which recorders retry."""
    with transaction(engine) as connection:
        tail = _advance_tail(connection, stream, to_offset)
        grown = {"stream_id": stream.stream_id, "end": tail.to_offset, "to_offset": to_offset}
        if connection.execute(_GROW_UNREADABLE, grown).rowcount == 0:
            add_event(connection, stream.stream_id, "unreadable", (tail.to_offset, to_offset), reason)
            extra = {"stream": stream.name, "from": tail.to_offset, "to": to_offset, "reason": reason}
            text = "offsets %d to %d of stream %r are not recorded, since they cannot be unpacked here: %s"
            logger.warning(text, tail.to_offset, to_offset - 1, stream.name, reason, extra=extra)


def _advance_tail(connection: sa.Connection, stream: StreamRow, to_offset: int) -> CoverageRow:
    """Move the tail forward, and return the previous one."""
    tail = tail_of(connection, stream.stream_id)
    if tail is None or tail.to_offset >= to_offset:
        raise CoverageConflict("another recorder moved the tail", stream=stream.name)
    set_tail(connection, stream, tail, to_offset, tail.position)
    return tail


def add_missing_event(engine: sa.Engine, stream: StreamRow) -> None:
    """Store that the broker does not have the stream any more. It may be declared again at any moment."""
    with transaction(engine) as connection:
        if connection.execute(_SET_MISSING, {"stream_id": stream.stream_id}).rowcount:
            add_event(connection, stream.stream_id, "missing")


def add_event(
    connection: sa.Connection, stream_id: int, kind: str, offsets: tuple[int, int] | None = None, detail: str = ""
) -> None:
    """Store an event of a stream, for `relatum status`."""
    start, end = offsets or (None, None)
    event = {"stream_id": stream_id, "kind": kind, "start": start, "end": end, "detail": detail}
    connection.execute(_ADD_EVENT, event)
