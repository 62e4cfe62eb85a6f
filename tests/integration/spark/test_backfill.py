"""Back-fill by Spark: what it writes is what a recorder would have written, whoever is killed or works beside it."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession

import relatum_spark
from relatum.errors import ConfigurationError, CoverageConflict, InvalidInput, KeyNotDefined, StreamNotFound
from relatum.recording import backfill as kernel_backfill
from relatum.recording import status, verify
from relatum.store import add_keys, make_engine, streams_named
from relatum_migrations import upgrade
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    publish_plain,
    record,
    recording,
    rows_of,
    unique_name,
    wait_recorded,
    wait_until,
)

KEYS = ["order_id", "host"]


def orders(count: int, start: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    """Numbered orders on three hosts with a time of their own, of which each tenth has no usable number."""
    return [
        (
            b"%d" % n,
            {
                "order_id": "x" * 2000 if n % 10 == 5 else f"o{n}",
                "host": f"h{n % 3}",
                "relatum_time": 1_700_000_000_000_000 + n * 1000,
            },
        )
        for n in range(start, start + count)
    ]


def fill(spark: SparkSession, streams: str | list[str], urls: tuple[str, str], **options: Any) -> list[Any]:
    """Back-fill by Spark."""
    return relatum_spark.backfill(spark, streams, broker=urls[0], database=urls[1], **options)


def table_of(engine: sa.Engine, stream: str) -> list[tuple[Any, ...]]:
    """All rows of a stream with their times."""
    query = sa.text(
        "SELECT stream_offset, k.name, value, time_us FROM relatum.relationships JOIN relatum.keys k USING (key_id) "
        "JOIN relatum.streams s USING (stream_id) WHERE s.name = :name ORDER BY 1, 2"
    )
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(query, {"name": stream})]


def skips_of(engine: sa.Engine) -> list[tuple[Any, ...]]:
    """What was skipped: key, reason, how often."""
    with engine.connect() as connection:
        return [
            tuple(row)
            for row in connection.execute(sa.text("SELECT key_id, reason, count FROM relatum.skips ORDER BY 1"))
        ]


def closed_ranges(engine: sa.Engine) -> list[tuple[Any, ...]]:
    """Ranges that are no tails: from, to, kind."""
    query = "SELECT from_offset, to_offset, kind FROM relatum.coverage WHERE NOT is_tail ORDER BY stream_id, 1"
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text(query))]


@pytest.fixture
def urls(amqp_url: str, database_url: str) -> tuple[str, str]:
    """The broker's and the database's."""
    return amqp_url, database_url


@pytest.fixture
def other_engine(empty_database_url: str) -> Iterator[sa.Engine]:
    """A second database with the schema, to compare with."""
    upgrade(empty_database_url)
    engine = make_engine(empty_database_url)
    yield engine
    engine.dispose()


def test_it_writes_what_the_recorder_would_have_written(
    spark: SparkSession, urls: tuple[str, str], engine: sa.Engine, other_engine: sa.Engine, stream_name: str
) -> None:
    """Rows, times and skips are the same; coverage is one range up to the tail; a second run finds nothing."""
    publish_plain(urls[0], stream_name, orders(2000), confirm=False)
    record(urls[0], other_engine, stream_name, keys=KEYS)
    add_keys(engine, KEYS)
    (report,) = fill(spark, stream_name, urls, slice_offsets=170)
    assert (report.messages, report.rows, report.from_offset, report.to_offset) == (2000, 3800, 0, 2000)
    assert table_of(engine, stream_name) == table_of(other_engine, stream_name)
    assert skips_of(engine) == skips_of(other_engine)
    assert closed_ranges(engine) == [(0, 2000, "recorded")]
    (seen,) = status(urls[0], engine.url, [stream_name])
    assert {name: seen.covered[name] for name in [*KEYS, "time"]} == {key: [(0, 2000)] for key in [*KEYS, "time"]}
    assert fill(spark, stream_name, urls)[0].messages == 0


def test_live_recording_and_other_back_fills_go_on_beside_it(
    spark: SparkSession, urls: tuple[str, str], engine: sa.Engine, stream_name: str
) -> None:
    """A recorder, a kernel's back-fill and Spark's at once: no row twice, none missing, no hole at the hand-over."""
    publish_plain(urls[0], stream_name, orders(2000), confirm=False)
    with recording(urls[0], engine, stream_name, keys=["order_id"]):
        wait_recorded(urls[0], engine, stream_name)
        add_keys(engine, ["host"])
        beside = [
            threading.Thread(target=publish_plain, args=[urls[0], stream_name, orders(500, start=2000)]),
            threading.Thread(target=kernel_backfill, args=[urls[0], engine.url, stream_name]),
        ]
        for thread in beside:
            thread.start()
        fill(spark, stream_name, urls, slice_offsets=100)
        for thread in beside:
            thread.join(90)
        wait_recorded(urls[0], engine, stream_name)
    fill(spark, stream_name, urls)
    hosts = [offset for key, _, offset in rows_of(engine, stream_name) if key == "host"]
    assert hosts == list(range(2500))
    (seen,) = status(urls[0], engine.url, [stream_name])
    assert seen.covered["host"] == [(0, 2500)]


def test_only_the_named_keys_are_filled(
    spark: SparkSession, urls: tuple[str, str], engine: sa.Engine, stream_name: str
) -> None:
    """Of two new keys one is asked for; the other stays unrecorded, and coverage says so."""
    publish_plain(urls[0], stream_name, orders(30))
    add_keys(engine, KEYS)
    fill(spark, stream_name, urls, keys=["host"])
    assert {key for key, _, _ in rows_of(engine, stream_name)} == {"host"}
    (seen,) = status(urls[0], engine.url, [stream_name])
    assert seen.covered["order_id"] == []


def test_several_streams_and_partitions_in_one_job(
    spark: SparkSession, urls: tuple[str, str], engine: sa.Engine, stream_name: str
) -> None:
    """A super stream stands for its partitions, which are known by its name afterwards."""
    super_stream = unique_name()
    partitions = [f"{super_stream}-{number}" for number in range(2)]
    for partition in partitions:
        declare_stream(urls[0], partition)
    try:
        with broker_connection(urls[0]) as connection:
            channel = connection.channel()
            channel.exchange_declare(super_stream, "direct", durable=True, arguments={"x-super-stream": True})
            for number, partition in enumerate(partitions):
                arguments = {"x-stream-partition-order": number}
                channel.queue_bind(partition, super_stream, str(number), arguments=arguments)
        for number, name in enumerate([stream_name, *partitions]):
            publish_plain(urls[0], name, orders(20, start=100 * number))
        add_keys(engine, KEYS)
        reports = fill(spark, [stream_name, super_stream], urls)
        assert [(report.stream, report.messages) for report in reports] == [
            (name, 20) for name in [stream_name, *partitions]
        ]
        with engine.connect() as connection:
            assert [row.name for row in streams_named(connection, "/", [super_stream])] == partitions
    finally:
        with broker_connection(urls[0]) as connection:
            connection.channel().exchange_delete(super_stream)
        for partition in partitions:
            delete_stream(urls[0], partition)


@pytest.mark.differs
def test_a_replaced_stream_is_refused_as_the_kernel_does(
    spark: SparkSession, urls: tuple[str, str], engine: sa.Engine, stream_name: str
) -> None:
    """The rows of another stream are never written in its name."""
    publish_plain(urls[0], stream_name, orders(10))
    add_keys(engine, ["order_id"])
    fill(spark, stream_name, urls)
    delete_stream(urls[0], stream_name)
    declare_stream(urls[0], stream_name)
    publish_plain(urls[0], stream_name, orders(10, start=50))
    add_keys(engine, ["host"])
    with pytest.raises(CoverageConflict, match="not the one that was recorded"):
        fill(spark, stream_name, urls)


def test_the_rate_of_all_tasks_together_is_kept(
    spark: SparkSession, urls: tuple[str, str], engine: sa.Engine, stream_name: str
) -> None:
    """600 messages at 200 a second take no less than two seconds, whatever the number of tasks."""
    publish_plain(urls[0], stream_name, orders(600))
    add_keys(engine, ["order_id"])
    (report,) = fill(spark, stream_name, urls, messages_per_s=200, slice_offsets=50)
    assert report.messages == 600
    assert report.seconds > 2


def test_what_is_wrong_is_said_before_any_job(
    spark: SparkSession, urls: tuple[str, str], engine: sa.Engine, stream_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers out of range, unknown names, and no server at all are one clear error each."""
    with pytest.raises(InvalidInput, match="messages_per_s"):
        fill(spark, stream_name, urls, messages_per_s=0)
    with pytest.raises(InvalidInput, match="partitions"):
        fill(spark, stream_name, urls, partitions=0)
    with pytest.raises(InvalidInput, match="slice_offsets"):
        fill(spark, stream_name, urls, slice_offsets=0)
    with pytest.raises(KeyNotDefined):
        fill(spark, stream_name, urls, keys=["nothing"])
    with pytest.raises(StreamNotFound):
        fill(spark, unique_name(), urls)
    monkeypatch.delenv("RELATUM_DATABASE_URL", raising=False)
    with pytest.raises(ConfigurationError, match="RELATUM_DATABASE_URL"):
        relatum_spark.backfill(spark, stream_name, broker=urls[0])


