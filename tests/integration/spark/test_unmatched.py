"""Messages without a counterpart, and whether that is known."""

import time
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession

from relatum.errors import ConfigurationError, KeyNotDefined, StreamNotFound, StreamReplaced
from relatum.recording import set_record_time
from relatum_spark import snapshot, unmatched
from tests.support import declare_stream, delete_stream, publish_plain
from tests.support.spark_joins import SECOND_US, record


def _orders(*numbers: int, time: float = 0) -> list[dict[str, Any]]:
    return [{"order_id": f"o{n}", "relatum_time": round((time + n) * SECOND_US)} for n in numbers]


def _found(frame: DataFrame) -> list[tuple[str, int, str]]:
    return sorted((row.value, row.left_offset, row.status) for row in frame.collect())


@pytest.fixture
def options(amqp_url: str, database_url: str) -> dict[str, Any]:
    """What each call is given."""
    return {"on": "order_id", "database": database_url, "broker": amqp_url}


def test_what_has_no_counterpart_is_absent_once_all_is_recorded(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, stream_name: str, other_stream: str, options: dict[str, Any]
) -> None:
    """Both streams recorded to their ends: absent; a message more on the right, and it is not known any more."""
    record(amqp_url, engine, {stream_name: _orders(1, 2, 3), other_stream: _orders(2)}, ["order_id"])
    alone = unmatched(spark, stream_name, other_stream, payloads=True, **options)
    assert alone.columns[:5] == ["value", "left_stream", "left_offset", "left_time", "status"]
    assert _found(alone) == [("o1", 0, "absent"), ("o3", 2, "absent")]
    assert {bytes(row.left_value) for row in alone.collect()} == {f"{stream_name} {n}".encode() for n in (0, 2)}
    publish_plain(amqp_url, other_stream, [(b"", {"order_id": "o3"})])
    later = unmatched(spark, stream_name, other_stream, **options)
    assert _found(later) == [("o1", 0, "not_recorded_yet"), ("o3", 2, "not_recorded_yet")]
    record(amqp_url, engine, {other_stream: []}, ["order_id"])
    assert _found(unmatched(spark, stream_name, other_stream, **options)) == [("o1", 0, "absent")]
    # The frame of before still says what held then.
    assert _found(later) == [("o1", 0, "not_recorded_yet"), ("o3", 2, "not_recorded_yet")]


def test_a_right_stream_that_was_never_recorded_proves_nothing(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, stream_name: str, other_stream: str, options: dict[str, Any]
) -> None:
    """Not recorded yet where it holds messages, absent where it is empty, an error where there is no such stream."""
    record(amqp_url, engine, {stream_name: _orders(1)}, ["order_id"])
    assert _found(unmatched(spark, stream_name, other_stream, **options)) == [("o1", 0, "absent")]
    publish_plain(amqp_url, other_stream, [b"no key"])
    assert _found(unmatched(spark, stream_name, other_stream, **options)) == [("o1", 0, "not_recorded_yet")]
    with pytest.raises(StreamNotFound):
        unmatched(spark, stream_name, "no-such-stream", **options)
    with pytest.raises(StreamNotFound):
        unmatched(spark, other_stream, stream_name, **options)
    with pytest.raises(KeyNotDefined):
        unmatched(spark, stream_name, other_stream, **{**options, "on": "no-such-key"})


def test_only_near_messages_count_where_a_span_is_given(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, stream_name: str, other_stream: str, options: dict[str, Any]
) -> None:
    """A counterpart too late is none; and nothing is proved where the right stream's times are not recorded."""
    streams = {stream_name: _orders(1, 2), other_stream: _orders(1, time=5) + _orders(2, time=50)}
    record(amqp_url, engine, streams, ["order_id"])
    assert _found(unmatched(spark, stream_name, other_stream, within=5, **options)) == [("o2", 1, "absent")]
    assert _found(unmatched(spark, stream_name, other_stream, after=50, **options)) == []
    assert len(_found(unmatched(spark, stream_name, other_stream, before=50, **options))) == 2
    set_record_time(amqp_url, engine.url, other_stream, on=False)
    record(amqp_url, engine, {other_stream: _orders(7)}, ["order_id"])
    assert _found(unmatched(spark, stream_name, other_stream, within=5, **options)) == [("o2", 1, "not_recorded_yet")]
    assert _found(unmatched(spark, stream_name, other_stream, **options)) == []


def test_young_messages_can_be_left_out(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, stream_name: str, other_stream: str, options: dict[str, Any]
) -> None:
    """Those whose age is not reached yet are not named."""
    now = time.time()
    orders = _orders(1, time=now - 10_000) + _orders(2, time=now - 50)
    record(amqp_url, engine, {stream_name: orders, other_stream: []}, ["order_id"])
    assert _found(unmatched(spark, stream_name, other_stream, older_than=5_000, **options)) == [("o1", 0, "absent")]
    assert len(_found(unmatched(spark, stream_name, other_stream, older_than=0, **options))) == 2


def test_a_snapshot_proves_what_was_recorded_then(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, stream_name: str, other_stream: str, options: dict[str, Any]
) -> None:
    """Rows and coverage are of the snapshot, the ends of the streams of now: what came meanwhile makes it uncertain."""
    record(amqp_url, engine, {stream_name: _orders(1, 2), other_stream: _orders(1)}, ["order_id"])
    with snapshot(options["database"]) as state:
        assert _found(unmatched(spark, stream_name, other_stream, snapshot=state, **options)) == [("o2", 1, "absent")]
        record(amqp_url, engine, {other_stream: _orders(2)}, ["order_id"])
        found = _found(unmatched(spark, stream_name, other_stream, snapshot=state, **options))
    assert found == [("o2", 1, "not_recorded_yet")]
    assert _found(unmatched(spark, stream_name, other_stream, **options)) == []


def test_frames_are_sides_too(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, stream_name: str, other_stream: str, options: dict[str, Any]
) -> None:
    """Of the left frame those without one of the right frame; an empty right frame leaves all, for certain."""
    record(amqp_url, engine, {stream_name: _orders(1, 2, 3), other_stream: _orders(1, 2, 3)}, ["order_id"])
    kind = "stream string, offset long"
    left = spark.createDataFrame([(stream_name, 0), (stream_name, 1)], kind)
    right = spark.createDataFrame([(other_stream, 1), (None, 2)], kind)
    assert _found(unmatched(spark, left, right, **options)) == [("o1", 0, "absent")]
    assert len(_found(unmatched(spark, left, right.limit(0), **options))) == 2
    assert _found(unmatched(spark, left, left, **options)) == [("o1", 0, "absent"), ("o2", 1, "absent")]


@pytest.mark.differs
def test_a_replaced_stream_is_named(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, stream_name: str, other_stream: str, options: dict[str, Any]
) -> None:
    """A right stream that was deleted and declared again proves nothing; nor can one be asked without a broker."""
    record(amqp_url, engine, {stream_name: _orders(1), other_stream: _orders(2)}, ["order_id"])
    delete_stream(amqp_url, other_stream)
    declare_stream(amqp_url, other_stream)
    publish_plain(amqp_url, other_stream, [b"another"])
    with pytest.raises(StreamReplaced):
        unmatched(spark, stream_name, other_stream, **options)
    with pytest.raises(ConfigurationError):
        unmatched(spark, stream_name, other_stream, on="order_id", database=options["database"])
