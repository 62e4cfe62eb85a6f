"""The parts of the relationship table: one after the other, whoever writes, reads or looks after them at that time."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import sqlalchemy as sa
from psycopg import sql

from relatum.recording import _part_tender, verify
from relatum.store import (
    Part,
    add_keys,
    copy_rows,
    copy_text,
    drop_parts,
    empty_parts,
    ensure_stream,
    make_engine,
    retain_from,
    turn_parts,
)
from relatum_consumer.lookups._probe_statement import probe_statement
from tests.support import new_streams, unique_name, wait_until
from tests.support.parts import MESSAGES, close, close_first, lines, offsets_in, parts_of, turn, write
from tests.support.place import Place
from tests.support.plans import nodes_of, plan_of
from tests.support.standstill import in_time


@pytest.fixture
def stream_id(engine: sa.Engine) -> int:
    """A stream."""
    with engine.begin() as connection:
        return ensure_stream(connection, "/", "s").stream_id


@pytest.fixture
def recorder_engine(engine: sa.Engine, database_url: str) -> Iterator[sa.Engine]:
    """The engine of a user that may do what recorders may, and no more."""
    name = unique_name("parts").replace("-", "_")
    parts = urlsplit(database_url)
    with psycopg.connect(database_url, autocommit=True) as administrator:
        user = sql.Identifier(name)
        administrator.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'x' IN ROLE relatum_recorder").format(user))
        made = make_engine(urlunsplit(parts._replace(netloc=f"{name}:x@{parts.hostname}:{parts.port}")))
        try:
            yield made
        finally:
            made.dispose()
            administrator.execute(sql.SQL("DROP ROLE {}").format(user))


def test_a_new_table_has_an_open_part_and_the_next_one(engine: sa.Engine) -> None:
    """Rows are written beside part 0 from the start; the part after that is there before it is needed."""
    assert [(part.part, part.is_opened) for part in parts_of(engine)] == [(0, True), (1, True)]
    turn_parts(engine)
    assert [(part.part, part.is_opened) for part in parts_of(engine)] == [(0, True), (1, True), (2, False)]


def test_a_recorder_may_do_all_of_it_and_change_nothing_else(recorder_engine: sa.Engine, stream_id: int) -> None:
    """Without any right on the schema: parts are made, filled, closed, made compact and dropped."""
    turn_parts(recorder_engine)
    write(recorder_engine, stream_id, range(MESSAGES))
    turn(recorder_engine)
    write(recorder_engine, stream_id, range(MESSAGES, 2 * MESSAGES))
    close(recorder_engine)
    assert parts_of(recorder_engine)[1][:4] == (1, True, True, True)
    assert offsets_in(recorder_engine, 1) == list(range(MESSAGES))
    assert offsets_in(recorder_engine) == list(range(2 * MESSAGES))
    with recorder_engine.begin() as connection:
        retain_from(connection, {stream_id: MESSAGES})
    assert drop_parts(recorder_engine) == {stream_id: MESSAGES}
    assert offsets_in(recorder_engine) == list(range(MESSAGES, 2 * MESSAGES))
    with recorder_engine.connect() as connection, pytest.raises(sa.exc.ProgrammingError, match="must be owner"):
        connection.execute(sa.text("DROP TABLE relatum.relationships_2"))


def test_a_consumer_reads_parts_that_were_made_later_and_makes_none(engine: sa.Engine, stream_id: int) -> None:
    """Its right is of the whole table; the functions are the recorder's."""
    turn_parts(engine)
    turn(engine)
    write(engine, stream_id, range(MESSAGES))
    with engine.connect() as connection:
        connection.execute(sa.text("SET ROLE relatum_consumer"))
        assert connection.execute(sa.text("SELECT count(*) FROM relatum.relationships")).scalar_one() == MESSAGES
        with pytest.raises(sa.exc.ProgrammingError, match="permission denied for function"):
            connection.execute(sa.text("SELECT relatum.make_part()"))


def test_many_make_the_next_part_at_once(engine: sa.Engine) -> None:
    """However many recorders look at the same time, there is one next part, and none of them fails."""
    turn_parts(engine)
    for expected in range(3, 8):
        start = threading.Barrier(4)

        def look(start: threading.Barrier = start) -> None:
            start.wait()
            turn_parts(engine, 0)
            turn_parts(engine)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: look(), range(4)))
        turn_parts(engine)
        found = parts_of(engine)
        assert [part.part for part in found] == list(range(len(found)))
        assert [part.is_opened for part in found] == [True] * (len(found) - 1) + [False]
        assert len(found) >= expected


