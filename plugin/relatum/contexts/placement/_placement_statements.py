"""The SQL of placements: each statement once, built with SQLAlchemy, its parameters bound.

All that lock rows take them in the order that `relatum.store._tables` names: placements by name, the super
stream, partitions by id. Where one statement does several of these, each part reads from the one before it.
"""

from functools import cache
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from relatum.contexts.placement._model import MoveInfo, PartitionRow, Placement
from relatum.contexts.placement._session_statements import KEEP_COMMITS, waited_for
from relatum.store import (
    arrays,
    context_moves,
    interval,
    moved_contexts,
    placement_epochs,
    placements,
    super_stream_partitions,
    super_streams,
)

_placements: Final = placements.c
_partitions: Final = super_stream_partitions.c
_moves: Final = context_moves.c

_ID: Final = sa.bindparam("of_super_stream", type_=sa.Integer)
_NAMES: Final = sa.any_(sa.bindparam("names", type_=sa.ARRAY(sa.Text)))
_LIMIT: Final = sa.bindparam("most", type_=sa.Integer)
_NOW: Final = sa.func.statement_timestamp()

_of_super_stream: Final = _placements.super_stream_id == _ID
# Written out: the planner has to see which of the partial indexes it may use.
_OPEN: Final[Any] = sa.literal_column("'open'")
_RELEASED: Final[Any] = sa.literal_column("'released'")
_is_open: Final = _placements.state == _OPEN


# The super stream and its partitions

find_super_stream: Final = sa.select(
    super_streams.c.super_stream_id, super_streams.c.header, super_streams.c.idle_s
).where(
    super_streams.c.vhost == sa.bindparam("of_vhost", type_=sa.Text),
    super_streams.c.name == sa.bindparam("of_name", type_=sa.Text),
)

super_stream_names: Final = (
    sa.select(super_streams.c.name)
    .where(super_streams.c.vhost == sa.bindparam("of_vhost", type_=sa.Text))
    .order_by(super_streams.c.name)
)

_IDLE_S: Final = sa.bindparam("new_idle_s", type_=sa.Float)
# Nobody else can have opened what this very transaction made.
_IDLE_FROM: Final = sa.case(
    (super_streams.c.created_at == sa.func.now(), sa.func.now()),
    else_=sa.func.now() + interval(sa.bindparam("known_in_s", type_=sa.Float)),
)

set_idle: Final = (
    sa.update(super_streams).where(super_streams.c.super_stream_id == _ID).values(idle_s=_IDLE_S, idle_from=_IDLE_FROM)
)

set_first_idle: Final = set_idle.where(super_streams.c.idle_s.is_(None))
"""Only where none was set yet."""

idle_rule: Final = sa.select(
    super_streams.c.idle_s, (super_streams.c.idle_from <= sa.func.now()).label("is_known")
).where(super_streams.c.super_stream_id == _ID)

add_super_stream: Final = insert(super_streams).on_conflict_do_nothing()

partitions: Final = (
    sa.select(*(_partitions[name] for name in PartitionRow.__dataclass_fields__))
    .where(_partitions.super_stream_id == _ID)
    .order_by(_partitions.place, _partitions.partition_id)
)
"""The columns of `PartitionRow`, in its order."""

add_partition: Final = insert(super_stream_partitions).on_conflict_do_nothing()

change_partition: Final = (
    sa.update(super_stream_partitions)
    .where(_partitions.super_stream_id == _ID, _partitions.stream == sa.bindparam("of_stream", type_=sa.Text))
    .values(
        binding_key=sa.bindparam("new_key", type_=sa.Text),
        place=sa.bindparam("new_place", type_=sa.Integer),
    )
)

set_weight: Final = (
    sa.update(super_stream_partitions)
    .where(_partitions.super_stream_id == _ID, _partitions.stream == sa.bindparam("of_stream", type_=sa.Text))
    .values(weight=sa.bindparam("new_weight", type_=sa.Float))
)

raise_generation: Final = (
    sa.update(super_streams)
    .where(super_streams.c.super_stream_id == _ID)
    .values(generation=super_streams.c.generation + 1)
    .returning(super_streams.c.generation)
)
"""Locks the super stream's row until the transaction ends; what changes takes the generation it gives."""

forget_changes: Final = (
    sa.update(super_streams)
    .where(super_streams.c.super_stream_id == _ID)
    .values(generation=super_streams.c.generation + 1, floor=super_streams.c.generation + 1)
)
"""Makes all that is cached count as wrong."""

generation: Final = sa.select(super_streams.c.generation).where(super_streams.c.super_stream_id == _ID)

# Reading placements

