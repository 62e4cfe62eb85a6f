"""Moves in PostgreSQL: each call is one transaction, and may be repeated when its outcome is not known.

Rows are locked in the order that `relatum.store.tables` says: placements by name, then the row of the super stream,
then partitions by their id. The row of a move is locked after its placements.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa

from relatum.contexts.placement._model import Move, MoveState, PartitionState, PlacementState
from relatum.contexts.placement._placement_opening import RAISE_GENERATION
from relatum.contexts.placement._stored_moves import MOVE, OF_MOVES, move_info
from relatum.contexts.serial.moving._move_steps import (
    Begin,
    MoveStep,
    SetAborting,
    SetFenced,
    Switch,
)
from relatum.errors import Conflict, MoveConflict, NotFound, StreamNotFound, SuperStreamConflict
from relatum.store.database import Database, sql
from relatum.store.members import LEASE_S
from relatum.waiting import Outages

logger = logging.getLogger("relatum.contexts")

_FACTS: Final = len(Move.__dataclass_fields__)

# What a crash of PostgreSQL takes back must not be in a stream already: a fence behind which a context goes on as if
# there was none would make strays of all its messages.
_KEEP_COMMITS: Final = sql("""
    SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'""")

_MOVES: Final = "WHERE m.super_stream_id = :super_stream_id::integer"

ONE: Final = sql(f"""
    SELECT {MOVE}, ARRAY (SELECT c.name FROM relatum.moved_contexts c WHERE c.move_id = m.move_id) AS names
    FROM {OF_MOVES} {_MOVES} AND m.move_id = :move_id::bigint""")
"""The columns of `Move`, and behind them the names of the contexts."""

UNDER_WAY: Final = sql(f"SELECT {MOVE} FROM {OF_MOVES} {_MOVES} AND m.ended_at IS NULL ORDER BY m.move_id")

LATEST: Final = sql(f"SELECT {MOVE} FROM {OF_MOVES} {_MOVES} ORDER BY m.move_id DESC LIMIT :latest::integer")

LOCK_NAMED: Final = sql("""
    SELECT name, partition_id, state, move_id FROM relatum.placements
    WHERE super_stream_id = :super_stream_id::integer AND name = ANY (:names::text[])
    ORDER BY name FOR UPDATE""")

_PARTITION: Final = sql("""
    SELECT partition_id, state FROM relatum.super_stream_partitions
    WHERE super_stream_id = :super_stream_id::integer AND stream = :stream::text""")

_LEASE_END: Final = "clock_timestamp() + make_interval(secs => :lease_s::double precision)"

_ADD_MOVE: Final = sql(f"""
    INSERT INTO relatum.context_moves (super_stream_id, source_id, target_id, contexts, fence_epoch, epoch, scan_from,
        target_scan_from, holder, lease_expires_at, started_at, generation)
    VALUES (:super_stream_id::integer, :source_id::integer, :target_id::integer, :contexts::integer, 0, 0,
        :scan_from::bigint, :target_scan_from::bigint, :holder::text, {_LEASE_END}, clock_timestamp(),
        :generation::bigint)
    RETURNING move_id""")

ADD_CONTEXTS: Final = sql("""
    INSERT INTO relatum.moved_contexts (move_id, name, from_epoch)
    SELECT :move_id::bigint, name, epoch FROM relatum.placements
    WHERE super_stream_id = :super_stream_id::integer AND name = ANY (:names::text[])""")

STOP: Final = sql("""
    UPDATE relatum.placements SET state = 'moving', move_id = :move_id::bigint, generation = :generation::bigint
    WHERE super_stream_id = :super_stream_id::integer AND name = ANY (:names::text[])""")

ATTEND: Final = sql(f"""
    UPDATE relatum.context_moves SET holder = :holder::text, lease_expires_at = {_LEASE_END}
    WHERE move_id = :move_id::bigint AND ended_at IS NULL""")

