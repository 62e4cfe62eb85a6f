"""What a test's database keeps of the test that had it before: nothing."""

from collections.abc import Iterator
from typing import LiteralString
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.support.databases import Databases

ROWS = """
INSERT INTO relatum.super_streams (name, header) SELECT 'orders' || n, 'host' FROM generate_series(1, {count}) n
"""

LEFT = "SELECT count(*) FROM relatum.super_streams"
"""What must be none."""


@pytest.fixture
def databases(database_server_url: str, _migrated_template: str, _copying: LiteralString) -> Iterator[Databases]:
    """Databases of this test alone."""
    made = Databases(database_server_url, _migrated_template, _copying)
    yield made
    made.close()


def _do(url: str, statements: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(statements.encode())


@pytest.mark.parametrize("count", [1, 100_000])
def test_rows_and_numbers_are_not_found_again(databases: Databases, count: int) -> None:
    """Few rows or many: the next test finds no row, the first number, the same secret, and another name."""
    first = databases.take()
    with psycopg.connect(first) as connection:
        secret = connection.execute("SELECT secret FROM relatum.masking").fetchall()
    _do(first, ROWS.format(count=count))
    with psycopg.connect(first) as left_open:
        left_open.execute(LEFT.encode())
        assert databases.give_back(first)
        with pytest.raises(psycopg.OperationalError):
            left_open.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(first)
    second = databases.take()
    with psycopg.connect(second) as connection:
        assert connection.execute(LEFT.encode()).fetchone() == (0,)
        assert connection.execute("SELECT secret FROM relatum.masking").fetchall() == secret
        connection.execute(ROWS.format(count=1).encode())
        assert connection.execute("SELECT super_stream_id FROM relatum.super_streams").fetchone() == (1,)
    databases.give_back(second)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE booked (message_id text)",
        "ALTER TABLE relatum.super_streams ADD COLUMN more integer",
        "ALTER TABLE relatum.super_streams ALTER COLUMN name DROP NOT NULL",
        "ALTER TABLE relatum.super_streams DROP CONSTRAINT super_streams_name",
        "REVOKE SELECT ON relatum.super_streams FROM relatum_consumer",
        "CREATE FUNCTION one() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
        "ALTER TABLE relatum.super_streams DISABLE TRIGGER ALL",
        "ALTER DATABASE {} SET default_transaction_read_only = on",
        "ALTER DATABASE {} CONNECTION LIMIT 5",
        "UPDATE relatum.masking SET secret = secret || secret",
        ROWS.format(count=10) + "; ANALYZE relatum.super_streams",
    ],
)
def test_one_that_is_not_as_the_template_is_dropped(
    databases: Databases, database_server_url: str, statement: str
) -> None:
    """Whatever else than rows of usual tables was changed: no other test gets it."""
    url = databases.take()
    _do(url, statement.replace("{}", name := urlsplit(url).path[1:]))
    assert not databases.give_back(url)
    with psycopg.connect(database_server_url) as connection:
        found = connection.execute("SELECT count(*) FROM pg_database WHERE datname = %s", [name])
        assert found.fetchone() == (0,)
