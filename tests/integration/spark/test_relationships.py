"""The relationship table in Spark: rows, balance, snapshots, push-down, and what is said where something is missing."""

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import relatum_spark
from relatum.errors import ConfigurationError, DatabaseUnavailable, InvalidInput, KeyNotDefined, StreamNotFound
from relatum.recording import prune
from relatum.store.catalog import remove_key
from relatum.store.parts import drop_parts
from tests.support import publish_plain, recording, unique_name, wait_until
from tests.support.databases import named
from tests.support.pages import blocks_of, run
from tests.support.pgbouncer import pgbouncer
from tests.support.place import Place
from tests.support.plans import filled_database
from tests.support.threads import beside

ROWS = 40_000
PARTITIONS = 8
TASKS = 4
"""Tasks that read one after the other, while rows are moved."""

SKEWED = """
INSERT INTO relatum.keys (name, sources, type)
  VALUES ('order_id', '{order_id}', 'text'), ('host', '{host}', 'text'), ('gone', '{gone}', 'text');
UPDATE relatum.keys SET removed_at = now() WHERE name = 'gone';
INSERT INTO relatum.streams (name, super_stream)
  VALUES ('hot', NULL), ('s-0', 's'), ('s-1', 's'), ('s-2', 's'), ('empty', NULL), ('old', NULL);
INSERT INTO relatum.coverage (stream_id, from_offset, to_offset, key_ids, with_time, is_tail)
  SELECT stream_id, 0, 2000000000, '{1,2}', true, true FROM relatum.streams WHERE name <> 'empty';
UPDATE relatum.streams SET replaced_at = now() WHERE name = 'old';
"""

COPY = "COPY relatum.relationships (stream_offset, time_us, stream_id, key_id, value, part) FROM STDIN"


def _skewed_rows() -> Iterator[tuple[int, int | None, int, int, str, int]]:
    """90 % of the rows in one stream, whose offsets jump by a thousand million in the middle; in two parts."""
    for n in range(ROWS):
        stream_id = 1 if n % 10 else 2 + n // 10 % 3
        offset = n if n < ROWS // 2 else 1_000_000_000 + n
        yield (
            offset,
            1_357_016_400_123_456 + n if n % 7 else None,
            stream_id,
            1 + n % 2,
            f"v{n // 20}",
            int(n > 0.7 * ROWS),
        )
    for n in range(1_000):
        yield n, None, 6, 1, "of a replaced stream", 0
        yield n, None, 1, 3, "of a removed key", 0


@pytest.fixture(scope="module")
def skewed(database_server_url: str, _migrated_template: str) -> Iterator[str]:
    """The URL of a database whose table is skewed, has a hole in its ids, and a quarter of its pages half empty."""
    then = "VACUUM ANALYZE relatum.relationships"
    with filled_database(database_server_url, _migrated_template, SKEWED, then=then) as connection:
        with connection.cursor() as cursor, cursor.copy(COPY) as copy:
            for row in _skewed_rows():
                copy.write_row(row)
        connection.execute(
            f"DELETE FROM relatum.relationships WHERE stream_id = 1 AND stream_offset < {ROWS // 4} "
            "AND stream_offset % 4 <> 0".encode()
        )
        connection.execute(then.encode())
        yield named(database_server_url, connection.info.dbname)


def _view(database: str, condition: str = "true") -> list[tuple[Any, ...]]:
    columns = "key, value, vhost, stream, stream_offset, (extract(epoch FROM time) * 1000000)::bigint"
    with psycopg.connect(database) as connection:
        rows = connection.execute(f"SELECT {columns} FROM relatum.relations WHERE {condition}".encode()).fetchall()
    return sorted(rows, key=itemgetter(0, 1, 3, 4))


def _rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    """The DataFrame's rows, sorted, its times in microseconds."""
    plain = frame.select("key", "value", "vhost", "stream", "stream_offset", F.unix_micros("time"))
    return sorted((tuple(row) for row in plain.collect()), key=itemgetter(0, 1, 3, 4))


