"""The parts of the relationship table: one after the other, while others write, read or maintain them."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relatum.recording import upkeep, verify
from relatum.store.catalog import add_keys, ensure_stream
from relatum.store.database import as_engine
from relatum.store.parts import Part, advance_parts, copy_rows, drop_parts, empty_parts, part_may_hold_values
from relatum.store.rows import copy_text
from relatum_consumer.lookups.by_key import probe_statement
from tests.support import new_streams, wait_until
from tests.support.databases import user_in
from tests.support.parts import MESSAGES, Parts
from tests.support.place import Place
from tests.support.plans import nodes_of, plan_of, text_of
from tests.support.standstill import in_time, somebody_waits


def parts_of(engine: sa.Engine, stream: str) -> Parts:
    with engine.begin() as connection:
        return Parts(engine, ensure_stream(connection, "/", stream).stream_id)


@pytest.fixture
def parts(engine: sa.Engine) -> Parts:
    return parts_of(engine, "s")


@pytest.fixture
def of_recorder(parts: Parts, database_url: str) -> Iterator[Parts]:
    """The same of a user that may do what recorders may, and no more."""
    with user_in(database_url, "relatum_recorder") as url, as_engine(url) as engine:
        yield replace(parts, engine=engine)


def test_a_recorder_may_do_all_of_it_and_change_nothing_else(of_recorder: Parts) -> None:
    """Without any right on the schema: parts are made, filled, closed, made compact and dropped."""
    advance_parts(of_recorder.engine)
    of_recorder.write(range(MESSAGES))
    of_recorder.turn()
    of_recorder.write(range(MESSAGES, 2 * MESSAGES))
    of_recorder.close()
    assert of_recorder.all()[1][:4] == (1, True, True, True)
    assert of_recorder.offsets(1) == list(range(MESSAGES))
    assert of_recorder.offsets() == list(range(2 * MESSAGES))
    of_recorder.retain(MESSAGES)
    assert drop_parts(of_recorder.engine) == {of_recorder.stream_id: MESSAGES}
    assert of_recorder.offsets() == list(range(MESSAGES, 2 * MESSAGES))
    with pytest.raises(sa.exc.ProgrammingError, match="must be owner"):
        of_recorder.sql("DROP TABLE relatum.relationships_2")


def test_a_consumer_reads_parts_that_were_made_later_and_makes_none(parts: Parts) -> None:
    """Its right is of the whole table; the functions are the recorder's."""
    advance_parts(parts.engine)
    parts.turn()
    parts.write(range(MESSAGES))
    with parts.engine.connect() as connection:
        connection.execute(sa.text("SET ROLE relatum_consumer"))
        assert connection.execute(sa.text("SELECT count(*) FROM relatum.relationships")).scalar_one() == MESSAGES
        with pytest.raises(sa.exc.ProgrammingError, match="permission denied for function"):
            connection.execute(sa.text("SELECT relatum.make_part()"))


def test_many_make_the_next_part_at_once(parts: Parts) -> None:
    """Recorders that look at the same time make one next part together, and none of them fails."""
    assert [(part.part, part.is_opened) for part in parts.all()] == [(0, True), (1, True)]
    advance_parts(parts.engine)
    assert [(part.part, part.is_opened) for part in parts.all()] == [(0, True), (1, True), (2, False)]
    for expected in range(3, 8):
        start = threading.Barrier(4)

        def look(start: threading.Barrier = start) -> None:
            start.wait()
            advance_parts(parts.engine, 0)
            advance_parts(parts.engine)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: look(), range(4)))
        advance_parts(parts.engine)
        found = parts.all()
        assert [part.part for part in found] == list(range(len(found)))
        assert [part.is_opened for part in found] == [True] * (len(found) - 1) + [False]
        assert len(found) >= expected


