"""Forgetting a serial consumer's name, which nobody consumes by any more."""

import sqlalchemy as sa

from relatum.checks import checked_name
from relatum.contexts.serial.consuming._serial_store import ConsumerStore


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
    store = ConsumerStore(super_stream, name, database, vhost=vhost)
    try:
        return store.forget()
    finally:
        store.dispose()
