"""Forgetting a serial consumer's name, which nobody consumes by any more."""

from typing import Final

import sqlalchemy as sa

from relatum.checks import checked_name
from relatum.errors import Conflict
from relatum.store import as_engine, holds, serial_consumers, serial_members, super_streams, translated_errors

_named: Final = (
    sa.select(serial_consumers.c.consumer_id)
    .join(super_streams, super_streams.c.super_stream_id == serial_consumers.c.super_stream_id)
    .where(
        super_streams.c.vhost == sa.bindparam("of_vhost"),
        super_streams.c.name == sa.bindparam("of_super_stream"),
        serial_consumers.c.name == sa.bindparam("named"),
    )
    .with_for_update(of=serial_consumers)
)


def forget_consumer(super_stream: str, name: str, *, database: str | sa.Engine, vhost: str = "/") -> bool:
    """Forget how far a serial consumer's name is. A partition can be retired once all names have consumed it.

    A consumer of that name that starts later begins anew.

    Args:
        super_stream: The super stream's name.
        name: The consumer's name.
        database: PostgreSQL's URL, or an engine.
        vhost: The super stream's virtual host.

    Returns:
        False where there was none of that name.

    Raises:
        Conflict: members of that name are up; close them first, or wait until their leases have run out.
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    checked_name("super_stream", super_stream)
    checked_name("name", name)
    checked_name("vhost", vhost)
    wanted = {"of_vhost": vhost, "of_super_stream": super_stream, "named": name}
    with translated_errors(), as_engine(database) as engine, engine.begin() as connection:
        consumer = connection.execute(_named, wanted).scalar_one_or_none()
        if consumer is None:
            return False
        is_up = sa.select(serial_members.c.holder).where(
            serial_members.c.consumer_id == consumer,
            holds(serial_members.c.lease_expires_at),
        )
        holder = connection.scalar(is_up.limit(1))
        if holder is not None:
            raise Conflict(f"{name!r} is not forgotten: its member {holder} is up")
        connection.execute(sa.delete(serial_consumers).where(serial_consumers.c.consumer_id == consumer))
    return True
