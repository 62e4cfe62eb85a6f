"""Taking a partition out of use: nobody is placed there any more, and who still has something to read there."""

from collections.abc import Mapping
from typing import Final

import sqlalchemy as sa

from relatum.contexts.placement._model import PartitionState
from relatum.contexts.serial.moving._move_store import kept
from relatum.errors import PartitionInUse, StreamNotFound
from relatum.store.database import Database, sql

_LOCK_SUPER_STREAM: Final = sql("""
    SELECT 1 FROM relatum.super_streams WHERE super_stream_id = :super_stream_id::integer FOR UPDATE""")

_LOCK_PARTITIONS: Final = sql("""
    SELECT partition_id, stream, state FROM relatum.super_stream_partitions
    WHERE super_stream_id = :super_stream_id::integer
    ORDER BY partition_id FOR UPDATE""")

MOVES_OF: Final = sql("""
    SELECT move_id FROM relatum.context_moves
    WHERE super_stream_id = :super_stream_id::integer AND ended_at IS NULL
        AND (source_id = :partition_id::integer OR target_id = :partition_id::integer)
    LIMIT 1""")

PLACED_IN: Final = sql("""
    SELECT name FROM relatum.placements WHERE partition_id = :partition_id::integer AND state <> 'released' LIMIT 1""")

_RETIRE: Final = sql("""
    UPDATE relatum.super_stream_partitions SET state = 'retired' WHERE partition_id = :partition_id::integer""")

_BEHIND: Final = sql("""
    SELECT c.name, s.stream
    FROM relatum.serial_consumers c
    JOIN relatum.serial_positions p ON p.consumer_id = c.consumer_id
    JOIN unnest(:partition_ids::integer[], :ends::bigint[]) AS needed(partition_id, "end")
        ON p.partition_id = needed.partition_id
    JOIN relatum.super_stream_partitions s ON s.partition_id = needed.partition_id
    WHERE c.super_stream_id = :super_stream_id::integer AND p.position < needed."end"
    LIMIT 1""")

_HOLDING: Final = sql("""
    SELECT c.name FROM relatum.serial_consumers c JOIN relatum.serial_holds h ON h.consumer_id = c.consumer_id
    WHERE c.super_stream_id = :super_stream_id::integer
        AND (h.partition_id = :partition_id::integer OR h.source_id = :partition_id::integer)
    LIMIT 1""")


def retire_partition(database: Database, super_stream_id: int, stream: str) -> None:
    """Take a partition out of use: nothing is placed or moved there any more. One that is retired stays so.

    Raises:
        StreamNotFound: the super stream has no such partition.
        PartitionInUse: contexts are there, or on their way; or it is the last one.
    """
    with kept(database) as connection:
        connection.execute(_LOCK_SUPER_STREAM, {"super_stream_id": super_stream_id})
        rows = connection.execute(_LOCK_PARTITIONS, {"super_stream_id": super_stream_id}).all()
        row = next((row for row in rows if row.stream == stream), None)
        if row is None:
            raise StreamNotFound(f"the super stream has no partition {stream!r}", stream=stream)
        if not any(row.stream != stream and row.state == PartitionState.ACTIVE for row in rows):
            raise PartitionInUse(f"{stream!r} is the last partition", stream=stream, reason="it is the last one")
        _check_unused(connection, super_stream_id, stream, row.partition_id)
        connection.execute(_RETIRE, {"partition_id": row.partition_id})


def _check_unused(connection: sa.Connection, super_stream_id: int, stream: str, partition_id: int) -> None:
    of_partition = {"super_stream_id": super_stream_id, "partition_id": partition_id}
    move_id = connection.execute(MOVES_OF, of_partition).scalar()
    if move_id is not None:
        reason = f"move {move_id} has not ended"
        raise PartitionInUse(f"{stream!r} cannot be retired: {reason}", stream=stream, reason=reason)
    context = connection.execute(PLACED_IN, of_partition).scalar()
    if context is not None:
        reason = f"{context!r} is placed there, and maybe more"
        raise PartitionInUse(f"{stream!r} cannot be retired: {reason}; move them", stream=stream, reason=reason)


def unread(database: Database, super_stream_id: int, partition_id: int, ends: Mapping[int, int]) -> str | None:
    """Which serial consumer has not read so far, or holds messages back because of a partition; None for none.

    - `partition_id`: The partition of the holds.
    - `ends`: By partition, the offset below which all is to be read.
    """
    wanted = {"super_stream_id": super_stream_id, "partition_ids": list(ends), "ends": list(ends.values())}
    with database.transaction() as connection:
        behind = connection.execute(_BEHIND, wanted).first()
        if behind is not None:
            return f"consumer {behind.name!r} has not read all of {behind.stream!r}"
        of_partition = {"super_stream_id": super_stream_id, "partition_id": partition_id}
        name = connection.execute(_HOLDING, of_partition).scalar()
        return None if name is None else f"consumer {name!r} holds messages back that come after it"