def test_partitions_are_balanced(spark: SparkSession, skewed: str) -> None:
    """The largest of 8 has at most 1.2 times the rows of the smallest, and all rows are those of the view."""
    frame = relatum_spark.relationships(spark, database=skewed, partitions=PARTITIONS).cache()
    counted = frame.groupBy(F.spark_partition_id()).agg(F.count("*").alias("rows")).collect()
    sizes = [row["rows"] for row in counted]
    assert len(sizes) == PARTITIONS
    assert max(sizes) <= 1.2 * min(sizes), sizes
    assert _rows(frame) == _view(skewed), "nothing of replaced streams and removed keys"
    frame.unpersist()


@pytest.mark.usefixtures("spark")
def test_text_is_compared_as_spark_compares_it(place: Place) -> None:
    """Pushed-down comparisons use the order of bytes, whatever the database's collation is."""
    place.put_recorded((b"", {"order_id": "a"}), keys=["order_id"])
    reading = Mock()
    relatum_spark.relationships(reading, database=place.database)
    table = reading.read.jdbc.call_args.args[1]
    columns = ", ".join(f"pg_collation_for({name})" for name in ("key", "value", "vhost", "stream"))
    with psycopg.connect(place.database) as connection:
        assert connection.execute(f"SELECT {columns} FROM {table}".encode()).fetchall() == [('"C"',) * 4]


def test_streams_keys_and_times_are_chosen(spark: SparkSession, skewed: str) -> None:
    """By name, a super stream by its own name too; a time means the same in whatever time zone the session has."""
    chosen: list[tuple[dict[str, Any], str]] = [
        ({"keys": "host"}, "key = 'host'"),
        ({"streams": "s"}, "stream LIKE 's-_'"),
        ({"streams": ["s-1", "hot"], "keys": ["order_id"]}, "stream IN ('s-1', 'hot') AND key = 'order_id'"),
        ({"streams": "empty"}, "false"),
        ({"vhost": "/nowhere"}, "false"),
        ({"vhost": "/", "streams": "s-2", "partitions": 1, "keys": ["host", "order_id"]}, "stream = 's-2'"),
    ]
    for options, condition in chosen:
        frame = relatum_spark.relationships(spark, database=skewed, **options)
        assert _rows(frame) == _view(skewed, condition), options
    try:
        for zone in ("America/New_York", "+05:30"):
            spark.conf.set("spark.sql.session.timeZone", zone)
            frame = relatum_spark.relationships(spark, database=skewed)
            found = frame.where(F.col("time") < F.timestamp_micros(F.lit(1_357_016_400_123_456 + 100)))
            assert _rows(found) == _view(skewed, "time < timestamptz '2013-01-01 05:00:00.123556Z'")
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def _one_by_one(frame: DataFrame, then: Callable[[int], None]) -> Counter[tuple[str, int]]:
    """The places that the tasks of a frame read, one task after the other, each after something was done."""
    rows = frame.select("stream", "stream_offset").rdd
    read: Counter[tuple[str, int]] = Counter()
    for number in range(rows.getNumPartitions()):
        then(number)
        read.update(map(tuple, frame.sparkSession.sparkContext.runJob(rows, list, [number])))
    return read


@pytest.mark.parametrize("moves_at", [1, TASKS - 1])
def test_rows_that_are_moved_between_tasks_are_read_once(spark: SparkSession, place: Place, moves_at: int) -> None:
    """Of a part that is marked as leaving, tasks before its rows are moved and tasks after it read each row once."""
    place.sql(MOVING)
    frame = relatum_spark.relationships(spark, database=place.database, partitions=TASKS)
    assert frame.rdd.getNumPartitions() == TASKS

    def move(task: int) -> None:
        if task == moves_at:
            assert place.sql("SELECT relatum.empty_part(1)") == [(True,)]

    read = _one_by_one(frame, move)
    # Rows of messages that retention has dropped may be missing, as always: they were not moved.
    assert set(_places(place)) <= set(read)
    assert max(read.values()) == 1


def test_a_part_that_is_dropped_between_tasks_takes_its_own_rows_alone(spark: SparkSession, place: Place) -> None:
    """With a snapshot it is not dropped before that ends; without one the rest is read once, and nobody fails."""
    place.sql(MOVING)
    place.sql(GONE)
    everything = Counter(_places(place))

    def drop(expected: dict[int, int]) -> Callable[[int], None]:
        def then(task: int) -> None:
            if task == TASKS // 2:
                assert drop_parts(place.engine) == expected

        return then

    with relatum_spark.snapshot(place.database) as state:
        frame = relatum_spark.relationships(spark, snapshot=state, partitions=TASKS)
        assert _one_by_one(frame, drop({})) == everything
    frame = relatum_spark.relationships(spark, database=place.database, partitions=TASKS)
    read = _one_by_one(frame, drop({1: 2_401, 2: 266}))
    assert set(_places(place)) <= set(read) <= set(everything)
    assert max(read.values()) == 1


