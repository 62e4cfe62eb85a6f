"""Alembic's environment: it runs on the connection it is handed, or prints SQL for review."""

from typing import Any

from alembic import context
from sqlalchemy import text

from relatum.store import SCHEMA, metadata


def _configure(**where: Any) -> None:
    context.configure(
        target_metadata=metadata,
        version_table_schema=SCHEMA,
        include_schemas=True,
        include_name=lambda name, kind, parents: kind != "schema" or name == SCHEMA,
        **where,
    )


def _run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is None:
        _configure(url="postgresql+psycopg://", literal_binds=True, dialect_opts={"paramstyle": "named"})
        with context.begin_transaction():
            context.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
            context.run_migrations()
        return
    connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
    _configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()


_run()
