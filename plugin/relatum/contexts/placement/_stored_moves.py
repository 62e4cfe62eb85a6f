"""Moves of contexts as they are stored, for all who read them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from relatum.contexts.placement._model import MoveInfo, MoveState
from relatum.store import sql

IS_WAITED_FOR: Final = "s.super_stream_id = m.super_stream_id AND s.seen < m.generation AND m.fence_epoch = 0"
"""Whether a publisher's session is one that a move waits for before its fence."""

MOVE: Final = f"""m.move_id, source.stream AS source, target.stream AS target, m.source_id, m.target_id, m.state,
        m.aborting, m.attempt, m.contexts, m.fence_epoch, m.epoch, m.scan_from, m.target_scan_from, m.fence_offset,
        m.marker_offset, m.holder, m.lease_expires_at, m.started_at, m.fenced_at, m.ended_at, m.reason,
        ARRAY (SELECT s.holder FROM relatum.publisher_sessions s WHERE {IS_WAITED_FOR}) AS waits_for"""
"""The columns of `MoveInfo`, in its order."""

OF_MOVES: Final = """relatum.context_moves m
    JOIN relatum.super_stream_partitions source ON source.partition_id = m.source_id
    JOIN relatum.super_stream_partitions target ON target.partition_id = m.target_id"""
"""Where these come from."""

FIND_MOVE: Final = sql(f"SELECT {MOVE} FROM {OF_MOVES} WHERE m.move_id = :move_id::bigint")

FENCE_AFTER: Final = sql(f"""
    SELECT {MOVE} FROM {OF_MOVES} JOIN relatum.moved_contexts c ON c.move_id = m.move_id
    WHERE c.name = :name::text AND m.super_stream_id = :super_stream_id::integer
        AND (source.stream = :stream::text AND m.fence_epoch > :above::bigint
            OR target.stream = :stream::text AND m.epoch > :above::bigint)
    ORDER BY m.fence_epoch LIMIT 1""")


def move_info(row: Sequence[Any]) -> MoveInfo:
    """A move from the columns of `MOVE`."""
    move = MoveInfo(*row)
    return replace(move, state=MoveState(move.state), waits_for=tuple(move.waits_for))
