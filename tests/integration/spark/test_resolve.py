"""Payloads for any DataFrame of places."""

from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

import relatum_spark
from relatum import Broker
from relatum.errors import BrokerUnavailable, ConfigurationError, InvalidInput, KeyNotDefined
from relatum.reading import StreamReader
from relatum.store.catalog import add_keys
from tests.support import publish_plain
from tests.support._raw_publisher import RawPublisher, amqp_record
from tests.support.place import Place
from tests.support.spark import Frame

MESSAGES = 60
PLACE = {"stream": pa.string(), "offset": pa.int64()}
AWAY = "amqp://guest:sesame-82@127.0.0.1:9/"


@pytest.fixture
def at(place: Place) -> dict[str, Any]:
    """The options that name the broker; numbered messages are in its stream."""
    headers = [{"order_id": f"o{n}", "relatum_time": 1_700_000_000_000_000 + n} for n in range(MESSAGES)]
    publish_plain(place.amqp, place.stream, [(b"body %d" % n, each) for n, each in enumerate(headers)], confirm=False)
    return {"broker": place.broker}


def resolve(frame: Frame, **options: Any) -> list[Row]:
    df: Any = frame
    return relatum_spark.resolve(df, keep_order=True, **options).collect()


def test_each_row_gets_its_message(spark: SparkSession, place: Place, at: dict[str, str]) -> None:
    """Rows keep their columns of any type and get their message; with keep_order they keep their order, too."""
    kinds = (
        "stream string, offset int, a array<int>, b map<string, double>, c struct<x: int, y: array<string>>, "
        "d decimal(20, 3), e date, f timestamp, g timestamp_ntz, h binary, i boolean, j float, `odd ``name.x` string"
    )
    moment = datetime(2026, 1, 2, 3, 4, 5, 6)
    values = (
        *([1, None], {"k": 1.5}, Row(x=1, y=["y", None]), Decimal("12.345"), date(2026, 1, 2)),
        *(moment.replace(tzinfo=UTC), moment, bytearray(b"\0\xff"), True, 0.5, "odd"),
    )
    offsets = [*range(MESSAGES - 1, -1, -7), 3, 3]
    nothing = [None] * len(values)
    given = [(place.stream, n, *values) for n in offsets] + [(place.stream, 99, *nothing), (None, 1, *nothing)]
    df = spark.createDataFrame(given, kinds)
    resolved = relatum_spark.resolve(df, **at)
    assert resolved.columns == [*df.columns, "timestamp", "value", "headers", "properties", "status"]
    assert resolved.select(*(F.col(f"`{name.replace('`', '``')}`") for name in df.columns)).schema == df.schema
    rows = resolved.collect()
    assert sorted(map(str, (row[: len(df.columns)] for row in rows))) == sorted(str(tuple(row)) for row in df.collect())
    found = [row for row in rows if row.status == "found"]
    assert sorted(row.offset for row in found) == sorted(offsets)
    for row in found:
        assert bytes(row.value) == b"body %d" % row.offset
        assert row.headers["order_id"] == f"o{row.offset}"
        assert row.timestamp.timestamp() == pytest.approx(1_700_000_000 + row.offset / 1e6, abs=1e-6)
        assert row.properties.delivery_mode == 1
    assert {row.offset: row.status for row in rows if row not in found} == {99: "not_found", 1: None}
    df = spark.range(0, 3 * MESSAGES, 1, 3).select(
        F.lit(place.stream).alias("stream"), (F.col("id") * 37 % MESSAGES).alias("offset"), "id"
    )
    rows = relatum_spark.resolve(df, keep_order=True, **at).collect()
    assert [row.id for row in rows] == list(range(3 * MESSAGES))
    assert all(bytes(row.value) == b"body %d" % row.offset for row in rows)


def test_a_later_batch_may_have_no_places(place: Place, at: dict[str, str]) -> None:
    """Rows without a place keep their nulls, wherever they are in a task."""
    frame = Frame(PLACE, [(place.stream, 1), (None, None), (place.stream, 2)])
    frame.batches = [frame.batches[0].slice(n, 1) for n in range(3)]
    assert [row.status for row in resolve(frame, **at)] == ["found", None, "found"]


def test_a_row_without_a_message_says_why(place: Place, at: dict[str, str]) -> None:
    """It is kept, with a status and no payload; columns can be left out, and a prefix is put before the others."""
    rows = [
        (place.stream, 2, "found"),
        (place.stream, MESSAGES, "not_found"),
        (place.stream, -1, "not_found"),
        (place.stream, 2**63 - 1, "not_found"),
        ("relatum-test-no-such-stream", 0, "no_stream"),
        (place.stream, None, None),
        (None, 1, None),
    ]
    found = resolve(Frame(PLACE | {"expected": pa.string()}, rows), **at)
    assert [(row.status, row.value is not None) for row in found] == [(each[2], each[2] == "found") for each in rows]
    kinds = {"s": pa.string(), "stream_offset": pa.int32(), "status": pa.string()}
    options: dict[str, Any] = {"stream_column": "s", "value": False, "headers": False, "prefix": "its_"}
    (row,) = resolve(Frame(kinds, [(place.stream, 0, "x")]), **options, **at)
    assert list(row.asDict()) == ["s", "stream_offset", "status", "its_timestamp", "its_status"]
    assert (row.status, row.its_status) == ("x", "found")


