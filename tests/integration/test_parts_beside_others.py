"""The parts of the table beside others: recorders that are killed, the release before, look-ups that leave some out."""

import subprocess
import sys

import psycopg
import pytest
import sqlalchemy as sa

from relatum.store import Part, copy_rows, ensure_stream, turn_parts
from relatum_consumer.lookups._probe_statement import probe_statement
from tests.support import wait_until
from tests.support.parts import MESSAGES, close, close_first, offsets_in, parts_of, turn, write
from tests.support.plans import nodes_of, plan_of


@pytest.fixture
def stream_id(engine: sa.Engine) -> int:
    """A stream."""
    with engine.begin() as connection:
        return ensure_stream(connection, "/", "s").stream_id


@pytest.fixture
def closed(engine: sa.Engine, stream_id: int) -> sa.Engine:
    """A database whose part 1 is closed and its messages are not retained, but whose old index is still there."""
    close_first(engine, stream_id)
    return engine


KILLED = """
import sys, psycopg
connection = psycopg.connect(sys.argv[1])
connection.execute("SELECT relatum." + sys.argv[2])
print("inside", flush=True)
sys.stdin.read()
"""
"""A recorder that has done a step and not committed it."""


@pytest.mark.parametrize("step", ["make_part()", "close_part(1)", "finish_part(1)", "empty_part(1)", "drop_part(1)"])
def test_a_recorder_that_is_killed_inside_a_step_leaves_nothing_of_it(
    closed: sa.Engine, database_url: str, stream_id: int, step: str
) -> None:
    """Neither a half of a part nor a lock: all rows are found afterwards, and the step is done by another."""
    with closed.begin() as connection:
        if step == "make_part()":
            connection.execute(sa.text("UPDATE relatum.table_parts SET opened_at = now()"))
        elif step == "close_part(1)":
            connection.execute(sa.text("UPDATE relatum.table_parts SET closed_at = NULL WHERE part = 1"))
            connection.execute(sa.text("DELETE FROM relatum.part_streams; DELETE FROM relatum.part_keys"))
            connection.execute(sa.text("DROP INDEX relatum.relationships_1_compact"))
        elif step == "empty_part(1)":
            connection.execute(
                sa.text("UPDATE relatum.table_parts SET leaving_at = now() - interval '2 days' WHERE part = 1")
            )
    before, tables = states_of(closed), tables_of(closed)
    recorder = subprocess.Popen(
        [sys.executable, "-c", KILLED, database_url, step], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with recorder:
        assert recorder.stdout is not None
        assert recorder.stdout.readline() == b"inside\n"
        recorder.kill()
    wait_until(lambda: sessions(closed) == 0, what="its session is over")
    assert (states_of(closed), tables_of(closed)) == (before, tables)
    assert offsets_in(closed) == list(range(2 * MESSAGES))
    with closed.begin() as connection:
        assert connection.execute(sa.text(f"SELECT relatum.{step}")).scalar_one()
    assert offsets_in(closed)[-MESSAGES:] == list(range(MESSAGES, 2 * MESSAGES))


def states_of(engine: sa.Engine) -> list[Part]:
    """What the parts are, without what PostgreSQL counts by itself when it analyses a table."""
    return [part._replace(size=0, known=0) for part in parts_of(engine)]


def tables_of(engine: sa.Engine) -> list[str]:
    """All tables and indexes of the schema."""
    query = "SELECT relname FROM pg_class WHERE relnamespace = 'relatum'::regnamespace ORDER BY 1"
    with engine.connect() as connection:
        return list(connection.scalars(sa.text(query)))


def sessions(engine: sa.Engine) -> int:
    """Sessions of this database that are in a transaction."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
    with engine.connect() as connection:
        return int(connection.execute(sa.text(query)).scalar_one())


def test_retention_of_the_release_before_deletes_no_row_of_another_part(closed: sa.Engine, stream_id: int) -> None:
    """It names rows by their places, of which each part has the same ones."""
    statement = (
        "DELETE FROM relatum.relationships WHERE ctid = ANY (ARRAY(SELECT ctid FROM relatum.relationships "
        "WHERE stream_id = :id AND stream_offset < :first LIMIT 10000)) AND stream_id = :id AND stream_offset < :first"
    )
    with closed.begin() as connection:
        connection.execute(sa.text("SET ROLE relatum_recorder"))
        gone = connection.execute(sa.text(statement), {"id": stream_id, "first": MESSAGES // 2}).rowcount
    assert gone == MESSAGES // 2
    assert offsets_in(closed) == list(range(MESSAGES // 2, 2 * MESSAGES))


def test_what_is_in_no_other_part_is_asked_of_one(engine: sa.Engine, database_url: str, stream_id: int) -> None:
    """Values in the order of time: a closed part that cannot have one is left out, one that has it never."""
    turn_parts(engine)
    for start in range(0, 5 * MESSAGES, MESSAGES):
        with engine.begin() as connection:
            copy_rows(connection, [f"1\tv{n:08d}\t{stream_id}\t{n}\t{n}\n" for n in range(start, start + MESSAGES)])
        turn(engine)
    close(engine)
    sought = probe_statement("oldest", keys=1, names=1, bounded=False, floored=False)
    given = {"vhost": "/", "key_id_0": 1, "name_0": "s", "limit": 2}
    with psycopg.connect(database_url, autocommit=True) as connection:
        for n in range(0, 5 * MESSAGES, 7):
            for text in sought:
                rows = connection.execute(text.encode(), given | {"value_0": f"v{n:08d}"}).fetchall()
                assert [row[1] for row in rows] == [n]
        plan = plan_of(connection, "force_generic_plan", sought.prepared, given | {"value_0": "v00000250"})
    asked = [node for node in nodes_of(plan) if node.get("Index Name") == "relationships_lookup"]
    found = [node["Actual Rows"] for node in asked if node["Actual Loops"]]
    assert sorted(found)[-1] == 1
    assert len(found) <= 4, "part 0, the one that has it, and those that are not closed"


def test_a_part_is_closed_by_what_was_committed_alone(engine: sa.Engine, stream_id: int) -> None:
    """A transaction that sees an older state than the rows would write down too little, and rows would not be found."""
    turn_parts(engine)
    turn(engine)
    older = engine.execution_options(isolation_level="REPEATABLE READ")
    with older.connect() as connection, pytest.raises(sa.exc.DBAPIError, match="READ COMMITTED"):
        connection.execute(sa.text("SELECT relatum.close_part(1)"))
    with engine.begin() as connection:
        connection.execute(
            sa.text(f'ALTER DATABASE "{engine.url.database}" SET default_transaction_isolation = serializable')
        )
    engine.dispose()
    close(engine)
    assert parts_of(engine)[1].is_closed


def test_a_recorder_of_the_release_before_goes_on(engine: sa.Engine, database_url: str, stream_id: int) -> None:
    """It writes into the table by the columns that it knows; such rows are part 0's, which is never closed."""
    with psycopg.connect(database_url) as before:
        before.execute("SET ROLE relatum_recorder")
        columns = "stream_offset, time_us, stream_id, key_id, value"
        with before.cursor().copy(f"COPY relatum.relationships ({columns}) FROM STDIN".encode()) as copy:
            copy.write("".join(f"{n}\t{n}\t{stream_id}\t1\tv{n}\n" for n in range(MESSAGES)))
    turn_parts(engine)
    write(engine, stream_id, range(MESSAGES, 2 * MESSAGES))
    turn(engine)
    close(engine)
    assert offsets_in(engine, 0) == list(range(MESSAGES))
    assert not parts_of(engine)[0].is_closed
