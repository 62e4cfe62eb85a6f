"""Writing to streams from Spark: what is written is what is read, and nothing is there twice."""

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest
import sqlalchemy as sa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

import relatum_spark
from pyspark_relatum import DefaultSource
from relatum.errors import BrokerUnavailable, Conflict, InvalidInput, PublishOutcomeUnknown, StreamNotFound
from relatum.keys import KeyDefinition
from relatum.local import LocalServers
from relatum.reading import Message, StreamReader
from relatum.store import add_keys
from relatum.superstreams import Layout, partition_of
from relatum_spark._sink import Published, _shape, write_task
from relatum_spark._sink_options import parse_sink_options
from tests.support import (
    declare_stream,
    delete_stream,
    publish_plain,
    recording,
    rows_of,
    stream_available,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.proxy import Proxy
from tests.support.standstill import in_time

Columns = dict[str, Any]

ROWS = 500


@pytest.fixture
def sink(spark: SparkSession, amqp_url: str, stream_url: str) -> dict[str, str]:
    """The options that name the broker, in a session that knows the format."""
    relatum_spark.register(spark)
    return {"broker": amqp_url, "streamUrl": stream_url}


def messages(url: str, stream: str) -> list[Message]:
    """All messages of a stream."""
    with StreamReader.open(url) as reader:
        found = reader.iterate(stream, "first", follow=False)
        return list(found)


def bodies(url: str, stream: str) -> list[bytes]:
    """The bodies of all messages of a stream."""
    return [message.body for message in messages(url, stream)]


def rows(count: int, start: int = 0) -> Columns:
    """Rows as a task has them."""
    return {"value": [b"row %d" % number for number in range(start, count)]}


def run_task(options: dict[str, str], columns: Columns, **more: Any) -> Published:
    """Run a task's part of a write, as an executor does."""
    parsed = parse_sink_options(options)
    place = {"write_id": "w", "epoch": 0, "task": 0} | more
    return write_task(parsed, _shape(parsed), iter([(columns, len(columns["value"]))]), **place)


# --- what is written is what is read ----------------------------------------------------------------------


def test_what_is_written_is_what_is_read(
    spark: SparkSession, sink: dict[str, str], amqp_url: str, stream_name: str
) -> None:
    """A message written by Spark equals one published by pika, property by property."""
    moment = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
    properties = {
        "content_type": "a/b", "content_encoding": "gzip", "delivery_mode": 2, "priority": 4, "correlation_id": "c",
        "reply_to": "a queue", "expiration": "60000", "message_id": "m", "timestamp": moment, "type": "t",
        "user_id": urlsplit(amqp_url).username, "app_id": "app",
    }  # fmt: skip
    headers = {"text": "tëxt", "long": "x" * 5000, "x-own": "y", "none": None}
    plain = properties | {"timestamp": int(moment.timestamp())}
    publish_plain(amqp_url, stream_name, [(b"body", pika.BasicProperties(headers=headers | {"id": 7}, **plain))])
    columns = spark.read.format("rabbitmq_streams").options(**sink, stream=stream_name).load().schema
    schema = StructType([columns[name] for name in ("value", "headers", "properties")]).add("id", "integer")
    df = spark.createDataFrame([(b"body", headers, tuple(properties.values()), 7)], schema)
    df.write.format("rabbitmq_streams").options(**sink, stream=stream_name, keyColumns="id").mode("append").save()
    published, written = messages(amqp_url, stream_name)
    assert written.headers == published.headers
    assert written.properties == published.properties
    assert (written.body, written.time_us) == (published.body, published.time_us)


def test_a_stream_can_be_copied(spark: SparkSession, sink: dict[str, str], amqp_url: str, stream_name: str) -> None:
    """What the source reads can be written again: bodies, headers as text, properties and times are those read."""
    sent = [(b"%d" % n, {"order_id": f"o{n}", "relatum_time": 1_700_000_000_000_000 + n}) for n in range(50)]
    publish_plain(amqp_url, stream_name, sent)
    copy = unique_name()
    declare_stream(amqp_url, copy)
    try:
        df = spark.read.format("rabbitmq_streams").options(**sink, stream=stream_name).load().drop("stream", "offset")
        df.write.format("rabbitmq_streams").options(**sink, stream=copy).mode("append").save()
        found = messages(amqp_url, copy)
        assert [(each.body, dict(each.headers)) for each in found] == sent
        assert len({each.properties.message_id for each in found}) == 50
    finally:
        delete_stream(amqp_url, copy)


def test_the_recorder_sees_lifted_keys(
    spark: SparkSession, sink: dict[str, str], amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """Columns named as keys are recorded: under the definition's header, with their own types."""
    add_keys(
        engine,
        [
            KeyDefinition("order_id"),
            KeyDefinition("number", "header:no", "integer"),
            KeyDefinition("at", type="timestamp"),
        ],
    )
    df = spark.range(20, numPartitions=1).select(
        F.col("id").cast("string").alias("value"),
        F.concat(F.lit("o"), F.col("id")).alias("order_id"),
        F.col("id").alias("number"),
        F.timestamp_seconds(F.col("id")).alias("at"),
    )
    more = {"stream": stream_name, "keyColumns": "order_id,number,at", "database": database_url}
    with recording(amqp_url, engine, stream_name):
        df.write.format("rabbitmq_streams").options(**sink, **more).mode("append").save()
        wait_recorded(amqp_url, engine, stream_name)
    expected = [
        row
        for n in range(20)
        for row in (("at", str(n * 1_000_000), n), ("number", str(n), n), ("order_id", f"o{n}", n))
    ]
    assert rows_of(engine, stream_name) == expected


def test_a_bad_key_is_refused_before_anything_is_sent(
    spark: SparkSession, sink: dict[str, str], amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """One value that cannot be recorded, in the last row of many, and the stream stays empty."""
    add_keys(engine, [KeyDefinition("number", type="integer")])
    df = spark.range(20_000, numPartitions=1).select(
        F.lit("v").alias("value"), F.when(F.col("id") == 19_999, "x").otherwise("1").alias("number")
    )
    more = {"stream": stream_name, "keyColumns": "number", "database": database_url}
    with pytest.raises(PySparkException, match=r"'number'.*not_integer; nothing was sent"):
        df.write.format("rabbitmq_streams").options(**sink, **more).mode("append").save()
    assert bodies(amqp_url, stream_name) == []


def test_super_streams_are_routed_as_by_other_clients(
    spark: SparkSession, sink: dict[str, str], amqp_url: str, layout: Layout
) -> None:
    """Each row is in the stream its routing key belongs to, in order, and once, however often it is written."""
    name, streams = layout.super_stream, [each.stream for each in layout]
    df = spark.range(300, numPartitions=1).select(F.col("id").cast("string").alias("value"), F.col("id").alias("key"))
    more = {"superStream": name, "routingKey": "key", "writeId": "w"}
    for _ in range(2):
        df.write.format("rabbitmq_streams").options(**sink, **more).mode("append").save()
    for place, stream in enumerate(streams):
        expected = [b"%d" % n for n in range(300) if partition_of(str(n), 3) == place]
        assert expected
        assert bodies(amqp_url, stream) == expected


# --- nothing is there twice -------------------------------------------------------------------------------


def test_a_write_repeated_publishes_nothing_twice(
    spark: SparkSession, sink: dict[str, str], amqp_url: str, stream_name: str, replays: int
) -> None:
    """A batch written again and again under one `writeId` is there once; under another, or none, once more."""
    df = spark.range(ROWS, numPartitions=3).select(F.col("id").cast("string").alias("value"))
    writer = df.write.format("rabbitmq_streams").options(**sink, stream=stream_name).mode("append")
    for _ in range(1 + replays):
        writer.option("writeId", "one").save()
    assert sorted(map(int, bodies(amqp_url, stream_name))) == list(range(ROWS))
    writer.option("writeId", "two").save()
    df.write.format("rabbitmq_streams").options(**sink, stream=stream_name).mode("append").save()
    assert len(bodies(amqp_url, stream_name)) == 3 * ROWS


def _streamed(spark: SparkSession, sink: dict[str, str], stream: str, source: Path, checkpoint: Path) -> None:
    """Run a streaming query over what is there of files, one file a micro-batch."""
    df = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(source))
    query = (
        df.writeStream.format("rabbitmq_streams")
        .options(**sink, stream=stream, checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def test_a_micro_batch_replayed_publishes_nothing_twice(
    spark: SparkSession, sink: dict[str, str], amqp_url: str, stream_name: str, tmp_path: Path, replays: int
) -> None:
    """A query whose last commit is lost several times publishes each row once, and goes on with the next batch."""
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()
    for number in range(2):
        (source / f"{number}.txt").write_text("".join(f"{number}-{line}\n" for line in range(100)))
    _streamed(spark, sink, stream_name, source, checkpoint)
    for _ in range(replays):
        (checkpoint / "commits" / "1").unlink()
        (checkpoint / "commits" / ".1.crc").unlink()
        _streamed(spark, sink, stream_name, source, checkpoint)
    (source / "2.txt").write_text("2-0\n")
    _streamed(spark, sink, stream_name, source, checkpoint)
    expected = [f"{number}-{line}".encode() for number in range(2) for line in range(100)] + [b"2-0"]
    found = bodies(amqp_url, stream_name)
    assert sorted(found) == sorted(expected)
    assert found[-1] == b"2-0"


def test_a_new_checkpoint_is_a_new_write(
    spark: SparkSession, sink: dict[str, str], amqp_url: str, stream_name: str, tmp_path: Path
) -> None:
    """A query that starts anew with another checkpoint publishes its rows: micro-batch 0 is not that of the other."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "0.txt").write_text("a\n")
    for number in range(2):
        _streamed(spark, sink, stream_name, source, tmp_path / f"checkpoint-{number}")
    assert bodies(amqp_url, stream_name) == [b"a", b"a"]


def test_foreach_batch_with_ids(
    spark: SparkSession, sink: dict[str, str], amqp_url: str, stream_name: str, tmp_path: Path
) -> None:
    """`writeId` and `batchId` make a write inside `foreachBatch` safe to repeat."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.txt").write_text(f"{number}\n")

    def write(batch: DataFrame, batch_id: int) -> None:
        for _ in range(2):
            batch.write.format("rabbitmq_streams").options(
                **sink, stream=stream_name, writeId="query", batchId=batch_id
            ).mode("append").save()

    df = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(source))
    query = df.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "c"))
    query.trigger(availableNow=True).start().awaitTermination()
    assert sorted(bodies(amqp_url, stream_name)) == [b"0", b"1", b"2"]


