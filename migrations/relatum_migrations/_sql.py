"""The files of SQL that the schema is made of."""

from pathlib import Path

from sqlalchemy import Connection

__all__ = ["run", "text"]


def text(name: str) -> str:
    return (Path(__file__).parent / "sql" / name).read_text()


def run(connection: Connection, name: str) -> None:
    """Run a file, in the transaction under way."""
    # Without parameters psycopg takes any number of statements, and `%` as it stands.
    connection.exec_driver_sql(text(name), execution_options={"no_parameters": True})