def test_a_part_that_is_written_is_not_closed(engine: sa.Engine, stream_id: int) -> None:
    """A transaction that took the open part has it until it ends, and all its rows are counted when it is closed."""
    turn_parts(engine)
    with engine.begin() as writing:
        copy_rows(writing, lines(stream_id, range(MESSAGES)))
        turn(engine)
        write(engine, stream_id, range(MESSAGES, MESSAGES + 1))
        close(engine)
        assert not parts_of(engine)[1].is_closed
        copy_rows(writing, lines(stream_id, range(MESSAGES + 1, MESSAGES + 3)))
    close(engine)
    assert parts_of(engine)[1].is_closed
    with engine.begin() as connection:
        query = sa.text("SELECT row_count, first_offset, last_offset FROM relatum.part_streams WHERE part = 1")
        assert connection.execute(query).one() == (MESSAGES, 0, MESSAGES - 1)
    assert offsets_in(engine, 2) == list(range(MESSAGES, MESSAGES + 3))


def test_who_chose_a_part_that_is_closed_meanwhile_writes_into_another(
    engine: sa.Engine, database_url: str, stream_id: int
) -> None:
    """A recorder that waits for the row of a part while that is closed does not write into it."""
    turn_parts(engine)
    with psycopg.connect(database_url) as closing:
        closing.execute("SELECT FROM relatum.table_parts WHERE part = 1 FOR UPDATE")
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write, engine, stream_id, range(MESSAGES))
            wait_until(lambda: waiting(engine), what="the recorder waits")
            closing.execute("UPDATE relatum.table_parts SET closed_at = now() WHERE part = 1")
            closing.commit()
            writing.result()
    assert offsets_in(engine, 1) == []
    assert offsets_in(engine) == list(range(MESSAGES))


def waiting(engine: sa.Engine) -> bool:
    """Whether somebody waits for a lock in this database."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with engine.connect() as connection:
        return bool(connection.execute(sa.text(query)).scalar_one())


def test_rows_of_one_transaction_lie_in_the_order_of_values(engine: sa.Engine, stream_id: int) -> None:
    """Whatever order they come in, and whatever is in a value: so each page of the index is come to once."""
    turn_parts(engine)
    values = [f"{n * 7919 % 1009:04d}" for n in range(1009)] + ["line\nend", "line\u2028end\x85", "tab\tand\\"]
    texts = [f"1\t{copy_text(value)}\t{stream_id}\t\\N\t{n}\n" for n, value in enumerate(values)]
    with engine.begin() as connection:
        copy_rows(connection, ["".join(texts[:500]), *texts[500:]])
        query = sa.text("SELECT value, stream_offset FROM relatum.relationships_1 ORDER BY ctid")
        assert list(connection.execute(query)) == sorted((value, n) for n, value in enumerate(values))


def test_a_closed_part_has_a_dense_index(engine: sa.Engine, stream_id: int) -> None:
    """The index that grew with random values is replaced; look-ups use the new one under the old one's name."""
    turn_parts(engine)
    with engine.begin() as connection:
        for start in range(0, 20_000, 1000):
            rows = [f"1\t{n * 7919 % 20_011:08d}\t{stream_id}\t{n}\t{n}\n" for n in range(start, start + 1000)]
            copy_rows(connection, rows)
    turn(engine)
    before = index_sizes(engine)
    close(engine)
    after = index_sizes(engine)
    assert set(after) == set(before), "names of indexes"
    assert after["relationships_1_lookup"] < 0.8 * before["relationships_1_lookup"]
    close(engine)
    assert index_sizes(engine) == after


def index_sizes(engine: sa.Engine) -> dict[str, int]:
    """Bytes of the indexes of part 1, by name."""
    query = sa.text(
        "SELECT indexrelid::regclass::text, pg_relation_size(indexrelid) FROM pg_index "
        "WHERE indrelid = 'relatum.relationships_1'::regclass"
    )
    with engine.connect() as connection:
        return {name.removeprefix("relatum."): size for name, size in connection.execute(query)}


@pytest.fixture
def closed(engine: sa.Engine, stream_id: int) -> sa.Engine:
    """A database whose part 1 is closed and its messages are not retained, but whose old index is still there."""
    close_first(engine, stream_id)
    return engine


@pytest.mark.parametrize("tend", [close, drop_parts], ids=["compact", "drop"])
def test_nobody_queues_behind_a_long_reader(closed: sa.Engine, tend: Callable[[sa.Engine], Any]) -> None:
    """While a reader has the table for long, what would need it alone gives up at once, and other look-ups go on."""
    with closed.connect() as reader:
        reader.execute(sa.text("SELECT count(*) FROM relatum.relationships"))
        with in_time(5.0):
            tend(closed)
        assert parts_of(closed)[1][:4] == (1, True, True, False)
        assert len(offsets_in(closed)) == 2 * MESSAGES
    wait_until(lambda: bool(tend(closed)) or parts_of(closed)[1][:4] != (1, True, True, False), what="it is done")


