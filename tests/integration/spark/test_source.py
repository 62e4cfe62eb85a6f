"""`spark.read.format("rabbitmq_streams")`: the right rows, and clear errors in time."""

import gc
import logging
import os
import pickle
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika
import pyarrow as pa
import pytest
import sqlalchemy as sa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import IntegerType, StructType

import relatum.wire._chunk
from pyspark_relatum import DefaultSource
from relatum.errors import (
    InvalidInput,
    InvalidRelationshipKey,
    KeyNotDefined,
    OffsetExpired,
    OffsetNotFound,
    RelatumError,
    StreamNotFound,
    Transient,
)
from relatum.local import LocalServers
from relatum.reading import StreamReader
from relatum.store import add_keys
from relatum_spark import Broker
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    publish_plain,
    record,
    unique_name,
    wait_until,
)
from tests.support._raw_publisher import RawPublisher
from tests.support.standstill import in_time

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
SCHEMA = (
    "struct<stream:string,offset:bigint,timestamp:timestamp,value:binary,headers:map<string,string>,"
    "properties:struct<content_type:string,content_encoding:string,delivery_mode:int,priority:int,"
    "correlation_id:string,reply_to:string,expiration:string,message_id:string,timestamp:timestamp,type:string,"
    "user_id:string,app_id:string>>"
)
QUICK_S = 45.0
"""Seconds in which what has nothing to read ends; most of it is Spark's own."""


@pytest.fixture
def filtering(spark: SparkSession) -> Iterator[None]:
    """Let sources take filters over."""
    spark.conf.set(PUSHDOWN, "true")
    yield
    spark.conf.set(PUSHDOWN, "false")


class Source:
    """Reads by the source, of one broker: in a session, or as the driver and the tasks do without one."""

    def __init__(self, amqp_url: str, stream_url: str) -> None:
        self.options = {"broker": amqp_url, "streamUrl": stream_url}

    def _given(self, stream: str | None, options: dict[str, Any]) -> dict[str, Any]:
        return self.options | ({} if stream is None else {"stream": stream}) | options

    def read(self, spark: SparkSession, stream: str | None = None, **options: Any) -> DataFrame:
        """A data frame of a stream."""
        return spark.read.format("rabbitmq_streams").options(**self._given(stream, options)).load()

    def reader(self, stream: str | None = None, **options: Any) -> DataSourceReader:
        """The reader as Spark has it in a task: pickled and back."""
        source = DefaultSource({name.lower(): str(value) for name, value in self._given(stream, options).items()})
        reader: DataSourceReader = pickle.loads(pickle.dumps(source.reader(source.schema())))
        return reader

    def parts(self, stream: str | None = None, **options: Any) -> list[list[dict[str, Any]]]:
        """The rows that the tasks of a read give."""
        reader = self.reader(stream, **options)
        return [
            [row for batch in reader.read(partition) for row in batch.to_pylist()]  # type: ignore[union-attr]
            for partition in reader.partitions()
        ]

    def offsets(self, stream: str | None = None, **options: Any) -> list[int]:
        """The offsets a read gives, in order."""
        return sorted(row["offset"] for part in self.parts(stream, **options) for row in part)


def wanted(partition: Any) -> tuple[str, int, int, tuple[int, ...] | None]:
    """What a task reads: stream, first offset, the one to end before, and the offsets alone that the table names."""
    part = partition.value
    return part.wanted.stream, part.wanted.start, part.wanted.stop, part.offsets


@pytest.fixture
def source(amqp_url: str, stream_url: str) -> Source:
    """The source."""
    return Source(amqp_url, stream_url)


def orders(count: int) -> list[tuple[bytes, pika.BasicProperties]]:
    """Messages with two headers and a `message_id`."""
    return [
        (
            b"body %d" % number,
            pika.BasicProperties(headers={"order_id": f"o{number}", "n": number % 3}, message_id=f"m{number}"),
        )
        for number in range(count)
    ]


