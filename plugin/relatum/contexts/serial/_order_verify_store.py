"""What the database knows of a super stream that its streams do not say any more."""

from dataclasses import dataclass

import sqlalchemy as sa

from relatum.store import context_moves, moved_contexts, super_stream_partitions, super_streams


@dataclass(frozen=True, slots=True)
class KnownSuperStream:
    """A super stream as the database has it.

    Attributes:
        header: The header that names its contexts.
        partitions: The ids of its partitions by the streams' names, retired ones included, in their order.
    """

    header: str
    partitions: dict[str, int]


def known_super_stream(connection: sa.Connection, vhost: str, name: str) -> KnownSuperStream | None:
    """A super stream by its name; None where nothing was ever placed in it."""
    header = connection.execute(
        sa.select(super_streams.c.header).where(super_streams.c.vhost == vhost, super_streams.c.name == name)
    ).scalar_one_or_none()
    if header is None:
        return None
    partitions = connection.execute(
        sa.select(super_stream_partitions.c.stream, super_stream_partitions.c.partition_id)
        .join(super_streams)
        .where(super_streams.c.vhost == vhost, super_streams.c.name == name)
        .order_by(super_stream_partitions.c.place, super_stream_partitions.c.partition_id)
    )
    return KnownSuperStream(header, dict(partitions.all()))


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
        .join(context_moves)
        .where(partition == sa.bindparam("partition"), offset < sa.bindparam("before"))
    )
