"""A serial consumer's positions and holds in PostgreSQL. Blocking, thread-safe.

Exactly-once rests on one statement: a position moves only if its row still names this member and the version that it
wrote last. An application's writes in the same transaction are committed with it, or not at all. If a commit gets no
answer, only the token that each attempt writes tells its outcome: the row may have changed since, even by this member.
A member whose lease has expired joins again under another name.
"""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from relatum.contexts._move_store import FLOORS
from relatum.contexts._partition_following import Following, Opened, Step
from relatum.contexts._serial_member_store import DRAINED, MemberStore
from relatum.contexts._super_stream_rows import Ask, asking
from relatum.errors import PartitionLost
from relatum.reading import Position, position_of
from relatum.store.database import sql
from relatum.store.settling import marked

_MINE: Final = """consumer_id = :consumer_id::integer AND partition_id = :partition_id::integer
        AND holder = :holder::text"""

# This fences off pending writes of this member.
BEGIN: Final = sql(f"""
    UPDATE relatum.serial_positions SET version = version + 1
    WHERE {_MINE}
    RETURNING position, version, last_offset, last_fingerprint, last_chunk_ms""")

SCANS: Final = sql("""
    SELECT scan_from FROM relatum.context_moves
    WHERE source_id = :partition_id::integer AND fence_offset IS NULL
    UNION ALL
    SELECT target_scan_from FROM relatum.context_moves
    WHERE target_id = :partition_id::integer AND marker_offset IS NULL""")
"""The offsets at which to search for fences and markers that are not found yet."""

_RESTART: Final = sql(f"""
    UPDATE relatum.serial_positions
    SET position = :position::bigint, version = version + 1, last_offset = NULL, last_fingerprint = NULL,
        last_chunk_ms = NULL
    WHERE {_MINE}""")
"""For a stream that was declared again or lost its end."""

_DRAIN: Final = sql(f"""
    UPDATE relatum.serial_positions SET position = {DRAINED}, version = version + 1
    WHERE {_MINE} AND EXISTS (
        SELECT FROM relatum.super_stream_partitions s
        WHERE s.partition_id = serial_positions.partition_id AND s.state = 'retired')""")

ADVANCE: Final = marked(f"""
        UPDATE relatum.serial_positions
        SET position = :position::bigint, version = version + 1,
            last_offset = coalesce(:last_offset::bigint, last_offset),
            last_fingerprint = CASE WHEN :last_offset::bigint IS NULL THEN last_fingerprint
                                    ELSE :last_fingerprint::bigint END,
            last_chunk_ms = CASE WHEN :last_offset::bigint IS NULL THEN last_chunk_ms ELSE :last_chunk_ms::bigint END
        WHERE {_MINE} AND version = :version::bigint""")
"""Moves a position; the last message read is kept if nothing was read."""

_IN_PARTITION: Final = "consumer_id = :consumer_id::integer AND partition_id = :partition_id::integer"
_FROM_PARTITION: Final = "consumer_id = :consumer_id::integer AND source_id = :partition_id::integer"

HOLDS_OF: Final = sql(f"""
    SELECT move_id, marker_offset, cursor, extract(epoch FROM clock_timestamp() - since)::float AS since_s
    FROM relatum.serial_holds WHERE {_IN_PARTITION}""")

_DROP_HOLDS: Final = sql(f"""
    DELETE FROM relatum.serial_holds WHERE {_IN_PARTITION} AND marker_offset >= :markers_from::bigint""")

_MOVE_HOLDS_BACK: Final = sql(f"""
    UPDATE relatum.serial_holds SET cursor = least(cursor, :position::bigint) WHERE {_IN_PARTITION}""")

_FREE_HOLDS: Final = sql(f"""
    UPDATE relatum.serial_holds SET fence_offset = -1
    WHERE {_FROM_PARTITION} AND fence_offset >= :fences_from::bigint""")