# Only of one who has it still: another goes on with a move whose holder was not heard of.
KEEP_ATTENDING: Final = sql(f"""
    UPDATE relatum.context_moves SET lease_expires_at = {_LEASE_END}
    WHERE move_id = :move_id::bigint AND ended_at IS NULL AND holder = :holder::text""")

TAKE_ABANDONED: Final = sql(f"""
    UPDATE relatum.context_moves SET holder = :holder::text, lease_expires_at = {_LEASE_END}
    WHERE move_id = (
        SELECT move_id FROM relatum.context_moves
        WHERE super_stream_id = :super_stream_id::integer AND ended_at IS NULL AND lease_expires_at < clock_timestamp()
        ORDER BY move_id LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING move_id""")

# The epochs are taken one behind the other: of an aborted move the marker is behind the fence in the same partition,
# and above it.
_LET_FENCE: Final = sql("""
    WITH fence AS (SELECT nextval('relatum.placement_epochs') AS epoch),
    after AS (SELECT nextval('relatum.placement_epochs') AS epoch, fence.epoch AS fence FROM fence)
    UPDATE relatum.context_moves m
    SET fence_epoch = after.fence, epoch = CASE WHEN m.aborting THEN after.epoch ELSE after.fence END
    FROM after
    WHERE m.move_id = :move_id::bigint AND m.super_stream_id = :super_stream_id::integer AND m.fence_epoch = 0
        AND m.fence_epoch < after.fence""")

SET_FENCED: Final = sql("""
    UPDATE relatum.context_moves
    SET state = 'fenced', fence_offset = :fence_offset::bigint, fenced_at = clock_timestamp()
    WHERE move_id = :move_id::bigint AND state = 'fencing' AND attempt = :attempt::integer""")

# The marker of an aborted move is behind its fence, which is at or behind where that can be.
SET_ABORTING: Final = sql("""
    UPDATE relatum.context_moves
    SET aborting = true, target_id = source_id, target_scan_from = scan_from, attempt = attempt + 1,
        epoch = nextval('relatum.placement_epochs'), reason = :reason::text
    WHERE move_id = :move_id::bigint AND ended_at IS NULL AND NOT aborting
        AND super_stream_id = :super_stream_id::integer""")

LOCK_MOVING: Final = sql("""
    SELECT p.name FROM relatum.placements p
    JOIN relatum.moved_contexts c ON c.name = p.name AND c.move_id = :move_id::bigint
    WHERE p.super_stream_id = :super_stream_id::integer AND p.move_id = :move_id::bigint
    ORDER BY p.name FOR UPDATE OF p""")

# Who went on with it last is still shown.
_SET_ENDED: Final = sql("""
    UPDATE relatum.context_moves
    SET state = CASE WHEN aborting THEN 'aborted' ELSE 'switched' END, marker_offset = :marker_offset::bigint,
        lease_expires_at = NULL, ended_at = clock_timestamp()
    WHERE move_id = :move_id::bigint AND state = 'fenced' AND attempt = :attempt::integer
    RETURNING source_id, target_id, epoch""")

GO_ON: Final = sql("""
    UPDATE relatum.placements
    SET state = 'open', move_id = NULL, partition_id = :partition_id::integer, epoch = :epoch::bigint,
        generation = :generation::bigint
    WHERE super_stream_id = :super_stream_id::integer AND name = ANY (:names::text[]) AND move_id = :move_id::bigint""")

_COUNT_SETS: Final = sql("""
    UPDATE relatum.super_stream_partitions SET open_sets = open_sets + :more::bigint
    WHERE partition_id = :partition_id::integer""")


class NothingToMove(Conflict):
    """None of the contexts is open in the source any more; nothing was written."""


@contextmanager
def kept(database: Database) -> Iterator[sa.Connection]:
    """A transaction that has reached the disk when it is committed."""
    with database.transaction() as connection:
        connection.execute(_KEEP_COMMITS)
        yield connection