def test_a_part_that_is_written_is_not_closed(parts: Parts) -> None:
    """A transaction that took the open part has it until it ends, and all its rows are counted when it is closed."""
    advance_parts(parts.engine)
    with parts.engine.begin() as writing:
        copy_rows(writing, parts.lines(range(MESSAGES)))
        parts.turn()
        parts.write(range(MESSAGES, MESSAGES + 1))
        parts.close()
        assert not parts.all()[1].is_closed
        copy_rows(writing, parts.lines(range(MESSAGES + 1, MESSAGES + 3)))
    parts.close()
    assert parts.all()[1].is_closed
    counted = parts.sql("SELECT row_count, first_offset, last_offset FROM relatum.part_streams WHERE part = 1")
    assert counted == [(MESSAGES, 0, MESSAGES - 1)]
    assert parts.offsets(2) == list(range(MESSAGES, MESSAGES + 3))


def test_who_chose_a_part_that_is_closed_meanwhile_writes_into_another(parts: Parts, database_url: str) -> None:
    """A recorder that waited for a part's row while the part was closed writes into the next one."""
    advance_parts(parts.engine)
    with parts.engine.begin() as closing, ThreadPoolExecutor(1) as pool:
        closing.execute(sa.text("SELECT FROM relatum.table_parts WHERE part = 1 FOR UPDATE"))
        writing = pool.submit(parts.write, range(MESSAGES))
        somebody_waits(database_url)
        closing.execute(sa.text("UPDATE relatum.table_parts SET closed_at = now() WHERE part = 1"))
        closing.commit()
        writing.result()
    assert parts.offsets(1) == []
    assert parts.offsets() == list(range(MESSAGES))


def test_rows_of_one_transaction_lie_in_the_order_of_values(parts: Parts) -> None:
    """Whatever order they come in, and whatever is in a value: so each page of the index is come to once."""
    advance_parts(parts.engine)
    values = [f"{n * 7919 % 1009:04d}" for n in range(1009)] + ["line\nend", "line\u2028end\x85", "tab\tand\\"]
    texts = [f"1\t{copy_text(value)}\t{parts.stream_id}\t\\N\t{n}\n" for n, value in enumerate(values)]
    with parts.engine.begin() as connection:
        copy_rows(connection, texts)
    found = parts.sql("SELECT value, stream_offset FROM relatum.relationships_1 ORDER BY ctid")
    assert found == sorted((value, n) for n, value in enumerate(values))


def test_a_closed_part_has_a_dense_index(parts: Parts) -> None:
    """The index that grew with random values is replaced; lookups use the new one under the old one's name."""
    advance_parts(parts.engine)
    with parts.engine.begin() as connection:
        for start in range(0, 20_000, 1000):
            numbers = range(start, start + 1000)
            copy_rows(connection, [f"1\t{n * 7919 % 20_011:08d}\t{parts.stream_id}\t{n}\t{n}\n" for n in numbers])
    parts.turn()
    before = index_sizes(parts)
    parts.close()
    after = index_sizes(parts)
    assert set(after) == set(before), "names of indexes"
    assert after["relatum.relationships_1_lookup"] < 0.8 * before["relatum.relationships_1_lookup"]
    parts.close()
    assert index_sizes(parts) == after


def index_sizes(parts: Parts) -> dict[str, int]:
    """Bytes of the indexes of part 1, by name."""
    query = "SELECT indexrelid::regclass::text, pg_relation_size(indexrelid) FROM pg_index "
    return dict(map(tuple, parts.sql(query + "WHERE indrelid = 'relatum.relationships_1'::regclass")))


@pytest.fixture
def closed(parts: Parts) -> Parts:
    """Part 1 is closed and its messages are not retained, but its old index is still there."""
    parts.close_first()
    return parts


@pytest.mark.parametrize("tend", [lambda of: of.close(), lambda of: drop_parts(of.engine)], ids=["compact", "drop"])
def test_nobody_queues_behind_a_long_reader(closed: Parts, tend: Callable[[Parts], Any]) -> None:
    """While a reader has the table for long, what would need it alone gives up at once, and other lookups continue."""
    with closed.engine.connect() as reader:
        reader.execute(sa.text("SELECT count(*) FROM relatum.relationships"))
        with in_time(5.0):
            tend(closed)
        assert closed.all()[1][:4] == (1, True, True, False)
        assert len(closed.offsets()) == 2 * MESSAGES
    wait_until(lambda: bool(tend(closed)) or closed.all()[1][:4] != (1, True, True, False), what="it is done")


