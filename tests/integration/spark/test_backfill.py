"""Back-fill by Spark: it writes what a recorder would have written, despite kills and concurrent writers."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import relatum_spark
from relatum.errors import ConfigurationError, CoverageConflict, KeyNotDefined, StreamNotFound
from relatum.recording import backfill as kernel_backfill
from relatum.store.catalog import add_keys, streams_named
from relatum.store.database import IDLE_S, as_engine
from relatum.superstreams import Layout
from tests.support import publish_plain, unique_name, wait_until
from tests.support._raw_publisher import RawPublisher
from tests.support.databases import Databases
from tests.support.place import Place
from tests.support.spark import Here
from tests.support.threads import beside

KEYS = ["order_id", "host"]
PARTITIONS = 2
BEGAN_US = 1_700_000_000_000_000


def publish(place: Place, count: int, start: int = 0, stream: str | None = None) -> None:
    """Publish numbered orders on three hosts with a time of their own, of which each tenth has no usable number."""
    orders = [
        (
            b"%d" % n,
            {"order_id": "x" * 2000 if n % 10 == 5 else f"o{n}", "host": f"h{n % 3}", "relatum_time": BEGAN_US + n},
        )
        for n in range(start, start + count)
    ]
    publish_plain(place.amqp, stream or place.stream, orders, confirm=False)


def fill(place: Place, *streams: str, spark: Any = None, **options: Any) -> list[Any]:
    """Back-fill by Spark, or by its tasks in this process."""
    given = {"broker": place.amqp, "database": place.database} | options
    return relatum_spark.backfill(spark or Here(), list(streams) or place.stream, **given)


TABLE = (
    "SELECT s.name, stream_offset, k.name, value, time_us FROM relatum.relationships JOIN relatum.keys k USING (key_id)"
    " JOIN relatum.streams s USING (stream_id) ORDER BY 1, 2, 3"
)
SKIPS = "SELECT key_id, reason, count FROM relatum.skips ORDER BY 1"
CLOSED = "SELECT from_offset, to_offset, kind FROM relatum.coverage WHERE NOT is_tail ORDER BY stream_id, 1"


@pytest.fixture
def other(place: Place, _databases: Databases) -> Iterator[Place]:
    """The same stream with a second database, to compare with."""
    with as_engine(url := _databases.take()) as engine:
        yield replace(place, database=url, engine=engine)
    _databases.give_back(url)


def test_it_writes_what_the_recorder_would_have_written(spark: SparkSession, place: Place, other: Place) -> None:
    """Rows, times and skips are the same; coverage is one range up to the tail; a second run finds nothing."""
    publish(place, 2000)
    other.record()
    add_keys(place.engine, KEYS)
    (report,) = fill(place, spark=spark, slice_offsets=170)
    assert (report.messages, report.rows, report.from_offset, report.to_offset) == (2000, 3800, 0, 2000)
    for query in (TABLE, SKIPS):
        assert place.sql(query) == other.sql(query)
    assert place.sql(CLOSED) == [(0, 2000, "recorded")]
    assert place.status().covered == {key: [(0, 2000)] for key in (*KEYS, "time")}
    assert fill(place)[0].messages == 0


def test_live_recording_and_other_back_fills_go_on_beside_it(spark: SparkSession, place: Place) -> None:
    """A recorder, a kernel's back-fill and Spark's at once: no row twice, none missing, no hole at the hand-over."""
    publish(place, 2000)
    with place.recording(keys=["order_id"]):
        place.wait_recorded()
        add_keys(place.engine, ["host"])
        with beside(publish, place, 500, 2000), beside(kernel_backfill, place.amqp, place.engine.url, place.stream):
            fill(place, spark=spark, slice_offsets=100)
        place.wait_recorded()
    fill(place)
    hosts = [offset for key, _, offset in place.rows() if key == "host"]
    assert hosts == list(range(2500))
    assert place.status().covered["host"] == [(0, 2500)]


def test_only_the_named_keys_are_filled_of_several_streams(place: Place, layout: Layout) -> None:
    """One job fills the named key alone of several streams; a super stream's partitions are known by its name."""
    names = [place.stream, *(each.stream for each in layout)]
    for number, name in enumerate(names):
        publish(place, 20, 100 * number, name)
    add_keys(place.engine, KEYS)
    reports = fill(place, place.stream, layout.super_stream, keys=["host"])
    assert [(report.stream, report.messages) for report in reports] == [(name, 20) for name in names]
    with place.engine.connect() as connection:
        assert [row.name for row in streams_named(connection, "/", [layout.super_stream])] == names[1:]
    assert {key for key, _, _ in place.rows()} == {"host"}
    assert place.status().covered["order_id"] == []


