"""The SQL of moves: each statement once, its parameters bound.

Rows are locked in the order that `relatum.store._tables` says: placements by name, then the row of the super
stream, then partitions by their id. The row of a move is locked after its placements.
"""

from typing import Final

import sqlalchemy as sa

from relatum.contexts.placement import _placement_statements as placement_statements
from relatum.contexts.placement._session_statements import is_waited_for
from relatum.store import (
    NOW,
    arrays,
    context_moves,
    from_now,
    lapsed,
    leased,
    moved_contexts,
    placement_epochs,
    placements,
    publisher_sessions,
    serial_consumers,
    serial_holds,
    serial_positions,
    super_stream_partitions,
    super_streams,
    unleased,
)

_moves: Final = context_moves.c
_places: Final = placements.c
_partitions: Final = super_stream_partitions.c

_of_super_stream: Final = sa.bindparam("of_super_stream", type_=sa.Integer)
_move: Final = sa.bindparam("of_move", type_=sa.BigInteger)
_attempt: Final = sa.bindparam("of_attempt", type_=sa.Integer)
_names: Final = sa.any_(sa.bindparam("named", type_=sa.ARRAY(sa.Text)))
_for: Final = sa.bindparam("holds_s", type_=sa.Float)
_lease: Final = from_now(_for)
_taken: Final = leased(_for, sa.bindparam("held_by", type_=sa.Text))
# Who went on with it last is still shown.
_unattended: Final = {name: value for name, value in unleased().items() if name != "holder"}
_open: Final = _moves.ended_at.is_(None)

# What a crash of PostgreSQL takes back must not be in a stream already: a fence behind which a context goes on as if
# there was none would make strays of all its messages.
keep_commits: Final = sa.select(sa.func.set_config("synchronous_commit", "on", True)).where(
    sa.func.current_setting("synchronous_commit") == "off"
)

# What a move is

_infos: Final = placement_statements.moves.where(_moves.super_stream_id == _of_super_stream)

one: Final = _infos.add_columns(
    sa.func.array(
        sa.select(moved_contexts.c.name).where(moved_contexts.c.move_id == _moves.move_id).scalar_subquery()
    ).label("names")
).where(_moves.move_id == _move)
"""The columns of `MoveInfo`, and behind them the names of the contexts."""

under_way: Final = _infos.where(_open).order_by(_moves.move_id)

latest: Final = _infos.order_by(_moves.move_id.desc()).limit(sa.bindparam("at_most", type_=sa.Integer))

# Beginning

lock_named: Final = (
    sa.select(_places.placement_id, _places.name, _places.epoch, _places.partition_id, _places.state, _places.move_id)
    .where(_places.super_stream_id == _of_super_stream, _places.name == _names)
    .order_by(_places.name)
    .with_for_update()
)

partition_named: Final = sa.select(_partitions.partition_id, _partitions.state).where(
    _partitions.super_stream_id == _of_super_stream, _partitions.stream == sa.bindparam("of_stream")
)

add_move: Final = (
    sa.insert(context_moves)
    .from_select(
        [
            "super_stream_id",
            "source_id",
            "target_id",
            "contexts",
            "fence_epoch",
            "epoch",
            "scan_from",
            "target_scan_from",
            "holder",
            "lease_expires_at",
            "started_at",
            "generation",
        ],
        sa.select(
            _of_super_stream,
            sa.bindparam("from_partition", type_=sa.Integer),
            sa.bindparam("to_partition", type_=sa.Integer),
            sa.bindparam("count", type_=sa.Integer),
            sa.literal_column("0"),
            sa.literal_column("0"),
            sa.bindparam("at_or_behind", type_=sa.BigInteger),
            sa.bindparam("target_at_or_behind", type_=sa.BigInteger),
            sa.bindparam("held_by", type_=sa.Text),
            _lease,
            NOW,
            sa.bindparam("at_generation", type_=sa.BigInteger),
        ),
    )
    .returning(_moves.move_id)
)

add_contexts: Final = sa.insert(moved_contexts).from_select(
    ["move_id", "name", "from_epoch"],
    sa.select(_move, _places.name, _places.epoch).where(
        _places.super_stream_id == _of_super_stream, _places.name == _names
    ),
)

stop: Final = (
    sa.update(placements)
    .where(_places.super_stream_id == _of_super_stream, _places.name == _names)
    .values(state="moving", move_id=_move, generation=sa.bindparam("at_generation", type_=sa.BigInteger))
)

# Waiting for publishers

_sessions: Final = publisher_sessions.c

sessions: Final = (
    sa.select(_sessions.holder, _sessions.beat, _sessions.session_s)
    .join_from(context_moves, publisher_sessions, is_waited_for)
    .where(_moves.move_id == _move)
)

forget_session: Final = sa.delete(publisher_sessions).where(
    _sessions.super_stream_id == _of_super_stream,
    _sessions.holder == sa.bindparam("held_by", type_=sa.Text),
    _sessions.beat == sa.bindparam("of_beat", type_=sa.BigInteger),
)

# One behind the other: of an aborted move the marker is behind the fence in the same partition, and above it.
_fence: Final = sa.select(placement_epochs.next_value().label("epoch")).cte("fence")
_after: Final = sa.select(placement_epochs.next_value().label("epoch"), _fence.c.epoch.label("fence")).cte("after")

let_fence: Final = (
    sa.update(context_moves)
    .where(
        _moves.move_id == _move,
        _moves.super_stream_id == _of_super_stream,
        _moves.fence_epoch == 0,
        _after.c.fence > _moves.fence_epoch,
    )
    .values(
        fence_epoch=_after.c.fence,
        epoch=sa.case((_moves.aborting, _after.c.epoch), else_=_after.c.fence),
    )
)