def test_a_worker_killed_in_the_middle_leaves_the_table_equal_and_the_next_run_goes_on(
    spark: SparkSession, urls: tuple[str, str], engine: sa.Engine, stream_name: str
) -> None:
    """Killed by SIGKILL between two commits: what is covered is right, the rest is filled by running it again."""
    publish_plain(urls[0], stream_name, orders(3000), confirm=False)
    add_keys(engine, KEYS)
    killed = threading.Event()

    def kill() -> None:
        def is_under_way() -> bool:
            return bool(closed_ranges(engine)) and bool(workers())

        wait_until(is_under_way, what="a first slice covered")
        for process in workers():
            os.kill(process, signal.SIGKILL)
        killed.set()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(Exception, match=r"worker|job|stage|Python"):  # Spark's own, by the moment of the kill
        fill(spark, stream_name, urls, slice_offsets=100, messages_per_s=600)
    thread.join(90)
    assert killed.is_set()
    covered = sum(end - start for start, end, _ in closed_ranges(engine))
    assert 0 < covered < 3000
    assert verify(urls[0], engine.url, [stream_name]).ok
    (report,) = fill(spark, stream_name, urls)
    assert report.messages == 3000 - covered
    assert len(rows_of(engine, stream_name)) == 5700


def workers() -> list[int]:
    """The processes of Spark's Python workers below this one: children of its daemon."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    return [
        process
        for process, parent in parents.items()
        if is_daemon(parent) and is_daemon(process) and below(process, parents)
    ]


def is_daemon(process: int) -> bool:
    """Whether it runs pyspark's daemon, as its forked workers do."""
    try:
        return Path(f"/proc/{process}/comm").read_text() == "pyspark.daemon\n"
    except OSError:
        return False


def below(process: int, parents: dict[int, int]) -> bool:
    """Whether a process descends from this one."""
    while process in parents:
        process = parents[process]
        if process == os.getpid():
            return True
    return False
