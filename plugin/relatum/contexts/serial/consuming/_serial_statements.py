"""The SQL of serial consumers and their holds: each statement once, its parameters bound.

A hold is messages of moved contexts that wait in a partition for what is before them in another.
"""

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from relatum.store import (
    NOW,
    Sharing,
    context_moves,
    holds,
    marked,
    moved_contexts,
    serial_consumers,
    serial_holds,
    serial_members,
    serial_positions,
    super_stream_partitions,
)

_consumers: Final = serial_consumers.c
_members: Final = serial_members.c
_positions: Final = serial_positions.c
_moves: Final = context_moves.c
_holds: Final = serial_holds.c
_partitions: Final = super_stream_partitions.c

_of_consumer: Final = sa.bindparam("of_consumer", type_=sa.Integer)
_of_partition: Final = sa.bindparam("of_partition", type_=sa.Integer)
_by: Final = sa.bindparam("by", type_=sa.Text)

# The consumer's name, and a row for each partition

find_consumer: Final = sa.select(_consumers.consumer_id).where(
    _consumers.super_stream_id == sa.bindparam("in_super_stream"), _consumers.name == sa.bindparam("named")
)

add_consumer: Final = (
    insert(serial_consumers)
    .values(super_stream_id=sa.bindparam("in_super_stream"), name=sa.bindparam("named"))
    .on_conflict_do_nothing()
)

lock_consumer: Final = sa.select(_consumers.consumer_id).where(_consumers.consumer_id == _of_consumer).with_for_update()

has_positions: Final = sa.select(_positions.partition_id).where(_positions.consumer_id == _of_consumer).limit(1)

streams_of: Final = (
    sa.select(_partitions.stream)
    .join(serial_consumers, _consumers.super_stream_id == _partitions.super_stream_id)
    .where(_consumers.consumer_id == _of_consumer)
)

moves_of: Final = sa.select(
    _moves.source_id,
    _moves.target_id,
    _moves.fence_offset,
    sa.func.coalesce(_moves.marker_offset, _moves.target_scan_from),
).where(_moves.super_stream_id == sa.bindparam("in_super_stream"))
"""The fields of `MovedBefore`, in their order."""

add_positions: Final = (
    insert(serial_positions)
    .values(consumer_id=_of_consumer, partition_id=_of_partition, position=sa.bindparam("at", type_=sa.BigInteger))
    .on_conflict_do_nothing()
)

add_new_partitions: Final = (
    insert(serial_positions)
    .from_select(
        ["consumer_id", "partition_id", "position"],
        sa.select(_consumers.consumer_id, _partitions.partition_id, sa.literal(0, sa.BigInteger))
        .join(super_stream_partitions, _partitions.super_stream_id == _consumers.super_stream_id)
        .where(
            _consumers.consumer_id == _of_consumer,
            ~sa.exists().where(
                _positions.consumer_id == _consumers.consumer_id, _positions.partition_id == _partitions.partition_id
            ),
        ),
    )
    .on_conflict_do_nothing()
)

# Members and their shares

DRAINED: Final = 2**63 - 1
"""The position in a stream that was deleted: behind everything."""

shared: Final = (
    sa.select(_positions.partition_id, _partitions.stream)
    .join(super_stream_partitions, _partitions.partition_id == _positions.partition_id)
    .where(_positions.consumer_id == _of_consumer, _positions.position < DRAINED)
    .order_by(_positions.partition_id)
)

PARTITIONS: Final = Sharing(
    _members.consumer_id,
    _positions.partition_id,
    _positions.holder,
    of_rows=_positions.consumer_id,
    are=[_positions.position < DRAINED],
    # Whatever is still on its way of who had it before is fenced off.
    taken={"version": _positions.version + 1},
)
"""Partitions, shared by the members of one consumer name."""

living: Final = sa.select(_members.holder).where(_members.consumer_id == _of_consumer, holds(_members.lease_expires_at))

forget: Final = sa.delete(serial_consumers).where(_consumers.consumer_id == _of_consumer)

_mine: Final = (
    _positions.consumer_id == _of_consumer,
    _positions.partition_id == _of_partition,
    _positions.holder == _by,
)

# Opening a partition

begin: Final = (
    sa.update(serial_positions)
    .where(*_mine)
    # Whatever of this member is still on its way is fenced off.
    .values(version=_positions.version + 1)
    .returning(
        _positions.position,
        _positions.version,
        _positions.last_offset,
        _positions.last_fingerprint,
        _positions.last_chunk_ms,
    )
)

scans_of: Final = sa.union_all(
    sa.select(_moves.scan_from.label("at")).where(_moves.source_id == _of_partition, _moves.fence_offset.is_(None)),
    sa.select(_moves.target_scan_from).where(_moves.target_id == _of_partition, _moves.marker_offset.is_(None)),
)

_from: Final = sa.bindparam("from_offset", type_=sa.BigInteger)
_to: Final = sa.bindparam("to_offset", type_=sa.BigInteger)
_sources: Final = super_stream_partitions.alias("sources")
_names: Final = (
    sa.select(sa.func.array_agg(moved_contexts.c.name))
    .where(moved_contexts.c.move_id == _moves.move_id)
    .scalar_subquery()
    .label("names")
)

lost_fences: Final = sa.select(_moves.move_id, _moves.fence_offset, _moves.fence_epoch, _names).where(
    _moves.source_id == _of_partition, _moves.fence_offset >= _from, _moves.fence_offset < _to
)

lost_markers: Final = (
    sa.select(_moves.move_id, _moves.marker_offset, _moves.epoch, _moves.fence_offset, _sources.c.stream, _names)
    .join(_sources, _sources.c.partition_id == _moves.source_id)
    .where(_moves.target_id == _of_partition, _moves.marker_offset >= _from, _moves.marker_offset < _to)
)


drain: Final = sa.update(serial_positions).where(*_mine).values(position=DRAINED, version=_positions.version + 1)

is_retired: Final = sa.select(_partitions.partition_id).where(
    _partitions.partition_id == _of_partition, _partitions.state == "retired"
)

# A stream that was declared again, or lost its end

_at: Final = sa.bindparam("at", type_=sa.BigInteger)
_known: Final = [sa.bindparam(f"known_{name}", type_=sa.BigInteger) for name in ("offset", "fingerprint", "chunk_ms")]
_LAST: Final = ("last_offset", "last_fingerprint", "last_chunk_ms")

go_on_from: Final = (
    sa.update(serial_positions)
    .where(*_mine)
    .values(position=_at, version=_positions.version + 1, **dict.fromkeys(_LAST))
)

# What a step stores

_advanced: Final = (
    sa.update(serial_positions)
    .where(*_mine, _positions.version == sa.bindparam("expected", type_=sa.BigInteger))
    .values(position=_at, version=_positions.version + 1)
)

advance_unread: Final = marked(_advanced)

advance: Final = marked(_advanced.values(**dict(zip(_LAST, _known, strict=True))))

# What is shown

status: Final = (
    sa.select(
        _positions.partition_id,
        _partitions.stream,
        _partitions.state,
        _positions.position,
        sa.case((PARTITIONS.is_held, _positions.holder)).label("holder"),
    )
    .join(super_stream_partitions, _partitions.partition_id == _positions.partition_id)
    .where(_positions.consumer_id == _of_consumer)
    .order_by(_partitions.place, _positions.partition_id)
)

# Holds: messages of moved contexts that wait in a partition for what is before them in another

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
