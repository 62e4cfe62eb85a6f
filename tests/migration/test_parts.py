"""A table with rows becomes one in parts while a recorder of the release before writes and lookups ask."""

import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

import relatum_migrations
from relatum.errors import DatabaseUnavailable
from tests.support.release_0_4 import REVISION, make_release_0_4

COPY = "COPY relatum.relationships (stream_offset, time_us, stream_id, key_id, value) FROM STDIN"
"""As the release before writes rows."""

ROWS = 50_000


def write(database_url: str, first: int, count: int) -> None:
    """Rows of the release before, in one transaction."""
    with psycopg.connect(database_url) as connection, connection.cursor().copy(COPY.encode()) as copy:
        copy.write("".join(f"{n}\t{n}\t1\t1\tv{n}\n" for n in range(first, first + count)))


@pytest.fixture
def before(empty_database_url: str) -> str:
    """A database of the release before, with rows."""
    make_release_0_4(empty_database_url)
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("INSERT INTO relatum.streams (name) VALUES ('s')")
        connection.execute("INSERT INTO relatum.keys (name, sources, type) VALUES ('k', '{k}', 'text')")
    write(empty_database_url, 0, ROWS)
    return empty_database_url


def counted(database_url: str, query: str) -> int:
    """A number."""
    with psycopg.connect(database_url) as connection:
        (number,) = connection.execute(query.encode()).fetchone() or (-1,)
    return int(number)


def test_recorders_and_lookups_go_on(before: str) -> None:
    """Nobody fails, no row is lost or given twice, and a statement that was prepared before answers as before."""
    over = threading.Event()

    def record() -> int:
        written = 0
        while not over.is_set():
            write(before, ROWS + written, 100)
            written += 100
        return written

    def look() -> int:
        query = "SELECT count(*) FROM relatum.relationships WHERE key_id = %s AND value = %s AND stream_id = 1"
        asked = 0
        with psycopg.connect(before, autocommit=True, prepare_threshold=0) as connection:
            while not over.is_set():
                asked += 1
                assert connection.execute(query, [1, f"v{asked % ROWS}"]).fetchone() == (1,)
        return asked

    with ThreadPoolExecutor(2) as pool:
        recording, looking = pool.submit(record), pool.submit(look)
        try:
            relatum_migrations.upgrade(before)
            write(before, 10 * ROWS, 1)
        finally:
            over.set()
        written = recording.result()
        assert looking.result()
    assert counted(before, "SELECT count(*) FROM relatum.relationships") == ROWS + written + 1
    assert counted(before, "SELECT count(*) FROM relatum.relationships_0") == ROWS + written + 1
    assert counted(before, "SELECT count(*) FROM relatum.relations") == ROWS + written + 1


def test_no_row_is_rewritten(before: str) -> None:
    """The table that was there is part 0: the same file."""
    of_table = "SELECT pg_relation_filenode('relatum.relationships{}')"
    file, index = counted(before, of_table.format("")), counted(before, of_table.format("_lookup"))
    relatum_migrations.upgrade(before)
    assert counted(before, of_table.format("_0")) == file
    assert counted(before, of_table.format("_0_lookup")) == index


def test_a_long_reader_is_not_waited_for_longer_than_told(before: str) -> None:
    """Whoever waits behind the migration waits as long as it does; it is repeated, and goes on where it was."""
    with psycopg.connect(before) as reader:
        reader.execute("SELECT count(*) FROM relatum.relationships")
        with pytest.raises(DatabaseUnavailable, match="lock"):
            relatum_migrations.upgrade(before, lock_timeout_s=0.1)
    assert relatum_migrations.current(before) == REVISION
    with psycopg.connect(before) as reader:
        # The first step changes another table: it is through, and is not done again.
        reader.execute("SELECT count(*) FROM relatum.coverage")
        with pytest.raises(DatabaseUnavailable, match="lock"):
            relatum_migrations.upgrade(before, lock_timeout_s=0.1)
    assert relatum_migrations.current(before) not in (REVISION, relatum_migrations.head())
    relatum_migrations.upgrade(before)
    assert counted(before, "SELECT count(*) FROM relatum.relationships") == ROWS


def test_rights_that_somebody_gave_are_those_of_the_parts(before: str) -> None:
    """A user of its own, granted by name and not by a role, goes on."""
    name = "relatum_test_granted"
    with psycopg.connect(before, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name}".encode())
        try:
            connection.execute(f"GRANT USAGE ON SCHEMA relatum TO {name}".encode())
            connection.execute(f"GRANT SELECT, INSERT ON relatum.relationships TO {name}".encode())
            relatum_migrations.upgrade(before)
            connection.execute(f"SET ROLE {name}".encode())
            connection.execute("INSERT INTO relatum.relationships_1 VALUES (1, 1, 1, 1, 'granted')")
            assert connection.execute("SELECT count(*) FROM relatum.relationships").fetchone() == (ROWS + 1,)
        finally:
            connection.execute("RESET ROLE")
            connection.execute(f"DROP OWNED BY {name}".encode())
            connection.execute(f"DROP ROLE {name}".encode())