# Steps: each a compare-and-set

set_fenced: Final = (
    sa.update(context_moves)
    .where(_moves.move_id == _move, _moves.state == "fencing", _moves.attempt == _attempt)
    .values(state="fenced", fence_offset=sa.bindparam("at_offset", type_=sa.BigInteger), fenced_at=NOW)
)

# The marker of an aborted move is behind its fence, which is at or behind where that can be.
set_aborting: Final = (
    sa.update(context_moves)
    .where(_moves.move_id == _move, _open, ~_moves.aborting, _moves.super_stream_id == _of_super_stream)
    .values(
        aborting=True,
        target_id=_moves.source_id,
        target_scan_from=_moves.scan_from,
        attempt=_moves.attempt + 1,
        epoch=placement_epochs.next_value(),
        reason=sa.bindparam("because", type_=sa.Text),
    )
)

lock_moving: Final = (
    sa.select(_places.name)
    .join(moved_contexts, (moved_contexts.c.name == _places.name) & (moved_contexts.c.move_id == _move))
    .where(_places.super_stream_id == _of_super_stream, _places.move_id == _move)
    .order_by(_places.name)
    .with_for_update(of=placements)
)

set_ended: Final = (
    sa.update(context_moves)
    .where(_moves.move_id == _move, _moves.state == "fenced", _moves.attempt == _attempt)
    .values(
        state=sa.case((_moves.aborting, "aborted"), else_="switched"),
        marker_offset=sa.bindparam("at_offset", type_=sa.BigInteger),
        **_unattended,
        ended_at=NOW,
    )
    .returning(_moves.source_id, _moves.target_id, _moves.epoch)
)

go_on: Final = (
    sa.update(placements)
    .where(_places.super_stream_id == _of_super_stream, _places.name == _names, _places.move_id == _move)
    .values(
        state="open",
        move_id=sa.null(),
        partition_id=sa.bindparam("to_partition", type_=sa.Integer),
        epoch=sa.bindparam("to_epoch", type_=sa.BigInteger),
        generation=sa.bindparam("at_generation", type_=sa.BigInteger),
    )
)

count_sets: Final = (
    sa.update(super_stream_partitions)
    .where(_partitions.partition_id == sa.bindparam("of_partition", type_=sa.Integer))
    .values(open_sets=_partitions.open_sets + sa.bindparam("more", type_=sa.BigInteger))
)

attend: Final = sa.update(context_moves).where(_moves.move_id == _move, _open).values(**_taken)

# Only of one who has it still: another goes on with a move whose holder was not heard of.
keep_attending: Final = (
    sa.update(context_moves)
    .where(_moves.move_id == _move, _open, _moves.holder == sa.bindparam("held_by", type_=sa.Text))
    .values(**leased(_for))
)

_is_abandoned: Final = (_moves.super_stream_id == _of_super_stream, _open, lapsed(_moves.lease_expires_at))

take_abandoned: Final = (
    sa.update(context_moves)
    .where(
        _moves.move_id
        == sa.select(_moves.move_id)
        .where(*_is_abandoned)
        .order_by(_moves.move_id)
        .limit(1)
        .with_for_update(skip_locked=True)
        .scalar_subquery()
    )
    .values(**_taken)
    .returning(_moves.move_id)
)

# Retiring

lock_super_stream: Final = (
    sa.select(super_streams.c.super_stream_id)
    .where(super_streams.c.super_stream_id == _of_super_stream)
    .with_for_update()
)

lock_partitions: Final = (
    sa.select(_partitions.partition_id, _partitions.stream, _partitions.state)
    .where(_partitions.super_stream_id == _of_super_stream)
    .order_by(_partitions.partition_id)
    .with_for_update()
)

_of_partition: Final = sa.bindparam("of_partition", type_=sa.Integer)

# Not a parameter: a plan for any state could not use the index of those that are not released.
_is_placed: Final = _places.state != sa.literal_column("'released'")

placed_in: Final = sa.select(_places.name).where(_places.partition_id == _of_partition, _is_placed).limit(1)

moves_of: Final = (
    sa.select(_moves.move_id)
    .where(
        _moves.super_stream_id == _of_super_stream,
        _open,
        (_moves.source_id == _of_partition) | (_moves.target_id == _of_partition),
    )
    .limit(1)
)

set_retired: Final = (
    sa.update(super_stream_partitions).where(_partitions.partition_id == _of_partition).values(state="retired")
)

# Deleting a partition: who still has something to read

_needed: Final = arrays("needed", partition_id=sa.Integer, end=sa.BigInteger)

behind: Final = (
    sa.select(serial_consumers.c.name, _partitions.stream)
    .join_from(serial_consumers, serial_positions, serial_positions.c.consumer_id == serial_consumers.c.consumer_id)
    .join(_needed, _needed.c.partition_id == serial_positions.c.partition_id)
    .join(super_stream_partitions, _partitions.partition_id == _needed.c.partition_id)
    .where(serial_consumers.c.super_stream_id == _of_super_stream, serial_positions.c.position < _needed.c.end)
    .limit(1)
)

holding: Final = (
    sa.select(serial_consumers.c.name)
    .join_from(serial_consumers, serial_holds, serial_holds.c.consumer_id == serial_consumers.c.consumer_id)
    .where(
        serial_consumers.c.super_stream_id == _of_super_stream,
        (serial_holds.c.partition_id == _of_partition) | (serial_holds.c.source_id == _of_partition),
    )
    .limit(1)
)
