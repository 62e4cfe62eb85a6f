"""Alembic's environment: runs on the given connection, or prints the statements that stamp a new database."""

from alembic import context

from relatum.store.tables import SCHEMA

context.configure(
    connection=context.config.attributes["connection"],
    dialect_name="postgresql",
    version_table_schema=SCHEMA,
    transactional_ddl=False,  # The caller controls the transaction.
)
context.run_migrations()
