"""Holds in PostgreSQL: messages of moved contexts that wait in a partition for what is before them in another."""

from collections.abc import Mapping
from typing import Any, Final

import sqlalchemy as sa

from relatum.contexts.serial.consuming._partition_following import Step
from relatum.store.database import sql

_IN_PARTITION: Final = "consumer_id = :consumer_id::integer AND partition_id = :partition_id::integer"
_FROM_PARTITION: Final = "consumer_id = :consumer_id::integer AND source_id = :partition_id::integer"

HOLDS_OF: Final = sql(f"""
    SELECT move_id, marker_offset, cursor, extract(epoch FROM clock_timestamp() - since)::float AS since_s
    FROM relatum.serial_holds WHERE {_IN_PARTITION}""")

_DROP: Final = sql(f"DELETE FROM relatum.serial_holds WHERE {_IN_PARTITION}")

_FREE: Final = sql(f"UPDATE relatum.serial_holds SET fence_offset = -1 WHERE {_FROM_PARTITION}")

_DROP_BEHIND: Final = sql(f"""
    DELETE FROM relatum.serial_holds WHERE {_IN_PARTITION} AND marker_offset >= :position::bigint""")

_MOVE_BACK: Final = sql(f"""
    UPDATE relatum.serial_holds SET cursor = least(cursor, :position::bigint) WHERE {_IN_PARTITION}""")

_FREE_BEHIND: Final = sql(f"""
    UPDATE relatum.serial_holds SET fence_offset = -1 WHERE {_FROM_PARTITION} AND fence_offset >= :end::bigint""")

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
"""Whether a hold has nothing to wait for any more: neither behind its fence, nor in holds of its source before that."""

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


def forget_holds(connection: sa.Connection, mine: Mapping[str, Any]) -> None:
    """Drop what is held in a partition that was declared again; nobody waits for what lay in it any more."""
    connection.execute(_DROP, mine)
    connection.execute(_FREE, mine)


def drop_holds(connection: sa.Connection, mine: Mapping[str, Any]) -> None:
    """Drop what is held in a partition."""
    connection.execute(_DROP, mine)


def move_holds_back(connection: sa.Connection, at: Mapping[str, Any], end: int) -> None:
    """Have holds go on at an earlier position of a stream that lost its end; nobody waits for a fence behind that."""
    connection.execute(_DROP_BEHIND, at)
    connection.execute(_MOVE_BACK, at)
    connection.execute(_FREE_BEHIND, {**at, "end": end})


def write_holds(connection: sa.Connection, mine: Mapping[str, Any], step: Step) -> None:
    """Write which holds a step begins, moves and ends."""
    begun = {hold.move_id for hold in step.begun}
    for hold in step.begun:
        new = {
            **mine,
            "move_id": hold.move_id,
            "source": hold.source,
            "epoch": hold.epoch,
            "marker_offset": hold.marker_offset,
            "cursor": hold.marker_offset + 1,
            "fence_offset": hold.fence_offset,
        }
        connection.execute(BEGIN_HOLD, new)
    for move_id, cursor, held in step.holds:
        if move_id not in begun:
            connection.execute(MOVE_HOLD, {**mine, "move_id": move_id, "cursor": cursor, "held": held})
    for move_id in step.ended:
        connection.execute(END_HOLD, {**mine, "move_id": move_id})
