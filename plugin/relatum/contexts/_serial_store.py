"""A serial consumer in PostgreSQL: its name, members, positions and holds. Blocking, thread-safe.

Exactly-once delivery depends on one statement: a position advances only if its row still has this member and the
version that this member wrote last. An application's writes in the same transaction are committed with the position, or
not at all. If a commit gets no answer, only the token that each attempt writes shows its outcome: later commits, even
of this member, may have changed the row. A member with an expired lease joins again as a new holder.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from relatum.common.waiting import Deadline
from relatum.contexts._move_store import FLOORS, SCANS
from relatum.contexts._partition_following import Following, Opened, Step
from relatum.contexts._partition_log import MovedBefore, consistent_starts
from relatum.contexts._super_stream_rows import Execute, execute_in, partitions_in
from relatum.errors import PartitionLost
from relatum.reading import Position, position_of
from relatum.reading.following import BrokerReach
from relatum.store.database import AnyDatabase, Database, sql
from relatum.store.members import Member, Share, Sharing
from relatum.store.rows import known_by
from relatum.store.settling import Tokens, forget_settlements, marked

POOL: Final = 4
"""Connections to keep open. More are opened on demand: each transaction of an application holds one."""

DRAINED: Final = 2**63 - 1
"""The position in a deleted stream: above all offsets."""

PARTITIONS: Final = Sharing(
    "serial_members",
    ("consumer_id", "integer"),
    "serial_positions",
    "partition_id",
    "holder",
    of_rows="consumer_id",
    are=f"position < {DRAINED}",
    # This fences off pending writes of the previous holder.
    taken="version = version + 1",
)
"""The members of one consumer name share its partitions."""

SHARED: Final = sql(f"""
    SELECT p.partition_id, s.stream
    FROM relatum.serial_positions p JOIN relatum.super_stream_partitions s ON s.partition_id = p.partition_id
    WHERE p.consumer_id = :consumer_id::integer AND p.position < {DRAINED}
    ORDER BY p.partition_id""")

_FIND_CONSUMER: Final = sql("""
    SELECT consumer_id FROM relatum.serial_consumers
    WHERE super_stream_id = :super_stream_id::integer AND name = :name::text""")

_ADD_CONSUMER: Final = sql("""
    INSERT INTO relatum.serial_consumers (super_stream_id, name) VALUES (:super_stream_id::integer, :name::text)
    ON CONFLICT DO NOTHING""")

LOCK_CONSUMER: Final = sql("""
    SELECT 1 FROM relatum.serial_consumers WHERE consumer_id = :consumer_id::integer FOR UPDATE""")

_MOVES: Final = sql("""
    SELECT source_id, target_id, fence_offset, coalesce(marker_offset, target_scan_from)
    FROM relatum.context_moves WHERE super_stream_id = :super_stream_id::integer""")
"""The fields of `MovedBefore`, in order."""

_HAS_POSITIONS: Final = sql("""
    SELECT 1 FROM relatum.serial_positions WHERE consumer_id = :consumer_id::integer LIMIT 1""")

_ADD_POSITION: Final = sql("""
    INSERT INTO relatum.serial_positions (consumer_id, partition_id, position, last_offset, last_fingerprint,
        last_chunk_ms)
    VALUES (:consumer_id::integer, :partition_id::integer, :position::bigint, :last_offset::bigint,
        :last_fingerprint::bigint, :last_chunk_ms::bigint)
    ON CONFLICT DO NOTHING""")

ADD_NEW_PARTITIONS: Final = sql("""
    INSERT INTO relatum.serial_positions (consumer_id, partition_id, position)
    SELECT c.consumer_id, s.partition_id, 0
    FROM relatum.serial_consumers c
    JOIN relatum.super_stream_partitions s ON s.super_stream_id = c.super_stream_id
    WHERE c.consumer_id = :consumer_id::integer AND NOT EXISTS (
        SELECT FROM relatum.serial_positions p
        WHERE p.consumer_id = c.consumer_id AND p.partition_id = s.partition_id)
    ON CONFLICT DO NOTHING""")

_OWN_ROW: Final = """consumer_id = :consumer_id::integer AND partition_id = :partition_id::integer
        AND holder = :holder::text"""

# This fences off pending writes of this member.
BEGIN: Final = sql(f"""
    UPDATE relatum.serial_positions SET version = version + 1
    WHERE {_OWN_ROW}
    RETURNING position, version, last_offset, last_fingerprint, last_chunk_ms""")

_RESTART: Final = sql(f"""
    UPDATE relatum.serial_positions
    SET position = :position::bigint, version = version + 1, last_offset = NULL, last_fingerprint = NULL,
        last_chunk_ms = NULL
    WHERE {_OWN_ROW}""")
"""Sets the position in a stream that was declared again or lost its tail."""

_DRAIN: Final = sql(f"""
    UPDATE relatum.serial_positions SET position = {DRAINED}, version = version + 1
    WHERE {_OWN_ROW} AND EXISTS (
        SELECT FROM relatum.super_stream_partitions s
        WHERE s.partition_id = serial_positions.partition_id AND s.state = 'retired')""")

ADVANCE: Final = marked(f"""
        UPDATE relatum.serial_positions
        SET position = :position::bigint, version = version + 1,
            last_offset = coalesce(:last_offset::bigint, last_offset),
            last_fingerprint = CASE WHEN :last_offset::bigint IS NULL THEN last_fingerprint
                                    ELSE :last_fingerprint::bigint END,
            last_chunk_ms = CASE WHEN :last_offset::bigint IS NULL THEN last_chunk_ms ELSE :last_chunk_ms::bigint END
        WHERE {_OWN_ROW} AND version = :version::bigint""")
"""Advances a position. Without a new message, the row keeps the last message read."""

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
"""Whether a hold is complete: its source is consumed past the fence, and has no earlier open hold of its contexts."""

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
    return PartitionLost(
        f"another member of {name!r} took over {stream!r}, or this member reopened it; nothing was written, and "
        "unacknowledged messages are delivered again: take the next batch",
        stream=stream,
    )


class ConsumerStore:
    """The rows of one consumer name that one member reads and writes. Call `ensure` first."""

    def __init__(self, name: str, database: AnyDatabase, *, lease_s: float) -> None:
        self.name = name
        self.tokens = Tokens()
        self.ending = Deadline(None)
        """The deadline of database calls, set when the member closes: closing must not wait for the database."""
        # `refusing=None`: usable after `close`, for another start and for the calls of a member that is closing.
        self.database = Database(
            database, refusing=None, ending=self.ending, pool_size=POOL, is_bounded=False, idle_s=lease_s
        )
        # The lease has a reserved connection: an application's transactions may hold all others for a long time.
        self._leases = Database(self.database.address, refusing=None, ending=self.ending, pool_size=1, idle_s=lease_s)
        self._member = Member(PARTITIONS, 0, lease_s=lease_s)

    @property
    def renewal_s(self) -> float:
        return self._member.renewal_s

    @property
    def consumer_id(self) -> int:
        return int(self._member.within)

    @property
    def me(self) -> dict[str, Any]:
        return {"consumer_id": self.consumer_id, "holder": self._member.holder}

    def _own_row(self, partition_id: int) -> dict[str, Any]:
        return {**self.me, "partition_id": partition_id}

    def reopen(self) -> None:
        """Reopen after a start that failed."""
        self.ending.restart()
        self.database.reopen()
        self._leases.reopen()

    def dispose(self) -> None:
        self.database.close()
        self._leases.close()

    def ensure(
        self, super_stream_id: int, read_ends: Callable[[Sequence[str]], Mapping[str, tuple[int, Position | None]]]
    ) -> None:
        """Create missing rows of this consumer. `read_ends`: where a new one starts, by stream."""
        with self.database.transaction() as connection:
            execute = execute_in(connection, super_stream_id=super_stream_id, name=self.name)
            execute(_ADD_CONSUMER)
            consumer_id = int(execute(_FIND_CONSUMER).scalar_one())
            is_new = execute(_HAS_POSITIONS, consumer_id=consumer_id).first() is None
            partitions = {row.stream: row.partition_id for row in partitions_in(connection, super_stream_id)}
        # Read the ends before the moves: the markers of later moves are then behind all start positions.
        ends = read_ends(list(partitions)) if is_new else {}
        with self.database.transaction() as connection:
            execute = execute_in(connection, super_stream_id=super_stream_id, consumer_id=consumer_id)
            execute(LOCK_CONSUMER)
            if ends and execute(_HAS_POSITIONS).first() is None:
                begun = {partition_id: ends.get(stream, (0, None)) for stream, partition_id in partitions.items()}
                starts = {partition_id: position for partition_id, (position, _) in begun.items()}
                starts = consistent_starts(starts, [MovedBefore(*row) for row in execute(_MOVES)])
                for partition_id, position in starts.items():
                    known = known_by(begun[partition_id][1])
                    execute(_ADD_POSITION, partition_id=partition_id, position=position, **known)
            execute(ADD_NEW_PARTITIONS)
            forget_settlements(connection)
        self._member.within = consumer_id

    def share(self, reach: BrokerReach, *, is_busy: bool) -> tuple[Share, dict[int, str]]:
        """Renew the lease, take free partitions up to this member's share, and return the partitions with streams.

        If the lease had expired, this becomes a new member, and pending writes of the old one are refused. A member
        that is cut off from the broker takes no partition, and others may take its partitions, unless its application
        has an unacknowledged batch (`is_busy`).
        """
        # If the caller closed its `Database`, this member can no longer commit, and must not renew its lease.
        self.database.check_open()
        with self._leases.transaction() as connection:
            connection.execute(ADD_NEW_PARTITIONS, self.me)
            rows = connection.execute(SHARED, self.me).all()
            streams = {row.partition_id: row.stream for row in rows}
            leased = is_busy or not reach.is_cut_off
            share = self._member.beat(connection, streams, takes=reach.may_take, leased=leased)
        return share, {partition_id: streams[partition_id] for partition_id in sorted(share.held)}

    def release(self, partition_id: int) -> None:
        with self._leases.transaction() as connection:
            self._member.release(connection, [partition_id])

    def leave(self) -> None:
        with self._leases.transaction() as connection:
            self._member.leave(connection)

    @contextmanager
    def _transaction(self, partition_id: int) -> Iterator[Execute]:
        """Open a transaction, and yield a function that runs statements for this member's partition."""
        with self.database.transaction() as connection:
            yield execute_in(connection, **self._own_row(partition_id))

    def open(self, partition_id: int) -> Opened | None:
        """Read the stored state of a partition; None if another member holds it."""
        with self._transaction(partition_id) as execute:
            row = execute(BEGIN).one_or_none()
            if row is None:
                return None
            holds = execute(HOLDS_OF).all()
            read_from = min([row.position, *(hold.marker_offset for hold in holds), *execute(SCANS).scalars()])
            floors = dict(execute(FLOORS, offset=read_from).all())
        position, version, *last = row
        known = None if last[0] is None else Position(*last)
        cursors = {hold.move_id: hold.cursor for hold in holds}
        since = {hold.move_id: hold.since_s for hold in holds}
        return Opened(position, version, known, cursors, since, floors, read_from)

    def restart(self, partition_id: int, position: int, *, markers_from: int, fences_from: int) -> None:
        """Move the position back, or to the start of a stream that was declared again.

        This drops holds with markers at or above `markers_from`: the markers are gone, or will be read again. Holds in
        other partitions no longer wait for fences at or above `fences_from`, which do not exist any more.
        """
        with self._transaction(partition_id) as execute:
            if execute(_RESTART, position=position).rowcount:
                execute(_DROP_HOLDS, markers_from=markers_from)
                execute(_MOVE_HOLDS_BACK, position=position)
                execute(_FREE_HOLDS, fences_from=fences_from)

    def drain(self, partition_id: int) -> bool:
        """Store that a retired partition's stream was deleted, so that no hold waits for it."""
        with self._transaction(partition_id) as execute:
            is_drained = bool(execute(_DRAIN).rowcount)
            if is_drained:
                execute(_DROP_HOLDS, markers_from=0)
            return is_drained

    def commit(self, following: Following, step: Step, token: UUID) -> bool:
        """Store a step in its own transaction; False if another member holds the partition."""
        if not (step.begun or step.ended or step.holds):
            # Without changes of holds, one statement needs one round trip.
            return bool(self.database.rows(ADVANCE, self._advance_parameters(following, step, token), once=True))
        with self.database.transaction() as connection:
            return self._write(connection, following, step, token)

    def _write(self, connection: sa.Connection, following: Following, step: Step, token: UUID) -> bool:
        """Store a step in a transaction; False, without writing, if another member holds the partition."""
        if connection.execute(ADVANCE, self._advance_parameters(following, step, token)).first() is None:
            return False
        execute = execute_in(connection, **self._own_row(following.partition_id))
        begun = {hold.move_id for hold in step.begun}
        for hold in step.begun:
            execute(
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
                execute(MOVE_HOLD, move_id=move_id, cursor=cursor, held=held)
        for move_id in step.ended:
            execute(END_HOLD, move_id=move_id)
        return True

    def _advance_parameters(self, following: Following, step: Step, token: UUID) -> dict[str, Any]:
        return {
            **self._own_row(following.partition_id),
            **self.tokens.of(token),
            **known_by(None if step.last is None else position_of(step.last)),
            "version": following.version,
            "position": step.position,
        }

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
        """Return (partition, move) of each complete hold in these partitions."""
        parameters = {**self.me, "partition_ids": list(partition_ids)}
        return [(row.partition_id, row.move_id) for row in self.database.rows(COMPLETE_HOLDS, parameters)]