_PLACEMENT: Final = {
    "stream": _partitions.stream,
    "binding_key": _partitions.binding_key,
}
placement_columns: Final = [
    _PLACEMENT[name] if name in _PLACEMENT else _placements[name] for name in Placement.__dataclass_fields__
]
_with_partition: Final = sa.select(*placement_columns).join_from(
    placements, super_stream_partitions, _partitions.partition_id == _placements.partition_id
)

find: Final = _with_partition.where(_of_super_stream, _placements.name == _NAMES, _placements.state != _RELEASED)
"""The columns of `Placement`, in its order; so with all that give placements."""

_changed: Final = (
    _with_partition.where(_of_super_stream, _placements.generation > sa.bindparam("since", type_=sa.BigInteger))
    .order_by(_placements.generation)
    .limit(_LIMIT)
    .subquery("changed")
)
changes: Final = (
    sa.select(super_streams.c.generation.label("now"), super_streams.c.floor, *_changed.c)
    .outerjoin_from(super_streams, _changed, sa.true())
    .where(super_streams.c.super_stream_id == _ID)
)
"""The generation, the floor, and the columns of `Placement`, once for each change; once with NULLs where none is."""

idle: Final = (
    _with_partition.where(
        _of_super_stream,
        _is_open,
        _placements.used_at < _NOW - interval(sa.bindparam("idle_s", type_=sa.Float)),
    )
    .order_by(_placements.used_at)
    .limit(_LIMIT)
)


@cache
def listed(*, in_partition: bool, after: bool) -> sa.Select[Any]:
    """Placements by name, of one partition or all, after a name or from the first."""
    query = _with_partition.where(
        _of_super_stream, _placements.state == sa.any_(sa.bindparam("states", type_=sa.ARRAY(sa.Text)))
    )
    if in_partition:
        query = query.where(_partitions.stream == sa.bindparam("of_stream", type_=sa.Text))
    if after:
        query = query.where(_placements.name > sa.bindparam("after", type_=sa.Text))
    return query.order_by(_placements.name).limit(_LIMIT)


# Placing

_new: Final = arrays("given", name=sa.Text, partition_id=sa.Integer)
# By itself, so that the epoch is taken once for both columns.
_numbered: Final = (
    sa.select(_new.c.name, _new.c.partition_id, placement_epochs.next_value().label("epoch"))
    .order_by(_new.c.name.collate("C"))
    .subquery("numbered")
)
_inserted = insert(placements).from_select(
    ["super_stream_id", "name", "partition_id", "epoch", "first_epoch"],
    sa.select(_ID, _numbered.c.name, _numbered.c.partition_id, _numbered.c.epoch, _numbered.c.epoch),
)
_placed: Final = (
    _inserted.on_conflict_do_update(
        constraint="placements_name",
        set_={
            "state": "open",
            "released_at": sa.null(),
            "partition_id": _inserted.excluded.partition_id,
            # Taken now that the row is locked: the one that was taken above may be below that of a move since.
            "epoch": placement_epochs.next_value(),
            "first_epoch": _placements.epoch + 1,
            "opened_at": _NOW,
            "used_at": _NOW,
        },
        where=_placements.state == _RELEASED,
    )
    .returning(*(_placements[name] for name in Placement.__dataclass_fields__ if name not in _PLACEMENT))
    .cte("placed")
)


def _counted(locked: sa.CTE, added: Any, *, only_active: bool = False) -> sa.CTE:
    """Add to the counts of partitions that are locked already, in their order.

    Where only active ones may be counted, one that was retired ends the statement: its count would be null. So what it
    has written is undone without a transaction around it, which would be two journeys to the server more.
    """
    number = added.c.number
    if only_active:
        number = sa.case((_partitions.state == "active", number), else_=sa.null())
    return (
        sa.update(super_stream_partitions)
        .where(_partitions.partition_id == locked.c.partition_id, _partitions.partition_id == added.c.partition_id)
        .values(open_sets=_partitions.open_sets + number)
        .returning(_partitions.partition_id, _partitions.stream, _partitions.binding_key)
        .cte("counted")
    )


@cache
def place(*, bounded: bool) -> sa.Select[Any]:
    """Place names where they are not placed; gives those that were.

    Each row has the columns of `Placement`, and `open_sets`: how many are open in the partitions it
    locked. Where the number is bounded, that is all of them, so that nobody else opens one meanwhile.
    """
    added = (
        sa.select(_placed.c.partition_id, sa.func.count().label("number"))
        .group_by(_placed.c.partition_id)
        .subquery("added")
    )
    to_lock = sa.select(_partitions.partition_id, _partitions.open_sets).order_by(_partitions.partition_id)
    if bounded:
        # The names first: the count makes it wait for them.
        any_placed = sa.select(sa.func.count()).select_from(_placed).scalar_subquery() > 0
        to_lock = to_lock.where(_partitions.super_stream_id == _ID, any_placed)
    else:
        to_lock = to_lock.where(_partitions.partition_id.in_(sa.select(_placed.c.partition_id)))
    locked = to_lock.with_for_update(key_share=True).cte("locked")
    counted = _counted(locked, added, only_active=True)
    columns = [counted.c[name] if name in _PLACEMENT else _placed.c[name] for name in Placement.__dataclass_fields__]
    before = sa.select(sa.cast(sa.func.sum(locked.c.open_sets), sa.BigInteger)).scalar_subquery()
    number = sa.select(sa.func.count()).select_from(_placed).scalar_subquery()
    return sa.select(*columns, (before + number).label("open_sets"), KEEP_COMMITS).join_from(
        _placed, counted, counted.c.partition_id == _placed.c.partition_id
    )


