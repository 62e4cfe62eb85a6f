"""Payloads for any DataFrame of places."""

from collections.abc import Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

import relatum_spark
from relatum.errors import ConfigurationError, InvalidInput, KeyNotDefined
from relatum.reading import StreamReader
from relatum.store import add_keys
from tests.support import declare_stream, delete_stream, publish_plain, unique_name

MESSAGES = 60


def _publish(amqp_url: str, stream: str, count: int = MESSAGES) -> None:
    publish_plain(
        amqp_url,
        stream,
        ((b"body %d" % n, {"order_id": f"o{n}", "relatum_time": 1_700_000_000_000_000 + n}) for n in range(count)),
        confirm=False,
    )


def _expected(row: Row) -> None:
    """Assert that a row holds the message `_publish` put at its offset."""
    number = row.offset
    assert row.status == "found"
    assert bytes(row.value) == b"body %d" % number
    assert row.headers["order_id"] == f"o{number}"
    assert row.timestamp.timestamp() == pytest.approx(1_700_000_000 + number / 1e6, abs=1e-6)
    assert row.properties.delivery_mode == 1


def test_each_row_gets_its_message(spark: SparkSession, amqp_url: str, stream_url: str, stream_name: str) -> None:
    """Rows in any order, with duplicates, each keep their columns and get the message at their offset."""
    _publish(amqp_url, stream_name)
    offsets = [*range(MESSAGES - 1, -1, -7), 3, 3]
    df = spark.createDataFrame([(stream_name, n, n * 2) for n in offsets], "stream string, offset long, twice int")
    resolved = relatum_spark.resolve(df, broker=amqp_url, stream_url=stream_url)
    assert resolved.columns == ["stream", "offset", "twice", "timestamp", "value", "headers", "properties", "status"]
    rows = resolved.collect()
    assert sorted(row.offset for row in rows) == sorted(offsets)
    for row in rows:
        _expected(row)
        assert row.twice == 2 * row.offset


def test_a_row_without_a_message_says_why(
    spark: SparkSession, amqp_url: str, stream_url: str, stream_name: str
) -> None:
    """A row past the end, of no stream, or with a null is kept, with a status and without a payload."""
    _publish(amqp_url, stream_name, 3)
    places = [
        (stream_name, 2, "found"),
        (stream_name, 3, "not_found"),
        (stream_name, -1, "not_found"),
        (stream_name, 2**63 - 1, "not_found"),
        ("relatum-test-no-such-stream", 0, "no_stream"),
        (stream_name, None, None),
        (None, 1, None),
    ]
    df = spark.createDataFrame(places, "stream string, offset long, expected string")
    rows = relatum_spark.resolve(df, broker=amqp_url, stream_url=stream_url).collect()
    assert len(rows) == len(places)
    for row in rows:
        assert row.status == row.expected
        assert (row.value is not None) == (row.status == "found")


def test_what_retention_dropped_is_expired(spark: SparkSession, amqp_url: str, stream_url: str) -> None:
    """An offset below the first retained one has the status `expired`."""
    name = unique_name()
    declare_stream(amqp_url, name, x_max_length_bytes=100_000, x_stream_max_segment_size_bytes=50_000)
    try:
        publish_plain(amqp_url, name, (b"x" * 10_000 for _ in range(60)))
        publish_plain(amqp_url, name, [b"the last"])
        with StreamReader.open(amqp_url) as reader:
            last = reader.bounds(name).last
        df = spark.createDataFrame([(name, 0), (name, last)], "stream string, offset long")
        rows = relatum_spark.resolve(df, broker=amqp_url, stream_url=stream_url).collect()
        assert {row.offset: row.status for row in rows} == {0: "expired", last: "found"}
    finally:
        delete_stream(amqp_url, name)


def test_columns_of_any_type_survive(spark: SparkSession, amqp_url: str, stream_url: str, stream_name: str) -> None:
    """Columns of every kind come back as they went in, also null ones, beside resolved and unresolved rows."""
    _publish(amqp_url, stream_name, 2)
    kinds = (
        "stream string, offset int, a array<int>, b map<string, double>, c struct<x: int, y: array<string>>, "
        "d decimal(20, 3), e date, f timestamp, g timestamp_ntz, h binary, i boolean, j float, `odd ``name.x` string"
    )
    moment = datetime(2026, 1, 2, 3, 4, 5, 6)
    values = (
        [1, None],
        {"k": 1.5},
        Row(x=1, y=["y", None]),
        Decimal("12.345"),
        date(2026, 1, 2),
        moment.replace(tzinfo=UTC),
        moment,
        bytearray(b"\0\xff"),
        True,
        0.5,
        "odd",
    )
    df = spark.createDataFrame([(stream_name, 0, *values), (stream_name, 99, *(None for _ in values))], kinds)
    resolved = relatum_spark.resolve(df, broker=amqp_url, stream_url=stream_url)
    assert resolved.select(*(F.col(f"`{name.replace('`', '``')}`") for name in df.columns)).schema == df.schema
    by_offset = {row.offset: row for row in resolved.collect()}
    assert {offset: row[: len(df.columns)] for offset, row in by_offset.items()} == {
        row.offset: tuple(row) for row in df.collect()
    }
    assert {offset: row.status for offset, row in by_offset.items()} == {0: "found", 99: "not_found"}


