"""The SQL that forgets placements and moves that are over, a bounded number at a time."""

from typing import Any, Final

import sqlalchemy as sa

from relatum.limits import INTEGER_MAX
from relatum.store import arrays, context_moves, interval, moved_contexts, placements, serial_holds, super_streams

_placements: Final = placements.c
_ID: Final = sa.bindparam("of_super_stream", type_=sa.Integer)
_LIMIT: Final = sa.bindparam("most", type_=sa.Integer)
_MOVES: Final = sa.any_(sa.bindparam("moves", type_=sa.ARRAY(sa.BigInteger)))

_is_forgotten: Final = (
    (_placements.super_stream_id == _ID)
    # Written out: the planner has to see that the partial index may be used.
    & (_placements.state == sa.literal_column("'released'"))
    & (_placements.released_at < sa.func.now() - interval(sa.bindparam("older_s", type_=sa.Float)))
)
_oldest: Final = (
    sa.select(_placements.placement_id).where(_is_forgotten).order_by(_placements.released_at).limit(_LIMIT)
)
_deleted: Final = (
    sa.delete(placements)
    # Asked again of the row itself: it may have been placed anew since.
    .where(_placements.placement_id == sa.any_(sa.func.array(_oldest.scalar_subquery())), _is_forgotten)
    .returning(_placements.generation)
    .cte("deleted")
)
_floor: Final = sa.select(sa.func.max(_deleted.c.generation)).scalar_subquery()
_number: Final = sa.select(sa.func.count()).select_from(_deleted).scalar_subquery()

forget_released: Final = (
    sa.update(super_streams)
    .where(super_streams.c.super_stream_id == _ID, _number > 0)
    .values(floor=sa.func.greatest(super_streams.c.floor, _floor))
    .returning(_number)
)
"""Deletes the longest released ones, and says that changes up to theirs are not remembered; gives how many."""

_move: Final = context_moves.alias("move")
_later: Final = context_moves.alias("later")
_also: Final = moved_contexts.alias("also")


def _firsts(name: str) -> Any:
    """The first retained offset of each partition, as a table."""
    return arrays(name, partition_id=sa.Integer, first=sa.BigInteger)


def _superseded(end: Any, name: str) -> "sa.ColumnElement[bool]":
    """Whether a later move wrote of the context in a partition, and retention has dropped that, too.

    Or the whole partition is gone.
    """
    first, gone = _firsts(name), _firsts(f"gone_{name}")
    is_gone = sa.exists(
        sa.select(sa.literal(1)).select_from(gone).where(gone.c.partition_id == end, gone.c.first == INTEGER_MAX)
    )
    return is_gone | sa.exists(
        sa.select(sa.literal(1))
        .select_from(_also)
        .join(_later, _later.c.move_id == _also.c.move_id)
        .join(first, first.c.partition_id == end)
        .where(
            _also.c.name == moved_contexts.c.name,
            _later.c.super_stream_id == _move.c.super_stream_id,
            _later.c.fence_epoch > _move.c.epoch,
            _later.c.ended_at.is_not(None),
            sa.or_(
                sa.and_(_later.c.source_id == end, _later.c.fence_offset < first.c.first),
                sa.and_(_later.c.target_id == end, _later.c.marker_offset < first.c.first),
            ),
        )
    )


ended_moves: Final = (
    sa.select(context_moves.c.move_id)
    .where(
        context_moves.c.super_stream_id == _ID,
        context_moves.c.move_id > sa.bindparam("after", type_=sa.BigInteger),
        context_moves.c.ended_at.is_not(None),
        # What begins to wait now reads a marker that is retained, and so needs no move that is deleted.
        ~sa.exists().where(serial_holds.c.move_id == context_moves.c.move_id),
    )
    .order_by(context_moves.c.move_id)
    .limit(_LIMIT)
)
"""Ended moves that nobody waits for, in their order, page by page."""

forget_contexts: Final = (
    sa.delete(moved_contexts)
    .where(
        moved_contexts.c.move_id == _move.c.move_id,
        # Said of both, or all moves would be read to join them.
        moved_contexts.c.move_id == _MOVES,
        _move.c.move_id == _MOVES,
        _superseded(_move.c.source_id, "at_source"),
        _superseded(_move.c.target_id, "at_target"),
    )
    .returning(moved_contexts.c.move_id)
)
"""Deletes contexts of ended moves where a later move of theirs says all that is still needed."""

forget_moves: Final = sa.delete(context_moves).where(
    context_moves.c.move_id == _MOVES,
    ~sa.exists().where(moved_contexts.c.move_id == context_moves.c.move_id),
)
"""Deletes ended moves that have no context left."""