def test_what_somebody_needs_is_not_dropped(closed: Parts) -> None:
    """A part is dropped once every stream with rows in it has dropped those messages."""
    other = parts_of(closed.engine, "other")
    closed.sql("INSERT INTO relatum.part_streams VALUES (0, 9, 10, 1, :other)", other=other.stream_id)
    assert drop_parts(closed.engine) == {}
    other.retain(9)
    assert drop_parts(closed.engine) == {}
    other.retain(10)
    closed.retain(5)
    retained = closed.sql("SELECT retained_from FROM relatum.streams ORDER BY stream_id")
    assert retained == [(MESSAGES,), (10,)], "it only grows"
    assert drop_parts(closed.engine) == {closed.stream_id: MESSAGES, other.stream_id: 10}
    assert closed.numbers == [0, 2, 3]


def a_day_passes(parts: Parts) -> None:
    """As if what was written down of parts had been written a day before."""
    for column in ("leaving_at", "emptied_at"):
        parts.sql(f"UPDATE relatum.table_parts SET {column} = {column} - interval '1 day'")


def test_a_stream_that_is_kept_for_long_keeps_no_part_of_others(parts: Parts) -> None:
    """The rows of a long-kept stream leave a part a day after it is marked, and the part is dropped a day later."""
    kept = parts_of(parts.engine, "kept")
    advance_parts(parts.engine)
    parts.write(range(MESSAGES))
    kept.write([1, 2, 3])
    parts.turn()
    parts.write([MESSAGES])
    parts.close()
    empty_parts(parts.engine)
    a_day_passes(parts)
    empty_parts(parts.engine)
    assert len(parts.offsets(1)) == MESSAGES + 3, "as long as most of it is retained"
    parts.retain(MESSAGES)
    kept.retain(2)
    empty_parts(parts.engine)
    empty_parts(parts.engine)
    assert len(parts.offsets(1)) == MESSAGES + 3, "it was said just now"
    a_day_passes(parts)
    with parts.engine.connect().execution_options(isolation_level="REPEATABLE READ") as snapshot:
        query = sa.text("SELECT stream_offset FROM relatum.relationships WHERE stream_id = :id ORDER BY 1")
        assert list(snapshot.scalars(query, {"id": kept.stream_id})) == [1, 2, 3]
        empty_parts(parts.engine)
        assert list(snapshot.scalars(query, {"id": kept.stream_id})) == [1, 2, 3]
    assert parts.offsets(2) == [2, 3, MESSAGES]
    assert drop_parts(parts.engine) == {}, "snapshots may be older"
    a_day_passes(parts)
    drop_parts(parts.engine)
    assert parts.numbers == [0, 2, 3]
    assert parts.offsets() == [2, 3, MESSAGES]


def test_look_ups_go_on_while_parts_go(parts: Parts) -> None:
    """A retained message is found each time it is asked for while parts are made, closed and dropped."""
    over = threading.Event()
    parts.write([10**6])
    query = sa.text("SELECT count(*) FROM relatum.relationships WHERE stream_offset = 1000000 AND key_id = 1")

    def look() -> int:
        asked = 0
        with parts.engine.connect() as connection:
            while not over.is_set() or not asked:
                with connection.begin():
                    assert connection.execute(query).scalar_one() == 1
                asked += 1
        return asked

    advance_parts(parts.engine)
    parts.turn()
    with ThreadPoolExecutor(2) as pool:
        looking = [pool.submit(look) for _ in range(2)]
        try:
            for start in range(0, 5 * MESSAGES, MESSAGES):
                parts.write(range(start, start + MESSAGES))
                parts.turn()
                parts.retain(start + MESSAGES)
                parts.close()
                drop_parts(parts.engine)
        finally:
            over.set()
        assert all(each.result() for each in looking)
    parts.close()
    wait_until(lambda: drop_parts(parts.engine) is not None and len(parts.all()) == 4, what="the parts to be dropped")
    assert parts.offsets() == [10**6]


