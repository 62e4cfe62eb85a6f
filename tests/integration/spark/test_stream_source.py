"""Streaming queries over RabbitMQ streams: each message once, whatever is replayed, limited, deleted or restarted."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyspark
import pytest
import sqlalchemy as sa
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from relatum.local import LocalServers
from relatum.store import add_keys
from relatum_spark import register
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    publish_plain,
    stream_available,
    unique_name,
    wait_until,
)

LIMIT_S = 240
FAST = {"processingTime": "100 milliseconds"}

HAS_ADMISSION = tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 2)
needs_admission = pytest.mark.skipif(not HAS_ADMISSION, reason="Spark before 4.2 tells a source nothing of triggers")


class Run:
    """One streaming query after another with one checkpoint, each writing what it reads to files."""

    def __init__(self, spark: SparkSession, directory: Path, amqp_url: str, stream_url: str) -> None:
        directory.mkdir(exist_ok=True)
        self._spark = spark
        self._directory = directory
        self._options = {"broker": amqp_url, "streamUrl": stream_url, "startingOffsets": "earliest"}
        self.checkpoint = directory / "checkpoint"

    def load(self, options: dict[str, Any]) -> DataFrame:
        """A streaming data frame, from the first message on unless the options say otherwise."""
        return self._spark.readStream.format("rabbitmq_streams").options(**(self._options | options)).load()

    def start(self, options: dict[str, Any], **trigger: Any) -> StreamingQuery:
        """Start a query that writes stream, offset and value."""
        stream = self.load(options)
        writer = stream.select("stream", "offset", "value").writeStream.foreachBatch(self._write)
        return writer.option("checkpointLocation", str(self.checkpoint)).trigger(**trigger).start()

    def _write(self, frame: Any, batch: int) -> None:
        rows = [[row.stream, row.offset, bytes(row.value).decode()] for row in frame.collect()]
        tries = len(list(self._directory.glob(f"batch-{batch}-*")))
        written = self._directory / "being-written"
        written.write_text(json.dumps(rows))
        written.rename(self._directory / f"batch-{batch}-{tries}")

    def to_end(self, options: dict[str, Any], **trigger: Any) -> list[dict[str, Any]]:
        """Run a query that ends by itself, and return its progress."""
        query = self.start(options, **(trigger or {"availableNow": True}))
        assert query.awaitTermination(LIMIT_S), "the query did not end"
        return [json.loads(progress.json) for progress in query.recentProgress]

    def batch(self, number: int, attempt: int = 0) -> list[tuple[str, int, str]]:
        """The rows of one try of a batch."""
        return sorted(map(tuple, json.loads((self._directory / f"batch-{number}-{attempt}").read_text())))

    def batches(self) -> list[int]:
        """The numbers of all batches that were written."""
        return sorted({int(path.name.split("-")[1]) for path in self._directory.glob("batch-*")})

    def rows(self) -> list[tuple[str, int, str]]:
        """The rows of all batches, of the last try of each."""
        tries = {path.name.split("-")[1]: path for path in sorted(self._directory.glob("batch-*"))}
        return sorted(tuple(row) for path in tries.values() for row in json.loads(path.read_text()))

    def forget_commit(self) -> int:
        """Make the last batch one that was not committed; return its number."""
        last = max(int(path.name) for path in (self.checkpoint / "commits").iterdir() if path.name.isdecimal())
        (self.checkpoint / "commits" / str(last)).unlink()
        (self.checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)
        return last

    def end_of(self, batch: int) -> dict[str, int]:
        """The offset in the checkpoint's log of a batch."""
        found: dict[str, int] = json.loads((self.checkpoint / "offsets" / str(batch)).read_text().splitlines()[-1])
        return found


@pytest.fixture
def run(spark: SparkSession, tmp_path: Path, amqp_url: str, stream_url: str) -> Iterator[Run]:
    """Queries of this test; those that still run are stopped."""
    register(spark)
    yield Run(spark, tmp_path, amqp_url, stream_url)
    for query in spark.streams.active:
        query.stop()


