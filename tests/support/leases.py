"""Leases in tests: made, and made to run out, without waiting for them."""

from datetime import timedelta
from typing import Final

import sqlalchemy as sa

from tests.support import tables

_LEASED: Final = (
    tables.recorder_members,
    tables.serial_members,
    tables.collector_members,
    tables.context_moves,
    tables.group_states,
)

NOW: Final = sa.func.clock_timestamp()

AGO: Final = NOW - timedelta(seconds=1)

LEASE_S: Final = 30.0
"""Seconds no test's machine is suspended for: a lease of a test ends by `let_lapse` alone."""


def let_lapse(engine: sa.Engine, holder: str | None = None) -> None:
    """Have the leases run out of one holder, or of all: as if it had been silent for that long."""
    with engine.begin() as connection:
        for table in _LEASED:
            has_one = table.c.lease_expires_at.is_not(None)
            its = has_one if holder is None else has_one & (table.c.holder == holder)
            connection.execute(sa.update(table).where(its).values(lease_expires_at=AGO))


def let_last(engine: sa.Engine) -> None:
    """Have the leases that there are continue for an hour: as if their holders renewed them again and again."""
    with engine.begin() as connection:
        for table in _LEASED:
            has_one = table.c.lease_expires_at.is_not(None)
            connection.execute(sa.update(table).where(has_one).values(lease_expires_at=NOW + timedelta(hours=1)))


def record_as(engine: sa.Engine, holder: str, *names: str) -> None:
    """Have some recorder hold these streams, or all, for an hour; `let_lapse` ends it."""
    with engine.begin() as connection:
        lease = {"holder": holder, "name": holder, "lease_expires_at": NOW + timedelta(hours=1)}
        connection.execute(sa.insert(tables.recorder_members).values(lease))
        held = sa.update(tables.streams).values(lease_holder=holder)
        connection.execute(held.where(tables.streams.c.name.in_(names)) if names else held)