def _places(place: Place) -> list[Any]:
    return place.sql("SELECT name, stream_offset FROM relatum.relationships JOIN relatum.streams USING (stream_id)")


GONE = """
UPDATE relatum.table_parts SET leaving_at = NULL;
UPDATE relatum.streams SET retained_from = 4000;
INSERT INTO relatum.part_streams (part, stream_id, row_count, first_offset, last_offset)
  SELECT part, stream_id, count(*), min(stream_offset), max(stream_offset) FROM relatum.relationships
  WHERE part = 1 GROUP BY 1, 2;
"""
"""No message of the first part is retained."""

MOVING = """
INSERT INTO relatum.keys (name, sources, type) VALUES ('k', '{k}', 'text');
INSERT INTO relatum.streams (name, retained_from) VALUES ('short', 1800), ('long', 0);
INSERT INTO relatum.coverage (stream_id, from_offset, to_offset, key_ids, with_time, is_tail)
  SELECT n, 0, 8000, '{1}', true, true FROM generate_series(1, 2) n;
SELECT relatum.make_part();
UPDATE relatum.table_parts SET opened_at = now();
SELECT relatum.make_part();
UPDATE relatum.table_parts SET opened_at = now();
INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value, part)
  SELECT n, n, 1 + (n % 10) / 9, 1, 'v' || n, 1 + n * 3 / 8000 FROM generate_series(0, 7999) n;
UPDATE relatum.table_parts SET closed_at = now(), leaving_at = now() - interval '2 days' WHERE part = 1;
"""
"""Three parts; of the first, which is leaving, a tenth is retained, and much of the rest."""