def test_a_task_that_ended_half_way_goes_on(sink: dict[str, str], amqp_url: str, stream_name: str) -> None:
    """What an attempt had sent when it died is found by the next, which sends the rest: none twice, none missing."""
    options = sink | {"stream": stream_name}
    assert run_task(options, rows(200)) == Published(200, 0)
    assert run_task(options, rows(ROWS)) == Published(ROWS - 200, 200)
    assert run_task(options, rows(ROWS)) == Published(0, ROWS)
    assert run_task(options, rows(ROWS), task=1) == Published(ROWS, 0)
    assert bodies(amqp_url, stream_name) == rows(ROWS)["value"] * 2


def test_a_line_that_broke_while_publishing(
    sink: dict[str, str], amqp_url: str, stream_url: str, stream_name: str
) -> None:
    """A connection that falls silent while publishing is an error in bounded time; the retry leaves none out."""
    columns: Columns = {"value": [b"%d" % n + b"x" * 1000 for n in range(5000)]}
    with Proxy.to(stream_url) as proxy:
        options = sink | {"streamUrl": proxy.url(stream_url), "stream": stream_name}
        parsed = parse_sink_options(options | {"maxInFlight": "100", "confirmTimeoutMs": "3000"})
        shape = _shape(parsed)

        def half() -> Iterator[tuple[Columns, int]]:
            yield columns, 5000

        for mode in ("blackhole_replies", "blackhole"):
            with in_time(3.0), pytest.raises((PublishOutcomeUnknown, BrokerUnavailable)):
                _write_while(proxy, mode, parsed, shape, half())
            proxy.mode = "pass"
            assert 0 < len(bodies(amqp_url, stream_name)) < 5000
    run_task(sink | {"stream": stream_name}, columns)
    assert bodies(amqp_url, stream_name) == columns["value"]


