"""Commits that can be caught in the middle: what an application writes waits, as it is committed, for a test's lock."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import sqlalchemy as sa

from tests.support._waiting import wait_until

written: Final = sa.Table(
    "consumed",
    sa.MetaData(),
    sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
    sa.Column("body", sa.Text),
)
"""A table of an application."""

_AT_COMMIT: Final = """
CREATE OR REPLACE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER at_commit AFTER {} DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION at_commit()
"""

_committing: Final = sa.text(
    "SELECT pid FROM pg_stat_activity"
    " WHERE datname = current_database() AND query = 'COMMIT' AND state = 'active' AND wait_event = 'advisory'"
)


def bodies_written(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(sa.select(written.c.body).order_by(written.c.id)))


def make_commits_wait(engine: sa.Engine, change: str = "INSERT ON consumed") -> None:
    """Have commits of such a change wait while `commits_held`: by default, of rows that an application writes."""
    if change.endswith("consumed"):
        written.create(engine)
    with engine.begin() as connection:
        connection.execute(sa.text(_AT_COMMIT.format(change)))


@contextmanager
def commits_held(engine: sa.Engine) -> Iterator[Callable[[], object]]:
    """Hold up commits until the function that this yields is called, or the block ends."""
    with engine.connect() as gate:
        release = partial(gate.execute, sa.text("SELECT pg_advisory_unlock_all()"))
        gate.execute(sa.text("SELECT pg_advisory_lock(1)"))
        try:
            yield release
        finally:
            release()


def committing(engine: sa.Engine) -> int | None:
    """The process of a commit that is held up; None for none. Others come by all the time, as leases are renewed."""
    with engine.connect() as connection:
        return connection.execute(_committing).scalar()


def end_committing(engine: sa.Engine) -> None:
    """Wait for a commit that is under way, and have the server end its session: it is rolled back."""
    pid = wait_until(lambda: committing(engine), what="a commit is under way")
    with engine.connect() as connection:
        connection.execute(sa.text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": pid})
