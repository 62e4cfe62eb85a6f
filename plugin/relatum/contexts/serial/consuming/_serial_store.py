"""A serial consumer's positions and holds in PostgreSQL. Blocking, thread-safe.

Exactly once rests on one statement: a position moves only where its row still names this member and the version that
this member wrote last. What an application writes in the same transaction is committed with it, or not at all. Whether
it was committed, where nobody answered, is told by the token that each try writes, and by nothing else: the row may
have been changed since, by this very member, too. A member whose lease has run out joins anew, under another name.
"""

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from relatum.contexts._options import SerialOptions
from relatum.contexts.placement._entries import Control
from relatum.contexts.placement._placement_opening import FIND_SUPER_STREAM
from relatum.contexts.placement._stored_moves import floors_before, lost_controls
from relatum.contexts.serial.consuming._partition_following import Following, Step
from relatum.contexts.serial.consuming._registration import (
    ADD_NEW_PARTITIONS,
    Initial,
    find_consumer,
    forget_consumer,
    register,
)
from relatum.contexts.serial.consuming._stored_holds import (
    COMPLETE_HOLDS,
    HOLDS_OF,
    drop_holds,
    forget_holds,
    move_holds_back,
    write_holds,
)
from relatum.errors import PartitionLost
from relatum.following import Reach
from relatum.reading import Position, position_of
from relatum.store.database import AnyDatabase, Database, sql
from relatum.store.members import Member, Share, Sharing
from relatum.store.settling import Tokens, marked
from relatum.waiting import Deadline

DRAINED: Final = 2**63 - 1
"""The position in a stream that was deleted: behind everything."""

PARTITIONS: Final = Sharing(
    "serial_members",
    ("consumer_id", "integer"),
    "serial_positions",
    "partition_id",
    "holder",
    of_rows="consumer_id",
    are=f"position < {DRAINED}",
    # Whatever is still on its way of who had it before is fenced off.
    taken="version = version + 1",
)
"""Partitions, shared by the members of one consumer name."""

_STREAMS: Final = sql("""
    SELECT s.stream FROM relatum.super_stream_partitions s
    JOIN relatum.serial_consumers c ON c.super_stream_id = s.super_stream_id
    WHERE c.consumer_id = :consumer_id::integer""")

SHARED: Final = sql(f"""
    SELECT p.partition_id, s.stream
    FROM relatum.serial_positions p JOIN relatum.super_stream_partitions s ON s.partition_id = p.partition_id
    WHERE p.consumer_id = :consumer_id::integer AND p.position < {DRAINED}
    ORDER BY p.partition_id""")

_MINE: Final = """consumer_id = :consumer_id::integer AND partition_id = :partition_id::integer
        AND holder = :holder::text"""

# Whatever of this member is still on its way is fenced off.
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
"""Where to search for fences and markers that are not found yet."""

_GO_ON_FROM: Final = sql(f"""
    UPDATE relatum.serial_positions
    SET position = :position::bigint, version = version + 1, last_offset = NULL, last_fingerprint = NULL,
        last_chunk_ms = NULL
    WHERE {_MINE}""")
"""For a stream that was declared again, or lost its end."""

_IS_RETIRED: Final = sql("""
    SELECT 1 FROM relatum.super_stream_partitions WHERE partition_id = :partition_id::integer AND state = 'retired'""")

_DRAIN: Final = sql(f"""
    UPDATE relatum.serial_positions SET position = {DRAINED}, version = version + 1 WHERE {_MINE}""")

ADVANCE_UNREAD: Final = marked(f"""
        UPDATE relatum.serial_positions SET position = :position::bigint, version = version + 1
        WHERE {_MINE} AND version = :version::bigint""")

ADVANCE: Final = marked(f"""
        UPDATE relatum.serial_positions
        SET position = :position::bigint, version = version + 1, last_offset = :last_offset::bigint,
            last_fingerprint = :last_fingerprint::bigint, last_chunk_ms = :last_chunk_ms::bigint
        WHERE {_MINE} AND version = :version::bigint""")


@dataclass(frozen=True, slots=True)
class Opened:
    """What is stored of a partition this member has now.

    Attributes:
        position: Where to go on delivering.
        version: The position's version.
        known_by: What lay at the last offset read; None where nothing was.
        holds: The cursor of each open hold, by move.
        since: For how long each has been open, seconds.
        read_from: Where to go on reading: what is held lies before the position.
    """

    position: int
    version: int
    known_by: Position | None
    holds: Mapping[int, int]
    since: Mapping[int, float]
    read_from: int


def known_by(position: Position) -> dict[str, int | None]:
    """What lay at an offset, as parameters of `ADVANCE`."""
    return {
        "last_offset": position.offset,
        "last_fingerprint": position.fingerprint,
        "last_chunk_ms": position.chunk_ms,
    }


def lost(stream: str, name: str) -> PartitionLost:
    """The error of a member that has a partition no more."""
    return PartitionLost(
        f"another member of {name!r} has {stream!r} now, or it was opened anew; nothing was written, and what was not "
        "acknowledged is delivered again",
        stream=stream,
    )


