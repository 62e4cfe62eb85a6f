"""What the database knows of fences and markers that retention has dropped."""

import sqlalchemy as sa

from relatum.store import context_moves, moved_contexts


def floors_before(connection: sa.Connection, partition_id: int, offset: int) -> dict[str, int]:
    """The floor of each context in a partition as of an offset: of what fences and markers before it say."""
    of_fences = _floors(context_moves.c.fence_epoch, context_moves.c.source_id, context_moves.c.fence_offset)
    of_markers = _floors(context_moves.c.epoch, context_moves.c.target_id, context_moves.c.marker_offset)
    both = sa.union_all(of_fences, of_markers).subquery()
    query = sa.select(both.c.name, sa.func.max(both.c.epoch)).group_by(both.c.name)
    rows = connection.execute(query, {"partition": partition_id, "before": offset})
    return dict(rows.all())


def _floors(epoch: sa.Column[int], partition: sa.Column[int], offset: sa.Column[int]) -> sa.Select[tuple[str, int]]:
    return (
        sa.select(moved_contexts.c.name, epoch.label("epoch"))
        .join(context_moves, context_moves.c.move_id == moved_contexts.c.move_id)
        .where(partition == sa.bindparam("partition"), offset < sa.bindparam("before"))
    )
