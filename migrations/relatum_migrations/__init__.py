"""Creates and upgrades the schema `relatum`: Alembic runs SQL files, from an importable package without an ini file.

`sql/new_in_0_5.sql` and `sql/schema.sql` are the whole schema, for new databases. A database of release 0.4.0 or later
gets the revisions that it lacks. `sql/functions.sql` and `sql/roles.sql` run each time.

The version table is `relatum.alembic_version`, so an application's own migrations are not affected.
"""

import io
from pathlib import Path
from typing import Final, TextIO

from alembic import command as alembic_command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from relatum.common.checks import checked_seconds
from relatum.errors import ConfigurationError
from relatum.store.database import IDLE_S, AnyDatabase, as_engine
from relatum.store.translation import translated_errors

__all__ = ["LOCK_S", "current", "head", "missing_roles", "sql", "upgrade"]

_LOCK = 0x72656C6174756D
"""The advisory lock of migrations ("relatum"): migrations that start together run one after the other."""

LOCK_S: Final = 30.0
"""Default seconds to wait for each lock. Sessions that queue behind the migration wait as long."""

_STEP_S: Final = 3600.0
"""Seconds for one SQL file: it may build indexes of large tables."""

_ROLES: Final = ("relatum_recorder", "relatum_consumer", "relatum_reader", "relatum_collector", "relatum_router")


def _config(connection: Connection | None = None, output: TextIO | None = None) -> Config:
    config = Config(output_buffer=output)
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _revisions() -> list[str]:
    """Return the revisions of this release, from release 0.4.0's to the newest."""
    scripts = ScriptDirectory.from_config(_config()).walk_revisions()
    return [script.revision for script in reversed(list(scripts))]


def upgrade(database: AnyDatabase, *, lock_timeout_s: float = LOCK_S) -> None:
    """Create the schema, or upgrade a schema of release 0.4.0 or later to the newest revision.

    Idempotent, and safe to call from several processes concurrently.

    Each call creates missing roles, if the user may create roles, and grants each role its privileges. `missing_roles`
    returns the roles that could not be created.

    Args:
        database: PostgreSQL's URL, or a `Database`. The user must own the schema, or have the right to create it.
        lock_timeout_s: Seconds to wait for each lock that other sessions hold. Default: 30.

    Raises:
        DatabaseUnavailable: PostgreSQL does not answer, or another session held a lock for too long. The schema is
            complete at the revision that `current` returns; call again to continue.
        InvalidInput: `lock_timeout_s` is not a number from 0.001 to 86,400.
        AccessRefused: the user may not create or change the schema.
        ConfigurationError: the schema is at a revision that this release cannot upgrade, or a new database's encoding
            is not UTF-8; nothing was changed.
    """
    revisions = _revisions()
    lock_timeout_ms = round(1000 * checked_seconds("lock_timeout_s", lock_timeout_s, least=0.001, most=86_400.0))
    with as_engine(database, statement_s=_STEP_S, idle_s=IDLE_S) as engine, translated_errors():
        # One transaction for each revision: 0024 reads a large table, which the locks of 0023 must not block.
        for revision in revisions:
            with engine.begin() as connection:
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
                connection.exec_driver_sql(f"SET LOCAL lock_timeout = {lock_timeout_ms}")
                found = _current(connection)
                if found is None:
                    _create(connection)
                    return
                if found not in revisions:
                    raise ConfigurationError(_UNKNOWN.format(found=found))
                if revision != revisions[-1]:
                    alembic_command.upgrade(_config(connection), revision)
                    continue
                run(connection, "functions.sql")
                alembic_command.upgrade(_config(connection), revision)
                run(connection, "roles.sql")


def _create(connection: Connection) -> None:
    encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
    if encoding not in ("UTF8", "SQL_ASCII"):
        raise ConfigurationError(
            f"the database's encoding is {encoding}, in which not every key's value can be stored: create a database "
            "with ENCODING 'UTF8'; nothing was changed"
        )
    # A statement with IF NOT EXISTS needs the right to create schemas, which the schema's owner may lack.
    if not inspect(connection).has_schema("relatum"):
        connection.exec_driver_sql(_CREATE)
    run(connection, *_FILES)
    alembic_command.stamp(_config(connection), "head")
    run(connection, "roles.sql")


def missing_roles(database: AnyDatabase) -> list[str]:
    """Return the names of Relatum's roles that do not exist, because the user of `upgrade` could not create them.

    Create them as a user who may create roles, then call `upgrade` again, which grants them their privileges.
    """
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        existing = set(connection.exec_driver_sql("SELECT rolname FROM pg_roles").scalars())
    return [role for role in _ROLES if role not in existing]


def current(database: AnyDatabase) -> str | None:
    """Return the revision of the database's schema; None if the schema does not exist."""
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        return _current(connection)


def _current(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version", schema="relatum"):
        return None
    return MigrationContext.configure(connection, opts={"version_table_schema": "relatum"}).get_current_revision()


def head() -> str:
    """Return the newest revision of this release."""
    return _revisions()[-1]


def sql() -> str:
    """Return the SQL that creates the schema in a new database, to review it. Does not connect to a database."""
    stamp = io.StringIO()
    alembic_command.stamp(_config(output=stamp), "head", sql=True)
    return "\n".join(("BEGIN;\n", _CREATE, *map(_text, _FILES), stamp.getvalue(), _text("roles.sql"), "COMMIT;\n"))


def run(connection: Connection, *names: str) -> None:
    """Run SQL files in the current transaction."""
    for name in names:
        # Without parameters psycopg accepts several statements, and does not interpret `%`.
        connection.exec_driver_sql(_text(name), execution_options={"no_parameters": True})


def _text(name: str) -> str:
    return (Path(__file__).parent / "sql" / name).read_text(encoding="utf-8")


_CREATE: Final = "CREATE SCHEMA IF NOT EXISTS relatum;\n"

_FILES: Final = ("functions.sql", "new_in_0_5.sql", "schema.sql")
"""The files that create everything in a new schema, in order, except the privileges."""

_UNKNOWN: Final = (
    "the schema `relatum` is at revision {found}, which this release cannot upgrade; nothing was changed. "
    "If the revision is 0003 or lower, first run `relatum migrate` of release 0.4.0. 0005 to 0022 were never released: "
    "drop the schema (DROP SCHEMA relatum CASCADE), then run `relatum migrate` and `relatum backfill`; or restore a "
    "backup of 0.4.0. For a later revision, use the release of Relatum that created it"
)
