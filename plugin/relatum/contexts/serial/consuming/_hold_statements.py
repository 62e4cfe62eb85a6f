"""The SQL of holds: messages of moved contexts that wait in a partition for what is before them in another."""

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from relatum.store import (
    NOW,
    moved_contexts,
    serial_consumers,
    serial_holds,
    serial_positions,
    super_stream_partitions,
)

_consumers: Final = serial_consumers.c
_holds: Final = serial_holds.c
_partitions: Final = super_stream_partitions.c
_sources: Final = super_stream_partitions.alias("sources")

_of_consumer: Final = sa.bindparam("of_consumer", type_=sa.Integer)
_of_partition: Final = sa.bindparam("of_partition", type_=sa.Integer)
_at: Final = sa.bindparam("at", type_=sa.BigInteger)

holds_of: Final = sa.select(
    _holds.move_id,
    _holds.marker_offset,
    _holds.cursor,
    sa.func.extract("epoch", NOW - _holds.since).cast(sa.Float).label("since_s"),
).where(_holds.consumer_id == _of_consumer, _holds.partition_id == _of_partition)

# A stream that was declared again, or lost its end: nobody waits for what lay there any more.

drop_holds_behind: Final = sa.delete(serial_holds).where(
    _holds.consumer_id == _of_consumer, _holds.partition_id == _of_partition, _holds.marker_offset >= _at
)

move_holds_back: Final = (
    sa.update(serial_holds)
    .where(_holds.consumer_id == _of_consumer, _holds.partition_id == _of_partition)
    .values(cursor=sa.func.least(_holds.cursor, _at))
)

free_holds_behind: Final = (
    sa.update(serial_holds)
    .where(
        _holds.consumer_id == _of_consumer,
        _holds.source_id == _of_partition,
        _holds.fence_offset >= sa.bindparam("end", type_=sa.BigInteger),
    )
    .values(fence_offset=-1)
)

drop_holds: Final = sa.delete(serial_holds).where(
    _holds.consumer_id == _of_consumer, _holds.partition_id == _of_partition
)

free_holds: Final = (
    sa.update(serial_holds)
    .where(_holds.consumer_id == _of_consumer, _holds.source_id == _of_partition)
    .values(fence_offset=-1)
)

# What a step stores

_of_move: Final = sa.bindparam("of_move", type_=sa.BigInteger)

begin_hold: Final = insert(serial_holds).from_select(
    [
        "consumer_id",
        "partition_id",
        "move_id",
        "source_id",
        "epoch",
        "marker_offset",
        "cursor",
        "fence_offset",
    ],
    sa.select(
        _of_consumer,
        _of_partition,
        _of_move,
        _partitions.partition_id,
        sa.bindparam("of_epoch", type_=sa.BigInteger),
        sa.bindparam("marked_at", type_=sa.BigInteger),
        sa.bindparam("next_held", type_=sa.BigInteger),
        sa.bindparam("fenced_at", type_=sa.BigInteger),
    )
    .join(serial_consumers, _consumers.super_stream_id == _partitions.super_stream_id)
    .where(_consumers.consumer_id == _of_consumer, _partitions.stream == sa.bindparam("of_source")),
)

_this_hold: Final = (
    _holds.consumer_id == _of_consumer,
    _holds.partition_id == _of_partition,
    _holds.move_id == _of_move,
)

move_hold: Final = (
    sa.update(serial_holds)
    .where(*_this_hold)
    .values(cursor=sa.bindparam("next_held", type_=sa.BigInteger), held=sa.bindparam("waiting", type_=sa.BigInteger))
)

end_hold: Final = sa.delete(serial_holds).where(*_this_hold)

# Which are complete

_source_positions: Final = serial_positions.alias("source_positions")
_before: Final = serial_holds.alias("holds_before")
_waiting: Final = moved_contexts.alias("waiting")
_waiting_before: Final = moved_contexts.alias("waiting_before")

_of_source: Final = (_source_positions.c.consumer_id == _holds.consumer_id) & (
    _source_positions.c.partition_id == _holds.source_id
)
_is_complete: Final = (_source_positions.c.position > _holds.fence_offset) & ~sa.exists(
    sa.select(sa.literal(1))
    .select_from(_before)
    .join(_waiting_before, _waiting_before.c.move_id == _before.c.move_id)
    .join(_waiting, _waiting.c.name == _waiting_before.c.name)
    .where(
        _before.c.consumer_id == _holds.consumer_id,
        _before.c.partition_id == _holds.source_id,
        _before.c.marker_offset < _holds.fence_offset,
        _waiting.c.move_id == _holds.move_id,
    )
)

complete_holds: Final = (
    sa.select(_holds.partition_id, _holds.move_id)
    .join(_source_positions, _of_source)
    .where(
        _holds.consumer_id == _of_consumer,
        _holds.partition_id == sa.any_(sa.bindparam("of_partitions", type_=sa.ARRAY(sa.Integer))),
        _is_complete,
    )
)

# What is shown

status_holds: Final = (
    sa.select(
        _holds.partition_id,
        _holds.move_id,
        _sources.c.stream.label("source"),
        _holds.fence_offset,
        _holds.held,
        sa.func.extract("epoch", NOW - _holds.since).cast(sa.Float).label("since_s"),
        sa.func.coalesce(_is_complete, sa.false()).label("is_complete"),
    )
    .join(_sources, _sources.c.partition_id == _holds.source_id)
    .outerjoin(_source_positions, _of_source)
    .where(_holds.consumer_id == _of_consumer)
    .order_by(_holds.partition_id, _holds.marker_offset)
)