def test_rows_are_the_messages(spark: SparkSession, source: Source, amqp_url: str, stream_name: str) -> None:
    """All columns, of all messages, each once, whatever the number of partitions."""
    publish_plain(amqp_url, stream_name, orders(100))
    frame = source.read(spark, stream_name, maxRecordsPerPartition=30, batchRows=7)
    assert frame.schema.simpleString() == SCHEMA
    rows = sorted(frame.collect(), key=lambda row: row.offset)
    assert [row.offset for row in rows] == list(range(100))
    assert [bytes(row.value) for row in rows] == [b"body %d" % number for number in range(100)]
    assert rows[5].headers == {"order_id": "o5", "n": "2"}
    assert (rows[5].stream, rows[5].properties.message_id, rows[5].properties.delivery_mode) == (stream_name, "m5", 1)
    assert abs(rows[5].timestamp.timestamp() - time.time()) < 120
    assert frame.rdd.getNumPartitions() == 4


def test_columns_can_be_left_out(source: Source, amqp_url: str, stream_name: str) -> None:
    """What is left out is not in the schema, and the rest is the same."""
    publish_plain(amqp_url, stream_name, orders(3))
    (bare,) = source.parts(stream_name, includeValue="false", includeHeaders="false")
    assert [list(row) for row in bare] == [["stream", "offset", "timestamp"]] * 3
    (rows,) = source.parts(stream_name, includeHeaders="false")
    assert [row["value"] for row in rows] == [b"body 0", b"body 1", b"body 2"]
    assert source.offsets(stream_name, includeValue="false") == [0, 1, 2]


def test_a_super_stream_and_a_list(source: Source, amqp_url: str) -> None:
    """Both read each of their streams, in as many partitions as are wanted."""
    name = unique_name()
    parts = [f"{name}-{number}" for number in range(3)]
    try:
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            channel.exchange_declare(name, "direct", durable=True, arguments={"x-super-stream": True})
            for number, part in enumerate(parts):
                declare_stream(amqp_url, part)
                channel.queue_bind(part, name, str(number), arguments={"x-stream-partition-order": number})
        for number, part in enumerate(parts[:2]):
            publish_plain(amqp_url, part, orders(10 * (number + 1)))
        read = source.parts(superStream=name, minPartitions=6)
        assert Counter(row["stream"] for part in read for row in part) == {parts[0]: 10, parts[1]: 20}
        assert len(read) >= 6
        assert len(source.offsets(streams=",".join(parts))) == 30
        with pytest.raises(StreamNotFound, match="no super stream"):
            source.offsets(superStream=name + "-none")
    finally:
        with broker_connection(amqp_url) as connection:
            connection.channel().exchange_delete(name)
        for part in parts:
            delete_stream(amqp_url, part)


def test_ranges_of_offsets(source: Source, amqp_url: str, stream_name: str) -> None:
    """The start is in a range, the end is not; -2 and -1 stand for the ends of the stream."""
    publish_plain(amqp_url, stream_name, orders(10))

    def between(start: int, end: int) -> list[int]:
        options = {"startingOffsets": f'{{"{stream_name}": {start}}}', "endingOffsets": f'{{"{stream_name}": {end}}}'}
        return source.offsets(stream_name, **options)

    assert between(3, 6) == [3, 4, 5]
    assert between(-2, 2) == [0, 1]
    assert between(8, -1) == [8, 9]
    assert between(9, 10) == [9]
    assert between(5, 5) == between(6, 5) == between(10, 10) == between(-1, -1) == []


def test_offsets_with_gaps(source: Source, amqp_url: str, stream_url: str, stream_name: str) -> None:
    """Offsets the broker uses for itself are no messages and no losses, in the middle as at the end of a slice."""
    publish_plain(amqp_url, stream_name, orders(3))
    publisher = RawPublisher(stream_url, stream_name)
    with publisher:
        for number in range(3):
            publisher.store_offset(f"reader-{number}", number)
            publisher.publish(b"\0Su\xa0\1x")
    with StreamReader.open(stream_url) as reader:
        last = reader.bounds(stream_name).last
    assert last is not None
    assert last > 5, "the tracking chunks took offsets"
    found = source.offsets(stream_name)
    assert len(found) == 6
    assert found[-1] == last
    for size in (1, 2):
        assert source.offsets(stream_name, maxRecordsPerPartition=size) == found


