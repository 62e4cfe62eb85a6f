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
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from pyspark_relatum import DefaultSource
from relatum import errors
from relatum.keys import KeyDefinition
from relatum.local import LocalServers
from relatum.reading import Message, StreamReader
from relatum.store.catalog import add_keys
from relatum.superstreams import Layout, partition_of
from tests.support import declare_stream, new_streams, publish_plain, stream_available, unique_name, wait_until
from tests.support.place import Place
from tests.support.proxy import SLOW_PART, Proxy
from tests.support.spark import uncommit
from tests.support.standstill import in_time
from tests.support.threads import beside

ROWS = 500
VALUE = StructType().add("value", "binary")
MOMENT = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
TEXTS = pa.map_(pa.string(), pa.string())
TIMES = pa.timestamp("us", "UTC")


class Sink:
    """Writes to one stream as the only task of a job does, in this process."""

    def __init__(self, amqp_url: str, stream_url: str, stream: str) -> None:
        self.amqp, self.stream = amqp_url, stream
        self.options = {"broker": amqp_url, "streamUrl": stream_url, "stream": stream}

    def write(self, columns: dict[str, Any], *, epoch: int = 0, **options: str | None) -> tuple[int, int]:
        """Write rows: how many messages were sent, and how many found. None takes an option away."""
        batch = pa.record_batch(columns)
        given = self.options | {"writeId": "w", "batchId": str(epoch)} | options
        source = DefaultSource({name: value for name, value in given.items() if value is not None})
        done = source.writer(from_arrow_schema(batch.schema), False).write(iter([batch]))
        return done.sent, done.found

    def write_bodies(self, values: list[bytes], **options: Any) -> tuple[int, int]:
        return self.write({"value": pa.array(values, pa.binary())}, **options)

    def messages(self, stream: str | None = None) -> list[Message]:
        with StreamReader.open(self.amqp) as reader:
            return list(reader.iterate(stream or self.stream))

    def bodies(self, stream: str | None = None) -> list[bytes]:
        return [message.body for message in self.messages(stream)]


@pytest.fixture
def sink(amqp_url: str, stream_url: str, stream_name: str) -> Sink:
    return Sink(amqp_url, stream_url, stream_name)


def rows(count: int) -> list[bytes]:
    return [b"row %d" % number for number in range(count)]


def test_a_stream_can_be_copied_any_number_of_times(spark: SparkSession, sink: Sink, replays: int) -> None:
    """What the source reads can be written again: once under one `writeId`, once more under another or none."""
    sent = [(b"%d" % n, {"order_id": f"o{n}", "relatum_time": 1_700_000_000_000_000 + n}) for n in range(50)]
    publish_plain(sink.amqp, sink.stream, sent)
    options = sink.options | {"maxRecordsPerPartition": "17"}
    df = spark.read.format("rabbitmq_streams").options(**options).load().drop("stream", "offset")
    with new_streams(sink.amqp, 1) as (copy,):
        writer = df.write.format("rabbitmq_streams").options(**(sink.options | {"stream": copy})).mode("append")
        for _ in range(1 + replays):
            writer.option("writeId", "one").save()
        found = sink.messages(copy)
        assert sorted((each.body, dict(each.headers)) for each in found) == sorted(sent)
        assert len({each.properties.message_id for each in found}) == 50
        writer.option("writeId", "two").save()
        df.write.format("rabbitmq_streams").options(**(sink.options | {"stream": copy})).mode("append").save()
        assert len(sink.messages(copy)) == 150