@pytest.fixture
def partitions(amqp_url: str) -> Iterator[Callable[[int], None]]:
    """Make a super stream `partitions.name` have so many partitions."""
    yield from _super_stream(amqp_url)


def _super_stream(amqp_url: str) -> Iterator[Any]:
    name = unique_name()
    made: list[str] = []

    def extend(count: int) -> None:
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            arguments = {"x-super-stream": True}
            channel.exchange_declare(name, "direct", durable=True, arguments=arguments)
            for number in range(len(made), count):
                declare_stream(amqp_url, f"{name}-{number}")
                order = {"x-stream-partition-order": number}
                channel.queue_bind(f"{name}-{number}", name, str(number), arguments=order)
                made.append(f"{name}-{number}")

    extend.name = name  # type: ignore[attr-defined]
    yield extend
    for stream in made:
        delete_stream(amqp_url, stream)
    with broker_connection(amqp_url) as connection:
        connection.channel().exchange_delete(name)


def bodies(begin: int, end: int) -> list[bytes]:
    """Bodies that say their number."""
    return [b"%d" % number for number in range(begin, end)]


def expected(stream: str, begin: int, end: int) -> list[tuple[str, int, str]]:
    """The rows of messages published by `bodies` to an empty stream."""
    return sorted((stream, number, str(number)) for number in range(begin, end))


@needs_admission
def test_a_limit_cuts_what_is_there_into_batches_of_at_most_that_many(
    run: Run, amqp_url: str, stream_name: str
) -> None:
    """1,000 offsets by 100 are ten batches, each of at most 100, and every message comes once.

    Progress holds the end of what was read and the end of the stream: their difference is the lag.
    """
    publish_plain(amqp_url, stream_name, bodies(0, 1000), confirm=False)
    progress = run.to_end({"stream": stream_name, "maxOffsetsPerTrigger": 100})
    source = next(each["sources"][0] for each in progress if each["numInputRows"])
    assert (source["endOffset"], source["latestOffset"]) == ({stream_name: 100}, {stream_name: 1000})
    assert [each["numInputRows"] for each in progress if each["numInputRows"]] == [100] * 10
    assert run.rows() == expected(stream_name, 0, 1000)


def test_a_limit_holds_on_every_version(run: Run, amqp_url: str, stream_name: str) -> None:
    """With a trigger by time no batch is larger than the limit, also after a restart."""
    publish_plain(amqp_url, stream_name, bodies(0, 300), confirm=False)
    options = {"stream": stream_name, "maxOffsetsPerTrigger": 50}
    query = run.start(options, **FAST)
    wait_until(lambda: len(run.rows()) >= 100, LIMIT_S)
    query.stop()
    query = run.start(options, **FAST)
    wait_until(lambda: len(run.rows()) >= 300, LIMIT_S)
    query.stop()
    assert all(len(run.batch(number)) <= 50 for number in run.batches())
    assert run.rows() == expected(stream_name, 0, 300)


@needs_admission
def test_available_now_ends_though_a_producer_goes_on(run: Run, amqp_url: str, stream_name: str) -> None:
    """A run reads what was there when it began, in several batches, and no more; the next run goes on there."""
    count = 1500
    publish_plain(amqp_url, stream_name, bodies(0, count), confirm=False)
    is_over = threading.Event()

    def produce() -> None:
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            number = count
            while not is_over.is_set():
                channel.basic_publish("", stream_name, b"%d" % number)
                connection.process_data_events(0.005)
                number += 1

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        options = {"stream": stream_name, "maxOffsetsPerTrigger": 1000}
        progress = run.to_end(options)
        first = len(run.rows())
        assert first >= count
        assert progress[-1]["sources"][0]["latestOffset"][stream_name] > first
    finally:
        is_over.set()
        producer.join()
    run.to_end(options)
    rows = run.rows()
    assert len(rows) > first
    assert rows == expected(stream_name, 0, len(rows))


