"""What a recorder writes down where a stream is not what it was, or cannot be read: holes, lost tails, generations.

RabbitMQ does not fsync streams, moves a reader that fell behind retention forward without a word, and starts a stream
that is declared again at offset 0. So nothing is concluded from offsets alone: what lies at the last recorded offset
is compared with what lay there.
"""

import logging
from bisect import bisect_left
from typing import Final

import sqlalchemy as sa

from relatum.errors import CoverageConflict, StreamUnavailable
from relatum.limits import INTEGER_MAX
from relatum.reading import Agreement, Position, StreamBounds, StreamReader, agreement, ends_of_known
from relatum.recording._uncover import lock_ranges, move_tail, position_before, uncover
from relatum.store.catalog import StreamRow
from relatum.store.coverage import CoverageRow, add_hole, coverage_of, tail_of
from relatum.store.database import sql
from relatum.store.tables import checkpoints, events, streams
from relatum.store.translation import translated_errors

logger = logging.getLogger("relatum.recorder")


def is_same(reader: StreamReader, stream: str, position: Position, bounds: StreamBounds) -> bool:
    """Whether the stream still holds, at an offset, what lay there. True where retention has taken the offset."""
    if bounds.first is not None and position.offset < bounds.first:
        return True
    # Asked also where the bounds end before it: they may be older than the position.
    found = agreement(reader, stream, position)
    if found is Agreement.UNKNOWN:
        raise StreamUnavailable(
            f"whether the stream {stream!r} is as it was at offset {position.offset} cannot be told now: no node that "
            "has it can be asked",
            stream=stream,
        )
    return found in (Agreement.SAME, Agreement.EXPIRED)


def after_loss(engine: sa.Engine, reader: StreamReader, stream: StreamRow) -> bool:
    """The stream is not what was recorded: cut back to where both agree, or begin a new generation."""
    bounds = ends_of_known(reader, stream.name)
    with translated_errors(), engine.begin() as connection:
        tail = tail_of(connection, stream.stream_id)
    agreed = _last_agreement(engine, reader, stream, bounds)
    if agreed is not None and tail is not None and _cut_back(engine, reader, stream, tail, agreed, bounds):
        return True
    _begin_generation(engine, stream)
    return False


def _last_agreement(
    engine: sa.Engine, reader: StreamReader, stream: StreamRow, bounds: StreamBounds
) -> Position | None:
    """The last checkpoint, or end of a range, that the stream agrees with; by halving, since agreement is a prefix."""
    if bounds.first is None or bounds.last is None:
        return None
    # What one node knows of the end is no reason to go back further: what lies behind it is asked, and waited for.
    end = bounds.last if bounds.is_proven else INTEGER_MAX
    with translated_errors(), engine.begin() as connection:
        rows = connection.execute(
            sa.select(checkpoints.c.last_offset, checkpoints.c.fingerprint, checkpoints.c.chunk_ms)
            .where(checkpoints.c.stream_id == stream.stream_id)
            .where(checkpoints.c.last_offset.between(bounds.first, end))
        ).all()
        ranges = coverage_of(connection, [stream.stream_id])
    known = {row.last_offset: Position(*row) for row in rows}
    ends = [row.position for row in ranges if row.position is not None]
    known |= {position.offset: position for position in ends if bounds.first <= position.offset <= end}
    positions = [known[offset] for offset in sorted(known)]
    agreed = bisect_left(positions, True, key=lambda each: not is_same(reader, stream.name, each, bounds))
    return positions[agreed - 1] if agreed else None


def _begin_generation(engine: sa.Engine, stream: StreamRow) -> None:
    """Begin a new generation: no row of the old one can answer for the new stream."""
    extra = {"stream": stream.name, "generation": stream.generation + 1}
    logger.warning("stream %r was deleted and declared again: recorded from its begin", stream.name, extra=extra)
    with translated_errors(), engine.begin() as connection:
        retired = connection.execute(
            sa.update(streams)
            .where(streams.c.stream_id == stream.stream_id, streams.c.replaced_at.is_(None))
            .values(replaced_at=sa.func.now(), state="replaced", lease_holder=None)
            .returning(streams.c.lease_holder)
        )
        if retired.rowcount != 1:
            raise CoverageConflict("another recorder began the stream's new generation", stream=stream.name)
        new = connection.execute(
            sa.insert(streams)
            .values(
                vhost=stream.vhost,
                name=stream.name,
                super_stream=stream.super_stream,
                generation=stream.generation + 1,
                record_time=stream.record_time,
            )
            .returning(streams.c.stream_id, streams.c.generation)
        ).one()
        note(connection, new.stream_id, "replaced", detail=f"generation {new.generation} begins")


_FORGET: Final = [
    sql(f"DELETE FROM relatum.{table} WHERE stream_id = :stream_id::integer AND {offset} >= :cut::bigint")
    for table, offset in (("receipts", "stream_offset"), ("checkpoints", "last_offset"))
]
"""What speaks of messages, which are others now."""


