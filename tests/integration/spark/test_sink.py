"""Writing to streams from Spark: what is written is what is read, and nothing is there twice."""

import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pika
import pyarrow as pa
import pytest
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from pyspark_relatum import DefaultSource
from relatum.errors import (
    BrokerUnavailable,
    Conflict,
    HeadersRefused,
    InvalidInput,
    InvalidRelationshipKey,
    PublishOutcomeUnknown,
    StreamNotFound,
)
from relatum.keys import KeyDefinition
from relatum.local import LocalServers
from relatum.reading import Message, StreamReader
from relatum.store import add_keys
from relatum.superstreams import Layout, partition_of
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
from tests.support.proxy import SLOW_PART, Proxy
from tests.support.standstill import in_time

ROWS = 500
VALUE = StructType().add("value", "binary")
MOMENT = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)


@pytest.fixture
def sink(amqp_url: str, stream_url: str) -> dict[str, str]:
    """The options that name the broker."""
    return {"broker": amqp_url, "streamUrl": stream_url}


def messages(url: str, stream: str) -> list[Message]:
    """All messages of a stream."""
    with StreamReader.open(url) as reader:
        found = reader.iterate(stream, "first", follow=False)
        return list(found)


def bodies(url: str, stream: str) -> list[bytes]:
    """The bodies of all messages of a stream."""
    return [message.body for message in messages(url, stream)]


def rows(count: int) -> list[bytes]:
    """The bodies of as many rows."""
    return [b"row %d" % number for number in range(count)]


def write(options: dict[str, str], columns: dict[str, Any], *, epoch: int = 0) -> tuple[int, int]:
    """Do what the only task of a write does: how many messages were sent, and how many found."""
    batch = pa.record_batch(columns)
    writer = DefaultSource(options | {"writeId": "w", "batchId": str(epoch)}).writer(
        from_arrow_schema(batch.schema), False
    )
    done = writer.write(iter([batch]))
    return done.sent, done.found


def write_bodies(options: dict[str, str], values: list[bytes], *, epoch: int = 0) -> tuple[int, int]:
    """The same of rows that have a body alone."""
    return write(options, {"value": pa.array(values, pa.binary())}, epoch=epoch)


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