BEGIN_HOLD: Final = sql("""
    INSERT INTO relatum.serial_holds (consumer_id, partition_id, move_id, source_id, epoch, marker_offset, cursor,
        fence_offset)
    SELECT :consumer_id::integer, :partition_id::integer, :move_id::bigint, source.partition_id, :epoch::bigint,
        :marker_offset::bigint, :cursor::bigint, :fence_offset::bigint
    FROM relatum.super_stream_partitions source
    JOIN relatum.serial_consumers c ON c.super_stream_id = source.super_stream_id
    WHERE c.consumer_id = :consumer_id::integer AND source.stream = :source::text""")

MOVE_HOLD: Final = sql(f"""
    UPDATE relatum.serial_holds SET cursor = :cursor::bigint, held = :held::bigint
    WHERE {_IN_PARTITION} AND move_id = :move_id::bigint""")

END_HOLD: Final = sql(f"DELETE FROM relatum.serial_holds WHERE {_IN_PARTITION} AND move_id = :move_id::bigint")

_IS_COMPLETE: Final = """at_source.position > h.fence_offset AND NOT EXISTS (
            SELECT FROM relatum.serial_holds before
            JOIN relatum.moved_contexts waiting_before ON waiting_before.move_id = before.move_id
            JOIN relatum.moved_contexts waiting ON waiting.name = waiting_before.name
            WHERE before.consumer_id = h.consumer_id AND before.partition_id = h.source_id
                AND before.marker_offset < h.fence_offset AND waiting.move_id = h.move_id)"""
"""Whether a hold has ended: its source is consumed to the fence, and has no open holds before it."""

_AT_SOURCE: Final = """relatum.serial_positions at_source
        ON at_source.consumer_id = h.consumer_id AND at_source.partition_id = h.source_id"""

COMPLETE_HOLDS: Final = sql(f"""
    SELECT h.partition_id, h.move_id FROM relatum.serial_holds h JOIN {_AT_SOURCE}
    WHERE h.consumer_id = :consumer_id::integer AND h.partition_id = ANY (:partition_ids::integer[])
        AND {_IS_COMPLETE}""")

HOLDS_SHOWN: Final = sql(f"""
    SELECT h.partition_id, h.move_id, source.stream AS source, h.fence_offset, h.held,
        extract(epoch FROM clock_timestamp() - h.since)::float AS since_s,
        coalesce({_IS_COMPLETE}, false) AS is_complete
    FROM relatum.serial_holds h
    JOIN relatum.super_stream_partitions source ON source.partition_id = h.source_id
    LEFT JOIN {_AT_SOURCE}
    WHERE h.consumer_id = :consumer_id::integer
    ORDER BY h.partition_id, h.marker_offset""")


def lost(stream: str, name: str) -> PartitionLost:
    """The error for a member that has lost a partition."""
    return PartitionLost(
        f"another member of {name!r} has {stream!r} now, or it was opened anew; nothing was written, and what was not "
        "acknowledged is delivered again",
        stream=stream,
    )


