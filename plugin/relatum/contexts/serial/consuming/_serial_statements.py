"""The SQL of serial consumers: each statement once, its parameters bound."""

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from relatum.store import (
    Sharing,
    context_moves,
    lapsed,
    marked,
    moved_contexts,
    serial_checkpoints,
    serial_consumers,
    serial_members,
    serial_positions,
    super_stream_partitions,
    super_streams,
)

_consumers: Final = serial_consumers.c
_members: Final = serial_members.c
_positions: Final = serial_positions.c
_moves: Final = context_moves.c
_partitions: Final = super_stream_partitions.c

_of_consumer: Final = sa.bindparam("of_consumer", type_=sa.Integer)
_of_partition: Final = sa.bindparam("of_partition", type_=sa.Integer)
_by: Final = sa.bindparam("by", type_=sa.Text)

# The consumer's name, and a row for each partition

find_super_stream: Final = sa.select(super_streams.c.super_stream_id, super_streams.c.header).where(
    super_streams.c.vhost == sa.bindparam("of_vhost"), super_streams.c.name == sa.bindparam("named")
)

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

partitions_of: Final = (
    sa.select(_partitions.partition_id, _partitions.stream)
    .where(_partitions.super_stream_id == sa.bindparam("in_super_stream"))
    .order_by(_partitions.place, _partitions.partition_id)
)

streams_of: Final = (
    sa.select(_partitions.stream)
    .join(serial_consumers, _consumers.super_stream_id == _partitions.super_stream_id)
    .where(_consumers.consumer_id == _of_consumer)
)

moves_of: Final = sa.select(
    _moves.source_id, _moves.target_id, _moves.fence_offset, _moves.marker_offset, _moves.target_scan_from
).where(_moves.super_stream_id == sa.bindparam("in_super_stream"))

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

# Asked with what is asked anyway; it reads the few moves that have not ended.
_is_abandoned: Final = sa.exists(
    sa.select(sa.literal(1))
    .select_from(context_moves)
    .join(serial_consumers, _consumers.super_stream_id == _moves.super_stream_id)
    .where(
        _consumers.consumer_id == _of_consumer,
        _moves.ended_at.is_(None),
        lapsed(_moves.lease_expires_at),
    )
)

shared: Final = (
    sa.select(_positions.partition_id, _partitions.stream, _is_abandoned.label("has_abandoned"))
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

# A stream that was declared again: what lay in it is nowhere, so nobody waits for it any more.

begin_anew: Final = (
    sa.update(serial_positions)
    .where(*_mine)
    .values(
        position=sa.bindparam("at", type_=sa.BigInteger),
        version=_positions.version + 1,
        last_offset=None,
        last_fingerprint=None,
        last_chunk_ms=None,
    )
)

# A stream that lost its end: what was read of it up to there is the same.

_at: Final = sa.bindparam("at", type_=sa.BigInteger)

go_back: Final = (
    sa.update(serial_positions)
    .where(*_mine)
    .values(
        position=sa.func.least(_positions.position, _at),
        version=_positions.version + 1,
        last_offset=sa.bindparam("known_offset", type_=sa.BigInteger),
        last_fingerprint=sa.bindparam("known_fingerprint", type_=sa.BigInteger),
        last_chunk_ms=sa.bindparam("known_chunk_ms", type_=sa.BigInteger),
    )
)

drop_checkpoints: Final = sa.delete(serial_checkpoints).where(
    serial_checkpoints.c.consumer_id == _of_consumer,
    serial_checkpoints.c.partition_id == _of_partition,
    serial_checkpoints.c.last_offset >= _at,
)

# What a step stores

advance: Final = marked(
    sa.update(serial_positions)
    .where(*_mine, _positions.version == sa.bindparam("expected", type_=sa.BigInteger))
    .values(
        position=sa.bindparam("at", type_=sa.BigInteger),
        version=_positions.version + 1,
        last_offset=sa.bindparam("known_offset", type_=sa.BigInteger),
        last_fingerprint=sa.bindparam("known_fingerprint", type_=sa.BigInteger),
        last_chunk_ms=sa.bindparam("known_chunk_ms", type_=sa.BigInteger),
    )
)

advance_unread: Final = marked(
    sa.update(serial_positions)
    .where(*_mine, _positions.version == sa.bindparam("expected", type_=sa.BigInteger))
    .values(position=sa.bindparam("at", type_=sa.BigInteger), version=_positions.version + 1)
)

# What lay at some offsets behind the position: the next one before the oldest of so many is forgotten.
_checkpoints: Final = serial_checkpoints.c
_here: Final = (_checkpoints.consumer_id == _of_consumer, _checkpoints.partition_id == _of_partition)

add_checkpoint: Final = (
    insert(serial_checkpoints)
    .values(
        consumer_id=_of_consumer,
        partition_id=_of_partition,
        last_offset=sa.bindparam("known_offset", type_=sa.BigInteger),
        fingerprint=sa.bindparam("known_fingerprint", type_=sa.BigInteger),
        chunk_ms=sa.bindparam("known_chunk_ms", type_=sa.BigInteger),
    )
    .on_conflict_do_nothing()
)

forget_checkpoints: Final = sa.delete(serial_checkpoints).where(
    *_here,
    _checkpoints.last_offset
    <= sa.select(_checkpoints.last_offset)
    .where(*_here)
    .order_by(_checkpoints.last_offset.desc())
    .offset(sa.bindparam("kept", type_=sa.Integer))
    .limit(1)
    .scalar_subquery(),
)

checkpoints_of: Final = (
    sa.select(_checkpoints.last_offset, _checkpoints.fingerprint, _checkpoints.chunk_ms)
    .where(*_here)
    .order_by(_checkpoints.last_offset)
)

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
