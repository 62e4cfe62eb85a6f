"""One state of the database for all tasks of a Spark job: an exported snapshot, held open."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import psycopg
import sqlalchemy as sa

from relatum.errors import InvalidInput
from relatum.store import as_engine, close_engine, make_engine, translated_errors
from relatum_spark._where import database_url

LIMIT_S: Final = 3600.0
"""Seconds a snapshot lives unless told otherwise: an hour of held-back vacuum does no harm yet."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state of the database, held by `snapshot`; to be given to `relationships`.

    Attributes:
        snapshot_id: PostgreSQL's name for it.
    """

    snapshot_id: str
    database: str = field(repr=False)

    @contextmanager
    def connect(self) -> Iterator[sa.Connection]:
        """A connection in a transaction that sees this state.

        Raises:
            InvalidInput: The snapshot has ended.
        """
        with as_engine(self.database) as engine, translated_errors(), engine.connect() as connection:
            self._enter(connection.execution_options(isolation_level="REPEATABLE READ"))
            yield connection

    def _enter(self, connection: sa.Connection) -> None:
        try:
            # The id is PostgreSQL's own, hexadecimal digits and dashes; the statement takes no parameters.
            connection.exec_driver_sql(f"SET TRANSACTION SNAPSHOT '{self.snapshot_id}'")
        except sa.exc.DBAPIError as error:
            if isinstance(error.orig, (psycopg.errors.UndefinedObject, psycopg.errors.InvalidParameterValue)):
                raise InvalidInput(
                    "the snapshot has ended: read inside its `with` block, and give it a longer limit_s where needed"
                ) from None
            raise

    def session_statements(self) -> list[str]:
        """What a task's connection runs first."""
        return [
            "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY",
            f"SET TRANSACTION SNAPSHOT '{self.snapshot_id}'",
        ]


@contextmanager
def snapshot(database: str | None = None, *, limit_s: float = LIMIT_S) -> Iterator[Snapshot]:
    """Hold one state of the database while the block runs, so that several reads and all their tasks see the same.

    Spark reads when an action runs: run it inside the block. While a snapshot is held, PostgreSQL cannot clean up
    deleted rows anywhere in the database; don't hold one for hours.

    Args:
        database: PostgreSQL's URL; None for RELATUM_DATABASE_URL.
        limit_s: Seconds after which PostgreSQL ends the snapshot by itself, should the driver hang. Tasks that start
            after that fail with `snapshot "…" does not exist`; those that run read on.

    Raises:
        ConfigurationError: No database is named, or its URL cannot be read.
        InvalidInput: `limit_s` is not between 1 and 86,400.
        DatabaseUnavailable: PostgreSQL does not answer.
    """
    if not 1 <= limit_s <= 86_400:
        raise InvalidInput(f"a snapshot lives from 1 to 86,400 seconds, not {limit_s:g}")
    url = database_url(database)
    engine = make_engine(url, pool_size=1)
    with translated_errors():
        connection = engine.connect()
    try:
        with translated_errors():
            snapshot_id = _export(connection, limit_s)
        yield Snapshot(snapshot_id, url)
    finally:
        # Closed without a rollback: the server may have ended it by its limit.
        connection.invalidate()
        connection.close()
        close_engine(engine)


def _export(connection: sa.Connection, limit_s: float) -> str:
    connection.execution_options(isolation_level="REPEATABLE READ")
    connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {int(limit_s * 1000)}")
    # Rows keep their places until the block ends: VACUUM FULL and CLUSTER would move them under readers by ctid.
    connection.exec_driver_sql("LOCK TABLE relatum.relationships IN ACCESS SHARE MODE")
    snapshot_id: str = connection.exec_driver_sql("SELECT pg_export_snapshot()").scalar_one()
    return snapshot_id
