"""Which of many processes records a stream.

A lease only saves work: two that both believe to hold it cannot both write, since the coverage moves by
compare-and-set. One statement takes and renews all leases of a process.
"""

from collections.abc import Iterable
from typing import Any, Final

import sqlalchemy as sa

from relatum.store import streams

LEASE_S: Final = 5.0
"""How long a lease holds without renewal."""

RENEWALS: Final = 3
"""How often a lease is renewed while it holds: every 1.7 s where it holds for 5."""


def take(connection: sa.Connection, stream_ids: Iterable[int], holder: str, lease_s: float) -> set[int]:
    """Take or renew the leases of streams; gives those that are ours now.

    Not among them are those that another holds, and, for this time, those whose row somebody has locked: see `holders`.
    """
    free = (
        streams.c.lease_holder.is_(None)
        | (streams.c.lease_holder == holder)
        | (streams.c.lease_expires_at < sa.func.clock_timestamp())
    )
    # In one order, and waiting for nobody: neither two that take the same streams nor a back-fill stand in the way.
    chosen = (
        sa.select(streams.c.stream_id)
        .where(_among(stream_ids), streams.c.replaced_at.is_(None), free)
        .order_by(streams.c.stream_id)
        .with_for_update(skip_locked=True)
    )
    statement = (
        sa.update(streams)
        .where(streams.c.stream_id.in_(chosen))
        .values(
            lease_holder=holder,
            lease_expires_at=sa.func.clock_timestamp() + sa.func.make_interval(0, 0, 0, 0, 0, 0, lease_s),
        )
        .returning(streams.c.stream_id)
    )
    return set(connection.execute(statement).scalars())


def holders(connection: sa.Connection, stream_ids: Iterable[int]) -> dict[int, str | None]:
    """Who held the leases of streams last, whether they have run out or not; replaced streams are left out."""
    query = sa.select(streams.c.stream_id, streams.c.lease_holder).where(
        _among(stream_ids), streams.c.replaced_at.is_(None)
    )
    return {row.stream_id: row.lease_holder for row in connection.execute(query)}


def is_held(connection: sa.Connection, stream_id: int) -> bool:
    """Whether some process records the stream now."""
    held = sa.select(streams.c.stream_id).where(
        streams.c.stream_id == stream_id, streams.c.lease_expires_at >= sa.func.clock_timestamp()
    )
    return connection.execute(held).first() is not None


def give_back(connection: sa.Connection, stream_ids: Iterable[int], holder: str) -> None:
    """Let another process take over at once."""
    connection.execute(
        sa.update(streams)
        .where(_among(stream_ids), streams.c.lease_holder == holder)
        .values(lease_holder=None, lease_expires_at=None)
    )


def _among(stream_ids: Iterable[int]) -> sa.ColumnElement[Any]:
    return streams.c.stream_id == sa.any_(sa.literal(sorted(stream_ids), sa.ARRAY(sa.Integer)))