def _streamed(spark: SparkSession, sink: Sink, source: Path, checkpoint: Path) -> None:
    """Run a streaming query over what is there of files, one file a micro-batch."""
    df = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(source))
    writer = df.writeStream.format("rabbitmq_streams").options(**sink.options, checkpointLocation=str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


def test_a_micro_batch_replayed_publishes_nothing_twice(
    spark: SparkSession, sink: Sink, tmp_path: Path, replays: int
) -> None:
    """A query whose last commit is lost several times publishes each row once, and continues with the next batch."""
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()
    for number in range(2):
        (source / f"{number}.txt").write_text("".join(f"{number}-{line}\n" for line in range(100)))
    _streamed(spark, sink, source, checkpoint)
    for _ in range(replays):
        uncommit(checkpoint, 1)
        _streamed(spark, sink, source, checkpoint)
    (source / "2.txt").write_text("2-0\n")
    _streamed(spark, sink, source, checkpoint)
    expected = [f"{number}-{line}".encode() for number in range(2) for line in range(100)] + [b"2-0"]
    found = sink.bodies()
    assert sorted(found) == sorted(expected)
    assert found[-1] == b"2-0"
    # With another checkpoint it is another write, whose micro-batch 0 is not that of the first.
    _streamed(spark, sink, source, tmp_path / "another")
    assert sorted(sink.bodies()) == sorted(expected * 2)


def test_what_is_written_is_what_is_read(sink: Sink) -> None:
    """A message written by Spark equals one published by pika, property by property."""
    properties = {
        "content_type": "a/b", "content_encoding": "gzip", "delivery_mode": 2, "priority": 4, "correlation_id": "c",
        "reply_to": "a queue", "expiration": "60000", "message_id": "m", "timestamp": MOMENT, "type": "t",
        "user_id": urlsplit(sink.amqp).username, "app_id": "app",
    }  # fmt: skip
    headers = {"text": "tëxt", "long": "x" * 5000, "x-own": "y", "none": None}
    plain = properties | {"timestamp": int(MOMENT.timestamp())}
    publish_plain(sink.amqp, sink.stream, [(b"body", pika.BasicProperties(headers=headers | {"id": 7}, **plain))])
    kinds = {"delivery_mode": pa.int32(), "priority": pa.int32(), "timestamp": TIMES}
    struct = pa.struct([(name, kinds.get(name, pa.string())) for name in properties])
    written = {"value": [b"body"], "headers": pa.array([list(headers.items())], TEXTS)}
    ids, described = pa.array([7], pa.int32()), pa.array([properties], struct)
    sink.write(written | {"properties": described, "id": ids}, keyColumns="id")
    one, other = sink.messages()
    assert (other.headers, other.properties) == (one.headers, one.properties)
    assert (other.body, other.time_us) == (one.body, one.time_us)


def test_the_recorder_sees_lifted_keys(sink: Sink, place: Place) -> None:
    """Columns named as keys are recorded: under the definition's header, with their own types."""
    keys = [KeyDefinition("order_id"), KeyDefinition("number", "header:no", "integer")]
    add_keys(place.engine, [*keys, KeyDefinition("at", type="timestamp")])
    numbers = list(range(20))
    columns = {
        "value": [b"%d" % n for n in numbers],
        "order_id": [f"o{n}" for n in numbers],
        "number": numbers,
        "at": pa.array([n * 1_000_000 for n in numbers], TIMES),
    }
    with place.recording():
        sink.write(columns, keyColumns="order_id,number,at", database=place.database)
        place.wait_recorded()
    assert place.rows() == [
        row for n in numbers for row in (("at", str(n * 1_000_000), n), ("number", str(n), n), ("order_id", f"o{n}", n))
    ]


def test_keys_and_times_keep_their_types(sink: Sink) -> None:
    """Numbers stay numbers, moments are microseconds, null gives no header; the time is a column's or the headers'."""
    given = [{"relatum_time": "5"}, {"relatum_time": "-6"}, {"relatum_receipt": "r"}]
    columns = {
        "value": [b"a", b"b", b"c"],
        "id": ["x", None, "z"],
        "n": [1, 2, 3],
        "at": pa.array([MOMENT] * 3, TIMES),
        "timestamp": pa.array([datetime.fromtimestamp(7, UTC), None, None], TIMES),
        "headers": pa.array([list(each.items()) for each in given], TEXTS),
    }
    sink.write(columns, keyColumns="id,n,at")
    first, second, third = sink.messages()
    at = int(MOMENT.timestamp()) * 1_000_000
    assert {name: first.headers[name] for name in ("id", "n", "at")} == {"id": "x", "n": 1, "at": at}
    assert "id" not in second.headers
    assert (first.time_us, second.time_us) == (7_000_000, -6)
    assert third.time is not None
    assert abs(third.time - datetime.now(UTC)) < timedelta(minutes=5)
    assert "relatum_receipt" not in third.headers


def test_times_without_a_zone_are_utc(sink: Sink) -> None:
    """As everywhere in Relatum: in a key's column, the message's time, a header and a property."""
    zoneless = pa.timestamp("us")
    columns = {
        "value": [b"a"],
        "at": pa.array([MOMENT], zoneless),
        "timestamp": pa.array([MOMENT], zoneless),
        "headers": pa.array([[("seen", MOMENT)]], pa.map_(pa.string(), zoneless)),
        "properties": pa.array([{"timestamp": MOMENT}], pa.struct([("timestamp", zoneless)])),
    }
    sink.write(columns, keyColumns="at")
    (message,) = sink.messages()
    assert (message.headers["at"], message.time) == (int(MOMENT.timestamp()) * 1_000_000, MOMENT)
    assert message.headers["seen"] == message.properties.timestamp == MOMENT


def test_super_streams_are_routed_as_by_other_clients(sink: Sink, layout: Layout) -> None:
    """Each row is in the stream its routing key belongs to, in order, and once, however often it is written."""
    values = [b"%d" % n for n in range(300)]
    for _ in range(2):
        options = {"stream": None, "superStream": layout.super_stream, "routingKey": "key"}
        sink.write({"value": values, "key": list(range(300))}, **options)
    for place, each in enumerate(layout):
        expected = [b"%d" % n for n in range(300) if partition_of(str(n), 3) == place]
        assert expected
        assert sink.bodies(each.stream) == expected


def test_a_task_that_ended_half_way_goes_on_in_its_order(sink: Sink) -> None:
    """The next attempt sends the rest; rows reordered, fewer or changed are refused, and so is an earlier batch."""
    assert sink.write_bodies(rows(100)) == (100, 0)
    good = rows(ROWS)
    for bad in (good[::-1], good[:50], [b"other", *good[1:]], []):
        with pytest.raises(errors.Conflict, match="sortWithinPartitions"):
            sink.write_bodies(bad)
    assert sink.bodies() == rows(100)
    assert sink.write_bodies(good) == (ROWS - 100, 100)
    assert sink.write_bodies(good) == (0, ROWS)
    for found in (0, 100):
        assert sink.write_bodies(rows(100), epoch=1) == (100 - found, found)
    with pytest.raises(errors.Conflict, match="rewound"):
        sink.write_bodies([*good, b"more"])
    assert sink.bodies() == good + rows(100)


def test_a_line_that_broke_while_publishing(sink: Sink, stream_url: str) -> None:
    """A line that falls silent, or a broker that freezes, is an error in bounded time; a retry leaves none out."""
    values = [b"%d" % n + b"x" * 1000 for n in range(5000)]
    with Proxy.to(stream_url) as proxy:
        given = sink.options | {"maxInFlight": "100", "confirmTimeoutMs": "3000", "writeId": "w"}
        writer = DefaultSource(given | {"streamUrl": proxy.url(stream_url)}).writer(VALUE, False)
        batch = pa.record_batch({"value": pa.array(values, pa.binary())})
        proxy.mode = "frozen"
        with in_time(3.0), pytest.raises(errors.BrokerUnavailable):
            writer.write(iter([batch]))
        proxy.mode, proxy.bytes_per_s = "pass", SLOW_PART / 0.01

        def break_after(mode: str, there: int) -> None:
            with StreamReader.open(sink.amqp) as reader:
                wait_until(lambda: reader.bounds(sink.stream).end > there, what="a first message")
            proxy.mode = mode

        for mode in ("blackhole_replies", "blackhole"):
            there = len(sink.bodies())
            lost = pytest.raises((errors.PublishOutcomeUnknown, errors.BrokerUnavailable))
            with beside(break_after, mode, there), in_time(3.0), lost:
                writer.write(iter([batch]))
            proxy.mode = "pass"
            assert there < len(sink.bodies()) < 5000, mode
    sink.write_bodies(values)
    assert sink.bodies() == values


def test_a_streaming_query_waits_for_a_broker_that_is_away(sink: Sink, stream_url: str) -> None:
    """Before a batch the broker is asked again, but not forever; a batch write is refused at once."""
    with Proxy.to(stream_url) as proxy:
        proxy.accepts = False
        options = sink.options | {"streamUrl": proxy.url(stream_url), "pollTimeoutMs": "90000"}
        with pytest.raises(errors.BrokerUnavailable):
            DefaultSource(options).writer(VALUE, False)
        with pytest.raises(errors.BrokerUnavailable):
            DefaultSource(options | {"pollTimeoutMs": "300"}).streamWriter(VALUE, False)
        comes_back = threading.Timer(1, setattr, (proxy, "accepts", True))
        started = time.monotonic()
        comes_back.start()
        DefaultSource(options).streamWriter(VALUE, False)
        assert time.monotonic() - started >= 1
        comes_back.join()


def test_deduplication_outlives_the_broker(private_servers: LocalServers) -> None:
    """A broker that was stopped and started again still knows what was published."""
    server = private_servers.rabbitmq
    sink = Sink(server.broker_url, server.stream_url, unique_name())
    declare_stream(server.broker_url, sink.stream)
    assert sink.write_bodies(rows(ROWS)) == (ROWS, 0)
    server.restart()
    wait_until(lambda: stream_available(server.broker_url, sink.stream), what="the stream after the restart")
    assert sink.write_bodies(rows(ROWS)) == (0, ROWS)
    assert sink.write_bodies(rows(ROWS + 5)) == (5, ROWS)
    assert sink.bodies() == rows(ROWS + 5)


def test_a_bad_row_is_refused_before_anything_is_sent(sink: Sink, place: Place) -> None:
    """A value, row or option that cannot be is refused with the reason, without credentials, and nothing is sent."""
    add_keys(place.engine, [KeyDefinition("number", type="integer")])
    headers = pa.array([[("a", "x" * 200_000)]], TEXTS)
    many = {"value": ["v"] * 20_000, "number": ["1"] * 19_999 + ["x"]}
    numbers, ids = {"keyColumns": "number", "database": place.database}, {"keyColumns": "id"}
    bad: list[tuple[dict[str, Any], dict[str, str], type[Exception], tuple[str, str] | None]] = [
        (many, numbers, errors.InvalidRelationshipKey, ("number", "not_integer")),
        ({"value": ["a", "b"], "id": ["ok", "bad\0"]}, ids, errors.InvalidRelationshipKey, ("id", "nul_character")),
        ({"value": ["v", None]}, {}, errors.InvalidInput, None),
        ({"value": pa.array([b"x" * (2 << 20)], pa.binary())}, {}, errors.InvalidInput, None),
        ({"value": ["v"], "headers": headers}, {}, errors.HeadersRefused, None),
    ]
    for columns, options, error, fields in bad:
        with pytest.raises(error) as caught:
            sink.write(columns, **options)
        assert fields is None or (caught.value.key, caught.value.reason) == fields  # type: ignore[attr-defined]
    assert sink.bodies() == []
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"stream": "relatum-no-such-stream"}, errors.StreamNotFound, "relatum-no-such-stream"),
        (
            {"superStream": "no-such-super", "routingKey": "value", "stream": None},
            errors.StreamNotFound,
            "no-such-super",
        ),
        ({"keyColumns": "nothing"}, errors.InvalidInput, "'nothing'"),
        (AWAY, errors.BrokerUnavailable, "127.0.0.1:1"),
    ]
    for options, error, words in wrong:
        given = {name: value for name, value in (sink.options | options).items() if value is not None}
        with pytest.raises(error, match=words) as refused:
            DefaultSource(given).writer(VALUE, False)
        assert "sesame" not in str(refused.value)


AWAY = {"broker": "amqp://guest:sesame@127.0.0.1:1/", "streamUrl": "rabbitmq-stream://guest:sesame@127.0.0.1:1/"}
