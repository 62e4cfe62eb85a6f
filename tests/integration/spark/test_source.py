"""`spark.read.format("rabbitmq_streams")`: the right rows, and clear errors in time."""

import gc
import logging
import os
import pickle
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import IntegerType, StructType

import relatum.wire.chunk
from pyspark_relatum import DefaultSource
from relatum import errors
from relatum.reading import StreamBounds, StreamReader
from relatum.store.catalog import add_keys
from relatum.superstreams import Layout
from tests.support import declare_stream, delete_stream, publish_plain, unique_name, wait_until
from tests.support._raw_publisher import RawPublisher
from tests.support._streams import Plain
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.standstill import end_first_scan, in_time

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
SCHEMA = (
    "struct<stream:string,offset:bigint,timestamp:timestamp,value:binary,headers:map<string,string>,"
    "properties:struct<content_type:string,content_encoding:string,delivery_mode:int,priority:int,"
    "correlation_id:string,reply_to:string,expiration:string,message_id:string,timestamp:timestamp,type:string,"
    "user_id:string,app_id:string>>"
)


class Source:
    """Reads of one stream by the source: in a session, or as the driver and the tasks do without one."""

    def __init__(self, amqp_url: str, stream_url: str, stream: str) -> None:
        self.options = {"broker": amqp_url, "streamUrl": stream_url, "stream": stream}
        self.amqp, self.stream = amqp_url, stream

    def put(self, messages: Iterable[Plain], stream: str | None = None) -> None:
        publish_plain(self.amqp, stream or self.stream, messages)

    def read(self, spark: SparkSession, **options: Any) -> DataFrame:
        return spark.read.format("rabbitmq_streams").options(**(self.options | options)).load()

    def reader(self, **options: Any) -> DataSourceReader:
        """The reader as Spark has it in a task: pickled and back. None takes an option away."""
        given = {name: str(value) for name, value in (self.options | options).items() if value is not None}
        source = DefaultSource({name.lower(): value for name, value in given.items()})
        reader: DataSourceReader = pickle.loads(pickle.dumps(source.reader(source.schema())))
        return reader

    def parts(self, **options: Any) -> list[list[dict[str, Any]]]:
        reader = self.reader(**options)
        return [
            [row for batch in reader.read(partition) for row in batch.to_pylist()]  # type: ignore[union-attr]
            for partition in reader.partitions()
        ]

    def offsets(self, **options: Any) -> list[int]:
        return sorted(row["offset"] for part in self.parts(**options) for row in part)

    def starting(self, offset: int) -> dict[str, str]:
        return {"startingOffsets": f'{{"{self.stream}": {offset}}}'}

    def ending(self, offset: int) -> dict[str, str]:
        """The option of an offset to end before."""
        return {"endingOffsets": f'{{"{self.stream}": {offset}}}'}


def wanted(partition: Any) -> tuple[str, int, int, tuple[int, ...] | None]:
    """What a task reads: stream, first offset, the one to end before, and the offsets alone that the table names."""
    part = partition.value
    return part.stream, part.start, part.stop, part.offsets


@pytest.fixture
def source(amqp_url: str, stream_url: str, stream_name: str) -> Source:
    return Source(amqp_url, stream_url, stream_name)


def orders(count: int) -> list[tuple[bytes, pika.BasicProperties]]:
    headers = [{"order_id": f"o{number}", "n": number % 3} for number in range(count)]
    return [
        (b"body %d" % number, pika.BasicProperties(headers=each, message_id=f"m{number}"))
        for number, each in enumerate(headers)
    ]


