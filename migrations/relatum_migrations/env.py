"""Alembic's environment: it runs on the connection it is handed, or prints what a new database is stamped with."""

from alembic import context

from relatum.store.tables import SCHEMA

context.configure(
    connection=context.config.attributes["connection"],
    dialect_name="postgresql",
    version_table_schema=SCHEMA,
    transactional_ddl=False,  # The transaction is the caller's.
)
context.run_migrations()
