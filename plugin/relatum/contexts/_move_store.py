"""Moves in PostgreSQL. Each call is one transaction; if its outcome is unknown, the call can be repeated.

Statements lock rows in the order of `relatum.store.tables`: placements by name, then the super stream's row, then
partitions by id. They lock a move's row after its placements.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa

from relatum.common.processes import new_holder
from relatum.common.waiting import Outages
from relatum.contexts._partition_log import Control, Fence, Marker
from relatum.contexts._placement_store import PlacementStore
from relatum.contexts._placements import Move, MoveState, MoveStep, PartitionState, PlacementState
from relatum.contexts._super_stream_rows import DURABLE_COMMIT, PARTITIONS, RAISE_GENERATION, Execute, execute_in
from relatum.errors import Conflict, MoveConflict, NotFound, StreamNotFound, SuperStreamConflict
from relatum.store.database import Database, sql
from relatum.store.members import LEASE_END, LEASE_S, RENEWED

logger = logging.getLogger("relatum.contexts")

_MOVE_COLUMNS: Final = len(Move.__dataclass_fields__)

MOVE: Final = """m.move_id, source.stream AS source, target.stream AS target, m.source_id, m.target_id, m.state,
        m.aborting, m.attempt, m.contexts, m.fence_epoch, m.epoch, m.scan_from, m.target_scan_from, m.fence_offset,
        m.marker_offset, m.holder, m.lease_expires_at, m.started_at, m.fenced_at, m.ended_at, m.reason"""
"""The columns of `Move`, in order."""

OF_MOVES: Final = """relatum.context_moves m
    JOIN relatum.super_stream_partitions source ON source.partition_id = m.source_id
    JOIN relatum.super_stream_partitions target ON target.partition_id = m.target_id"""
"""The tables of the columns in `MOVE`."""

# A move without a fence's epoch has published nothing yet. If it is being aborted, it has an epoch all the same.
FENCE_AFTER: Final = sql(f"""
    SELECT found.*, pg_is_in_recovery() AS is_standby FROM (VALUES (1)) one LEFT JOIN (
        SELECT {MOVE} FROM {OF_MOVES} JOIN relatum.moved_contexts c ON c.move_id = m.move_id
        WHERE c.name = :name::text AND m.super_stream_id = :super_stream_id::integer AND m.fence_epoch > 0
            AND (source.stream = :stream::text AND m.fence_epoch > :above::bigint
                OR target.stream = :stream::text AND m.epoch > :above::bigint)
        ORDER BY m.fence_epoch LIMIT 1) found ON true""")
"""One row: the columns of `Move` (NULL: no move), and whether the server is a standby, which may lag."""

_CONTROLS: Final = """(
        SELECT move_id, fence_offset AS at, scan_from, fence_epoch AS epoch, NULL::integer AS comes_from, fence_offset
        FROM relatum.context_moves WHERE source_id = :partition_id::integer
        UNION ALL
        SELECT move_id, marker_offset, target_scan_from, epoch, source_id, fence_offset
        FROM relatum.context_moves WHERE target_id = :partition_id::integer) m"""
"""The fences and markers of a partition. `at` is the offset, at or above `scan_from`; NULL until it is known."""

FLOORS: Final = sql(f"""
    SELECT c.name, max(m.epoch) FROM {_CONTROLS} JOIN relatum.moved_contexts c ON c.move_id = m.move_id
    WHERE m.at < :offset::bigint GROUP BY c.name""")

LOST_CONTROLS: Final = sql(f"""
    SELECT m.move_id, m.at, m.epoch, m.fence_offset, source.stream,
        ARRAY (SELECT c.name FROM relatum.moved_contexts c WHERE c.move_id = m.move_id) AS names
    FROM {_CONTROLS} LEFT JOIN relatum.super_stream_partitions source ON source.partition_id = m.comes_from
    WHERE m.at >= :from_offset::bigint AND m.at < :to_offset::bigint ORDER BY m.at""")

SCANS: Final = sql(f"SELECT m.scan_from FROM {_CONTROLS} WHERE m.at IS NULL")
"""The offsets from which to search for fences and markers that have not been found."""

# A crash of PostgreSQL must not undo a fence that is in a stream: behind a fence that the database lost, all messages
# of its contexts would be strays.
_FORCE_DURABLE: Final = sql(f"SELECT {DURABLE_COMMIT}")

_MOVES: Final = "WHERE m.super_stream_id = :super_stream_id::integer"

ONE: Final = sql(f"""
    SELECT {MOVE}, ARRAY (SELECT c.name FROM relatum.moved_contexts c WHERE c.move_id = m.move_id) AS names
    FROM {OF_MOVES} {_MOVES} AND m.move_id = :move_id::bigint""")
"""The columns of `Move`, then the names of its contexts."""

UNDER_WAY: Final = sql(f"SELECT {MOVE} FROM {OF_MOVES} {_MOVES} AND m.ended_at IS NULL ORDER BY m.move_id")

LATEST: Final = sql(f"SELECT {MOVE} FROM {OF_MOVES} {_MOVES} ORDER BY m.move_id DESC LIMIT :latest::integer")

LOCK_NAMED: Final = sql("""
    SELECT name, partition_id, state, move_id FROM relatum.placements
    WHERE super_stream_id = :super_stream_id::integer AND name = ANY (:names::text[])
    ORDER BY name FOR UPDATE""")

_ADD_MOVE: Final = sql(f"""
    INSERT INTO relatum.context_moves (super_stream_id, source_id, target_id, contexts, fence_epoch, epoch, scan_from,
        target_scan_from, holder, lease_expires_at, started_at, generation)
    VALUES (:super_stream_id::integer, :source_id::integer, :target_id::integer, :contexts::integer, 0, 0,
        :scan_from::bigint, :target_scan_from::bigint, :holder::text, {LEASE_END}, clock_timestamp(),
        :generation::bigint)
    RETURNING move_id""")

ADD_CONTEXTS: Final = sql("""
    INSERT INTO relatum.moved_contexts (move_id, name, from_epoch)
    SELECT :move_id::bigint, name, epoch FROM relatum.placements
    WHERE super_stream_id = :super_stream_id::integer AND name = ANY (:names::text[])""")

STOP: Final = sql("""
    UPDATE relatum.placements SET state = 'moving', move_id = :move_id::bigint, generation = :generation::bigint
    WHERE super_stream_id = :super_stream_id::integer AND name = ANY (:names::text[])""")

# This needs no current lease: two movers of one move do no harm.
ATTEND: Final = sql(f"""
    UPDATE relatum.context_moves SET holder = :holder::text, {RENEWED}
    WHERE move_id = :move_id::bigint AND ended_at IS NULL""")

TAKE_ABANDONED: Final = sql(f"""
    UPDATE relatum.context_moves SET holder = :holder::text, {RENEWED}
    WHERE move_id = (
        SELECT move_id FROM relatum.context_moves
        WHERE super_stream_id = :super_stream_id::integer AND ended_at IS NULL AND lease_expires_at < clock_timestamp()
        ORDER BY move_id LIMIT 1 FOR UPDATE SKIP LOCKED)
    RETURNING move_id""")

# Epochs rise: an aborted move's marker follows its fence in the same partition, with a higher epoch. The attempt rises,
# because a mover of release 0.4 may have published a fence of epoch 0 at another offset.
_LET_FENCE: Final = sql("""
    WITH fence AS (SELECT nextval('relatum.placement_epochs') AS epoch),
    after AS (SELECT nextval('relatum.placement_epochs') AS epoch, fence.epoch AS fence FROM fence)
    UPDATE relatum.context_moves m
    SET attempt = m.attempt + 1, fence_epoch = after.fence,
        epoch = CASE WHEN m.aborting THEN after.epoch ELSE after.fence END
    FROM after
    WHERE m.move_id = :move_id::bigint AND m.super_stream_id = :super_stream_id::integer AND m.fence_epoch = 0
        AND m.fence_epoch < after.fence""")

SET_FENCED: Final = sql("""
    UPDATE relatum.context_moves
    SET state = 'fenced', fence_offset = :fence_offset::bigint, fenced_at = clock_timestamp()
    WHERE move_id = :move_id::bigint AND state = 'fencing' AND attempt = :attempt::integer""")

# An aborted move's marker follows its fence, so the search for the marker begins at the fence's earliest offset.
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

# The row keeps its last holder, which operators can see.
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
    """None of the contexts is still open in the source; nothing was written."""


class MoveStore(PlacementStore):
    """The placements and moves of one super stream. Thread-safe. Call `open` first."""

    def __init__(self, database: Database, vhost: str, super_stream: str) -> None:
        super().__init__(database, vhost, super_stream)
        self.outages = Outages(logger, database=database.address.name)

    @contextmanager
    def durable_transaction(self) -> Iterator[Execute]:
        """Open a transaction whose commit waits for the disk; yield a function that runs its statements."""
        with self.database.transaction() as connection:
            connection.execute(_FORCE_DURABLE)
            yield execute_in(connection, super_stream_id=self.super_stream_id)

    def begin(
        self, source: str, target: str, contexts: Collection[str], scan_from: int, target_scan_from: int, holder: str
    ) -> MoveStep:
        """Begin a move of the contexts that are open in the source, and return it.

        `holder` performs only this move: if the call is repeated, the holder identifies the move of the first call.
        """
        with self.durable_transaction() as execute:
            rows = execute(LOCK_NAMED, names=sorted(contexts)).all()
            for row in rows:
                if row.state == PlacementState.MOVING:
                    found = self._step(execute, row.move_id)
                    if found.holder == holder:
                        return found
                    raise already_moving(row.name, found)
            source_id = self.partition(execute, source).partition_id
            names = [row.name for row in rows if (row.state, row.partition_id) == ("open", source_id)]
            if not names:
                raise NothingToMove(f"none of the contexts is still in {source!r}; nothing was moved")
            generation = execute(RAISE_GENERATION).scalar_one()
            # Read the target's state while the super stream's row is locked: `retire` locks that row, too.
            to = self.partition(execute, target)
            if to.state == PartitionState.RETIRED:
                raise SuperStreamConflict(
                    f"partition {target!r} is retired and takes no contexts: choose another target",
                    super_stream=self.super_stream,
                    reason="the target is retired",
                )
            move_id = execute(
                _ADD_MOVE,
                source_id=source_id,
                target_id=to.partition_id,
                contexts=len(names),
                scan_from=scan_from,
                target_scan_from=target_scan_from,
                holder=holder,
                lease_s=LEASE_S,
                generation=generation,
            ).scalar_one()
            execute(ADD_CONTEXTS, names=names, move_id=move_id)
            execute(STOP, names=names, move_id=move_id, generation=generation)
            return self._step(execute, move_id)

    def look(self, move_id: int) -> MoveStep:
        return _step_of(self._only(self._select(ONE, move_id=move_id), move_id))

    def attend(self, move_id: int, holder: str) -> None:
        self._select(ATTEND, move_id=move_id, holder=holder, lease_s=LEASE_S)

    def take_abandoned(self) -> int | None:
        """Take over a move whose lease has expired, and return its id; None if there is none."""
        parameters = self._with_id(holder=new_holder(), lease_s=LEASE_S)
        return next((row.move_id for row in self.database.rows(TAKE_ABANDONED, parameters, once=True)), None)

    def assign_fence_epoch(self, move_id: int) -> MoveStep:
        """Assign the fence's epoch. Call this when no publisher relies on a refresh from before the move."""
        return self._after(_LET_FENCE, move_id)

    def set_fenced(self, move_id: int, attempt: int, fence_offset: int) -> MoveStep:
        """Store the offset of a move's fence, if the attempt is current and the move's state is `fencing`."""
        return self._after(SET_FENCED, move_id, attempt=attempt, fence_offset=fence_offset)

    def set_aborting(self, move_id: int, reason: str | None) -> MoveStep:
        """Make the source the target, unless the move is already being aborted or has ended."""
        return self._after(SET_ABORTING, move_id, reason=reason)

    def _after(self, statement: sa.TextClause, move_id: int, **given: Any) -> MoveStep:
        """Run a statement, and return the move's state after it, even if the statement changed nothing."""
        with self.durable_transaction() as execute:
            execute(statement, move_id=move_id, **given)
            return self._step(execute, move_id)

    def switch(self, move_id: int, attempt: int, marker_offset: int) -> MoveStep:
        """End a fenced move, if the attempt is current: its contexts are then open in the target."""
        with self.durable_transaction() as execute:
            names = execute(LOCK_MOVING, move_id=move_id).scalars().all()
            row = execute(_SET_ENDED, move_id=move_id, attempt=attempt, marker_offset=marker_offset).one_or_none()
            if row is not None:
                generation = execute(RAISE_GENERATION).scalar_one()
                to = {"partition_id": row.target_id, "epoch": row.epoch, "generation": generation}
                execute(GO_ON, move_id=move_id, names=names, **to)
                counts = [(row.source_id, -len(names)), (row.target_id, len(names))]
                # Sorted: partitions are locked in the order of their ids.
                for partition_id, more in sorted(counts) if row.source_id != row.target_id else ():
                    execute(_COUNT_SETS, partition_id=partition_id, more=more)
            return self._step(execute, move_id)

    def moves(self, *, latest: int | None = None) -> list[Move]:
        """Return the moves that have not ended, oldest first; or the `latest` of all moves, newest first."""
        rows = self._select(UNDER_WAY) if latest is None else self._select(LATEST, latest=latest)
        return [_move(row) for row in rows]

    def move(self, move_id: int) -> Move:
        return _move(self._only(self._select(ONE, move_id=move_id), move_id))

    def fence_after(self, name: str, epoch: int, stream: str) -> Move | None:
        """Return the first move of `name` into or out of `stream` with a fence or marker above `epoch`.

        Behind that fence or marker, messages with `epoch` are strays. If that move was deleted, this returns a later
        one. That is safe: retention has dropped its fence or marker, too, so all retained messages are behind it.
        None: messages with `epoch` cannot be strays in `stream`.
        """
        parameters = self._with_id(name=name, stream=stream, above=epoch)
        # Publishers rely on the result, so a standby, which may lag, must not answer.
        [row] = self.database.rows(FENCE_AFTER, parameters, on_primary=True)
        return None if row.move_id is None else _move(row)

    def partition(self, execute: Execute, stream: str) -> Any:
        """Return a partition's row in a transaction, or raise `StreamNotFound`."""
        for row in execute(PARTITIONS):
            if row.stream == stream:
                return row
        raise StreamNotFound(f"{stream!r} is not a partition of {self.super_stream!r}", stream=stream)

    def _step(self, execute: Execute, move_id: int) -> MoveStep:
        return _step_of(self._only(execute(ONE, move_id=move_id).all(), move_id))

    def _only(self, rows: Sequence[Any], move_id: int) -> Any:
        if not rows:
            raise NotFound(f"super stream {self.super_stream!r} has no move {move_id}: list its moves")
        return rows[0]


def already_moving(name: str, move: Move) -> MoveConflict:
    message = f"{name!r} is already part of move {move.move_id}: resume or abort that move"
    return MoveConflict(message, move_id=move.move_id, state=move.state.value)


def _step_of(row: Any) -> MoveStep:
    step = MoveStep(*row[:_MOVE_COLUMNS], names=frozenset(row.names))
    return replace(step, state=MoveState(step.state))


def _move(row: Sequence[Any]) -> Move:
    move = Move(*row[:_MOVE_COLUMNS])
    return replace(move, state=MoveState(move.state))


def lost_controls(database: Database, partition_id: int, from_offset: int, to_offset: int) -> list[tuple[int, Control]]:
    """Return the fences and markers in a range of offsets that retention has dropped, ascending."""
    lost = {"partition_id": partition_id, "from_offset": from_offset, "to_offset": to_offset}
    return [
        (row.at, Fence(row.move_id, row.epoch, frozenset(row.names)))
        if row.stream is None
        else (row.at, Marker(row.move_id, row.epoch, frozenset(row.names), row.stream, row.fence_offset))
        for row in database.rows(LOST_CONTROLS, lost)
    ]