def test_what_somebody_needs_is_not_dropped(closed: sa.Engine, stream_id: int) -> None:
    """A part goes when all its streams have dropped its messages, are replaced or forgotten; and a row may be late."""
    with closed.begin() as connection:
        other = ensure_stream(connection, "/", "other").stream_id
        connection.execute(
            sa.text("INSERT INTO relatum.part_streams VALUES (0, 9, 10, 1, :other)").bindparams(other=other)
        )
    assert drop_parts(closed) == {}
    with closed.begin() as connection:
        retain_from(connection, {other: 9})
    assert drop_parts(closed) == {}
    with closed.begin() as connection:
        retain_from(connection, {other: 10, stream_id: 5})
        query = sa.text("SELECT retained_from FROM relatum.streams ORDER BY stream_id")
        assert list(connection.scalars(query)) == [MESSAGES, 10], "it only grows"
    assert drop_parts(closed) == {stream_id: MESSAGES, other: 10}
    assert [part.part for part in parts_of(closed)] == [0, 2, 3]


def a_day_passes(engine: sa.Engine) -> None:
    """As if what was written down of parts had been written a day before."""
    query = "UPDATE relatum.table_parts SET {0} = {0} - interval '1 day'"
    with engine.begin() as connection:
        for column in ("leaving_at", "emptied_at"):
            connection.execute(sa.text(query.format(column)))


def test_a_stream_that_is_kept_for_long_keeps_no_part_of_others(engine: sa.Engine, stream_id: int) -> None:
    """Its rows are moved, a day after that was said, and the part goes a day later; each is there once all the time."""
    with engine.begin() as connection:
        kept = ensure_stream(connection, "/", "kept").stream_id
    turn_parts(engine)
    write(engine, stream_id, range(MESSAGES))
    write(engine, kept, [1, 2, 3])
    turn(engine)
    write(engine, stream_id, [MESSAGES])
    close(engine)
    empty_parts(engine)
    a_day_passes(engine)
    empty_parts(engine)
    assert len(offsets_in(engine, 1)) == MESSAGES + 3, "as long as most of it is retained"
    with engine.begin() as connection:
        retain_from(connection, {stream_id: MESSAGES, kept: 2})
    empty_parts(engine)
    empty_parts(engine)
    assert len(offsets_in(engine, 1)) == MESSAGES + 3, "it was said just now"
    a_day_passes(engine)
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as snapshot:
        query = sa.text("SELECT stream_offset FROM relatum.relationships WHERE stream_id = :id ORDER BY 1")
        assert list(snapshot.scalars(query, {"id": kept})) == [1, 2, 3]
        empty_parts(engine)
        assert list(snapshot.scalars(query, {"id": kept})) == [1, 2, 3]
    assert offsets_in(engine, 2) == [2, 3, MESSAGES]
    assert drop_parts(engine) == {}, "snapshots may be older"
    a_day_passes(engine)
    drop_parts(engine)
    assert [part.part for part in parts_of(engine)] == [0, 2, 3]
    assert offsets_in(engine) == [2, 3, MESSAGES]


def test_look_ups_go_on_while_parts_go(engine: sa.Engine, stream_id: int) -> None:
    """Who asks for what is retained while parts are made, closed and dropped gets it, each time."""
    over = threading.Event()
    write(engine, stream_id, [10**6])

    def look() -> int:
        asked = 0
        with engine.connect() as connection:
            query = sa.text("SELECT count(*) FROM relatum.relationships WHERE stream_offset = 1000000 AND key_id = 1")
            while not over.is_set():
                with connection.begin():
                    assert connection.execute(query).scalar_one() == 1
                asked += 1
        return asked

    turn_parts(engine)
    turn(engine)
    with ThreadPoolExecutor(2) as pool:
        looking = [pool.submit(look) for _ in range(2)]
        try:
            for start in range(0, 5 * MESSAGES, MESSAGES):
                write(engine, stream_id, range(start, start + MESSAGES))
                turn(engine)
                with engine.begin() as connection:
                    retain_from(connection, {stream_id: start + MESSAGES})
                close(engine)
                drop_parts(engine)
        finally:
            over.set()
        assert all(each.result() for each in looking)
    close(engine)
    wait_until(lambda: drop_parts(engine) is not None and len(parts_of(engine)) == 4, what="parts that are not needed")
    assert offsets_in(engine) == [10**6]