def test_what_retention_dropped_is_expired(amqp_url: str, broker: Broker, short_stream: str) -> None:
    """An offset below the first retained one has the status `expired`."""
    publish_plain(amqp_url, short_stream, [*(b"x" * 10_000 for _ in range(60)), b"the last"])
    with StreamReader.open(amqp_url) as reader:
        last = reader.bounds(short_stream).last
    rows = resolve(Frame(PLACE, [(short_stream, 0), (short_stream, last)]), broker=broker)
    assert [row.status for row in rows] == ["expired", "found"]


def test_large_payloads_come_in_several_batches(amqp_url: str, broker: Broker, stream_name: str) -> None:
    """Payloads of more bytes than one batch holds all arrive, each in its row."""
    publish_plain(amqp_url, stream_name, (b"%01000000d" % n for n in range(12)))
    df: Any = Frame(PLACE, [(stream_name, n) for n in (*range(12), 50)])
    resolved: Any = relatum_spark.resolve(df, keep_order=True, broker=broker)
    assert len(resolved.batches) > 1
    rows = resolved.collect()
    assert [(row.offset, row.status) for row in rows] == [*((n, "found") for n in range(12)), (50, "not_found")]
    assert [(len(row.value), int(row.value[-2:])) for row in rows[:12]] == [(1_000_000, n) for n in range(12)]


def test_a_message_that_does_not_carry_the_key_is_not_given(place: Place, at: dict[str, str]) -> None:
    """With check= a message that carries another value has the status `replaced` and is not given."""
    add_keys(place.engine, ["order_id"])
    rows = [(place.stream, 0, "o0"), (place.stream, 1, "o7"), (place.stream, 2, None)]
    frame = Frame(PLACE | {"order": pa.string()}, rows)
    found = resolve(frame, check={"order_id": "order"}, database=place.database, **at)
    assert [row.status for row in found] == ["found", "replaced", "found"]
    assert found[1].value is None
    with pytest.raises(KeyNotDefined):
        resolve(frame, check={"nothing": "order"}, database=place.database, **at)


def test_a_message_that_cannot_be_unpacked_is_unreadable(place: Place) -> None:
    """Its value cannot be checked, so it does not show that its stream was declared again."""
    add_keys(place.engine, ["order_id"])
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish((1, 2, 50, b"not gzip"), amqp_record(b"good", message_id="good"))
    frame = Frame(PLACE | {"order": pa.string()}, [(place.stream, 0, "a"), (place.stream, 1, None)])
    found = resolve(frame, check={"order_id": "order"}, broker=place.broker, database=place.database)
    assert [row.status for row in found] == ["unreadable", "unreadable"]


CLASHING = Frame({"stream": pa.string(), "stream_offset": pa.int64(), "VALUE": pa.string(), "status": pa.string()})


@pytest.mark.parametrize(
    ("frame", "options", "words"),
    [
        (None, {"stream_column": "where"}, "where"),
        (None, {"offset_column": "text"}, "integer"),
        (None, {"stream_column": "offset"}, "text"),
        (None, {"partitions": 0, "keep_order": False}, "partitions"),
        (None, {"partitions": 2}, "partitions"),
        (None, {"check": {"order_id": "offset"}}, "text"),
        (CLASHING, {}, r"value, status .* prefix="),
    ],
)
def test_wrong_arguments_are_refused(frame: Frame | None, options: Mapping[str, Any], words: str) -> None:
    """A wrong argument, or a column that is there already, is named before anything runs."""
    df: Any = frame or Frame(PLACE | {"text": pa.string()})
    with pytest.raises(InvalidInput, match=words):
        relatum_spark.resolve(df, **{"broker": AWAY, "keep_order": True} | options)


def test_a_broker_that_is_away_fails_the_task(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither error nor plan shows the password; rows without a place need only a broker that is named."""
    df = spark.createDataFrame([("s", 0)], "stream string, offset long")
    relatum_spark.resolve(df, broker=AWAY).explain(extended=True)
    shown = capsys.readouterr().out
    assert "MapInArrow" in shown
    assert "sesame" not in shown
    with pytest.raises(BrokerUnavailable) as raised:
        resolve(Frame(PLACE, [("s", 0)]), broker=Broker(AWAY, stream_url=AWAY.replace("amqp", "rabbitmq-stream")))
    assert "sesame" not in str(raised.value)
    for rows in ([(None, 0), ("s", None)], []):
        assert [row.status for row in resolve(Frame(PLACE, rows), broker=AWAY)] == [None] * len(rows)
    monkeypatch.delenv("RELATUM_BROKER_URL", raising=False)
    with pytest.raises(ConfigurationError, match="RELATUM_BROKER_URL"):
        resolve(Frame(PLACE))