def _cut_back(
    engine: sa.Engine,
    reader: StreamReader,
    stream: StreamRow,
    tail: CoverageRow,
    agreed: Position,
    bounds: StreamBounds,
) -> bool:
    """Forget everything behind the last agreement, so that it is recorded again as the stream has it now.

    False where nothing that is retained would be left to know the stream by: nothing was changed then.
    """
    with translated_errors(), engine.connect() as connection, connection.begin() as transaction:
        lock_ranges(connection, stream.stream_id, (0, INTEGER_MAX))
        now = tail_of(connection, stream.stream_id)
        if now is None or (now.coverage_id, now.to_offset, now.mark) != (tail.coverage_id, tail.to_offset, tail.mark):
            raise CoverageConflict("another recorder moved the tail meanwhile", stream=stream.name)
        first = bounds.first or 0
        cut, _ = uncover(connection, reader, stream, (agreed.offset + 1, INTEGER_MAX), first)
        known = agreed if cut == agreed.offset + 1 else position_before(reader, stream.name, cut, first)
        if known is None and cut > 0:
            transaction.rollback()
            return False
        if not is_same(reader, stream.name, agreed, bounds):
            raise CoverageConflict("the stream changed again meanwhile", stream=stream.name)
        for statement in _FORGET:
            connection.execute(statement, {"stream_id": stream.stream_id, "cut": cut})
        now = tail_of(connection, stream.stream_id)
        assert now is not None, "it stays where it was"
        move_tail(connection, now, cut, known)
        note(
            connection, stream.stream_id, "tail_lost", (cut, tail.to_offset), "recorded again as the stream has it now"
        )
    extra = {"stream": stream.name, "from": cut, "to": tail.to_offset}
    logger.warning("stream %r has lost its end: recorded again from %d on", stream.name, cut, extra=extra)
    return True


def pass_hole(engine: sa.Engine, stream: StreamRow, to_offset: int) -> None:
    """Go on behind offsets that retention has taken. They are a hole, unless nothing was ever recorded before them."""
    with translated_errors(), engine.begin() as connection:
        tail = _move_tail(connection, stream, to_offset)
        connection.execute(
            sa.update(streams).where(streams.c.stream_id == stream.stream_id).values(first_offset=to_offset)
        )
        if tail.position is None:
            return
        hole = (tail.to_offset, to_offset)
        add_hole(connection, stream.stream_id, hole)
        note(connection, stream.stream_id, "hole", hole, "retention was faster than recording")
    extra = {"stream": stream.name, "from": hole[0], "to": hole[1]}
    text = "retention dropped offsets %d to %d of stream %r before they were recorded"
    logger.warning(text, hole[0], hole[1] - 1, stream.name, extra=extra)


def _move_tail(connection: sa.Connection, stream: StreamRow, to_offset: int) -> CoverageRow:
    """Close the tail, and open one like it further on; gives the one that was closed."""
    tail = tail_of(connection, stream.stream_id)
    if tail is None or tail.to_offset >= to_offset:
        raise CoverageConflict("another recorder moved the tail meanwhile", stream=stream.name)
    move_tail(connection, tail, to_offset, tail.position)
    return tail


def pass_over(engine: sa.Engine, stream: StreamRow, to_offset: int, reason: str) -> None:
    """Go on behind messages that cannot be unpacked here, and leave them uncovered: a gap that is tried again."""
    with translated_errors(), engine.begin() as connection:
        tail = _move_tail(connection, stream, to_offset)
        last = sa.select(sa.func.max(events.c.event_id)).where(events.c.stream_id == stream.stream_id).scalar_subquery()
        grown = connection.execute(
            sa.update(events)
            .where(events.c.event_id == last, events.c.kind == "unreadable", events.c.to_offset == tail.to_offset)
            .values(to_offset=to_offset)
        )
        if grown.rowcount == 0:
            note(connection, stream.stream_id, "unreadable", (tail.to_offset, to_offset), reason)
            extra = {"stream": stream.name, "from": tail.to_offset, "to": to_offset, "reason": reason}
            text = "offsets %d to %d of stream %r are not recorded, and cannot be unpacked here: %s"
            logger.warning(text, tail.to_offset, to_offset - 1, stream.name, reason, extra=extra)


def note_missing(engine: sa.Engine, stream: StreamRow) -> None:
    """Write down that the broker has no such stream any more; it may be declared again at any moment."""
    with translated_errors(), engine.begin() as connection:
        missing = sa.update(streams).where(streams.c.stream_id == stream.stream_id).values(state="missing")
        connection.execute(missing)
        note(connection, stream.stream_id, "missing")


def note(
    connection: sa.Connection, stream_id: int, kind: str, offsets: tuple[int, int] | None = None, detail: str = ""
) -> None:
    """Write down what happened to a stream, for `relatum status`."""
    start, end = offsets or (None, None)
    connection.execute(
        sa.insert(events).values(stream_id=stream_id, kind=kind, from_offset=start, to_offset=end, detail=detail)
    )