class ConsumerStore(MemberStore):
    """The rows of one consumer name, as one member reads and writes them."""

    @contextmanager
    def _asking(self, partition_id: int) -> Iterator[Ask]:
        """Open a transaction, and yield a function that runs statements about this member's partition."""
        with self.database.transaction() as connection:
            yield asking(connection, **self._mine(partition_id))

    def open(self, partition_id: int) -> Opened | None:
        """Read the stored state of a partition; None if another member holds it."""
        with self._asking(partition_id) as ask:
            row = ask(BEGIN).one_or_none()
            if row is None:
                return None
            holds = ask(HOLDS_OF).all()
            read_from = min([row.position, *(hold.marker_offset for hold in holds), *ask(SCANS).scalars()])
            floors = dict(ask(FLOORS, offset=read_from).all())
        known_by = None
        if row.last_offset is not None:
            known_by = Position(row.last_offset, row.last_fingerprint, row.last_chunk_ms)
        cursors = {hold.move_id: hold.cursor for hold in holds}
        since = {hold.move_id: hold.since_s for hold in holds}
        return Opened(row.position, row.version, known_by, cursors, since, floors, read_from)

    def restart(self, partition_id: int, position: int, *, markers_from: int, fences_from: int) -> None:
        """Set the position back, or to the beginning of a stream that was declared again.

        Holds whose markers are at or after `markers_from` are dropped: these markers are gone, or read again. Holds in
        other partitions stop waiting for fences at or after `fences_from`, which no longer exist.
        """
        with self._asking(partition_id) as ask:
            if ask(_RESTART, position=position).rowcount:
                ask(_DROP_HOLDS, markers_from=markers_from)
                ask(_MOVE_HOLDS_BACK, position=position)
                ask(_FREE_HOLDS, fences_from=fences_from)

    def drain(self, partition_id: int) -> bool:
        """Store that a retired partition's stream was deleted: no hold has to wait for it."""
        with self._asking(partition_id) as ask:
            is_drained = bool(ask(_DRAIN).rowcount)
            if is_drained:
                ask(_DROP_HOLDS, markers_from=0)
            return is_drained

    def commit(self, following: Following, step: Step, token: UUID) -> bool:
        """Store a step in its own transaction; False if another member holds the partition."""
        if not (step.begun or step.ended or step.holds):
            # One statement, one round trip.
            return bool(self.database.rows(ADVANCE, self._moved(following, step, token), once=True))
        with self.database.transaction() as connection:
            return self._write(connection, following, step, token)

    def _write(self, connection: sa.Connection, following: Following, step: Step, token: UUID) -> bool:
        """Store a step in a transaction; False, without writing, if another member holds the partition."""
        if connection.execute(ADVANCE, self._moved(following, step, token)).first() is None:
            return False
        _write_holds(asking(connection, **self._mine(following.partition_id)), step)
        return True

    def _moved(self, following: Following, step: Step, token: UUID) -> dict[str, Any]:
        """The parameters of `ADVANCE`, which returns a row if it moved the position."""
        last = None if step.last is None else position_of(step.last)
        return {
            **self._mine(following.partition_id),
            **self.tokens.of(token),
            "version": following.version,
            "position": step.position,
            "last_offset": None if last is None else last.offset,
            "last_fingerprint": None if last is None else last.fingerprint,
            "last_chunk_ms": None if last is None else last.chunk_ms,
        }

    def came_through(self, token: UUID) -> bool:
        """Whether a commit without an answer took effect. Call it once."""
        return self.tokens.came_through(self.database.engine, token)

    @contextmanager
    def joined(self, following: Following, step: Step, *, stop: threading.Event) -> Iterator[sa.Connection]:
        """Open a transaction for an application's writes, which stores the step when it commits; see `Tokens`."""

        def store(connection: sa.Connection, token: UUID) -> None:
            if not self._write(connection, following, step, token):
                raise lost(following.stream, self.name)

        what = f" of this batch of {following.stream!r}"
        with self.tokens.transaction(self.database.engine, store, stop=stop, what=what) as connection:
            yield connection

    def complete(self, partition_ids: Collection[int]) -> list[tuple[int, int]]:
        """Read the holds in these partitions that have ended: partition and move of each."""
        wanted = {**self.me, "partition_ids": list(partition_ids)}
        return [(row.partition_id, row.move_id) for row in self.database.rows(COMPLETE_HOLDS, wanted)]


def _write_holds(ask: Ask, step: Step) -> None:
    """Write the holds that a step begins, advances and ends."""
    begun = {hold.move_id for hold in step.begun}
    for hold in step.begun:
        ask(
            BEGIN_HOLD,
            move_id=hold.move_id,
            source=hold.source,
            epoch=hold.epoch,
            marker_offset=hold.marker_offset,
            cursor=hold.marker_offset + 1,
            fence_offset=hold.fence_offset,
        )
    for move_id, cursor, held in step.holds:
        if move_id not in begun:
            ask(MOVE_HOLD, move_id=move_id, cursor=cursor, held=held)
    for move_id in step.ended:
        ask(END_HOLD, move_id=move_id)