def test_the_first_batch_replayed_loses_nothing_when_the_query_begins_at_the_end(
    run: Run, amqp_url: str, stream_name: str
) -> None:
    """The end has moved when the first batch is replayed: what came in between is read all the same."""
    publish_plain(amqp_url, stream_name, bodies(0, 50))
    options = {"stream": stream_name, "startingOffsets": "latest"}
    query = run.start(options, **FAST)
    wait_until(lambda: run.batches() == [0], LIMIT_S)
    query.stop()
    if (run.checkpoint / "commits" / "0").exists():
        assert run.forget_commit() == 0
    publish_plain(amqp_url, stream_name, bodies(50, 80))
    query = run.start(options, **FAST)
    wait_until(lambda: len(run.rows()) >= 30, LIMIT_S)
    query.stop()
    assert run.rows() == expected(stream_name, 50, 80)


def test_where_to_begin_is_asked_for_once(run: Run, amqp_url: str, stream_name: str) -> None:
    """The checkpoint, not the option, says where a second run begins."""
    publish_plain(amqp_url, stream_name, bodies(0, 50))
    begin = {"stream": stream_name, "startingOffsets": json.dumps({stream_name: 20})}
    run.to_end(begin)
    assert run.rows() == expected(stream_name, 20, 50)
    publish_plain(amqp_url, stream_name, bodies(50, 60))
    run.to_end(begin)
    assert run.rows() == expected(stream_name, 20, 60)


def test_a_batch_that_was_not_committed_is_read_again_the_same(run: Run, amqp_url: str, stream_name: str) -> None:
    """Three times: the last commit is lost, more is published, and the same range comes again, then what is new.

    Rows follow from offsets alone, so a replay by other tasks gives the same.
    """
    count = 40
    publish_plain(amqp_url, stream_name, bodies(0, count))
    run.to_end({"stream": stream_name, "maxRecordsPerPartition": 7})
    for attempt in range(3):
        options = {"stream": stream_name, "maxRecordsPerPartition": 9 + attempt}
        last = run.forget_commit()
        before = run.batch(last)
        publish_plain(amqp_url, stream_name, bodies(count, count + 10))
        count += 10
        run.to_end(options)
        assert run.batch(last, 1) == before, f"replay {attempt}"
        if run.rows() != expected(stream_name, 0, count):
            run.to_end(options)  # Spark 4.1 may end after the replayed batch
        assert run.rows() == expected(stream_name, 0, count)


def test_no_batch_comes_while_nothing_is_published(run: Run, amqp_url: str, stream_name: str) -> None:
    """An empty stream, and one read to its end, make no batches."""
    query = run.start({"stream": stream_name}, **FAST)
    wait_until(lambda: "Waiting for data" in query.status["message"], LIMIT_S)
    publish_plain(amqp_url, stream_name, bodies(0, 5))
    wait_until(lambda: run.rows() == expected(stream_name, 0, 5), LIMIT_S)
    wait_until(lambda: "Waiting for" in query.status["message"], LIMIT_S)
    query.stop()
    assert [number for number in run.batches() if not run.batch(number)] in ([], [0])


def test_a_partition_added_later_is_read_from_its_start(run: Run, amqp_url: str, partitions: Any) -> None:
    """A running query takes up what a new partition of the super stream already holds."""
    partitions(1)
    first, second = f"{partitions.name}-0", f"{partitions.name}-1"
    publish_plain(amqp_url, first, bodies(0, 10))
    query = run.start({"superStream": partitions.name}, **FAST)
    wait_until(lambda: len(run.rows()) == 10, LIMIT_S)
    declare_stream(amqp_url, second)
    publish_plain(amqp_url, second, bodies(0, 20))
    partitions(2)
    wait_until(lambda: len(run.rows()) == 30, LIMIT_S)
    query.stop()
    assert run.rows() == sorted(expected(first, 0, 10) + expected(second, 0, 20))