def test_nothing_to_read_is_quick(source: Source, stream_name: str) -> None:
    """An empty stream gives no rows, and no error."""
    began = time.monotonic()
    assert source.offsets(stream_name) == []
    assert source.offsets(stream_name, startingOffsets="latest") == []
    assert time.monotonic() - began < QUICK_S


def test_what_is_not_there_is_named(source: Source, amqp_url: str, stream_name: str) -> None:
    """A missing stream and offsets beyond the end are errors at once, which name them; or no rows, on request."""
    publish_plain(amqp_url, stream_name, orders(3))
    began = time.monotonic()
    missing = unique_name()
    with pytest.raises(RelatumError, match=missing):
        source.offsets(missing)
    beyond = {"startingOffsets": f'{{"{stream_name}": 9}}'}
    with pytest.raises(RelatumError, match="beyond the end"):
        source.offsets(stream_name, **beyond)
    assert source.offsets(stream_name, failOnDataLoss="false", **beyond) == []
    past = {"endingOffsets": f'{{"{stream_name}": 9}}'}
    with pytest.raises(RelatumError, match="beyond the end"):
        source.offsets(stream_name, **past)
    assert source.offsets(stream_name, failOnDataLoss="false", **past) == [0, 1, 2]
    with pytest.raises(RelatumError, match="not among those read"):
        source.offsets(stream_name, startingOffsets='{"other": 1}')
    assert time.monotonic() - began < 2 * QUICK_S


def test_a_deleted_stream_ends_the_task(source: Source, amqp_url: str) -> None:
    """A stream that goes away between planning and reading is a typed error in time."""
    name = unique_name()
    declare_stream(amqp_url, name)
    publish_plain(amqp_url, name, orders(3))
    reader = source.reader(name)
    (partition,) = reader.partitions()
    delete_stream(amqp_url, name)
    began = time.monotonic()
    with pytest.raises((StreamNotFound, Transient)):
        list(reader.read(partition))
    assert time.monotonic() - began < QUICK_S


def test_moments(source: Source, amqp_url: str, stream_name: str) -> None:
    """A read by moments begins and ends where the broker had written so much: windows that touch lose nothing."""
    publish_plain(amqp_url, stream_name, orders(5))
    publish_plain(amqp_url, stream_name, orders(5))
    with StreamReader.open(source.options["broker"]) as reader:
        chunks = {m.offset: m.chunk_ms for m in reader.iterate(stream_name)}
    cut = chunks[6]
    assert cut is not None
    first = min(offset for offset, ms in chunks.items() if ms is not None and ms >= cut)
    assert source.offsets(stream_name, startingTimestamp=cut) == list(range(first, 10))
    assert source.offsets(stream_name, endingTimestamp=cut) == list(range(first))
    assert source.offsets(stream_name, startingOffsetsByTimestamp=f'{{"{stream_name}": {cut}}}') == list(
        range(first, 10)
    )
    assert source.offsets(stream_name, startingTimestamp=0, endingTimestamp=4_000_000_000_000) == list(range(10))
    with pytest.raises(RelatumError, match="startingOffsetsByTimestampStrategy"):
        source.offsets(stream_name, startingTimestamp=4_000_000_000_000)
    late = {"startingTimestamp": 4_000_000_000_000, "startingOffsetsByTimestampStrategy": "latest"}
    assert source.offsets(stream_name, **late) == []


@pytest.fixture
def short_stream(amqp_url: str) -> Iterator[str]:
    """A stream that keeps about 200 kB."""
    name = unique_name()
    declare_stream(amqp_url, name, x_max_length_bytes=200_000, x_stream_max_segment_size_bytes=50_000)
    yield name
    delete_stream(amqp_url, name)