POOL: Final = 4
"""Connections kept. More are opened where it takes them: each transaction an application joins holds one."""


class ConsumerStore:
    """The rows of one consumer name, as one member reads and writes them."""

    def __init__(
        self,
        super_stream: str,
        name: str,
        database: AnyDatabase,
        *,
        vhost: str,
        lease_s: float = SerialOptions().lease_s,
    ) -> None:
        self.super_stream = super_stream
        self.name = name
        self.vhost = vhost
        self.tokens = Tokens()
        self.ending = Deadline(None)
        """Brought forward as the member ends, which must not wait for a database that does not answer."""
        # It is begun anew after a start that failed, and says that it leaves as it is closed.
        self._database = Database(database, refusing=None, ending=self.ending, pool_size=POOL, is_bounded=False)
        self.database = self._database
        # A connection that nobody else uses up: transactions that applications join may hold all others for long.
        self._of_lease = Database(self._database.address, refusing=None, ending=self.ending, pool_size=1)
        self.engine = self._database.engine
        self._member = Member(PARTITIONS, 0, lease_s=lease_s)

    @property
    def renewal_s(self) -> float:
        """Seconds between two times the lease is renewed."""
        return self._member.renewal_s

    @property
    def _consumer_id(self) -> int:
        return int(self._member.within)

    @property
    def me(self) -> dict[str, Any]:
        """The parameters that name the consumer and this member."""
        return {"consumer_id": self._consumer_id, "holder": self._member.holder}

    def _mine(self, partition_id: int) -> dict[str, Any]:
        return {**self.me, "partition_id": partition_id}

    def dispose(self) -> None:
        """Give connections back; the store is not used any more."""
        self._database.close()
        self._of_lease.close()

    # --- the consumer's name ----------------------------------------------------------------------------------------

    def find_header(self) -> str | None:
        """The header that names the super stream's contexts; None where nobody has said so yet."""
        row = self._super_stream()
        return None if row is None else str(row.header)

    def _super_stream(self) -> Any:
        named = {"vhost": self.vhost, "name": self.super_stream}
        return next(iter(self._database.rows(FIND_SUPER_STREAM, named)), None)

    def ensure(self, initial: Initial) -> None:
        """Make the rows of this consumer name, where they are not there."""
        self._member.within = register(self._database, self._super_stream().super_stream_id, self.name, initial)

    def find(self) -> bool:
        """Whether this consumer name is known. It is not made where it is not."""
        row = self._super_stream()
        found = None if row is None else find_consumer(self._database, row.super_stream_id, self.name)
        self._member.within = found or 0
        return found is not None

    def forget(self) -> bool:
        """Forget this consumer name; False where it is not known.

        Raises:
            Conflict: members of it are up; nothing was changed.
        """
        return self.find() and forget_consumer(self._database, self._consumer_id, self.name)

    # --- this member ------------------------------------------------------------------------------------------------

    def share(self, reach: Reach, *, is_busy: bool) -> tuple[Share, dict[int, str]]:
        """Renew the lease, and take what this member should have and nobody has; gives that, with the streams.

        Where the lease has run out, this is a new member: what is under way of the one before is not taken for its own.

        Args:
            reach: Whether it reaches the broker: cut off, it takes nothing, and others may have what it has.
            is_busy: Whether its application has a batch in hand, for which a member that is cut off keeps its lease.
        """
        # Who cannot commit any more keeps no lease.
        self._database.check_open()
        with self._of_lease.transaction() as connection:
            connection.execute(ADD_NEW_PARTITIONS, self.me)
            rows = connection.execute(SHARED, self.me).all()
            streams = {row.partition_id: row.stream for row in rows}
            if reach.is_cut_off or reach.is_returning:
                share = self._member.hold_on(connection, streams, leased=is_busy or reach.is_returning)
            else:
                share = self._member.beat(connection, streams)
        return share, {partition_id: streams[partition_id] for partition_id in sorted(share.held)}

    def release(self, partition_id: int) -> None:
        """Let another member have a partition."""
        with self._of_lease.transaction() as connection:
            self._member.release(connection, [partition_id])

    def leave(self) -> None:
        """Let others have all that this member has, at once."""
        with self._of_lease.transaction() as connection:
            self._member.leave(connection)

    # --- opening a partition ----------------------------------------------------------------------------------------

    def open(self, partition_id: int) -> Opened | None:
        """What is stored of a partition; None where it is not this member's."""
        mine = self._mine(partition_id)
        with self._database.transaction() as connection:
            row = connection.execute(BEGIN, mine).one_or_none()
            if row is None:
                return None
            holds = connection.execute(HOLDS_OF, mine).all()
            scans = connection.scalars(SCANS, {"partition_id": partition_id})
            read_from = min([row.position, *(hold.marker_offset for hold in holds), *scans])
        known_by = None
        if row.last_offset is not None:
            known_by = Position(row.last_offset, row.last_fingerprint, row.last_chunk_ms)
        return Opened(
            row.position,
            row.version,
            known_by,
            {hold.move_id: hold.cursor for hold in holds},
            {hold.move_id: hold.since_s for hold in holds},
            read_from,
        )

    def floors(self, partition_id: int, offset: int) -> dict[str, int]:
        """The floors of contexts in a partition as of an offset."""
        with self._database.transaction() as connection:
            return floors_before(connection, partition_id, offset)

    def lost_controls(self, partition_id: int, from_offset: int, to_offset: int) -> list[tuple[int, Control]]:
        """The fences and markers that lay at these offsets, ascending, for a stream that has them no more."""
        if from_offset >= to_offset:
            return []
        with self._database.transaction() as connection:
            return lost_controls(connection, partition_id, from_offset, to_offset)

    def partitions(self) -> frozenset[str]:
        """The streams of all partitions the super stream has, or had."""
        return frozenset(row.stream for row in self._database.rows(_STREAMS, self.me))

    def begin_anew(self, partition_id: int, position: int) -> None:
        """Begin with a stream that was declared again: nobody waits for what lay in it any more."""
        mine = self._mine(partition_id)
        with self._database.transaction() as connection:
            if connection.execute(_GO_ON_FROM, {**mine, "position": position}).rowcount:
                forget_holds(connection, mine)

    def go_back(self, partition_id: int, position: int, end: int) -> None:
        """Go on from an earlier offset of a stream that lost its end; nobody waits for a fence that is lost.

        Args:
            partition_id: The partition.
            position: The offset, below the one stored.
            end: The offset behind the stream's last message, by its leader's word.
        """
        at = {**self._mine(partition_id), "position": position}
        with self._database.transaction() as connection:
            if connection.execute(_GO_ON_FROM, at).rowcount:
                move_holds_back(connection, at, end)

    def drain(self, partition_id: int) -> bool:
        """Note that a partition's stream is gone, if it was retired: there is nothing left to wait for in it."""
        mine = self._mine(partition_id)
        with self._database.transaction() as connection:
            if connection.execute(_IS_RETIRED, {"partition_id": partition_id}).first() is None:
                return False
            connection.execute(_DRAIN, mine)
            drop_holds(connection, mine)
            return True

    # --- steps ------------------------------------------------------------------------------------------------------

    def commit(self, following: Following, step: Step, token: UUID) -> bool:
        """Store a step in a transaction of its own; False where the partition is another member's now."""
        if not (step.begun or step.ended or step.holds):
            # One statement, one round trip.
            statement, moved = self._moved(following, step, token)
            return bool(self._database.rows(statement, moved, once=True))
        with self._database.transaction() as connection:
            return self._write(connection, following, step, token)

    def _write(self, connection: sa.Connection, following: Following, step: Step, token: UUID) -> bool:
        """Store a step in a transaction; False, and nothing is written, where the partition is another member's."""
        if not self._advance(connection, following, step, token):
            return False
        write_holds(connection, self._mine(following.partition_id), step)
        return True

    def _advance(self, connection: sa.Connection, following: Following, step: Step, token: UUID) -> bool:
        statement, moved = self._moved(following, step, token)
        return connection.execute(statement, moved).first() is not None

    def _moved(self, following: Following, step: Step, token: UUID) -> tuple[sa.TextClause, dict[str, Any]]:
        """The statement that moves a position, and its parameters; it gives a row where it has moved it."""
        moved = {**self._mine(following.partition_id), "version": following.version, "position": step.position}
        moved |= self.tokens.of(token)
        if step.last is None:
            return ADVANCE_UNREAD, moved
        return ADVANCE, moved | known_by(position_of(step.last))

    def came_through(self, token: UUID) -> bool:
        """Whether a try that nobody answered was committed; asked once."""
        return self.tokens.came_through(self.engine, token)

    @contextmanager
    def joined(self, following: Following, step: Step, *, stop: threading.Event) -> Iterator[sa.Connection]:
        """A transaction that an application writes in, and that stores the step at its end.

        Raises:
            PartitionLost: The partition is another member's; all was rolled back.
            CommitInDoubt: It is not known whether it was committed; it was asked about for ten seconds.
        """

        def store(connection: sa.Connection, token: UUID) -> None:
            if not self._write(connection, following, step, token):
                raise lost(following.stream, self.name)

        what = f" of this batch of {following.stream!r}"
        with self.tokens.transaction(self.engine, store, stop=stop, what=what) as connection:
            yield connection

    # --- holds --------------------------------------------------------------------------------------------------------

    def complete(self, partition_ids: Collection[int]) -> list[tuple[int, int]]:
        """The holds in these partitions that have nothing to wait for any more: partition and move of each."""
        wanted = {**self.me, "partition_ids": list(partition_ids)}
        return [(row.partition_id, row.move_id) for row in self._database.rows(COMPLETE_HOLDS, wanted)]