@pytest.mark.differs
def test_a_replaced_stream_is_refused_as_the_kernel_does(place: Place) -> None:
    """The rows of another stream are never written in its name."""
    publish(place, 10)
    add_keys(place.engine, ["order_id"])
    fill(place)
    place.declare_again()
    publish(place, 10, 50)
    add_keys(place.engine, ["host"])
    with pytest.raises(CoverageConflict):
        fill(place)


def test_a_batch_that_cannot_be_unpacked_does_not_keep_the_back_fill_from_its_end(place: Place) -> None:
    """All other messages are recorded, and the call returns; the batch stays uncovered."""
    place.put((b"", {"order_id": "a"}))
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish((7, 2, 9, b"compressed"))
    place.put((b"", {"order_id": "b"}))
    add_keys(place.engine, ["order_id"])
    (report,) = fill(place)
    assert (report.messages, place.values()) == (2, ["a", "b"])
    assert place.status().covered["order_id"] == [(0, 1), (3, 4)]


def test_a_task_that_freezes_amid_a_commit_keeps_no_locks(place: Place) -> None:
    """PostgreSQL ends a transaction of the driver or of a task that is idle for too long."""
    place.sql("CREATE TABLE limits (idle text)")
    place.sql(
        "CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO limits VALUES (current_setting('idle_in_transaction_session_timeout')); RETURN NEW; END $$"
    )
    place.sql("CREATE TRIGGER look BEFORE INSERT ON relatum.coverage FOR EACH ROW EXECUTE FUNCTION look()")
    publish(place, 10)
    add_keys(place.engine, ["order_id"])
    fill(place)
    assert place.sql("SELECT DISTINCT idle FROM limits") == [(f"{IDLE_S:g}s",)]


def test_the_rate_of_all_tasks_together_is_kept(place: Place) -> None:
    """The two tasks that run at once have half of the rate each, however many slices there are."""
    publish(place, 300)
    add_keys(place.engine, ["order_id"])
    (report,) = fill(place, messages_per_s=100, slice_offsets=50)
    assert report.messages == 300
    assert report.seconds >= 3


def test_what_is_wrong_is_said_before_any_job(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown names, and no server at all, are one clear error each."""
    with pytest.raises(KeyNotDefined):
        fill(place, keys=["nothing"])
    with pytest.raises(StreamNotFound):
        fill(place, unique_name())
    monkeypatch.delenv("RELATUM_DATABASE_URL", raising=False)
    with pytest.raises(ConfigurationError, match="RELATUM_DATABASE_URL"):
        fill(place, database=None)


def test_a_worker_killed_in_the_middle_leaves_the_table_equal_and_the_next_run_goes_on(
    spark: SparkSession, place: Place
) -> None:
    """Killed by SIGKILL between two commits: what is covered is right, the rest is filled by running it again."""
    publish(place, 3000)
    add_keys(place.engine, KEYS)

    def kill() -> None:
        wait_until(lambda: place.sql(CLOSED) and workers(), what="a first slice covered")
        for process in workers():
            os.kill(process, signal.SIGKILL)

    # The error is Spark's own, depending on the moment of the kill.
    with beside(kill), pytest.raises(Exception, match=r"worker|job|stage|Python"):
        fill(place, spark=spark, slice_offsets=100, messages_per_s=600)
    done = sum(end - start for start, end, _ in place.sql(CLOSED))
    assert 0 < done < 3000
    assert place.verify().ok
    (report,) = fill(place)
    assert report.messages == 3000 - done
    assert len(place.rows()) == 5700


def workers() -> list[int]:
    """The processes of Spark's Python workers below this one: children of its daemon, which have its name."""
    parents, daemons = {}, set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            parents[int(entry.name)] = int(rest.split()[1])
            if name == "pyspark.daemon":
                daemons.add(int(entry.name))

    def is_below(process: int) -> bool:
        while process in parents and process != os.getpid():
            process = parents[process]
        return process == os.getpid()

    return [process for process in daemons if parents[process] in daemons and is_below(process)]