def overtake(amqp_url: str, stream: str) -> int:
    """Publish until retention has dropped the first messages; the first one left."""
    publish_plain(amqp_url, stream, [b"x" * 10_000] * 100)
    with StreamReader.open(amqp_url) as reader:
        wait_until(lambda: (reader.bounds(stream).first or 0) > 0, what="retention")
        return reader.bounds(stream).first or 0


def test_a_dropped_start_is_noticed(source: Source, amqp_url: str, short_stream: str) -> None:
    """With failOnDataLoss the error names the first available offset; without it the rest is read."""
    publish_plain(amqp_url, short_stream, orders(10))
    first = overtake(amqp_url, short_stream)
    begin = {"startingOffsets": f'{{"{short_stream}": 3}}'}
    with pytest.raises(RelatumError, match="first one available is"):
        source.offsets(short_stream, **begin)
    found = source.offsets(short_stream, failOnDataLoss="false", **begin)
    assert found[0] >= first > 3
    # RabbitMQ 4.x drops more a moment later.
    assert set(source.offsets(short_stream)) <= set(found)


def test_retention_that_overtakes_a_task(
    source: Source, amqp_url: str, short_stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Between planning and reading: an error that names the first available offset, or a warning with what is lost."""
    publish_plain(amqp_url, short_stream, orders(10))
    strict = source.reader(short_stream)
    lenient = source.reader(short_stream, failOnDataLoss="false")
    (partition,) = strict.partitions()
    assert wanted(partition) == (short_stream, 0, 10, None)
    first = overtake(amqp_url, short_stream)
    with pytest.raises(OffsetExpired) as caught:
        list(strict.read(partition))
    assert caught.value.first >= first
    with caplog.at_level(logging.WARNING, "relatum.spark"):
        assert list(lenient.read(partition)) == []
    assert f"offsets 0 to 9 of {short_stream} are lost" in caplog.text


def test_retention_in_the_middle_of_a_read(
    source: Source, amqp_url: str, short_stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What was read before the hole is given; a warning names the hole, and reading goes on behind it."""
    publish_plain(amqp_url, short_stream, [b"x" * 10_000] * 18)
    options = {"failOnDataLoss": "false", "batchRows": 1, "endingOffsets": f'{{"{short_stream}": 18}}'}
    reader = source.reader(short_stream, **options)
    (partition,) = reader.partitions()
    with caplog.at_level(logging.WARNING, "relatum.spark"):
        batches: Any = reader.read(partition)
        offsets = next(batches)["offset"].to_pylist()
        overtake_far(amqp_url, short_stream, 18)
        for batch in batches:
            offsets += batch["offset"].to_pylist()
    holes = re.findall(rf"offsets (\d+) to (\d+) of {short_stream} are lost", caplog.text)
    lost = [offset for first, last in holes for offset in range(int(first), int(last) + 1)]
    assert sorted(offsets + lost) == list(range(18))
    assert offsets[0] == 0
    assert lost


def overtake_far(amqp_url: str, stream: str, offset: int) -> None:
    """Publish until everything before an offset has been dropped."""
    publish_plain(amqp_url, stream, [b"x" * 10_000] * 100)
    with StreamReader.open(amqp_url) as reader:
        wait_until(lambda: (reader.bounds(stream).first or 0) > offset, what="retention")


def test_a_stream_declared_again_is_noticed(source: Source, amqp_url: str) -> None:
    """Offsets that were planned and are not there any more are no end of the stream."""
    name = unique_name()
    declare_stream(amqp_url, name)
    try:
        publish_plain(amqp_url, name, orders(9))
        reader = source.reader(name)
        (partition,) = reader.partitions()
        delete_stream(amqp_url, name)
        declare_stream(amqp_url, name)
        publish_plain(amqp_url, name, orders(4))
        with pytest.raises(OffsetNotFound, match="declared again"):
            list(reader.read(partition))
    finally:
        delete_stream(amqp_url, name)


def test_a_frozen_broker_ends_the_task_in_time(private_servers: LocalServers) -> None:
    """Task and planning fail within pollTimeoutMs and five seconds; once the broker answers, the same works."""
    rabbitmq = private_servers.rabbitmq
    name, poll_s = unique_name(), 3
    declare_stream(rabbitmq.broker_url, name)
    publish_plain(rabbitmq.broker_url, name, orders(10))
    source = Source(rabbitmq.broker_url, rabbitmq.stream_url)
    reader = source.reader(name, pollTimeoutMs=poll_s * 1000)
    (partition,) = reader.partitions()
    rabbitmq.freeze()
    try:
        with in_time(poll_s), pytest.raises(Transient):
            list(reader.read(partition))
        with in_time(poll_s), pytest.raises(Transient):
            source.offsets(name, pollTimeoutMs=poll_s * 1000)
    finally:
        rabbitmq.thaw()
    assert sum(batch.num_rows for batch in reader.read(partition)) == 10
    assert source.offsets(name, pollTimeoutMs=poll_s * 1000) == list(range(10))


def test_a_broker_that_freezes_in_the_middle_of_a_slice(private_servers: LocalServers) -> None:
    """A reader that has begun waits no longer than it was told."""
    rabbitmq = private_servers.rabbitmq
    name, poll_s = unique_name(), 2
    declare_stream(rabbitmq.broker_url, name)
    publish_plain(rabbitmq.broker_url, name, [b"x" * 10_000] * 300)
    source = Source(rabbitmq.broker_url, rabbitmq.stream_url)
    reader = source.reader(name, batchRows=1, pollTimeoutMs=poll_s * 1000)
    (partition,) = reader.partitions()
    batches: Any = reader.read(partition)
    next(batches)
    rabbitmq.freeze()
    try:
        with in_time(poll_s), pytest.raises(Transient):
            list(batches)
    finally:
        rabbitmq.thaw()
    assert source.offsets(name, pollTimeoutMs=90_000) == list(range(300))


@pytest.fixture
def recorded(amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str) -> str:
    """A stream whose first 20 messages are in the table and whose last 10 are not."""
    add_keys(engine, ["order_id", "n"])
    publish_plain(amqp_url, stream_name, orders(20))
    record(amqp_url, engine, stream_name)
    publish_plain(amqp_url, stream_name, orders(10))
    return stream_name


def test_key_look_up(source: Source, recorded: str, database_url: str) -> None:
    """All messages with one of the values, those that the table does not know yet included."""
    options = {"database": database_url, "key": "n", "keyValues": '["1", 2]'}
    matching = [offset for offset in range(30) if (offset if offset < 20 else offset - 20) % 3 in (1, 2)]
    assert source.offsets(recorded, **options) == matching
    one = options | {"key": "order_id", "keyValues": '["o7"]'}
    assert source.offsets(recorded, **one) == [7, 27]
    assert source.offsets(recorded, endingOffsets=f'{{"{recorded}": 20}}', **one) == [7]
    assert source.offsets(recorded, **(one | {"keyValues": '["none"]'})) == []
    parts = [wanted(partition) for partition in source.reader(recorded, **one).partitions()]
    assert parts == [(recorded, 0, 30, (7,)), (recorded, 20, 30, None)]


def test_key_columns(source: Source, recorded: str, database_url: str) -> None:
    """Each key is a column of its canonical value, with and without headers."""
    for headers in ("true", "false"):
        (rows,) = source.parts(recorded, database=database_url, keys="order_id,n", includeHeaders=headers)
        assert list(rows[8])[-2:] == ["order_id", "n"]
        assert (rows[8]["order_id"], rows[8]["n"]) == ("o8", "2")


@pytest.mark.usefixtures("filtering")
def test_a_data_frame_serves_any_query(spark: SparkSession, source: Source, recorded: str, database_url: str) -> None:
    """A filter of one query leaves nothing behind for the next, though the session lets sources take filters.

    One on a key column gives the messages with that value, those that the table does not know yet included.
    """
    frame = source.read(spark, recorded, database=database_url, keys="order_id,n")
    assert sorted(row.offset for row in frame.where("order_id = 'o7'").collect()) == [7, 27]
    both = frame.where("order_id IN ('o7', 'o8', 'o9') AND n = '2' AND offset < 25")
    assert sorted(row.offset for row in both.collect()) == [8]
    assert frame.count() == 30


@pytest.mark.differs
def test_a_key_of_a_stream_declared_again(source: Source, amqp_url: str, recorded: str, database_url: str) -> None:
    """Rows of the old stream answer for nothing in the new one."""
    delete_stream(amqp_url, recorded)
    declare_stream(amqp_url, recorded)
    publish_plain(amqp_url, recorded, list(reversed(orders(30))))
    options = {"database": database_url, "key": "order_id", "keyValues": '["o7"]'}
    assert source.offsets(recorded, **options) == [22]


def test_bad_keys_are_refused(source: Source, recorded: str, database_url: str) -> None:
    """Before any job: a key nobody defined, and a value no message can carry."""
    with pytest.raises(KeyNotDefined, match="no key 'nobody'"):
        source.reader(recorded, database=database_url, keys="nobody")
    with pytest.raises(InvalidRelationshipKey, match="keyValues"):
        source.reader(recorded, database=database_url, key="n", keyValues="[1.5]")


def test_credentials_are_in_no_plan_and_no_error(
    spark: SparkSession, source: Source, amqp_url: str, stream_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither `explain` nor an error shows the password."""
    frame = source.read(spark, stream_name)
    frame.explain(True)
    credentials = urlsplit(amqp_url).netloc.rpartition("@")[0]
    assert credentials
    assert credentials not in capsys.readouterr().out
    with pytest.raises(PySparkException) as caught:
        source.read(spark, stream_name, broker="amqp://nobody:secretsecret@127.0.0.1:1/").count()
    assert "secretsecret" not in str(caught.value)


def test_a_schema_of_ones_own_is_refused(source: Source) -> None:
    """Columns are chosen by options."""
    with pytest.raises(InvalidInput, match="includeValue"):
        DefaultSource(source.options | {"stream": "s"}).reader(StructType().add("a", IntegerType()))


def test_a_broken_neighbour_hides_nothing(
    spark: SparkSession,
    source: Source,
    amqp_url: str,
    stream_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A package of somebody else's that Spark cannot import does not matter once `register` was called."""
    (tmp_path / "pyspark_broken.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    publish_plain(amqp_url, stream_name, orders(2))
    assert "pyspark_broken" not in sys.modules
    assert source.read(spark, stream_name).count() == 2


def test_workers_are_used_again_and_run_what_is_compiled(spark: SparkSession, amqp_url: str) -> None:
    """On this machine a task's Python has the hot modules in the form that the driver's has.

    A worker leaves what it has loaded out of garbage collections; the driver's program decides on its own ones.
    """

    def seen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            Broker.of(amqp_url).open().close()
            again, spared = "SPARK_REUSE_WORKER" in os.environ, gc.get_freeze_count() > 10_000
            yield pa.RecordBatch.from_pydict(
                {"again": [again], "spared": [spared], "file": [relatum.wire._chunk.__file__]}
            )

    kinds = "again boolean, spared boolean, file string"
    assert [tuple(row) for row in spark.range(1).mapInArrow(seen, kinds).collect()] == [
        (True, True, relatum.wire._chunk.__file__)
    ]
    before = gc.get_freeze_count()
    Broker.of(amqp_url).open().close()
    assert gc.get_freeze_count() == before


def test_spark_finds_the_source_by_itself() -> None:
    """The shim's class has the name by which `register` makes it known."""
    assert DefaultSource.name() == "rabbitmq_streams"
