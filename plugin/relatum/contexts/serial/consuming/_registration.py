"""A serial consumer's name: made known, with a place to begin in each partition; found; and forgotten."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from relatum.contexts.placement._placement_opening import partitions_in
from relatum.contexts.serial._partition_log import MovedBefore, consistent_starts
from relatum.errors import Conflict
from relatum.store.database import Database, sql
from relatum.store.settling import forget_settlements

_FIND_CONSUMER: Final = sql("""
    SELECT consumer_id FROM relatum.serial_consumers
    WHERE super_stream_id = :super_stream_id::integer AND name = :name::text""")

_ADD_CONSUMER: Final = sql("""
    INSERT INTO relatum.serial_consumers (super_stream_id, name) VALUES (:super_stream_id::integer, :name::text)
    ON CONFLICT DO NOTHING""")

_LOCK_CONSUMER: Final = sql("""
    SELECT 1 FROM relatum.serial_consumers WHERE consumer_id = :consumer_id::integer FOR UPDATE""")

_FORGET_CONSUMER: Final = sql("DELETE FROM relatum.serial_consumers WHERE consumer_id = :consumer_id::integer")

_MOVES: Final = sql("""
    SELECT source_id, target_id, fence_offset, coalesce(marker_offset, target_scan_from)
    FROM relatum.context_moves WHERE super_stream_id = :super_stream_id::integer""")
"""The fields of `MovedBefore`, in their order."""

_HAS_POSITIONS: Final = sql("""
    SELECT 1 FROM relatum.serial_positions WHERE consumer_id = :consumer_id::integer LIMIT 1""")

_ADD_POSITION: Final = sql("""
    INSERT INTO relatum.serial_positions (consumer_id, partition_id, position)
    VALUES (:consumer_id::integer, :partition_id::integer, :position::bigint)
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

MEMBERS_UP: Final = sql("""
    SELECT holder FROM relatum.serial_members
    WHERE consumer_id = :consumer_id::integer AND lease_expires_at >= clock_timestamp()
    LIMIT 1""")

Initial = Callable[[Sequence[str]], Mapping[str, int]]
"""Finds where to begin in each of these streams."""


def register(database: Database, super_stream_id: int, name: str, initial: Initial) -> int:
    """Make the rows of a consumer's name, where they are not there; gives its id."""
    named = {"super_stream_id": super_stream_id, "name": name}
    with database.transaction() as connection:
        connection.execute(_ADD_CONSUMER, named)
        consumer_id = int(connection.execute(_FIND_CONSUMER, named).scalar_one())
        of_consumer = {"consumer_id": consumer_id}
        is_new = connection.execute(_HAS_POSITIONS, of_consumer).first() is None
        partitions = {row.stream: row.partition_id for row in partitions_in(connection, super_stream_id)}
    # Before the moves are read: the marker of a move that is not seen below lies behind all of these.
    ends = initial(list(partitions)) if is_new else {}
    with database.transaction() as connection:
        connection.execute(_LOCK_CONSUMER, of_consumer)
        if is_new and connection.execute(_HAS_POSITIONS, of_consumer).first() is None:
            starts = {partition_id: ends.get(stream, 0) for stream, partition_id in partitions.items()}
            moves = [MovedBefore(*row) for row in connection.execute(_MOVES, named)]
            rows = [
                {**of_consumer, "partition_id": partition_id, "position": at}
                for partition_id, at in consistent_starts(starts, moves).items()
            ]
            connection.execute(_ADD_POSITION, rows)
        connection.execute(ADD_NEW_PARTITIONS, of_consumer)
        forget_settlements(connection)
    return consumer_id


def find_consumer(database: Database, super_stream_id: int, name: str) -> int | None:
    """The id of a consumer's name; None where it is not known."""
    found = database.rows(_FIND_CONSUMER, {"super_stream_id": super_stream_id, "name": name})
    return found[0].consumer_id if found else None


def forget_consumer(database: Database, consumer_id: int, name: str) -> bool:
    """Forget a consumer's name; False where another was first.

    Raises:
        Conflict: members of it are up; nothing was changed.
    """
    of_consumer = {"consumer_id": consumer_id}
    with database.transaction() as connection:
        connection.execute(_LOCK_CONSUMER, of_consumer)
        holder = connection.scalar(MEMBERS_UP, of_consumer)
        if holder is not None:
            raise Conflict(f"{name!r} is not forgotten: its member {holder} is up")
        return bool(connection.execute(_FORGET_CONSUMER, of_consumer).rowcount)