def test_a_pooler_gets_its_sessions_back_as_they_were(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    """A setting of a task must not stay in a session that pgbouncer gives to other clients next."""
    place.sql(SMALL)
    with pgbouncer(place.database, tmp_path, pool_size=1, more="ignore_startup_parameters = extra_float_digits") as url:
        assert relatum_spark.relationships(spark, database=url).count() == 150
        with psycopg.connect(url) as session:
            assert session.execute("SHOW enable_nestloop").fetchone() == ("on",)


def test_what_is_not_there_is_named(spark: SparkSession, skewed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Spark is asked for anything. Where the driver is missing, it is said in three ways what to do."""
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"streams": "x'; DROP SCHEMA relatum CASCADE; --"}, StreamNotFound),
        ({"streams": "old"}, StreamNotFound),
        ({"streams": "hot", "vhost": "elsewhere"}, StreamNotFound),
        ({"keys": ["host", "gone"]}, KeyNotDefined),
    ]
    for options, error in wrong:
        with pytest.raises(error):
            relatum_spark.relationships(spark, database=skewed, **options)
    monkeypatch.setattr("relatum_spark._servers.DRIVER", "com.example.NoDriver")
    for call in (relatum_spark.relationships, relatum_spark.catalog):
        with pytest.raises(ConfigurationError) as said:
            call(spark, database="postgresql://u:s3cr3t@127.0.0.1:9/d")
        for way in ("spark.jars.packages=org.postgresql:postgresql:", "spark.jars=", "folder `jars`"):
            assert way in str(said.value)


SMALL = """
INSERT INTO relatum.keys (name, sources, type) VALUES ('a', '{a}', 'text'), ('b', '{b}', 'text');
INSERT INTO relatum.streams (name) VALUES ('s');
INSERT INTO relatum.coverage (stream_id, from_offset, to_offset, key_ids, with_time, is_tail)
  VALUES (1, 0, 50, '{1}', true, false), (1, 50, 100, '{1,2}', true, true);
INSERT INTO relatum.relationships SELECT n, NULL, 1, 1, 'x' FROM generate_series(0, 99) n;
INSERT INTO relatum.relationships SELECT n, NULL, 1, 2, 'y' FROM generate_series(50, 99) n;
"""
"""One stream: offsets below 100 recorded, those from 50 for two keys."""

LATER = """
INSERT INTO relatum.relationships SELECT n, NULL, 1, 1, 'later' FROM generate_series(100, 199) n;
UPDATE relatum.coverage SET to_offset = 200 WHERE is_tail;
INSERT INTO relatum.relationships SELECT n, NULL, 1, 2, 'back-filled' FROM generate_series(0, 49) n;
INSERT INTO relatum.coverage (stream_id, from_offset, to_offset, key_ids, with_time) VALUES (1, 0, 50, '{2}', true);
"""


def test_a_data_frame_stays_as_it_was_made(spark: SparkSession, place: Place) -> None:
    """Rows recorded or back-filled later are in the next one, however often this one is used."""
    place.sql(SMALL)
    frame = relatum_spark.relationships(spark, database=place.database)
    before = _view(place.database)
    assert _rows(frame) == before
    place.sql(LATER)
    assert _rows(frame) == before
    assert _rows(relatum_spark.relationships(spark, database=place.database)) == _view(place.database)


def test_a_snapshot_keeps_what_is_pruned(spark: SparkSession, place: Place) -> None:
    """Rows, streams and keys are as they were at its start; a snapshot that has ended is named."""
    place.put(*((b"", {"a": str(n), "b": "1"}) for n in range(100)))
    with recording(place.amqp, place.engine, place.stream, keys=["a", "b"]):
        place.wait_recorded()
        before = _view(place.database)
        with relatum_spark.snapshot(place.database) as state:
            remove_key(place.engine, "b")
            assert sum(prune(place.amqp, place.engine.url).rows.values()) >= 100
            frame = relatum_spark.relationships(spark, snapshot=state)
            assert _rows(frame) == before
            of_b = relatum_spark.relationships(spark, snapshot=state, keys="b")
            assert _rows(of_b) == [row for row in before if row[0] == "b"]
    assert _rows(relatum_spark.relationships(spark, database=place.database)) == _view(place.database, "key = 'a'")
    with pytest.raises(InvalidInput):
        relatum_spark.relationships(spark, snapshot=state)
    with pytest.raises(Exception, match=r'snapshot ".*" does not exist'):
        frame.collect()


def test_a_snapshot_ends_by_its_limit(database_url: str) -> None:
    """A hanging driver holds back vacuum until the limit; VACUUM FULL waits; no other database is read by it."""

    def is_over(state: relatum_spark.Snapshot) -> bool:
        try:
            with state.connect():
                return False
        except InvalidInput:
            return True

    with relatum_spark.snapshot(database_url) as state, psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("SET lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            connection.execute("VACUUM FULL relatum.relationships")
        session: Any = None
        with pytest.raises(InvalidInput, match="another database"):
            relatum_spark.relationships(session, database="postgresql://h/other", snapshot=state)
    with relatum_spark.snapshot(database_url, limit_s=1) as state:
        wait_until(lambda: is_over(state), what="the end of the snapshot")
    for limit_s in (0, 86_401):
        with pytest.raises(InvalidInput, match="seconds"), relatum_spark.snapshot(database_url, limit_s=limit_s):
            pass


def test_reads_are_exact_while_rows_come_and_go(spark: SparkSession, place: Place, is_long: bool) -> None:
    """With recorder and prune at work: no row twice, none missing below where the read ends, none of before missing."""
    stop = threading.Event()

    def recorded() -> int:
        return len(_view(place.database, "key = 'n'"))

    def publish() -> None:
        for start in count(0, 300):
            messages = [(b"", {"n": str(n), "old": "1"}) for n in range(start, start + 300)]
            publish_plain(place.amqp, place.stream, messages, confirm=False)
            # Not faster than they are recorded, or a slow machine would have more and more to read.
            wait_until(lambda start=start: stop.is_set() or recorded() >= start + 300, what="the rows")  # type: ignore[misc]
            if stop.is_set():
                return

    reads: list[tuple[int, list[int]]] = []
    with place.recording(keys=["n", "old"]):
        with beside(publish, stop=stop.set) as publishing:
            wait_until(lambda: recorded() > 1_000, what="the first rows")
            remove_key(place.engine, "old")
            with beside(partial(prune, place.amqp, place.engine.url, batch_rows=500)):
                # Until rows came between reads: three of them may be faster than the next rows.
                while len(reads) < (20 if is_long else 3) or reads[0][0] == reads[-1][0]:
                    assert not publishing.done(), "rows came all the time"
                    before = recorded()
                    frame = relatum_spark.relationships(spark, database=place.database, partitions=4)
                    reads.append((before, sorted(int(row["value"]) for row in frame.select("value").collect())))
            assert not publishing.done(), "rows came all the time"
        place.wait_recorded()
    assert reads[0][0] < reads[-1][0]
    for before, values in reads:
        assert values == list(range(len(values)))
        assert len(values) >= before


def test_nothing_shows_the_password(spark: SparkSession, skewed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a plan, the catalog, the session's settings, a snapshot's text, or an error of the driver or of Spark."""
    # A server that has none for us is not asked for it.
    url = re.sub(r"//([^:@/]+)@", r"//\1:s3cr3t@", skewed)
    secret = sa.make_url(url).password or ""
    relatum_spark.relationships(spark, database=url).explain(True)
    view = relatum_spark.catalog(spark, unique_name("c").replace("-", "_"), database=url)
    spark.sql(f"SELECT count(*) FROM {view}").explain("formatted")
    spark.sql("SET").show(1_000, truncate=False)
    with relatum_spark.snapshot(url) as state:
        print(state)
    shown = capsys.readouterr().out
    assert "JDBCRelation" in shown
    assert secret not in shown
    url = "postgresql://someone:s3cr3t@127.0.0.1:9/nowhere"
    with pytest.raises(DatabaseUnavailable) as refused:
        relatum_spark.relationships(spark, database=url)
    view = relatum_spark.catalog(spark, unique_name("c").replace("-", "_"), database=url)
    with pytest.raises(Exception, match=r"(?i)jdbc|connect") as failed:
        spark.sql(f"SELECT count(*) FROM {view}").collect()
    assert "s3cr3t" not in f"{refused.value} {failed.value}"


def test_the_catalog_works_inside_postgresql(
    spark: SparkSession, skewed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Aggregates, filters, orders and limits are pushed down; the catalog is made once for one database."""
    name = unique_name("c").replace("-", "_")
    view = relatum_spark.catalog(spark, name, database=skewed)

    def plan(query: str) -> str:
        spark.sql(query).explain()
        return capsys.readouterr().out

    query = f"SELECT key, count(*) AS n FROM {view} WHERE stream = 's-1' GROUP BY key"
    shown = plan(query)
    assert "PushedAggregates: [COUNT(*)]" in shown
    assert "stream = 's-1'" in shown
    counted = {row["key"]: row["n"] for row in spark.sql(query).collect()}
    assert counted == Counter(row[0] for row in _view(skewed, "stream = 's-1'"))
    query = f"SELECT stream_offset FROM {view} WHERE key = 'host' ORDER BY stream_offset DESC LIMIT 3"
    assert "PushedTopN: ORDER BY [stream_offset DESC" in plan(query)
    found = [row["stream_offset"] for row in spark.sql(query).collect()]
    assert found == sorted((row[4] for row in _view(skewed, "key = 'host'")), reverse=True)[:3]
    assert relatum_spark.catalog(spark, name, database=skewed) == view
    with pytest.raises(ConfigurationError, match="another name"):
        relatum_spark.catalog(spark, name, database="postgresql://u@elsewhere/db")
    with pytest.raises(InvalidInput, match="name"):
        relatum_spark.catalog(spark, "x.y", database=skewed)


def test_what_the_page_shows_of_spark_runs(spark: SparkSession, skewed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Python block of docs/sql.md, one after the other, on this database."""
    url = sa.make_url(skewed)
    monkeypatch.setenv("RELATUM_DATABASE_URL", skewed)
    names: dict[str, Any] = {"spark": spark}
    blocks = blocks_of("sql.md", renamed={"reader": str(url.username), "…": url.password or ""})
    assert len(blocks) >= 3
    for block in blocks:
        run("sql.md", block.replace("db.example.com:5432/shop", f"{url.host}:{url.port}/{url.database}"), names)
    assert names["rows"].count() == len(_view(skewed, "key = 'order_id'"))