def test_keys_become_columns(
    run: Run, spark: SparkSession, amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """The option keys works as in a batch."""
    add_keys(engine, ["order_id"])
    publish_plain(amqp_url, stream_name, [(b"a", {"order_id": "o1"}), (b"b", {})])
    options = {"stream": stream_name, "keys": "order_id", "database": database_url, "includeHeaders": "false"}
    stream = run.load(options)
    assert stream.columns == ["stream", "offset", "timestamp", "value", "order_id"]
    name = unique_name("keys").replace("-", "_")
    query = stream.writeStream.format("memory").queryName(name).trigger(availableNow=True).start()
    assert query.awaitTermination(LIMIT_S)
    assert [row.order_id for row in spark.table(name).orderBy("offset").collect()] == ["o1", None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endingOffsets": "latest"}, "endingOffsets.*batch's alone"),
        ({"key": "order_id", "keyValues": '["o1"]', "database": "postgresql://nobody@127.0.0.1:1/none"}, "Enrichment"),
    ],
)
def test_what_a_batch_alone_has_is_refused(run: Run, stream_name: str, options: dict[str, str], words: str) -> None:
    """An end, and a key to look up, end the query at its start; Spark tells the source no earlier that it streams."""
    with pytest.raises(StreamingQueryException, match=words):
        run.to_end({"stream": stream_name} | options)


def test_a_query_goes_on_when_the_broker_was_away(
    spark: SparkSession, tmp_path: Path, private_servers: LocalServers
) -> None:
    """The broker is killed and started again under a query, which reads on without having ended."""
    register(spark)
    broker, stream = private_servers.rabbitmq, unique_name()
    run = Run(spark, tmp_path / "run", broker.broker_url, broker.stream_url)
    declare_stream(broker.broker_url, stream)
    publish_plain(broker.broker_url, stream, bodies(0, 10))
    query = run.start({"stream": stream}, **FAST)
    try:
        wait_until(lambda: run.rows() == expected(stream, 0, 10), LIMIT_S)
        wait_until(lambda: not query.status["isDataAvailable"], LIMIT_S)
        broker.kill()
        broker.start()
        wait_until(lambda: stream_available(broker.broker_url, stream), LIMIT_S)
        publish_plain(broker.broker_url, stream, bodies(10, 20))
        wait_until(lambda: run.rows() == expected(stream, 0, 20), LIMIT_S)
        assert query.isActive
    finally:
        query.stop()


def test_a_broker_that_stays_away_ends_the_query(
    spark: SparkSession, tmp_path: Path, private_servers: LocalServers
) -> None:
    """The query ends with an error after pollTimeoutMs; it names no credentials, and a later run goes on."""
    register(spark)
    broker, stream = private_servers.rabbitmq, unique_name()
    run = Run(spark, tmp_path / "run", broker.broker_url, broker.stream_url)
    declare_stream(broker.broker_url, stream)
    publish_plain(broker.broker_url, stream, bodies(0, 10))
    query = run.start({"stream": stream, "pollTimeoutMs": 2000}, **FAST)
    wait_until(lambda: run.rows() == expected(stream, 0, 10), LIMIT_S)
    broker.kill()
    with pytest.raises(StreamingQueryException) as raised:
        query.awaitTermination(LIMIT_S)
    assert "BrokerUnavailable" in str(raised.value) or "ConnectionLost" in str(raised.value)
    password = urlsplit(broker.broker_url).password
    assert password
    assert password not in str(raised.value)
    broker.start()
    wait_until(lambda: stream_available(broker.broker_url, stream), LIMIT_S)
    publish_plain(broker.broker_url, stream, bodies(10, 20))
    run.to_end({"stream": stream})
    assert run.rows() == expected(stream, 0, 20)
