"""Moves in PostgreSQL: each call is one transaction, and may be repeated when its outcome is not known."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa

from relatum.contexts.placement import _placement_statements as placement_statements
from relatum.contexts.placement._model import MoveInfo, MoveState, PartitionState, PlacementState
from relatum.contexts.placement._placement_store import move_info
from relatum.contexts.serial.moving import _move_statements as statements
from relatum.contexts.serial.moving._move_steps import (
    Begin,
    ForgetSession,
    MoveStep,
    SessionSeen,
    SetAborting,
    SetFenced,
    Switch,
)
from relatum.errors import Conflict, MoveConflict, NotFound, PartitionInUse, StreamNotFound, SuperStreamConflict
from relatum.store import LEASE_S, Database
from relatum.waiting import Outages

logger = logging.getLogger("relatum.contexts")

_FACTS: Final = len(MoveInfo.__dataclass_fields__)


class NothingToMove(Conflict):
    """None of the contexts is open in the source any more; nothing was written."""


class MoveStore:
    """The moves of one super stream. Threads may share it."""

    def __init__(self, database: Database, super_stream_id: int, super_stream: str) -> None:
        self._database = Database(database)
        self._transaction = self._database.transaction
        self._id = super_stream_id
        self._name = super_stream
        self.outages = Outages(logger, database=database.address.name)
        """What is away, of all moves of the super stream."""

    @contextmanager
    def _kept(self) -> Iterator[sa.Connection]:
        """A transaction that has reached the disk when it is committed."""
        with self._transaction() as connection:
            connection.execute(statements.keep_commits)
            yield connection

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
        named = {"of_super_stream": self._id, "named": sorted(wanted.contexts)}
        with self._kept() as connection:
            rows = connection.execute(statements.lock_named, named).all()
            for row in rows:
                if row.state == PlacementState.MOVING:
                    return self._begun_before(connection, row.move_id, row.name, holder)
            source = self._partition(connection, wanted.source)
            names = [row.name for row in rows if (row.state, row.partition_id) == ("open", source.partition_id)]
            if not names:
                raise NothingToMove(f"none of the contexts is in {wanted.source!r} any more; nothing was moved")
            generation = connection.execute(placement_statements.raise_generation, named).scalar_one()
            # Behind the generation's lock, which whoever retires a partition takes, too.
            target = self._partition(connection, wanted.target)
            if target.state == PartitionState.RETIRED:
                raise SuperStreamConflict(
                    f"partition {wanted.target!r} is retired: no context can go there",
                    super_stream=self._name,
                    reason="the target is retired",
                )
            partitions = (source.partition_id, target.partition_id)
            move_id = self._add(connection, wanted, partitions, len(names), holder, generation)
            stopped = {**named, "named": names, "of_move": move_id, "at_generation": generation}
            connection.execute(statements.add_contexts, stopped)
            connection.execute(statements.stop, stopped)
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

    def _add(
        self,
        connection: sa.Connection,
        wanted: Begin,
        partitions: tuple[int, int],
        count: int,
        holder: str,
        generation: int,
    ) -> int:
        added = {
            "of_super_stream": self._id,
            "from_partition": partitions[0],
            "to_partition": partitions[1],
            "count": count,
            "at_or_behind": wanted.scan_from,
            "target_at_or_behind": wanted.target_scan_from,
            "held_by": holder,
            "holds_s": LEASE_S,
            "at_generation": generation,
        }
        return int(connection.execute(statements.add_move, added).scalar_one())

    def _partition(self, connection: sa.Connection, stream: str) -> Any:
        row = connection.execute(
            statements.partition_named, {"of_super_stream": self._id, "of_stream": stream}
        ).one_or_none()
        if row is None:
            raise StreamNotFound(f"the super stream has no partition {stream!r}", stream=stream)
        return row

    def _row(self, connection: sa.Connection, move_id: int) -> Any:
        row = connection.execute(statements.one, {"of_super_stream": self._id, "of_move": move_id}).one_or_none()
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
        self._database.rows(statements.attend, {"of_move": move_id, "held_by": holder, "holds_s": LEASE_S})

    def keep_attending(self, move_id: int, holder: str) -> None:
        """Say that its holder still goes on with a move; nothing where that is another by now."""
        self._database.rows(statements.keep_attending, {"of_move": move_id, "held_by": holder, "holds_s": LEASE_S})

    def take_abandoned(self, holder: str) -> int | None:
        """Take a move that has not ended and that nobody attends, for this holder alone; None where there is none."""
        taken = {"of_super_stream": self._id, "held_by": holder, "holds_s": LEASE_S}
        return next((row.move_id for row in self._database.rows(statements.take_abandoned, taken, once=True)), None)

    def sessions(self, move_id: int) -> dict[str, SessionSeen]:
        """The publishers, by holder, that may not know of a move yet."""
        rows = self._database.rows(statements.sessions, {"of_move": move_id})
        return {row.holder: SessionSeen(row.beat, row.session_s) for row in rows}

    def forget_session(self, wanted: ForgetSession) -> None:
        """Remove a session that has lapsed."""
        gone = {"of_super_stream": self._id, "held_by": wanted.holder, "of_beat": wanted.beat}
        self._database.rows(statements.forget_session, gone)

    def let_fence(self, move_id: int) -> MoveStep:
        """Have a move fenced, now that all publishers know of it."""
        with self._kept() as connection:
            connection.execute(statements.let_fence, {"of_super_stream": self._id, "of_move": move_id})
            return self._step(connection, move_id)

    def set_fenced(self, wanted: SetFenced) -> MoveStep:
        """Note where a move's fence lies, if it is at that attempt and not fenced yet."""
        values = {"of_move": wanted.move_id, "of_attempt": wanted.attempt, "at_offset": wanted.fence_offset}
        with self._kept() as connection:
            connection.execute(statements.set_fenced, values)
            return self._step(connection, wanted.move_id)

    def switch(self, wanted: Switch) -> MoveStep:
        """End a move, if it is at that attempt and fenced: its contexts go on in the target."""
        of_move = {"of_super_stream": self._id, "of_move": wanted.move_id}
        ended = {**of_move, "of_attempt": wanted.attempt, "at_offset": wanted.marker_offset}
        with self._kept() as connection:
            names = connection.scalars(statements.lock_moving, of_move).all()
            row = connection.execute(statements.set_ended, ended).one_or_none()
            if row is not None:
                generation = connection.execute(placement_statements.raise_generation, of_move).scalar_one()
                gone_on = {"named": names, "to_partition": row.target_id, "to_epoch": row.epoch}
                connection.execute(statements.go_on, {**of_move, **gone_on, "at_generation": generation})
                _count(connection, row.source_id, row.target_id, len(names))
            return self._step(connection, wanted.move_id)

    def set_aborting(self, wanted: SetAborting, reason: str | None) -> MoveStep:
        """Turn a move back to its source, unless it was turned back before or has ended."""
        values = {"of_super_stream": self._id, "of_move": wanted.move_id, "because": reason}
        with self._kept() as connection:
            connection.execute(statements.set_aborting, values)
            return self._step(connection, wanted.move_id)

    def moves(self, *, latest: int | None = None) -> list[MoveInfo]:
        """The moves that have not ended, oldest first; or so many of all, latest first."""
        of_super_stream = {"of_super_stream": self._id}
        with self._transaction() as connection:
            if latest is None:
                rows = connection.execute(statements.under_way, of_super_stream)
            else:
                rows = connection.execute(statements.latest, {**of_super_stream, "at_most": latest})
            return [_info_of(row) for row in rows]

    def move(self, move_id: int) -> MoveInfo:
        """A move as it is shown.

        Raises:
            NotFound: there is none of that number.
        """
        with self._transaction() as connection:
            return _info_of(self._row(connection, move_id))

    def retire(self, stream: str) -> None:
        """Take a partition out of use: nothing is placed or moved there any more. One that is retired stays so.

        Raises:
            StreamNotFound: the super stream has no such partition.
            PartitionInUse: contexts are there, or on their way; or it is the last one.
        """
        of_super_stream = {"of_super_stream": self._id}
        with self._kept() as connection:
            connection.execute(statements.lock_super_stream, of_super_stream)
            rows = connection.execute(statements.lock_partitions, of_super_stream).all()
            row = next((row for row in rows if row.stream == stream), None)
            if row is None:
                raise StreamNotFound(f"the super stream has no partition {stream!r}", stream=stream)
            if not any(row.stream != stream and row.state == PartitionState.ACTIVE for row in rows):
                raise PartitionInUse(f"{stream!r} is the last partition", stream=stream, reason="it is the last one")
            self._check_unused(connection, stream, row.partition_id)
            connection.execute(statements.set_retired, {"of_partition": row.partition_id})

    def unread(self, partition_id: int, ends: Mapping[int, int]) -> str | None:
        """Which serial consumer has not read so far, or holds messages back because of a partition; None for none.

        Args:
            partition_id: The partition of the holds.
            ends: By partition, the offset below which all is to be read.
        """
        wanted = {"of_super_stream": self._id, "partition_ids": list(ends), "ends": list(ends.values())}
        with self._transaction() as connection:
            behind = connection.execute(statements.behind, wanted).first()
            if behind is not None:
                return f"consumer {behind.name!r} has not read all of {behind.stream!r}"
            of_partition = {"of_super_stream": self._id, "of_partition": partition_id}
            name = connection.execute(statements.holding, of_partition).scalar()
            return None if name is None else f"consumer {name!r} holds messages back that come after it"

    def _check_unused(self, connection: sa.Connection, stream: str, partition_id: int) -> None:
        of_partition = {"of_super_stream": self._id, "of_partition": partition_id}
        move_id = connection.execute(statements.moves_of, of_partition).scalar()
        if move_id is not None:
            reason = f"move {move_id} has not ended"
            raise PartitionInUse(f"{stream!r} cannot be retired: {reason}", stream=stream, reason=reason)
        context = connection.execute(statements.placed_in, of_partition).scalar()
        if context is not None:
            reason = f"{context!r} is placed there, and maybe more"
            raise PartitionInUse(f"{stream!r} cannot be retired: {reason}; move them", stream=stream, reason=reason)


def _count(connection: sa.Connection, source_id: int, target_id: int, moved: int) -> None:
    """Count the placements of both partitions anew, in the order in which partitions are locked."""
    if source_id == target_id:
        return
    for partition_id, more in sorted([(source_id, -moved), (target_id, moved)]):
        connection.execute(statements.count_sets, {"of_partition": partition_id, "more": more})


def _step_of(row: Any) -> MoveStep:
    step = MoveStep(*row[:_FACTS], names=frozenset(row.names))
    return replace(step, state=MoveState(step.state), waits_for=tuple(step.waits_for))


def _info_of(row: Any) -> MoveInfo:
    return move_info(row[:_FACTS])
