"""Adding partitions, and retiring those without placements that every serial consumer has read."""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from relatum.contexts._control_streams import ControlStreams
from relatum.contexts._move_store import MoveStore
from relatum.contexts._placement_store import PlacementStore
from relatum.contexts._placements import PartitionRow, PartitionState
from relatum.contexts._super_stream_rows import Ask
from relatum.errors import PartitionInUse, StreamNotFound, SuperStreamConflict
from relatum.store.database import sql

LOOK_S: Final = 0.1
"""Seconds between two checks of the consumers' positions."""

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

_UNREAD: Final = sql("""
    (SELECT c.name, s.stream
    FROM relatum.serial_consumers c
    JOIN relatum.serial_positions p ON p.consumer_id = c.consumer_id
    JOIN unnest(:partition_ids::integer[], :ends::bigint[]) AS needed(partition_id, "end")
        ON p.partition_id = needed.partition_id
    JOIN relatum.super_stream_partitions s ON s.partition_id = needed.partition_id
    WHERE c.super_stream_id = :super_stream_id::integer AND p.position < needed."end"
    LIMIT 1)
    UNION ALL
    (SELECT c.name, NULL FROM relatum.serial_consumers c JOIN relatum.serial_holds h ON h.consumer_id = c.consumer_id
    WHERE c.super_stream_id = :super_stream_id::integer
        AND (h.partition_id = :partition_id::integer OR h.source_id = :partition_id::integer)
    LIMIT 1)""")
"""A consumer that has not read a partition to its end, or holds messages because of the retired one."""


def checked_key(rows: Sequence[PartitionRow], super_stream: str, key: str | None) -> str | None:
    """Return the binding key of a new partition: the given one, or the next number. Keys of retired ones are refused.

    None lets the broker choose the number, which does not know of deleted partitions.
    """
    retired = {row.stream for row in rows if row.state is PartitionState.RETIRED}
    if key is None:
        numbers = [row.stream.removeprefix(f"{super_stream}-") for row in rows]
        taken = [int(number) for number in numbers if number.isascii() and number.isdecimal()]
        return str(1 + max(taken, default=-1)) if retired else None
    if f"{super_stream}-{key}" in retired:
        raise SuperStreamConflict(
            f"partition '{super_stream}-{key}' was retired, and its name is not used again: take another binding key",
            super_stream=super_stream,
            reason="the partition was retired",
        )
    return key


def retire(moves: MoveStore, stream: str) -> None:
    """Retire a partition: nothing is placed in it or moved to it. Idempotent.

    Raises:
        StreamNotFound, PartitionInUse: nothing was changed.
    """
    with moves.kept() as ask:
        ask(_LOCK_SUPER_STREAM)
        rows = ask(_LOCK_PARTITIONS).all()
        row = next((row for row in rows if row.stream == stream), None)
        if row is None:
            raise StreamNotFound(f"the super stream has no partition {stream!r}", stream=stream)
        if not any(row.stream != stream and row.state == PartitionState.ACTIVE for row in rows):
            raise PartitionInUse(f"{stream!r} is the last partition", stream=stream, reason="it is the last one")
        _check_unused(ask, stream, row.partition_id)
        ask(_RETIRE, partition_id=row.partition_id)


def _check_unused(ask: Ask, stream: str, partition_id: int) -> None:
    move_id = ask(MOVES_OF, partition_id=partition_id).scalar()
    if move_id is not None:
        reason = f"move {move_id} has not ended"
        raise PartitionInUse(f"{stream!r} cannot be retired: {reason}", stream=stream, reason=reason)
    context = ask(PLACED_IN, partition_id=partition_id).scalar()
    if context is not None:
        reason = f"{context!r} is placed there, and maybe more"
        raise PartitionInUse(f"{stream!r} cannot be retired: {reason}; move them", stream=stream, reason=reason)


def wait_until_read(placements: PlacementStore, streams: ControlStreams, retired: str, timeout_s: float) -> None:
    """Wait until every consumer has read all present messages of the super stream.

    This includes other partitions: an adoption there may stand for a message in the retired one.

    Raises:
        PartitionInUse: a consumer did not finish in time.
    """
    rows, ends = placements.partitions(), dict[int, int]()
    for row in rows:
        with suppress(StreamNotFound):  # one that was retired and deleted before
            ends[row.partition_id] = streams.end_of(row.stream)
    wanted = {
        "super_stream_id": placements.super_stream_id,
        "partition_ids": list(ends),
        "ends": list(ends.values()),
        "partition_id": next(row.partition_id for row in rows if row.stream == retired),
    }
    give_up_at = time.monotonic() + timeout_s
    while found := placements.database.rows(_UNREAD, wanted):
        if time.monotonic() >= give_up_at:
            name, stream = found[0]
            reason = (
                f"consumer {name!r} holds messages back that come after it"
                if stream is None
                else f"consumer {name!r} has not read all of {stream!r}"
            )
            raise PartitionInUse(
                f"{retired!r} is retired, but was not deleted: {reason}", stream=retired, reason=reason
            )
        time.sleep(LOOK_S)