class MoveStore:
    """The moves of one super stream. Threads may share it."""

    def __init__(self, database: Database, super_stream_id: int, super_stream: str) -> None:
        self._database = Database(database, idle_s=LEASE_S)
        self._transaction = self._database.transaction
        self._id = super_stream_id
        self._name = super_stream
        self.outages = Outages(logger, database=database.address.name)
        """What is away, of all moves of the super stream."""

    def begin(self, wanted: Begin, holder: str) -> MoveStep:
        """Begin a move of those contexts that are open in the source now.

        Args:
            wanted: The move.
            holder: Who goes on with it, unique for this move: a repeated call finds by it what the first one began.

        Raises:
            MoveConflict: another move has one of them.
            NothingToMove: none of them is in the source any more.
            StreamNotFound: the super stream has no such partition.
            SuperStreamConflict: the target is retired.
        """
        named = {"super_stream_id": self._id, "names": sorted(wanted.contexts)}
        with kept(self._database) as connection:
            rows = connection.execute(LOCK_NAMED, named).all()
            for row in rows:
                if row.state == PlacementState.MOVING:
                    return self._begun_before(connection, row.move_id, row.name, holder)
            source = self._partition(connection, wanted.source)
            names = [row.name for row in rows if (row.state, row.partition_id) == ("open", source.partition_id)]
            if not names:
                raise NothingToMove(f"none of the contexts is in {wanted.source!r} any more; nothing was moved")
            generation = connection.execute(RAISE_GENERATION, named).scalar_one()
            # Behind the generation's lock, which whoever retires a partition takes, too.
            target = self._partition(connection, wanted.target)
            if target.state == PartitionState.RETIRED:
                raise SuperStreamConflict(
                    f"partition {wanted.target!r} is retired: no context can go there",
                    super_stream=self._name,
                    reason="the target is retired",
                )
            added = {
                "super_stream_id": self._id,
                "source_id": source.partition_id,
                "target_id": target.partition_id,
                "contexts": len(names),
                "scan_from": wanted.scan_from,
                "target_scan_from": wanted.target_scan_from,
                "holder": holder,
                "lease_s": LEASE_S,
                "generation": generation,
            }
            move_id = int(connection.execute(_ADD_MOVE, added).scalar_one())
            stopped = {"super_stream_id": self._id, "names": names, "move_id": move_id, "generation": generation}
            connection.execute(ADD_CONTEXTS, stopped)
            connection.execute(STOP, stopped)
            return self._step(connection, move_id)

    def _begun_before(self, connection: sa.Connection, move_id: int, context: str, holder: str) -> MoveStep:
        """The move a context is in, where this holder began it before; else it is in the way."""
        row = self._row(connection, move_id)
        if row.holder == holder:
            return _step_of(row)
        raise MoveConflict(
            f"{context!r} is moved already, by move {move_id}: go on with that one, or abort it",
            move_id=move_id,
            state=row.state,
        )

    def _partition(self, connection: sa.Connection, stream: str) -> Any:
        row = connection.execute(_PARTITION, {"super_stream_id": self._id, "stream": stream}).one_or_none()
        if row is None:
            raise StreamNotFound(f"the super stream has no partition {stream!r}", stream=stream)
        return row

    def _row(self, connection: sa.Connection, move_id: int) -> Any:
        row = connection.execute(ONE, {"super_stream_id": self._id, "move_id": move_id}).one_or_none()
        if row is None:
            raise NotFound(f"there is no move {move_id} of this super stream")
        return row

    def _step(self, connection: sa.Connection, move_id: int) -> MoveStep:
        return _step_of(self._row(connection, move_id))

    def look(self, move_id: int) -> MoveStep:
        """A move as its steps need it.

        Raises:
            NotFound: there is none of that number.
        """
        with self._transaction() as connection:
            return self._step(connection, move_id)

    def attend(self, move_id: int, holder: str) -> None:
        """Say who goes on with a move, so that others see that somebody does."""
        self._database.rows(ATTEND, {"move_id": move_id, "holder": holder, "lease_s": LEASE_S})

    def keep_attending(self, move_id: int, holder: str) -> None:
        """Say that its holder still goes on with a move; nothing where that is another by now."""
        self._database.rows(KEEP_ATTENDING, {"move_id": move_id, "holder": holder, "lease_s": LEASE_S})

    def take_abandoned(self, holder: str) -> int | None:
        """Take a move that has not ended and that nobody attends, for this holder alone; None where there is none."""
        taken = {"super_stream_id": self._id, "holder": holder, "lease_s": LEASE_S}
        return next((row.move_id for row in self._database.rows(TAKE_ABANDONED, taken, once=True)), None)

    def let_fence(self, move_id: int) -> MoveStep:
        """Have a move fenced, now that no publisher relies on what was before it."""
        with kept(self._database) as connection:
            connection.execute(_LET_FENCE, {"super_stream_id": self._id, "move_id": move_id})
            return self._step(connection, move_id)

    def set_fenced(self, wanted: SetFenced) -> MoveStep:
        """Note where a move's fence lies, if it is at that attempt and not fenced yet."""
        values = {"move_id": wanted.move_id, "attempt": wanted.attempt, "fence_offset": wanted.fence_offset}
        with kept(self._database) as connection:
            connection.execute(SET_FENCED, values)
            return self._step(connection, wanted.move_id)

    def switch(self, wanted: Switch) -> MoveStep:
        """End a move, if it is at that attempt and fenced: its contexts go on in the target."""
        of_move = {"super_stream_id": self._id, "move_id": wanted.move_id}
        ended = {**of_move, "attempt": wanted.attempt, "marker_offset": wanted.marker_offset}
        with kept(self._database) as connection:
            names = connection.scalars(LOCK_MOVING, of_move).all()
            row = connection.execute(_SET_ENDED, ended).one_or_none()
            if row is not None:
                generation = connection.execute(RAISE_GENERATION, of_move).scalar_one()
                gone_on = {"names": names, "partition_id": row.target_id, "epoch": row.epoch}
                connection.execute(GO_ON, {**of_move, **gone_on, "generation": generation})
                _count(connection, row.source_id, row.target_id, len(names))
            return self._step(connection, wanted.move_id)

    def set_aborting(self, wanted: SetAborting, reason: str | None) -> MoveStep:
        """Turn a move back to its source, unless it was turned back before or has ended."""
        values = {"super_stream_id": self._id, "move_id": wanted.move_id, "reason": reason}
        with kept(self._database) as connection:
            connection.execute(SET_ABORTING, values)
            return self._step(connection, wanted.move_id)

    def moves(self, *, latest: int | None = None) -> list[Move]:
        """The moves that have not ended, oldest first; or so many of all, latest first."""
        of_super_stream = {"super_stream_id": self._id}
        with self._transaction() as connection:
            if latest is None:
                rows = connection.execute(UNDER_WAY, of_super_stream)
            else:
                rows = connection.execute(LATEST, {**of_super_stream, "latest": latest})
            return [move_info(row) for row in rows]

    def move(self, move_id: int) -> Move:
        """A move as it is shown.

        Raises:
            NotFound: there is none of that number.
        """
        with self._transaction() as connection:
            return move_info(self._row(connection, move_id))


def _count(connection: sa.Connection, source_id: int, target_id: int, moved: int) -> None:
    """Count the placements of both partitions anew, in the order in which partitions are locked."""
    if source_id == target_id:
        return
    for partition_id, more in sorted([(source_id, -moved), (target_id, moved)]):
        connection.execute(_COUNT_SETS, {"partition_id": partition_id, "more": more})


def _step_of(row: Any) -> MoveStep:
    step = MoveStep(*row[:_FACTS], names=frozenset(row.names))
    return replace(step, state=MoveState(step.state))
