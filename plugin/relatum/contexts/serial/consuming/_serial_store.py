"""A serial consumer's positions and holds in PostgreSQL. Blocking, thread-safe.

Exactly once rests on one statement: a position moves only where its row still names this member and the version that
this member wrote last. What an application writes in the same transaction is committed with it, or not at all. Whether
it was committed, where nobody answered, is told by the token that each try writes, and by nothing else: the row may
have been changed since, by this very member, too. A member whose lease has run out joins anew, under another name.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from relatum.contexts._options import SerialOptions
from relatum.contexts.placement._entries import Control, Fence, Marker
from relatum.contexts.placement._placement_opening import FIND_SUPER_STREAM, partitions_in
from relatum.contexts.serial._order_verify import floors_before
from relatum.contexts.serial._partition_log import MovedBefore, consistent_starts
from relatum.contexts.serial.consuming import _serial_statements as statements
from relatum.contexts.serial.consuming._partition_following import Following, Step
from relatum.errors import Conflict, PartitionLost
from relatum.following import Reach
from relatum.reading import position_of
from relatum.store import (
    AnyDatabase,
    Database,
    Member,
    Position,
    Share,
    Tokens,
    forget_settlements,
)
from relatum.waiting import Deadline


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


Initial = Callable[[Sequence[str]], Mapping[str, int]]
"""Finds where to begin in each of these streams."""


def known_by(position: Position) -> dict[str, int | None]:
    """What lay at an offset, as parameters."""
    return {
        "known_offset": position.offset,
        "known_fingerprint": position.fingerprint,
        "known_chunk_ms": position.chunk_ms,
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
        self.engine = self._database.engine
        self._member = Member(statements.PARTITIONS, 0, lease_s=lease_s)

    @property
    def renewal_s(self) -> float:
        """Seconds between two times the lease is renewed."""
        return self._member.renewal_s

    @property
    def _consumer_id(self) -> int:
        return int(self._member.within)

    @property
    def _me(self) -> dict[str, Any]:
        return {"of_consumer": self._consumer_id, "by": self._member.holder}

    def _mine(self, partition_id: int) -> dict[str, Any]:
        return {**self._me, "of_partition": partition_id}

    def dispose(self) -> None:
        """Give connections back; the store is not used any more."""
        self._database.close()

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
        super_stream = self._super_stream().super_stream_id
        with self._database.transaction() as connection:
            named = {"in_super_stream": super_stream, "named": self.name}
            connection.execute(statements.add_consumer, named)
            self._member.within = connection.execute(statements.find_consumer, named).scalar_one()
            is_new = connection.execute(statements.has_positions, self._me).first() is None
            partitions = {row.stream: row.partition_id for row in partitions_in(connection, super_stream)}
        # Before the moves are read: the marker of a move that is not seen below lies behind all of these.
        ends = initial(list(partitions)) if is_new else {}
        with self._database.transaction() as connection:
            connection.execute(statements.lock_consumer, self._me)
            if is_new and connection.execute(statements.has_positions, self._me).first() is None:
                starts = {partition_id: ends.get(stream, 0) for stream, partition_id in partitions.items()}
                moves = [MovedBefore(*row) for row in connection.execute(statements.moves_of, named)]
                rows = [
                    {"of_consumer": self._consumer_id, "of_partition": partition_id, "at": at}
                    for partition_id, at in consistent_starts(starts, moves).items()
                ]
                connection.execute(statements.add_positions, rows)
            connection.execute(statements.add_new_partitions, self._me)
            forget_settlements(connection)

    def find(self) -> bool:
        """Whether this consumer name is known. It is not made where it is not."""
        row = self._super_stream()
        if row is None:
            return False
        named = {"in_super_stream": row.super_stream_id, "named": self.name}
        found = self._database.rows(statements.find_consumer, named)
        self._member.within = found[0].consumer_id if found else 0
        return bool(found)

    def forget(self) -> bool:
        """Forget this consumer name; False where it is not known.

        Raises:
            Conflict: members of it are up; nothing was changed.
        """
        if not self.find():
            return False
        with self._database.transaction() as connection:
            connection.execute(statements.lock_consumer, self._me)
            holder = connection.scalar(statements.living.limit(1), self._me)
            if holder is not None:
                raise Conflict(f"{self.name!r} is not forgotten: its member {holder} is up")
            return bool(connection.execute(statements.forget, self._me).rowcount)

    # --- this member ------------------------------------------------------------------------------------------------

    def share(self, reach: Reach, *, is_busy: bool) -> tuple[Share, dict[int, str]]:
        """Renew the lease, and take what this member should have and nobody has; gives that, with the streams.

        Where the lease has run out, this is a new member: what is under way of the one before is not taken for its own.

        Args:
            reach: Whether it reaches the broker: cut off, it takes nothing, and others may have what it has.
            is_busy: Whether its application has a batch in hand, for which a member that is cut off keeps its lease.
        """
        with self._database.transaction() as connection:
            connection.execute(statements.add_new_partitions, {"of_consumer": self._consumer_id})
            rows = connection.execute(statements.shared, {"of_consumer": self._consumer_id}).all()
            streams = {row.partition_id: row.stream for row in rows}
            if reach.is_cut_off or reach.is_returning:
                share = self._member.hold_on(connection, streams, leased=is_busy or reach.is_returning)
            else:
                share = self._member.beat(connection, streams)
        return share, {partition_id: streams[partition_id] for partition_id in sorted(share.held)}

    def release(self, partition_id: int) -> None:
        """Let another member have a partition."""
        with self._database.transaction() as connection:
            self._member.release(connection, [partition_id])

    def leave(self) -> None:
        """Let others have all that this member has, at once."""
        with self._database.transaction() as connection:
            self._member.leave(connection)

    # --- opening a partition ----------------------------------------------------------------------------------------

    def open(self, partition_id: int) -> Opened | None:
        """What is stored of a partition; None where it is not this member's."""
        mine = self._mine(partition_id)
        with self._database.transaction() as connection:
            row = connection.execute(statements.begin, mine).one_or_none()
            if row is None:
                return None
            holds = connection.execute(statements.holds_of, mine).all()
            scans = connection.scalars(statements.scans_of, {"of_partition": partition_id})
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
        lost = {"of_partition": partition_id, "from_offset": from_offset, "to_offset": to_offset}
        found: list[tuple[int, Control]] = []
        with self._database.transaction() as connection:
            for move_id, at, epoch, names in connection.execute(statements.lost_fences, lost):
                found.append((at, Fence(move_id, epoch, frozenset(names or ()))))
            for move_id, at, epoch, fence, source, names in connection.execute(statements.lost_markers, lost):
                found.append((at, Marker(move_id, epoch, frozenset(names or ()), source, fence)))
        return sorted(found, key=lambda each: each[0])

    def partitions(self) -> frozenset[str]:
        """The streams of all partitions the super stream has, or had."""
        return frozenset(row.stream for row in self._database.rows(statements.streams_of, self._me))

    def begin_anew(self, partition_id: int, position: int) -> None:
        """Begin with a stream that was declared again: nobody waits for what lay in it any more."""
        mine = self._mine(partition_id)
        with self._database.transaction() as connection:
            if connection.execute(statements.go_on_from, {**mine, "at": position}).rowcount:
                connection.execute(statements.drop_holds, mine)
                connection.execute(statements.free_holds, mine)

    def go_back(self, partition_id: int, position: int, end: int) -> None:
        """Go on from an earlier offset of a stream that lost its end; nobody waits for a fence that is lost.

        Args:
            partition_id: The partition.
            position: The offset, below the one stored.
            end: The offset behind the stream's last message, by its leader's word.
        """
        at = {**self._mine(partition_id), "at": position}
        with self._database.transaction() as connection:
            if connection.execute(statements.go_on_from, at).rowcount:
                connection.execute(statements.drop_holds_behind, at)
                connection.execute(statements.move_holds_back, at)
                connection.execute(statements.free_holds_behind, {**at, "end": end})

    def drain(self, partition_id: int) -> bool:
        """Note that a partition's stream is gone, if it was retired: there is nothing left to wait for in it."""
        mine = self._mine(partition_id)
        with self._database.transaction() as connection:
            if connection.execute(statements.is_retired, {"of_partition": partition_id}).first() is None:
                return False
            connection.execute(statements.drain, mine)
            connection.execute(statements.drop_holds, mine)
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
        mine = self._mine(following.partition_id)
        begun = {hold.move_id for hold in step.begun}
        for hold in step.begun:
            connection.execute(
                statements.begin_hold,
                {
                    **mine,
                    "of_move": hold.move_id,
                    "of_source": hold.source,
                    "of_epoch": hold.epoch,
                    "marked_at": hold.marker_offset,
                    "next_held": hold.marker_offset + 1,
                    "fenced_at": hold.fence_offset,
                },
            )
        for move_id, cursor, held in step.holds:
            if move_id not in begun:
                moved = {**mine, "of_move": move_id, "next_held": cursor, "waiting": held}
                connection.execute(statements.move_hold, moved)
        for move_id in step.ended:
            connection.execute(statements.end_hold, {**mine, "of_move": move_id})
        return True

    def _advance(self, connection: sa.Connection, following: Following, step: Step, token: UUID) -> bool:
        statement, moved = self._moved(following, step, token)
        return connection.execute(statement, moved).first() is not None

    def _moved(self, following: Following, step: Step, token: UUID) -> tuple[sa.Insert, dict[str, Any]]:
        """The statement that moves a position, and its parameters; it gives a row where it has moved it."""
        moved = {**self._mine(following.partition_id), "expected": following.version, "at": step.position}
        moved |= self.tokens.of(token)
        if step.last is None:
            return statements.advance_unread, moved
        return statements.advance, moved | known_by(position_of(step.last))

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

    # --- holds, and what is shown -----------------------------------------------------------------------------------

    def complete(self, partition_ids: Collection[int]) -> list[tuple[int, int]]:
        """The holds in these partitions that have nothing to wait for any more: partition and move of each."""
        wanted = {**self._me, "of_partitions": list(partition_ids)}
        return [(row.partition_id, row.move_id) for row in self._database.rows(statements.complete_holds, wanted)]

    def status(self) -> tuple[list[Any], list[Any]]:
        """The rows of all partitions, and of all open holds."""
        rows = self._database.rows
        return rows(statements.status, self._me), rows(statements.status_holds, self._me)