def test_recorders_go_from_part_to_part(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message has its row once though parts fill up, close and become compact under two recorders."""
    for limit, value in {"PART_BYTES": 8192, "TURN_S": 0.02, "MAINTAIN_S": 0.02}.items():
        monkeypatch.setattr(upkeep, limit, value)
    add_keys(place.engine, ["order"])
    with new_streams(place.amqp, 2) as streams:
        with place.recording(streams[0]), place.recording(streams[1]):
            for start in range(0, 400, 40):
                for stream in streams:
                    numbers = range(start, start + 40)
                    place.put(*[(b"", {"order": f"o{number}"}) for number in numbers], to=stream)
                    place.wait_recorded(stream)
            wait_until(lambda: sum(part.is_compact for part in Parts(place.engine).all()) > 3, what="compact parts")
        for stream in streams:
            assert [row[1] for row in place.rows(stream)] == [f"o{number}" for number in range(400)]
        assert verify(place.amqp, place.database, streams).ok


def test_a_plan_made_for_an_empty_part_does_not_outlive_that(parts: Parts) -> None:
    """A session that planned while a part was empty probes the part's index once it has rows."""
    advance_parts(parts.engine)
    with parts.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("VACUUM ANALYZE"))
        connection.execute(sa.text("SET plan_cache_mode = force_generic_plan"))
        query = "PREPARE asked AS SELECT * FROM relatum.relationships WHERE key_id = 1 AND value = $1"
        connection.execute(sa.text(query))
        explained = sa.text("EXPLAIN EXECUTE asked('v')")
        assert "Seq Scan on relationships_1" in "\n".join(connection.scalars(explained))
        parts.write(range(40_000))
        advance_parts(parts.engine)
        assert "Seq Scan on relationships_1" not in "\n".join(connection.scalars(explained))


def test_what_is_in_no_other_part_is_asked_of_one(parts: Parts, database_url: str) -> None:
    """Values in the order of time: a closed part that cannot have one is left out, one that has it never."""
    advance_parts(parts.engine)
    for start in range(0, 5 * MESSAGES, MESSAGES):
        rows = [f"1\tv{n:08d}\t{parts.stream_id}\t{n}\t{n}\n" for n in range(start, start + MESSAGES)]
        with parts.engine.begin() as connection:
            copy_rows(connection, rows)
        parts.turn()
    parts.close()
    sought = text_of(probe_statement("oldest", keys=1, names=1, floored=False))
    given = {"vhost": "/", "key_id_0": 1, "name_0": "s", "limit": 2, "since": None, "until": None}
    with psycopg.connect(database_url, autocommit=True) as asking:
        for n in range(0, 5 * MESSAGES, 7):
            found = asking.execute(sought.encode(), given | {"value_0": f"v{n:08d}"}).fetchall()
            assert [row[1] for row in found] == [n]
        # What the function queries.
        key_id, value = "CAST(%(key_id)s AS smallint)", "CAST(%(value)s AS text)"
        inside = f"""SELECT r.stream_offset, r.time_us FROM relatum.relationships r
          WHERE r.key_id = {key_id} AND r.value = {value} AND r.stream_id = CAST(%(stream_id)s AS integer)
            AND {part_may_hold_values("r", key_id, value, value)}
          ORDER BY r.time_us, r.stream_offset LIMIT 2"""
        sought_of = {"key_id": 1, "value": "v00000250", "stream_id": parts.stream_id}
        plan = plan_of(asking, "force_generic_plan", inside, sought_of)
    asked = [node for node in nodes_of(plan) if node.get("Index Name") == "relationships_lookup"]
    counts = [node["Actual Rows"] for node in asked if node["Actual Loops"]]
    assert sorted(counts)[-1] == 1
    assert len(counts) <= 4, "part 0, the one that has it, and those that are not closed"


