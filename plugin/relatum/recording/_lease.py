"""Which of many processes records a stream.

A lease only saves work: two that both believe to hold it cannot both write, since the coverage moves by
compare-and-set.
"""

from typing import Final

import sqlalchemy as sa

from relatum.store import streams, translated_errors

LEASE_S: Final = 4.0
"""How long a lease holds without renewal: after that long another process takes over from one that died."""

RENEW_S: Final = 1.0
"""How often a holder renews, and how often the others look."""

_EXPIRES: Final = sa.func.clock_timestamp() + sa.func.make_interval(0, 0, 0, 0, 0, 0, LEASE_S)


def take(engine: sa.Engine, stream_id: int, holder: str) -> bool:
    """Take or renew the lease of a stream; False where another holds it."""
    free = (
        streams.c.lease_holder.is_(None)
        | (streams.c.lease_holder == holder)
        | (streams.c.lease_expires_at < sa.func.clock_timestamp())
    )
    statement = (
        sa.update(streams)
        .where(streams.c.stream_id == stream_id, streams.c.replaced_at.is_(None), free)
        .values(lease_holder=holder, lease_expires_at=_EXPIRES)
    )
    with translated_errors(), engine.begin() as connection:
        return connection.execute(statement).rowcount == 1


def is_held(connection: sa.Connection, stream_id: int) -> bool:
    """Whether some process records the stream now."""
    held = sa.select(streams.c.stream_id).where(
        streams.c.stream_id == stream_id, streams.c.lease_expires_at >= sa.func.clock_timestamp()
    )
    return connection.execute(held).first() is not None


def give_back(engine: sa.Engine, stream_id: int, holder: str) -> None:
    """Let another process take over at once."""
    statement = (
        sa.update(streams)
        .where(streams.c.stream_id == stream_id, streams.c.lease_holder == holder)
        .values(lease_holder=None, lease_expires_at=None)
    )
    with translated_errors(), engine.begin() as connection:
        connection.execute(statement)