def test_a_bad_row_is_refused_before_anything_is_sent(
    sink: dict[str, str], amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """One value that cannot be recorded, in the last row of many, a row without a body, or too large a header."""
    add_keys(engine, [KeyDefinition("number", type="integer")])
    options = sink | {"stream": stream_name}
    keyed = options | {"keyColumns": "number", "database": database_url}
    with pytest.raises(InvalidRelationshipKey, match="nothing was sent") as caught:
        write(keyed, {"value": ["v"] * 20_000, "number": ["1"] * 19_999 + ["x"]})
    assert (caught.value.key, caught.value.reason) == ("number", "not_integer")
    with pytest.raises(InvalidRelationshipKey, match="nothing was sent") as caught:
        write(options | {"keyColumns": "id"}, {"value": ["a", "b"], "id": ["ok", "bad\0"]})
    assert (caught.value.key, caught.value.reason) == ("id", "nul_character")
    with pytest.raises(InvalidInput, match="no value"):
        write(options, {"value": ["v", None]})
    with pytest.raises(InvalidInput, match="the broker takes"):
        write_bodies(options, [b"x" * (2 << 20)])
    headers = pa.array([[("a", "x" * 200_000)]], pa.map_(pa.string(), pa.string()))
    with pytest.raises(HeadersRefused):
        write(options, {"value": ["v"], "headers": headers})
    assert bodies(amqp_url, stream_name) == []


def test_keys_and_times_keep_their_types(sink: dict[str, str], amqp_url: str, stream_name: str) -> None:
    """Numbers stay numbers, moments are microseconds, null is no header.

    A message's time is the column `timestamp`, else what the headers say, as text too, else the time of writing.
    """
    kind, moment = pa.map_(pa.string(), pa.string()), pa.timestamp("us", "UTC")
    given = [{"relatum_time": "5"}, {"relatum_time": "-6"}, {"relatum_receipt": "r"}]
    columns = {
        "value": [b"a", b"b", b"c"],
        "id": ["x", None, "z"],
        "n": [1, 2, 3],
        "at": pa.array([MOMENT] * 3, moment),
        "timestamp": pa.array([datetime.fromtimestamp(7, UTC), None, None], moment),
        "headers": pa.array([list(each.items()) for each in given], kind),
    }
    write(sink | {"stream": stream_name, "keyColumns": "id,n,at"}, columns)
    first, second, third = messages(amqp_url, stream_name)
    at = int(MOMENT.timestamp()) * 1_000_000
    assert {name: first.headers[name] for name in ("id", "n", "at")} == {"id": "x", "n": 1, "at": at}
    assert "id" not in second.headers
    assert (first.time_us, second.time_us) == (7_000_000, -6)
    assert third.time is not None
    assert abs(third.time - datetime.now(UTC)) < timedelta(minutes=5)
    assert "relatum_receipt" not in third.headers


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
    # With another checkpoint it is another write, whose micro-batch 0 is not that of the first.
    _streamed(spark, sink, stream_name, source, tmp_path / "another")
    assert sorted(bodies(amqp_url, stream_name)) == sorted(expected * 2)


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
    assert write_bodies(options, rows(200)) == (200, 0)
    assert write_bodies(options, rows(ROWS)) == (ROWS - 200, 200)
    assert write_bodies(options, rows(ROWS)) == (0, ROWS)
    assert bodies(amqp_url, stream_name) == rows(ROWS)


def test_a_line_that_broke_while_publishing(
    sink: dict[str, str], amqp_url: str, stream_url: str, stream_name: str
) -> None:
    """A connection that falls silent while publishing is an error in bounded time; the retry leaves none out."""
    values = [b"%d" % n + b"x" * 1000 for n in range(5000)]
    given = sink | {"stream": stream_name, "maxInFlight": "100", "confirmTimeoutMs": "3000", "writeId": "w"}
    with Proxy.to(stream_url) as proxy:
        writer = DefaultSource(given | {"streamUrl": proxy.url(stream_url)}).writer(VALUE, False)
        proxy.bytes_per_s = SLOW_PART / 0.01
        for number, mode in enumerate(("blackhole_replies", "blackhole")):
            there = len(bodies(amqp_url, stream_name))
            breaking = threading.Thread(target=_break_after, args=[proxy, mode, amqp_url, stream_name, there])
            breaking.start()
            with in_time(3.0), pytest.raises((PublishOutcomeUnknown, BrokerUnavailable)):
                writer.write(iter([pa.record_batch({"value": pa.array(values, pa.binary())})]))
            breaking.join()
            proxy.mode = "pass"
            assert there < len(bodies(amqp_url, stream_name)) < 5000, number
    write_bodies(sink | {"stream": stream_name}, values)
    assert bodies(amqp_url, stream_name) == values


def _break_after(proxy: Proxy, mode: str, amqp_url: str, stream: str, there: int) -> None:
    """Change the proxy's mode as soon as a message more is in the stream."""
    with StreamReader.open(amqp_url) as reader:
        wait_until(lambda: reader.bounds(stream).end > there, what="a first message")
    proxy.mode = mode


def test_a_streaming_query_waits_for_a_broker_that_is_away(
    sink: dict[str, str], stream_url: str, stream_name: str
) -> None:
    """Before a batch the broker is asked again, but not for ever; a batch write is refused at once."""
    with Proxy.to(stream_url) as proxy:
        proxy.accepts = False
        options = sink | {"streamUrl": proxy.url(stream_url), "stream": stream_name, "pollTimeoutMs": "90000"}
        with pytest.raises(BrokerUnavailable):
            DefaultSource(options).writer(VALUE, False)
        with pytest.raises(BrokerUnavailable):
            DefaultSource(options | {"pollTimeoutMs": "300"}).streamWriter(VALUE, False)
        comes_back = threading.Timer(1, setattr, (proxy, "accepts", True))
        started = time.monotonic()
        comes_back.start()
        DefaultSource(options).streamWriter(VALUE, False)
        assert time.monotonic() - started >= 1
        comes_back.join()


def test_another_order_is_an_error(sink: dict[str, str], amqp_url: str, stream_name: str) -> None:
    """A task whose rows come back in another order, fewer, or changed, is refused, and has sent nothing."""
    options = sink | {"stream": stream_name}
    write_bodies(options, rows(100))
    good = rows(200)
    for bad in (good[::-1], good[:50], [b"other", *good[1:]], []):
        with pytest.raises(Conflict, match="sortWithinPartitions"):
            write_bodies(options, bad)
    assert bodies(amqp_url, stream_name) == rows(100)
    write_bodies(options, rows(100), epoch=1)
    with pytest.raises(Conflict, match="set back"):
        write_bodies(options, rows(200))
    assert len(bodies(amqp_url, stream_name)) == 200


def test_deduplication_outlives_the_broker(private_servers: LocalServers) -> None:
    """A broker that was stopped and started again still knows what was published."""
    server = private_servers.rabbitmq
    name = unique_name()
    declare_stream(server.broker_url, name)
    options = {"broker": server.broker_url, "streamUrl": server.stream_url, "stream": name}
    assert write_bodies(options, rows(ROWS)) == (ROWS, 0)
    server.restart()
    wait_until(lambda: stream_available(server.broker_url, name), what="the stream after the restart")
    assert write_bodies(options, rows(ROWS)) == (0, ROWS)
    assert write_bodies(options, rows(ROWS + 5)) == (5, ROWS)
    assert bodies(server.broker_url, name) == rows(ROWS + 5)


def test_a_frozen_broker_is_noticed_in_time(private_servers: LocalServers) -> None:
    """A broker that answers nothing any more ends the task soon; once it goes on, a retry publishes all."""
    server = private_servers.rabbitmq
    name = unique_name()
    declare_stream(server.broker_url, name)
    options = {"broker": server.broker_url, "streamUrl": server.stream_url, "stream": name, "confirmTimeoutMs": "2000"}
    writer = DefaultSource(options | {"writeId": "w"}).writer(VALUE, False)
    server.freeze()
    try:
        with in_time(2.0), pytest.raises(BrokerUnavailable):
            writer.write(iter([pa.record_batch({"value": rows(ROWS)})]))
    finally:
        server.thaw()
    assert write_bodies(options, rows(ROWS)) == (ROWS, 0)
    assert bodies(server.broker_url, name) == rows(ROWS)


# --- refused on the driver --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"stream": "relatum-no-such-stream"}, StreamNotFound, "no stream"),
        ({"superStream": "relatum-no-such-stream", "routingKey": "value"}, StreamNotFound, "no super stream"),
        ({"keyColumns": "nothing"}, InvalidInput, "no column 'nothing'"),
        ({"confirmTimeout": "1"}, InvalidInput, "confirmTimeoutMs"),
        (
            {"broker": "amqp://guest:sesame@127.0.0.1:1/", "streamUrl": "rabbitmq-stream://guest:sesame@127.0.0.1:1/"},
            BrokerUnavailable,
            "127.0.0.1:1",
        ),
    ],
)
def test_bad_options_are_refused_before_a_job_runs(
    sink: dict[str, str], stream_name: str, options: dict[str, str], error: type[Exception], words: str
) -> None:
    """A write that cannot be is refused with the reason, without credentials."""
    given = sink | ({} if "superStream" in options else {"stream": stream_name}) | options
    with pytest.raises(error, match=words) as caught:
        DefaultSource(given).writer(VALUE, False)
    assert "sesame" not in str(caught.value)
