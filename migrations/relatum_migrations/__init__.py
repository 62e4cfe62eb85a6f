"""Making and changing the schema `relatum`: Alembic inside, importable, no ini file to keep.

The version table is `relatum.alembic_version`, the schema's own: an application's migrations are not touched.
"""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Final

from alembic import command as alembic_command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from relatum.store import SCHEMA, AnyDatabase, as_engine, translated_errors
from relatum_migrations import _roles

__all__ = ["LOCK_S", "current", "head", "missing_roles", "sql", "upgrade"]

_LOCK = 0x72656C6174756D
"""The advisory lock a migration takes, so that several that start together run one after the other ("relatum")."""


LOCK_S: Final = 30.0
"""Seconds to wait for each lock, by default. Whoever waits behind a migration that waits waits as long."""

_STATEMENT_S: Final = 3600.0
"""Seconds for one statement: indexes of large tables take their time."""

_APART: Final = ("0010",)
"""Revisions that end a transaction: the next one reads a large table, which a lock of theirs would close meanwhile."""


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def upgrade(database: AnyDatabase, revision: str = "head", *, lock_timeout_s: float = LOCK_S) -> None:
    """Make the schema, or bring it to a newer revision. Safe to call again and from several processes.

    At the newest revision it makes the roles that lack, where the user may, and grants each what it needs; also where
    there was nothing else to do. `missing_roles` says which could not be made.

    Args:
        database: PostgreSQL's URL, or a `Database`. The user must own the schema, or may create it.
        revision: Which revision to go to; the newest by default.
        lock_timeout_s: Seconds to wait for each lock that other sessions hold. Default 30.

    Raises:
        DatabaseUnavailable: PostgreSQL does not answer, or a lock was held for too long: the schema is at the revision
            that `current` tells, whole, and it is safe to repeat.
        AccessRefused: the user may not create the schema.
    """
    newest = head()
    wanted = newest if revision == "head" else revision
    steps = [step for step in _APART if step < wanted] + [wanted]
    with as_engine(database, statement_s=_STATEMENT_S) as engine, translated_errors():
        for step in steps:
            # Each in a transaction of its own.
            with engine.begin() as connection:
                # Another migration is waited for: it ends.
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {round(lock_timeout_s * 1000)}")
                alembic_command.upgrade(_config(connection), step)
                if step == newest:
                    _roles.grant_roles(connection)


def missing_roles(database: AnyDatabase) -> list[str]:
    """The roles that the server does not have: this user could not make them. Nobody may be granted their rights.

    Whoever may makes them, and then calls `upgrade` again, which grants them what they need.
    """
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        return _roles.missing_roles(connection)


def current(database: AnyDatabase) -> str | None:
    """The revision the database is at; None where the schema is not there."""
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        if not inspect(connection).has_table("alembic_version", schema=SCHEMA):
            return None
        context = MigrationContext.configure(connection, opts={"version_table_schema": SCHEMA})
        return context.get_current_revision()


def head() -> str:
    """The newest revision this release knows."""
    newest = ScriptDirectory.from_config(_config()).get_current_head()
    assert newest is not None, "the wheel holds the revisions"
    return newest


def sql(revision: str = "head") -> str:
    """The SQL an upgrade from nothing would run, for review; nothing is run."""
    text = io.StringIO()
    config = _config()
    config.output_buffer = text
    with redirect_stdout(text):
        alembic_command.upgrade(config, revision, sql=True)
    return text.getvalue()