def _write_while(proxy: Proxy, mode: str, options: Any, shape: Any, batches: Any) -> None:
    """Run a task, and change the proxy's mode as soon as its first messages are confirmed."""
    import relatum_spark._publisher as publisher_module

    taken = publisher_module.Publisher._handle
    count = 0

    def handle(self: Any, event: Any) -> None:
        nonlocal count
        taken(self, event)
        count += 1
        if count == 5:
            proxy.mode = mode

    publisher_module.Publisher._handle = handle  # type: ignore[method-assign]
    try:
        write_task(options, shape, batches, write_id="w", epoch=0, task=0)
    finally:
        publisher_module.Publisher._handle = taken  # type: ignore[method-assign]


def test_a_streaming_query_waits_for_a_broker_that_is_away(
    sink: dict[str, str], stream_url: str, stream_name: str
) -> None:
    """Before a batch the broker is asked again, but not for ever; a batch write is refused at once."""
    schema = StructType().add("value", "string")
    with Proxy.to(stream_url) as proxy:
        proxy.accepts = False
        options = sink | {"streamUrl": proxy.url(stream_url), "stream": stream_name, "pollTimeoutMs": "90000"}
        with pytest.raises(BrokerUnavailable):
            DefaultSource(options).writer(schema, False)
        with pytest.raises(BrokerUnavailable):
            DefaultSource(options | {"pollTimeoutMs": "300"}).streamWriter(schema, False)
        comes_back = threading.Timer(1, setattr, (proxy, "accepts", True))
        started = time.monotonic()
        comes_back.start()
        DefaultSource(options).streamWriter(schema, False)
        assert time.monotonic() - started >= 1
        comes_back.join()