def test_a_part_is_closed_by_what_was_committed_alone(parts: Parts) -> None:
    """A transaction that sees an older state than the rows would write down too little, and rows would not be found."""
    advance_parts(parts.engine)
    parts.turn()
    older = replace(parts, engine=parts.engine.execution_options(isolation_level="REPEATABLE READ"))
    with pytest.raises(sa.exc.DBAPIError, match="READ COMMITTED"):
        older.sql("SELECT relatum.close_part(1)")
    parts.sql(f'ALTER DATABASE "{parts.engine.url.database}" SET default_transaction_isolation = serializable')
    parts.engine.dispose()
    parts.close()
    assert parts.all()[1].is_closed


def test_a_recorder_of_the_release_before_goes_on(closed: Parts) -> None:
    """A recorder of the release before writes into part 0 and deletes no row of another part by its `ctid`."""
    columns = "stream_offset, time_us, stream_id, key_id, value"
    retention = (
        "DELETE FROM relatum.relationships WHERE ctid = ANY (ARRAY(SELECT ctid FROM relatum.relationships "
        "WHERE stream_id = :id AND stream_offset < :first LIMIT 10000)) AND stream_id = :id AND stream_offset < :first"
    )
    late = range(2 * MESSAGES, 3 * MESSAGES)
    with closed.engine.begin() as connection:
        connection.execute(sa.text("SET ROLE relatum_recorder"))
        gone = connection.execute(sa.text(retention), {"id": closed.stream_id, "first": MESSAGES // 2}).rowcount
        driver: Any = connection.connection.driver_connection
        with driver.cursor().copy(f"COPY relatum.relationships ({columns}) FROM STDIN".encode()) as copy:
            copy.write("".join(f"{n}\t{n}\t{closed.stream_id}\t1\tv{n}\n" for n in late))
    closed.close()
    assert gone == MESSAGES // 2
    assert closed.offsets() == list(range(MESSAGES // 2, 3 * MESSAGES))
    assert closed.offsets(0) == list(late)
    assert not closed.all()[0].is_closed


@pytest.mark.parametrize("step", ["make_part()", "close_part(1)", "finish_part(1)", "empty_part(1)", "drop_part(1)"])
def test_a_recorder_that_is_lost_in_a_step_leaves_nothing_of_it(closed: Parts, database_url: str, step: str) -> None:
    """A step whose session is lost changes nothing and holds no lock, and another recorder does it."""
    before_it = {
        "make_part()": ["UPDATE relatum.table_parts SET opened_at = now()"],
        "close_part(1)": [
            "UPDATE relatum.table_parts SET closed_at = NULL WHERE part = 1",
            "DELETE FROM relatum.part_streams; DELETE FROM relatum.part_keys",
            "DROP INDEX relatum.relationships_1_compact",
        ],
        "empty_part(1)": ["UPDATE relatum.table_parts SET leaving_at = now() - interval '2 days' WHERE part = 1"],
    }
    for statement in before_it.get(step, []):
        closed.sql(statement)
    before = state_of(closed)
    recorder = psycopg.connect(database_url)
    recorder.execute(f"SELECT relatum.{step}".encode())
    with socket.socket(fileno=os.dup(recorder.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)
    recorder.close()
    in_transactions = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
    wait_until(lambda: not closed.sql(in_transactions), what="its session is over")
    assert state_of(closed) == before
    assert closed.offsets() == list(range(2 * MESSAGES))
    assert closed.sql(f"SELECT relatum.{step}")[0][0]
    assert closed.offsets()[-MESSAGES:] == list(range(MESSAGES, 2 * MESSAGES))


def state_of(parts: Parts) -> tuple[list[Part], list[Any]]:
    """What the parts are, without what PostgreSQL counts by itself, and all tables and indexes of the schema."""
    tables = parts.sql("SELECT relname FROM pg_class WHERE relnamespace = 'relatum'::regnamespace ORDER BY 1")
    return [part._replace(size=0, known=0) for part in parts.all()], tables
