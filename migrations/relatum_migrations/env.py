"""Alembic's environment: runs on the given connection, or prints the statements that stamp a new database."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    dialect_name="postgresql",
    version_table_schema="relatum",
    transactional_ddl=False,  # The caller controls the transaction.
)
context.run_migrations()
