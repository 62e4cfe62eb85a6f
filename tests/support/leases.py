"""Leases in tests: made, and made to run out, without waiting for them."""

from typing import Final

import sqlalchemy as sa

_LEASED: Final = ("recorder_members", "serial_members", "collector_members", "context_moves", "group_states")

LEASE_S: Final = 30.0
"""Seconds no test's machine is suspended for: a lease of a test ends by `let_lapse` alone."""


def let_lapse(engine: sa.Engine, holder: str | None = None) -> None:
    """Have the leases run out of one holder, or of all: as if it had been silent for that long."""
    _end_in(engine, "-1 second", holder)


def let_last(engine: sa.Engine) -> None:
    """Have the leases that there are continue for an hour: as if their holders renewed them again and again."""
    _end_in(engine, "1 hour")


def _end_in(engine: sa.Engine, time: str, holder: str | None = None) -> None:
    its = "lease_expires_at IS NOT NULL AND (CAST(:holder AS text) IS NULL OR holder = :holder)"
    with engine.begin() as connection:
        for table in _LEASED:
            update = f"UPDATE relatum.{table} SET lease_expires_at = clock_timestamp() + interval '{time}' WHERE {its}"
            connection.execute(sa.text(update), {"holder": holder})


def record_as(engine: sa.Engine, holder: str, *names: str) -> None:
    """Have some recorder hold these streams, or all, for an hour; `let_lapse` ends it."""
    member = "INSERT INTO relatum.recorder_members (holder, name, lease_expires_at) "
    member += "VALUES (:holder, :holder, now() + interval '1 hour')"
    held = "UPDATE relatum.streams SET lease_holder = :holder" + " WHERE name = ANY (:names)" * bool(names)
    with engine.begin() as connection:
        connection.execute(sa.text(member), {"holder": holder})
        connection.execute(sa.text(held), {"holder": holder, "names": list(names)})