def test_another_order_is_an_error(sink: dict[str, str], amqp_url: str, stream_name: str) -> None:
    """A task whose rows come back in another order, fewer, or changed, is refused, and has sent nothing."""
    options = sink | {"stream": stream_name}
    run_task(options, rows(100))
    good = rows(200)["value"]
    for bad in (good[::-1], good[:50], [b"other", *good[1:]], []):
        with pytest.raises(Conflict, match="sortWithinPartitions"):
            run_task(options, {"value": bad})
    assert bodies(amqp_url, stream_name) == rows(100)["value"]
    run_task(options, rows(100), epoch=1)
    with pytest.raises(Conflict, match="set back"):
        run_task(options, rows(200))
    assert len(bodies(amqp_url, stream_name)) == 200


def test_deduplication_outlives_the_broker(private_servers: LocalServers) -> None:
    """A broker that was stopped and started again still knows what was published."""
    server = private_servers.rabbitmq
    name = unique_name()
    declare_stream(server.broker_url, name)
    options = {"broker": server.broker_url, "streamUrl": server.stream_url, "stream": name}
    assert run_task(options, rows(ROWS)).sent == ROWS
    server.restart()
    wait_until(lambda: stream_available(server.broker_url, name), what="the stream after the restart")
    assert run_task(options, rows(ROWS)) == Published(0, ROWS)
    assert run_task(options, rows(ROWS + 5)) == Published(5, ROWS)
    assert bodies(server.broker_url, name) == rows(ROWS + 5)["value"]


def test_a_frozen_broker_is_noticed_in_time(private_servers: LocalServers) -> None:
    """A broker that answers nothing any more ends the task soon; once it goes on, a retry publishes all."""
    server = private_servers.rabbitmq
    name = unique_name()
    declare_stream(server.broker_url, name)
    options = {"broker": server.broker_url, "streamUrl": server.stream_url, "stream": name, "confirmTimeoutMs": "2000"}
    parsed = parse_sink_options(options)
    shape = _shape(parsed)
    server.freeze()
    try:
        with in_time(2.0), pytest.raises(BrokerUnavailable):
            write_task(parsed, shape, iter([(rows(ROWS), ROWS)]), write_id="w", epoch=0, task=0)
    finally:
        server.thaw()
    assert run_task(options, rows(ROWS)) == Published(ROWS, 0)
    assert bodies(server.broker_url, name) == rows(ROWS)["value"]


# --- refused on the driver --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stream": "relatum-no-such-stream"}, "no stream"),
        ({"superStream": "relatum-no-such-stream", "routingKey": "value"}, "no super stream"),
        ({"keyColumns": "nothing"}, "no column 'nothing'"),
        ({"confirmTimeout": "1"}, "confirmTimeoutMs"),
        (
            {"broker": "amqp://guest:sesame@127.0.0.1:1/", "streamUrl": "rabbitmq-stream://guest:sesame@127.0.0.1:1/"},
            "127.0.0.1:1",
        ),
    ],
)
def test_bad_options_are_refused_before_a_job_runs(
    spark: SparkSession, sink: dict[str, str], stream_name: str, options: dict[str, str], words: str
) -> None:
    """A write that cannot be is refused with the reason, without credentials."""
    given = sink | ({} if "superStream" in options else {"stream": stream_name}) | options
    df = spark.createDataFrame([("v",)], "value string")
    with pytest.raises(PySparkException, match=words) as caught:
        df.write.format("rabbitmq_streams").options(**given).mode("append").save()
    assert "sesame" not in str(caught.value)


def test_streams_are_not_overwritten(spark: SparkSession, sink: dict[str, str], stream_name: str) -> None:
    """Only appending makes sense of a stream."""
    df = spark.createDataFrame([("v",)], "value string")
    with pytest.raises(PySparkException, match="append"):
        df.write.format("rabbitmq_streams").options(**sink, stream=stream_name).mode("overwrite").save()


def test_errors_are_the_kernels(sink: dict[str, str], stream_name: str) -> None:
    """A stream that is not there, and more tasks than a write may have, are errors of `relatum.errors`."""
    with pytest.raises(StreamNotFound):
        run_task(sink | {"stream": "relatum-no-such-stream"}, rows(1))
    with pytest.raises(InvalidInput, match="coalesce"):
        run_task(sink | {"stream": stream_name}, rows(1), task=200)
