"""Moves of contexts as they are stored, for all who read them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa

from relatum.contexts._entries import Control, Fence, Marker
from relatum.contexts._placements import Move, MoveState
from relatum.store.database import sql

MOVE: Final = """m.move_id, source.stream AS source, target.stream AS target, m.source_id, m.target_id, m.state,
        m.aborting, m.attempt, m.contexts, m.fence_epoch, m.epoch, m.scan_from, m.target_scan_from, m.fence_offset,
        m.marker_offset, m.holder, m.lease_expires_at, m.started_at, m.fenced_at, m.ended_at, m.reason"""
"""The columns of `Move`, in its order."""

OF_MOVES: Final = """relatum.context_moves m
    JOIN relatum.super_stream_partitions source ON source.partition_id = m.source_id
    JOIN relatum.super_stream_partitions target ON target.partition_id = m.target_id"""
"""Where these come from."""

FIND_MOVE: Final = sql(f"SELECT {MOVE} FROM {OF_MOVES} WHERE m.move_id = :move_id::bigint")

FENCE_AFTER: Final = sql(f"""
    SELECT found.*, pg_is_in_recovery() AS is_standby FROM (VALUES (1)) one LEFT JOIN (
        SELECT {MOVE} FROM {OF_MOVES} JOIN relatum.moved_contexts c ON c.move_id = m.move_id
        WHERE c.name = :name::text AND m.super_stream_id = :super_stream_id::integer
            AND (source.stream = :stream::text AND m.fence_epoch > :above::bigint
                OR target.stream = :stream::text AND m.epoch > :above::bigint)
        ORDER BY m.fence_epoch LIMIT 1) found ON true""")
"""One row: the columns of `Move`, NULLs where there is none, and whether the server may know of too little."""

_FLOORS: Final = sql("""
    SELECT name, max(epoch) FROM (
        SELECT c.name, m.fence_epoch AS epoch
        FROM relatum.moved_contexts c JOIN relatum.context_moves m ON m.move_id = c.move_id
        WHERE m.source_id = :partition_id::integer AND m.fence_offset < :offset::bigint
        UNION ALL
        SELECT c.name, m.epoch
        FROM relatum.moved_contexts c JOIN relatum.context_moves m ON m.move_id = c.move_id
        WHERE m.target_id = :partition_id::integer AND m.marker_offset < :offset::bigint) told
    GROUP BY name""")

_NAMES: Final = "(SELECT array_agg(c.name) FROM relatum.moved_contexts c WHERE c.move_id = m.move_id) AS names"

LOST_FENCES: Final = sql(f"""
    SELECT m.move_id, m.fence_offset, m.fence_epoch, {_NAMES} FROM relatum.context_moves m
    WHERE m.source_id = :partition_id::integer
        AND m.fence_offset >= :from_offset::bigint AND m.fence_offset < :to_offset::bigint""")

LOST_MARKERS: Final = sql(f"""
    SELECT m.move_id, m.marker_offset, m.epoch, m.fence_offset, source.stream, {_NAMES}
    FROM relatum.context_moves m JOIN relatum.super_stream_partitions source ON source.partition_id = m.source_id
    WHERE m.target_id = :partition_id::integer
        AND m.marker_offset >= :from_offset::bigint AND m.marker_offset < :to_offset::bigint""")


def move_info(row: Sequence[Any]) -> Move:
    """A move from the columns of `MOVE`; what a statement adds to them comes after."""
    move = Move(*row[: len(Move.__dataclass_fields__)])
    return replace(move, state=MoveState(move.state))


def floors_before(connection: sa.Connection, partition_id: int, offset: int) -> dict[str, int]:
    """The floor of each context in a partition as of an offset: of what fences and markers before it say."""
    rows = connection.execute(_FLOORS, {"partition_id": partition_id, "offset": offset})
    return dict(rows.all())


def lost_controls(
    connection: sa.Connection, partition_id: int, from_offset: int, to_offset: int
) -> list[tuple[int, Control]]:
    """The fences and markers that lay at these offsets, ascending, for a stream that has them no more."""
    lost = {"partition_id": partition_id, "from_offset": from_offset, "to_offset": to_offset}
    found: list[tuple[int, Control]] = []
    for move_id, at, epoch, names in connection.execute(LOST_FENCES, lost):
        found.append((at, Fence(move_id, epoch, frozenset(names or ()))))
    for move_id, at, epoch, fence, source, names in connection.execute(LOST_MARKERS, lost):
        found.append((at, Marker(move_id, epoch, frozenset(names or ()), source, fence)))
    return sorted(found, key=lambda each: each[0])