def test_recorders_go_from_part_to_part(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recorders write while parts fill up, are closed and made compact: each message has its row once."""
    monkeypatch.setattr(_part_tender, "PART_BYTES", 8192)
    monkeypatch.setattr(_part_tender, "TURN_S", 0.02)
    monkeypatch.setattr(_part_tender, "TEND_S", 0.02)
    add_keys(place.engine, ["order"])
    with new_streams(place.amqp, 2) as streams:
        with place.recording(streams[0]), place.recording(streams[1]):
            for start in range(0, 400, 40):
                for stream in streams:
                    numbers = range(start, start + 40)
                    place.put(*[(b"", {"order": f"o{number}"}) for number in numbers], to=stream)
                    place.wait_recorded(stream)
            wait_until(lambda: sum(part.is_compact for part in parts_of(place.engine)) > 3, what="compact parts")
        for stream in streams:
            assert [row[1] for row in place.rows(stream)] == [f"o{number}" for number in range(400)]
        assert verify(place.amqp, place.database, streams).ok


def test_a_plan_made_for_an_empty_part_does_not_outlive_that(engine: sa.Engine, stream_id: int) -> None:
    """A session that asked while a part was known to be empty asks its index once it has rows."""
    turn_parts(engine)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("VACUUM ANALYZE"))
        connection.execute(sa.text("SET plan_cache_mode = force_generic_plan"))
        connection.execute(
            sa.text("PREPARE asked AS SELECT * FROM relatum.relationships WHERE key_id = 1 AND value = $1")
        )
        explained = sa.text("EXPLAIN EXECUTE asked('v')")
        assert "Seq Scan on relationships_1" in "\n".join(connection.scalars(explained))
        write(engine, stream_id, range(40_000))
        turn_parts(engine)
        assert "Seq Scan on relationships_1" not in "\n".join(connection.scalars(explained))


# --- beside others: recorders that are killed, the release before, look-ups that leave some out -----------------------


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


@pytest.mark.parametrize("step", ["make_part()", "close_part(1)", "finish_part(1)", "empty_part(1)", "drop_part(1)"])
def test_a_recorder_that_is_lost_inside_a_step_leaves_nothing_of_it(
    closed: sa.Engine, database_url: str, step: str
) -> None:
    """Neither a half of a part nor a lock: all rows are found afterwards, and the step is done by another."""
    before_it = {
        "make_part()": ["UPDATE relatum.table_parts SET opened_at = now()"],
        "close_part(1)": [
            "UPDATE relatum.table_parts SET closed_at = NULL WHERE part = 1",
            "DELETE FROM relatum.part_streams; DELETE FROM relatum.part_keys",
            "DROP INDEX relatum.relationships_1_compact",
        ],
        "empty_part(1)": ["UPDATE relatum.table_parts SET leaving_at = now() - interval '2 days' WHERE part = 1"],
    }
    with closed.begin() as connection:
        for statement in before_it.get(step, []):
            connection.execute(sa.text(statement))
    before, tables = states_of(closed), tables_of(closed)
    recorder = psycopg.connect(database_url)
    recorder.execute(f"SELECT relatum.{step}".encode())
    with socket.socket(fileno=os.dup(recorder.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
    recorder.close()
    wait_until(lambda: sessions(closed) == 0, what="its session is over")
    assert (states_of(closed), tables_of(closed)) == (before, tables)
    assert offsets_in(closed) == list(range(2 * MESSAGES))
    with closed.begin() as connection:
        assert connection.execute(sa.text(f"SELECT relatum.{step}")).scalar_one()
    assert offsets_in(closed)[-MESSAGES:] == list(range(MESSAGES, 2 * MESSAGES))


def test_a_recorder_of_the_release_before_goes_on(closed: sa.Engine, stream_id: int) -> None:
    """It writes by the columns that it knows, into part 0, which is never closed; it deletes rows by their places.

    Each part has the same places: no row of another part is deleted.
    """
    columns = "stream_offset, time_us, stream_id, key_id, value"
    retention = (
        "DELETE FROM relatum.relationships WHERE ctid = ANY (ARRAY(SELECT ctid FROM relatum.relationships "
        "WHERE stream_id = :id AND stream_offset < :first LIMIT 10000)) AND stream_id = :id AND stream_offset < :first"
    )
    late = range(2 * MESSAGES, 3 * MESSAGES)
    with closed.begin() as connection:
        connection.execute(sa.text("SET ROLE relatum_recorder"))
        gone = connection.execute(sa.text(retention), {"id": stream_id, "first": MESSAGES // 2}).rowcount
        driver: Any = connection.connection.driver_connection
        with driver.cursor().copy(f"COPY relatum.relationships ({columns}) FROM STDIN".encode()) as copy:
            copy.write("".join(f"{n}\t{n}\t{stream_id}\t1\tv{n}\n" for n in late))
    close(closed)
    assert gone == MESSAGES // 2
    assert offsets_in(closed) == list(range(MESSAGES // 2, 3 * MESSAGES))
    assert offsets_in(closed, 0) == list(late)
    assert not parts_of(closed)[0].is_closed