# Releasing

_ended: Final = arrays("given", name=sa.Text, epoch=sa.BigInteger)
_to_release: Final = (
    sa.select(_placements.placement_id, _placements.name, _placements.state)
    .join_from(placements, _ended, _placements.name == _ended.c.name.collate("C"))
    .where(
        _of_super_stream,
        _placements.state != _RELEASED,
        _ended.c.epoch.between(_placements.first_epoch, _placements.epoch),
    )
    .order_by(_placements.name)
    .with_for_update(of=placements, key_share=True)
    .cte("to_release")
)
_raised: Final = (
    sa.update(super_streams)
    .where(
        super_streams.c.super_stream_id == _ID,
        sa.select(sa.func.count()).select_from(_to_release).where(_to_release.c.state == _OPEN).scalar_subquery() > 0,
    )
    .values(generation=super_streams.c.generation + 1)
    .returning(super_streams.c.generation)
    .cte("raised")
)
_released: Final = (
    sa.update(placements)
    # The state as it was when the row was locked: this statement's own view of the row may be older.
    .where(_placements.placement_id == _to_release.c.placement_id, _to_release.c.state == _OPEN)
    .values(
        state="released",
        # Of an older view too, in which the row still moves: PostgreSQL checks constraints on that before on this one.
        move_id=sa.null(),
        released_at=_NOW,
        generation=sa.select(_raised.c.generation).scalar_subquery(),
    )
    .returning(_placements.partition_id, _placements.name)
    .cte("released")
)
_fewer: Final = (
    sa.select(_released.c.partition_id, (-sa.func.count()).label("number"))
    .group_by(_released.c.partition_id)
    .subquery("fewer")
)
_left: Final = (
    sa.select(_partitions.partition_id)
    .where(_partitions.partition_id.in_(sa.select(_released.c.partition_id)))
    .order_by(_partitions.partition_id)
    .with_for_update(key_share=True)
    .cte("locked")
)

release: Final = (
    sa.select(_to_release.c.name)
    .where(_to_release.c.state == "moving")
    .add_cte(_to_release, _raised, _released, _left, _counted(_left, _fewer))
)
"""Releases placements that had one of the epochs given since they were opened; gives the names of those that move."""

_touched: Final = (
    sa.select(_placements.placement_id)
    .where(_of_super_stream, _placements.name == _NAMES, _is_open)
    # What somebody holds just now is in use by that one.
    .with_for_update(key_share=True, skip_locked=True)
    .cte("touched")
)

touch: Final = sa.update(placements).where(_placements.placement_id == _touched.c.placement_id).values(used_at=_NOW)

# Moves

_source: Final = super_stream_partitions.alias("source")
_target: Final = super_stream_partitions.alias("target")
_MOVE: Final = {
    "source": _source.c.stream,
    "target": _target.c.stream,
    "waits_for": waited_for,
}

moves: Final = (
    sa.select(*(_MOVE[name] if name in _MOVE else _moves[name] for name in MoveInfo.__dataclass_fields__))
    .join_from(context_moves, _source, _source.c.partition_id == _moves.source_id)
    .join(_target, _target.c.partition_id == _moves.target_id)
)
"""The columns of `MoveInfo`, in its order, of all moves: to be narrowed down."""

move: Final = moves.where(_moves.move_id == sa.bindparam("of_move", type_=sa.BigInteger))

_at: Final = sa.bindparam("of_stream", type_=sa.Text)
_above: Final = sa.bindparam("above", type_=sa.BigInteger)

fence_after: Final = (
    moves.join(moved_contexts, moved_contexts.c.move_id == _moves.move_id)
    .where(
        moved_contexts.c.name == sa.bindparam("of_name", type_=sa.Text),
        _moves.super_stream_id == _ID,
        sa.or_(
            sa.and_(_source.c.stream == _at, _moves.fence_epoch > _above),
            sa.and_(_target.c.stream == _at, _moves.epoch > _above),
        ),
    )
    .order_by(_moves.fence_epoch)
    .limit(1)
)
