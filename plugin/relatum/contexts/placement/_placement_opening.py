"""The rows of a super stream with placements: made where they are not there, and agreed on where they are."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from relatum.checks import checked_name, seconds_text
from relatum.contexts.placement import _placement_statements as statements
from relatum.contexts.placement._model import PartitionLike, PartitionRow, PartitionState
from relatum.errors import StreamNotFound, SuperStreamConflict, SuperStreamNotFound
from relatum.store import AnyDatabase, as_engine, super_streams, translated_errors

USED_EVERY_S: Final = 15.0
"""Seconds between two times at which a router writes down which sets it used."""

IDLE_S_MIN: Final = 4 * USED_EVERY_S
"""The shortest time without use after which sets are closed: a router that is late by some rounds loses none."""


class Opened(NamedTuple):
    """A super stream's row, and its partitions, retired ones included."""

    super_stream_id: int
    header: str
    partitions: list[PartitionRow]


def placed_super_streams(database: AnyDatabase, *, vhost: str = "/") -> list[str]:
    """The super streams over which something is placed, serialization contexts or affinity sets, by name.

    Args:
        database: PostgreSQL's URL, or a `Database`.
        vhost: Their virtual host.

    Raises:
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    checked_name("vhost", vhost)
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        of_vhost = sa.select(super_streams.c.name).where(super_streams.c.vhost == vhost)
        return list(connection.scalars(of_vhost.order_by(super_streams.c.name)))


def open_super_stream(
    connection: sa.Connection,
    whose: tuple[str, str],
    header: str | None,
    wanted: list[PartitionLike] | None,
    idle_s: float | None = None,
) -> Opened:
    """Make the rows of a super stream, named by virtual host and name; see `PlacementStore.open`."""
    vhost, name = whose
    named = {"of_vhost": vhost, "of_name": name}
    found = connection.execute(statements.find_super_stream, named).one_or_none()
    if found is None:
        if header is None or wanted is None:
            raise not_found(name)
        new = {"vhost": vhost, "name": name, "header": header}
        connection.execute(statements.add_super_stream, new)
        found = connection.execute(statements.find_super_stream, named).one()
    if header not in (None, found.header):
        raise SuperStreamConflict(
            f"the sets of super stream {name!r} are named by the header {found.header!r}, not by {header!r}",
            super_stream=name,
            reason=f"its header is {found.header!r}",
        )
    if idle_s is not None:
        _agree_on_idle(connection, (found.super_stream_id, name), idle_s, stored=found.idle_s)
    known = partitions_in(connection, found.super_stream_id)
    if wanted is not None and _synced(connection, found.super_stream_id, known, wanted):
        known = partitions_in(connection, found.super_stream_id)
    return Opened(found.super_stream_id, found.header, known)


def _agree_on_idle(connection: sa.Connection, whose: tuple[int, str], idle_s: float, *, stored: float | None) -> None:
    """See that sets are closed after this time, for all; who says so first sets it."""
    super_stream_id, name = whose
    if stored is None:
        new = {"of_super_stream": super_stream_id, "new_idle_s": float(idle_s)}
        connection.execute(statements.set_first_idle, new)
        # Another may have been first, and this one has waited for it.
        stored = connection.execute(statements.idle_s, {"of_super_stream": super_stream_id}).scalar_one()
    if stored != float(idle_s):
        raise SuperStreamConflict(
            f"the sets of super stream {name!r} are closed after {seconds_text(stored)} without use, not after "
            f"{seconds_text(idle_s)}: it is the same for all routers, and changed by `AffinitySets.set_idle`",
            super_stream=name,
            reason=f"its idle_s is {stored:g}",
        )


def set_weights(connection: sa.Connection, super_stream_id: int, name: str, weights: Mapping[str, float]) -> None:
    """Set the weights of partitions, by stream; locks them in the order of their ids, as everybody does."""
    ids = {row.stream: row.partition_id for row in partitions_in(connection, super_stream_id)}
    for stream in sorted(weights, key=lambda stream: ids.get(stream, 0)):
        if stream not in ids:
            raise StreamNotFound(f"{stream!r} is no partition of {name!r}", stream=stream)
        connection.execute(
            statements.set_weight,
            {"of_super_stream": super_stream_id, "of_stream": stream, "new_weight": weights[stream]},
        )


def not_found(name: str) -> SuperStreamNotFound:
    """The error of a super stream of which nothing is stored."""
    return SuperStreamNotFound(
        f"nothing is placed in super stream {name!r} yet: a router that opens it makes it known",
        super_stream=name,
    )


def partitions_in(connection: sa.Connection, super_stream_id: int) -> list[PartitionRow]:
    """The partitions in the order of their places."""
    rows = connection.execute(statements.partitions, {"of_super_stream": super_stream_id}).all()
    return [partition_of(row) for row in rows]


def partition_of(row: Any) -> PartitionRow:
    """A partition from its row."""
    return replace(PartitionRow(*row), state=PartitionState(row.state))


def _synced(
    connection: sa.Connection, super_stream_id: int, known: Sequence[PartitionRow], wanted: Sequence[PartitionLike]
) -> bool:
    """Add what is new and change what is bound in another way; gives whether anything was."""
    by_stream = {row.stream: row for row in known}
    has_changed = False
    for partition in wanted:
        row = by_stream.get(partition.stream)
        if row is None:
            new = {"stream": partition.stream, "binding_key": partition.binding_key, "place": partition.place}
            connection.execute(statements.add_partition, {"super_stream_id": super_stream_id, **new})
        elif (row.binding_key, row.place) != (partition.binding_key, partition.place):
            changed = {"new_key": partition.binding_key, "new_place": partition.place, "of_stream": partition.stream}
            connection.execute(statements.forget_changes, {"of_super_stream": super_stream_id})
            connection.execute(statements.change_partition, {"of_super_stream": super_stream_id, **changed})
        else:
            continue
        has_changed = True
    return has_changed