def test_rows_are_the_messages(
    spark: SparkSession, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All columns of all messages, each once; a broken package of others does not matter, and Spark finds the shim."""
    assert DefaultSource.name() == "rabbitmq_streams"
    (tmp_path / "pyspark_broken.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    source.put(orders(100))
    frame = source.read(spark, maxRecordsPerPartition=30, batchRows=7)
    assert frame.schema.simpleString() == SCHEMA
    rows = sorted(frame.collect(), key=lambda row: row.offset)
    assert "pyspark_broken" not in sys.modules
    assert [row.offset for row in rows] == list(range(100))
    assert [bytes(row.value) for row in rows] == [b"body %d" % number for number in range(100)]
    assert rows[5].headers == {"order_id": "o5", "n": "2"}
    assert (rows[5].stream, rows[5].properties.message_id, rows[5].properties.delivery_mode) == (source.stream, "m5", 1)
    assert abs(rows[5].timestamp.timestamp() - time.time()) < 120
    assert frame.rdd.getNumPartitions() == 4


def test_credentials_are_in_no_plan_and_no_error(
    spark: SparkSession, source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither `explain` nor an error shows the password. And a view over a stream cannot be inserted into."""
    frame = source.read(spark)
    frame.explain(True)
    credentials = urlsplit(source.amqp).netloc.rpartition("@")[0]
    assert credentials
    assert credentials not in capsys.readouterr().out
    with pytest.raises(PySparkException) as caught:
        source.read(spark, broker="amqp://nobody:secretsecret@127.0.0.1:1/").count()
    assert "secretsecret" not in str(caught.value)
    frame.createOrReplaceTempView("a_view")
    with pytest.raises(AnalysisException):
        spark.sql("INSERT INTO a_view SELECT * FROM a_view")


def test_workers_are_used_again_and_run_what_is_compiled(spark: SparkSession, amqp_url: str) -> None:
    """A worker runs the driver's compiled modules and freezes what it loaded; the driver's collector is left alone."""
    options = {"broker": amqp_url, "stream": "s"}

    def seen(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            DefaultSource(options).schema()
            again, spared = "SPARK_REUSE_WORKER" in os.environ, gc.get_freeze_count() > 10_000
            file = relatum.wire.chunk.__file__
            yield pa.RecordBatch.from_pydict({"again": [again], "spared": [spared], "file": [file]})

    kinds = "again boolean, spared boolean, file string"
    assert [tuple(row) for row in spark.range(1).mapInArrow(seen, kinds).collect()] == [
        (True, True, relatum.wire.chunk.__file__)
    ]
    before = gc.get_freeze_count()
    DefaultSource(options).schema()
    assert gc.get_freeze_count() == before


@pytest.fixture
def recorded(place: Place) -> Place:
    """A place whose stream's first 20 messages are in the table, and whose last 10 are not."""
    add_keys(place.engine, ["order_id", "n"])
    publish_plain(place.amqp, place.stream, orders(20))
    place.record()
    publish_plain(place.amqp, place.stream, orders(10))
    return place


def test_a_data_frame_serves_any_query(spark: SparkSession, source: Source, recorded: Place) -> None:
    """A filter leaves nothing behind for the next query; one on a key finds messages not in the table yet, too."""
    spark.conf.set(PUSHDOWN, "true")
    try:
        frame = source.read(spark, database=recorded.database, keys="order_id,n")
        assert sorted(row.offset for row in frame.where("order_id = 'o7'").collect()) == [7, 27]
        both = frame.where("order_id IN ('o7', 'o8', 'o9') AND n = '2' AND offset < 25")
        assert sorted(row.offset for row in both.collect()) == [8]
        assert frame.count() == 30
    finally:
        spark.conf.set(PUSHDOWN, "false")


def test_columns_can_be_left_out(source: Source) -> None:
    """What is left out is not in the schema, and the rest is the same. No other schema is taken."""
    source.put(orders(3))
    (bare,) = source.parts(includeValue="false", includeHeaders="false")
    assert [list(row) for row in bare] == [["stream", "offset", "timestamp"]] * 3
    assert [row["offset"] for row in bare] == [0, 1, 2]
    (rows,) = source.parts(includeHeaders="false")
    assert [row["value"] for row in rows] == [b"body 0", b"body 1", b"body 2"]
    with pytest.raises(errors.InvalidInput, match="includeValue"):
        DefaultSource(source.options).reader(StructType().add("a", IntegerType()))


def test_a_super_stream_and_a_list(source: Source, layout: Layout) -> None:
    """Both read each of their streams, in as many partitions as are wanted; one given as a stream is named."""
    names = [each.stream for each in layout]
    for number, name in enumerate(names[:2]):
        source.put(orders(10 * (number + 1)), name)
    read = source.parts(stream=None, superStream=layout.super_stream, minPartitions=6)
    assert Counter(row["stream"] for part in read for row in part) == {names[0]: 10, names[1]: 20}
    assert len(read) >= 6
    assert len(source.offsets(stream=None, streams=",".join(names))) == 30
    with pytest.raises(errors.StreamNotFound, match="no super stream"):
        source.offsets(stream=None, superStream=layout.super_stream + "-none")
    with pytest.raises(errors.StreamNotFound, match="superStream"):
        source.offsets(stream=layout.super_stream)


def test_ranges_of_offsets(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    """-2 and -1 are the stream's ends; what is missing or beyond the end is an error, or a warning on request."""
    assert source.offsets() == source.offsets(startingOffsets="latest") == []
    source.put(orders(10))

    def between(start: int, end: int) -> list[int]:
        return source.offsets(**source.starting(start), **source.ending(end))

    assert between(3, 6) == [3, 4, 5]
    assert between(-2, 2) == [0, 1]
    assert between(8, -1) == [8, 9]
    assert between(9, 10) == [9]
    assert between(5, 5) == between(6, 5) == between(10, 10) == between(-1, -1) == []
    missing = unique_name()
    with pytest.raises(errors.RelatumError, match=missing):
        source.offsets(stream=missing)
    for beyond, rest in ((source.starting(19), []), (source.ending(19), [*range(10)])):
        with pytest.raises(errors.OffsetNotFound, match="failOnDataLoss"):
            source.offsets(**beyond)
        with caplog.at_level(logging.WARNING, "relatum.spark"):
            assert source.offsets(failOnDataLoss="false", **beyond) == rest
        assert "beyond the end" in caplog.text
        assert "failOnDataLoss" not in caplog.text
    with pytest.raises(errors.InvalidInput, match="other"):
        source.offsets(startingOffsets='{"other": 1}')


def test_moments(source: Source) -> None:
    """A read by moments begins and ends where the broker had written so much: windows that touch lose nothing."""
    source.put(orders(5))
    source.put(orders(5))
    with StreamReader.open(source.amqp) as reader:
        chunks = {m.offset: m.chunk_ms for m in reader.iterate(source.stream)}
    cut = chunks[6]
    assert cut is not None
    first = min(offset for offset, ms in chunks.items() if ms is not None and ms >= cut)
    for start in ({"startingTimestamp": cut}, {"startingOffsetsByTimestamp": f'{{"{source.stream}": {cut}}}'}):
        assert source.offsets(**start) == list(range(first, 10))
    assert source.offsets(endingTimestamp=cut) == list(range(first))
    assert source.offsets(startingTimestamp=0, endingTimestamp=4_000_000_000_000) == list(range(10))
    with pytest.raises(errors.RelatumError, match="startingOffsetsByTimestampStrategy"):
        source.offsets(startingTimestamp=4_000_000_000_000)
    late = {"startingTimestamp": 4_000_000_000_000, "startingOffsetsByTimestampStrategy": "latest"}
    assert source.offsets(**late) == []


def test_a_moment_that_comes_while_a_read_is_planned(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first message after it may be behind the end that was asked for first, and a gap of the broker's own."""
    source.put(orders(2))
    ask = StreamReader.bounds

    def ask_before_a_message(reader: StreamReader, stream: str) -> StreamBounds:
        bounds = ask(reader, stream)
        if bounds.end == 2:
            with RawPublisher(source.options["streamUrl"], stream) as publisher:
                publisher.store_offset("a-consumer", 1)
                publisher.publish(b"\0Su\xa0\1x")
        return bounds

    with StreamReader.open(source.amqp) as reader:
        latest = max(message.chunk_ms or 0 for message in reader.iterate(source.stream))
    wait_until(lambda: time.time() * 1000 > latest + 1)
    monkeypatch.setattr(StreamReader, "bounds", ask_before_a_message)
    assert source.offsets(endingTimestamp=latest + 1) == [0, 1]


def test_keys(source: Source, recorded: Place) -> None:
    """All messages with one of the values, recorded or not; each key is a column of its canonical value."""
    of_table = {"database": recorded.database}
    options = of_table | {"key": "n", "keyValues": '["1", 2]'}
    assert source.offsets(**options) == [offset for offset in range(30) if offset % 20 % 3 in (1, 2)]
    one = of_table | {"key": "order_id", "keyValues": '["o7"]'}
    assert source.offsets(**one) == [7, 27]
    assert source.offsets(**source.ending(20), **one) == [7]
    assert source.offsets(**(one | {"keyValues": '["none"]'})) == []
    parts = [wanted(partition) for partition in source.reader(**one).partitions()]
    assert parts == [(recorded.stream, 0, 30, (7,)), (recorded.stream, 20, 30, None)]
    for headers in ("true", "false"):
        (rows,) = source.parts(keys="order_id,n", includeHeaders=headers, **of_table)
        assert list(rows[8])[-2:] == ["order_id", "n"]
        assert (rows[8]["order_id"], rows[8]["n"]) == ("o8", "2")
    with pytest.raises(errors.KeyNotDefined, match="nobody"):
        source.reader(keys="nobody", **of_table)
    with pytest.raises(errors.InvalidRelationshipKey, match="keyValues"):
        source.reader(key="n", keyValues="[1.5]", **of_table)


def test_a_key_of_what_release_0_4_recorded(source: Source, recorded: Place) -> None:
    """A message without a row that was recorded over AMQP 0.9.1 is found, too."""
    recorded.sql("UPDATE relatum.coverage SET over_amqp = true")
    recorded.sql("DELETE FROM relatum.relationships WHERE stream_offset = 7")
    assert source.offsets(database=recorded.database, key="order_id", keyValues='["o7"]') == [7, 27]


@pytest.mark.differs
def test_a_key_of_messages_that_only_a_new_leader_retains(source: Source, recorded: Place) -> None:
    """Messages whose rows were pruned, by the first offset of a former leader, are read from the stream."""
    recorded.sql("UPDATE relatum.streams SET retained_from = 10")
    recorded.sql("DELETE FROM relatum.relationships WHERE stream_offset < 10")
    assert source.offsets(database=recorded.database, key="order_id", keyValues='["o7"]') == [7, 27]


@pytest.mark.differs
def test_a_key_of_a_stream_declared_again(source: Source, recorded: Place) -> None:
    """Rows of the old stream answer for nothing in the new one."""
    delete_stream(recorded.amqp, recorded.stream)
    declare_stream(recorded.amqp, recorded.stream)
    source.put(list(reversed(orders(30))))
    assert source.offsets(database=recorded.database, key="order_id", keyValues='["o7"]') == [22]


def test_a_stream_that_is_deleted_or_declared_again_ends_the_task(source: Source) -> None:
    """Offsets that were planned and are not there any more are not the end of the stream, but a typed error in time."""
    source.put(orders(9))
    reader, lenient = source.reader(), source.reader(failOnDataLoss="false")
    (partition,) = reader.partitions()
    delete_stream(source.amqp, source.stream)
    with in_time(30), pytest.raises((errors.StreamNotFound, errors.Transient)):
        list(reader.read(partition))
    assert list(lenient.read(partition)) == []
    declare_stream(source.amqp, source.stream)
    source.put(orders(4))
    with pytest.raises(errors.OffsetNotFound, match="declared again"):
        list(reader.read(partition))


def test_what_cannot_be_unpacked_is_no_empty_message(source: Source, recorded: Place) -> None:
    """It is an error, or left out with failOnDataLoss=false; by a key, too."""
    with RawPublisher(source.options["streamUrl"], source.stream) as publisher:
        publisher.publish((7, 2, 9, b"compressed"))
    by_key = {"database": recorded.database, "key": "order_id", "keyValues": '["o7"]'}
    for options, offsets in (({}, list(range(30))), ({"includeHeaders": "false"}, list(range(30))), (by_key, [7, 27])):
        with pytest.raises(errors.UndecodableMessage, match="offset 30") as caught:
            source.offsets(**options)
        assert (caught.value.stream, caught.value.offset) == (source.stream, 30)
        assert source.offsets(failOnDataLoss="false", **options) == offsets


@pytest.mark.parametrize("last", [8, None])
def test_the_end_that_a_lagging_node_shows_is_no_loss(
    source: Source, monkeypatch: pytest.MonkeyPatch, last: int | None
) -> None:
    """Without an answer of the leader the task fails and Spark repeats it, also with failOnDataLoss=false."""
    source.put(orders(9))
    (planned,) = source.reader().partitions()
    longer = InputPartition(replace(planned.value, stop=12))
    bounds = StreamBounds(None if last is None else 0, last, is_proven=False)
    monkeypatch.setattr(StreamReader, "bounds", lambda self, stream: bounds)
    for flag in ("true", "false"):
        with pytest.raises(errors.StreamUnavailable):
            list(source.reader(failOnDataLoss=flag).read(longer))
        # A read that is planned now would lack the newest messages without an error.
        with pytest.raises(errors.StreamUnavailable):
            source.reader(failOnDataLoss=flag, pollTimeoutMs=300).partitions()


def test_a_message_that_may_only_be_missing_now_is_no_loss(
    source: Source, recorded: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that waits for its replicas proves nothing about an offset of the table."""
    options = {"database": recorded.database, "key": "order_id", "keyValues": '["o7"]'}
    reader = source.reader(failOnDataLoss="false", **options)
    by_offset, _ = reader.partitions()
    unproven = errors.OffsetNotFound("", stream=source.stream, offset=7, last=None, is_proven=False)
    monkeypatch.setattr(StreamReader, "read_many", lambda self, ids: iter([unproven]))
    with pytest.raises(errors.OffsetNotFound):
        list(reader.read(by_offset))


def test_a_scan_that_a_lagging_node_ends_early_loses_nothing(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader is away while a task scans, and back when the task compares the stream's end."""
    source.put(orders(9))
    end_first_scan(monkeypatch)
    assert source.offsets() == list(range(9))


@pytest.fixture
def short(fleeting: Place) -> Source:
    return Source(fleeting.amqp, fleeting.stream_url, fleeting.stream)


def overtake(source: Source, offset: int = 0) -> int:
    """Publish until retention has dropped all up to an offset; the first one left."""
    source.put([b"x" * 10_000] * 100)
    with StreamReader.open(source.amqp) as reader:
        wait_until(lambda: (reader.bounds(source.stream).first or 0) > offset, what="retention")
        return reader.bounds(source.stream).first or 0


def test_retention_is_noticed(short: Source, caplog: pytest.LogCaptureFixture) -> None:
    """By an error with the first available offset, or a warning and the rest: when planned, and when read."""
    stream = short.stream
    short.put(orders(10))
    strict, lenient = short.reader(), short.reader(failOnDataLoss="false")
    (partition,) = strict.partitions()
    assert wanted(partition) == (stream, 0, 10, None)
    first = overtake(short)
    with pytest.raises(errors.OffsetExpired) as caught:
        list(strict.read(partition))
    assert caught.value.first >= first
    with caplog.at_level(logging.WARNING, "relatum.spark"):
        assert list(lenient.read(partition)) == []
    assert f"offsets 0 to 9 of {stream} are lost" in caplog.text
    with pytest.raises(errors.OffsetExpired):
        short.offsets(**short.starting(3))
    found = short.offsets(failOnDataLoss="false", **short.starting(3))
    assert found[0] >= first > 3
    # RabbitMQ 4.x drops more a moment later.
    assert set(short.offsets()) <= set(found)


def test_retention_in_the_middle_of_a_read(short: Source, caplog: pytest.LogCaptureFixture) -> None:
    """What was read before the hole is given; a warning names the hole, and reading continues behind it."""
    stream = short.stream
    short.put([b"x" * 10_000] * 18)
    reader = short.reader(failOnDataLoss="false", batchRows=1, **short.ending(18))
    (partition,) = reader.partitions()
    with caplog.at_level(logging.WARNING, "relatum.spark"):
        batches: Any = reader.read(partition)
        offsets = next(batches)["offset"].to_pylist()
        overtake(short, 18)
        for batch in batches:
            offsets += batch["offset"].to_pylist()
    holes = re.findall(rf"offsets (\d+) to (\d+) of {stream} are lost", caplog.text)
    lost = [offset for first, last in holes for offset in range(int(first), int(last) + 1)]
    assert sorted(offsets + lost) == list(range(18))
    assert offsets[0] == 0
    assert lost


def test_a_slow_query_outlives_its_connection(source: Source) -> None:
    """While Spark takes no rows, no heartbeats are sent, and the broker closes the connection: the task reads on."""
    source.put([b"x" * 10_000] * 300)
    with Proxy.to(source.options["streamUrl"]) as streams:
        reader = source.reader(batchRows=1, streamUrl=streams.url(source.options["streamUrl"]))
        (partition,) = reader.partitions()
        batches: Any = reader.read(partition)
        offsets = next(batches)["offset"].to_pylist()
        streams.cut()
        for batch in batches:
            offsets += batch["offset"].to_pylist()
    assert offsets == list(range(300))


def test_a_frozen_broker_ends_the_task_in_time(source: Source) -> None:
    """Before a slice, in the middle of one, and while planning; once the broker answers, the same works."""
    source.put([b"x" * 10_000] * 300)
    with Proxy.to(source.amqp) as amqp, Proxy.to(source.options["streamUrl"]) as streams:
        lines = {"broker": amqp.url(source.amqp), "streamUrl": streams.url(source.options["streamUrl"])}
        reader = source.reader(batchRows=1, pollTimeoutMs=2000, **lines)
        (partition,) = reader.partitions()
        for is_under_way in (False, True):
            batches: Any = reader.read(partition)
            if is_under_way:
                next(batches)
            amqp.mode = streams.mode = "frozen"
            with in_time(2), pytest.raises(errors.Transient):
                list(batches)
            with in_time(2), pytest.raises(errors.Transient):
                source.offsets(pollTimeoutMs=2000, **lines)
            amqp.mode = streams.mode = "pass"
        assert source.offsets(pollTimeoutMs=90_000, **lines) == list(range(300))