def test_order_is_kept_on_request(spark: SparkSession, amqp_url: str, stream_url: str, stream_name: str) -> None:
    """With keep_order the rows come in the order they had, also across partitions."""
    _publish(amqp_url, stream_name)
    df = spark.range(0, 3 * MESSAGES, 1, 3).select(
        F.lit(stream_name).alias("stream"), (F.col("id") * 37 % MESSAGES).alias("offset"), "id"
    )
    rows = relatum_spark.resolve(df, broker=amqp_url, stream_url=stream_url, keep_order=True).collect()
    assert [row.id for row in rows] == list(range(3 * MESSAGES))
    for row in rows:
        _expected(row)


def test_large_payloads_come_in_several_batches(
    spark: SparkSession, amqp_url: str, stream_url: str, stream_name: str
) -> None:
    """Payloads of more bytes than one batch holds all arrive, each in its row."""
    publish_plain(amqp_url, stream_name, (b"%01000000d" % n for n in range(12)))
    df = spark.createDataFrame([(stream_name, n) for n in (*range(12), 50)], "stream string, offset long")
    resolved = relatum_spark.resolve(df, broker=amqp_url, stream_url=stream_url, partitions=1)
    rows = resolved.select("offset", "status", F.length("value").alias("bytes"), F.substring("value", -2, 2)).collect()
    assert [(row[0], row[1], row[2]) for row in rows] == [(n, "found", 1_000_000) for n in range(12)] + [
        (50, "not_found", None)
    ]
    assert [int(row[3]) for row in rows[:12]] == list(range(12))


def test_value_and_headers_can_be_left_out(
    spark: SparkSession, amqp_url: str, stream_url: str, stream_name: str
) -> None:
    """Without value and headers their columns are not there, and a prefix is put before the others."""
    _publish(amqp_url, stream_name, 1)
    df = spark.createDataFrame([(stream_name, 0, "x")], "s string, stream_offset long, status string")
    resolved = relatum_spark.resolve(
        df, stream_column="s", value=False, headers=False, prefix="its_", broker=amqp_url, stream_url=stream_url
    )
    assert resolved.columns == ["s", "stream_offset", "status", "its_timestamp", "its_status"]
    assert [row.its_status for row in resolved.collect()] == ["found"]


def test_a_message_that_does_not_carry_the_key_is_not_given(
    spark: SparkSession, amqp_url: str, stream_url: str, stream_name: str, engine: sa.Engine, database_url: str
) -> None:
    """With check= a message that carries another value has the status `replaced` and is not given."""
    add_keys(engine, ["order_id"])
    _publish(amqp_url, stream_name, 3)
    places = [(stream_name, 0, "o0"), (stream_name, 1, "o7"), (stream_name, 2, None)]
    df = spark.createDataFrame(places, "stream string, offset long, order string")
    resolved = relatum_spark.resolve(
        df, check={"order_id": "order"}, broker=amqp_url, stream_url=stream_url, database=database_url
    )
    rows = {row.offset: row for row in resolved.collect()}
    assert {offset: row.status for offset, row in rows.items()} == {0: "found", 1: "replaced", 2: "found"}
    assert rows[1].value is None
    with pytest.raises(KeyNotDefined):
        relatum_spark.resolve(df, check={"nothing": "order"}, broker=amqp_url, database=database_url)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stream_column": "where"}, "where"),
        ({"offset_column": "text"}, "integer"),
        ({"stream_column": "offset"}, "text"),
        ({"partitions": 0}, "partitions"),
        ({"partitions": 2, "keep_order": True}, "partitions"),
        ({"check": {"order_id": "offset"}}, "text"),
    ],
)
def test_wrong_arguments_are_refused(
    spark: SparkSession, amqp_url: str, options: Mapping[str, Any], words: str
) -> None:
    """A wrong argument is refused before anything runs, and named."""
    df = spark.createDataFrame([], "stream string, offset long, text string")
    with pytest.raises(InvalidInput, match=words):
        relatum_spark.resolve(df, broker=amqp_url, **options)


def test_clashing_columns_are_named(spark: SparkSession, amqp_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that are there already are named, and how to avoid it; and so is a missing broker."""
    df = spark.createDataFrame([], "stream string, stream_offset long, VALUE string, status string")
    with pytest.raises(InvalidInput, match=r"value, status .* prefix="):
        relatum_spark.resolve(df, broker=amqp_url)
    monkeypatch.delenv("RELATUM_BROKER_URL", raising=False)
    with pytest.raises(ConfigurationError, match="RELATUM_BROKER_URL"):
        relatum_spark.resolve(df, prefix="a_")


def test_a_broker_that_is_away_fails_the_task(spark: SparkSession) -> None:
    """Where no broker answers the job fails with that error; neither it nor the plan shows the password."""
    broker = "amqp://guest:sesame-82@127.0.0.1:9/"
    df = spark.createDataFrame([("s", 0)], "stream string, offset long")
    resolved = relatum_spark.resolve(df, broker=broker, stream_url="rabbitmq-stream://guest:sesame-82@127.0.0.1:9")
    with pytest.raises(PySparkException, match="BrokerUnavailable") as raised:
        resolved.collect()
    plan = resolved._sc._jvm.PythonSQLUtils.explainString(resolved._jdf.queryExecution(), "extended")  # type: ignore
    assert "sesame" not in str(raised.value) + plan


def test_nothing_is_read_for_no_rows(spark: SparkSession) -> None:
    """An empty DataFrame, or one without a place, needs no broker that answers."""
    df = spark.createDataFrame([(None, 0), ("s", None)], "stream string, offset long")
    for rows in (df, df.limit(0)):
        resolved = relatum_spark.resolve(rows, broker="amqp://127.0.0.1:9/").collect()
        assert all(row.status is None for row in resolved)
