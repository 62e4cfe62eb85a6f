"""What a recorder writes down where a stream is not what it was, or cannot be read: holes, lost tails, generations.

RabbitMQ does not fsync streams, moves a reader that fell behind retention forward without a word, and starts a stream
that is declared again at offset 0. So nothing is concluded from offsets alone: what lies at the last recorded offset
is compared with what lay there.
"""

import logging
from bisect import bisect_left

import sqlalchemy as sa

from relatum.errors import CoverageConflict, StreamUnavailable
from relatum.limits import INTEGER_MAX
from relatum.reading import Agreement, Position, StreamBounds, StreamReader, agreement, ends_of_known
from relatum.store.catalog import StreamRow, lock_stream
from relatum.store.coverage import CoverageRow, NewTail, add_hole, close_tail, coverage_of, open_tail, tail_of
from relatum.store.database import sql
from relatum.store.tables import (
    checkpoints,
    coverage,
    events,
    group_scans,
    receipts,
    relationships,
    streams,
    time_blocks,
)
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
    if agreed is None or tail is None:
        _begin_generation(engine, stream)
        return False
    _cut_back(engine, stream, tail, agreed)
    return True


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


def _cut_back(engine: sa.Engine, stream: StreamRow, tail: CoverageRow, agreed: Position) -> None:
    """Forget everything behind the last agreement, so that it is recorded again as the stream has it now."""
    with translated_errors(), engine.begin() as connection:
        # Whoever else opens or back-fills this stream waits here.
        lock_stream(connection, stream.stream_id)
        # Consumers of groups that count a part as scanned have done so before the cut, or see the coverage behind it.
        connection.execute(sql("LOCK TABLE relatum.group_scans IN SHARE ROW EXCLUSIVE MODE"))
        now = tail_of(connection, stream.stream_id)
        if now is None or (now.coverage_id, now.to_offset, now.mark) != (tail.coverage_id, tail.to_offset, tail.mark):
            raise CoverageConflict("another recorder moved the tail meanwhile", stream=stream.name)
        cut = _cut_offset(connection, stream.stream_id, agreed.offset + 1)
        for table, column in _FORGOTTEN:
            connection.execute(sa.delete(table).where(table.c.stream_id == stream.stream_id, column >= cut))
        scanned = group_scans.c.stream_id == stream.stream_id
        connection.execute(sa.delete(group_scans).where(scanned, group_scans.c.from_offset >= cut))
        connection.execute(sa.update(group_scans).where(scanned, group_scans.c.to_offset > cut).values(to_offset=cut))
        of_stream = coverage.c.stream_id == stream.stream_id
        connection.execute(sa.delete(coverage).where(of_stream, (coverage.c.from_offset >= cut) | coverage.c.is_tail))
        if tail.from_offset < cut:
            connection.execute(sa.insert(coverage).values(_closed_range(tail, cut)))
        connection.execute(sa.update(coverage).where(of_stream, coverage.c.to_offset > cut).values(to_offset=cut))
        # What lay behind the cut is not what the stream is known by any more.
        unknown = {"last_offset": None, "last_fingerprint": None, "last_chunk_ms": None}
        connection.execute(sa.update(coverage).where(of_stream, coverage.c.last_offset >= cut).values(unknown))
        _open_tail(connection, tail, cut, agreed if cut == agreed.offset + 1 else None)
        note(
            connection, stream.stream_id, "tail_lost", (cut, tail.to_offset), "recorded again as the stream has it now"
        )
    extra = {"stream": stream.name, "from": cut, "to": tail.to_offset}
    logger.warning("stream %r has lost its end: recorded again from %d on", stream.name, cut, extra=extra)


_FORGOTTEN = (
    (relationships, relationships.c.stream_offset),
    (time_blocks, time_blocks.c.last_offset),
    (receipts, receipts.c.stream_offset),
    (checkpoints, checkpoints.c.last_offset),
)


def _cut_offset(connection: sa.Connection, stream_id: int, cut: int) -> int:
    """The cut, moved back to where no block of the time index lies on both sides of it."""
    at = sa.bindparam("cut", type_=sa.BigInteger)
    straddling = sa.select(sa.func.min(time_blocks.c.first_offset)).where(
        time_blocks.c.stream_id == stream_id, time_blocks.c.first_offset < at, time_blocks.c.last_offset >= at
    )
    while (first := connection.execute(straddling, {"cut": cut}).scalar_one()) is not None:
        cut = first
    return cut


def _closed_range(tail: CoverageRow, cut: int) -> dict[str, object]:
    return {
        "stream_id": tail.stream_id,
        "from_offset": tail.from_offset,
        "to_offset": cut,
        "key_ids": list(tail.key_ids),
        "with_time": tail.with_time,
        "kind": "recorded",
        "over_amqp": tail.over_amqp,
    }


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
    close_tail(connection, tail)
    _open_tail(connection, tail, to_offset, tail.position)
    return tail


def _open_tail(connection: sa.Connection, like: CoverageRow, from_offset: int, position: Position | None) -> None:
    """Open a tail like another one of the stream."""
    tail = NewTail(like.stream_id, from_offset, like.with_time, position)
    open_tail(connection, tail, like.key_ids)


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
