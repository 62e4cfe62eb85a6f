"""Pairs of messages that share a value, against comparing each with each."""

from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from relatum.errors import InvalidInput, KeyNotDefined, StreamNotFound
from relatum_spark import related_pairs, snapshot
from relatum_spark._pairs import Span, paired
from relatum_spark._sides import keyed
from relatum_spark._unmatched import without
from tests.support.spark_joins import SECOND_US, Relation, record, side

RELATIONS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from("lm"), st.integers(0, 30), st.none() | st.integers(-30, 30)),
    max_size=25,
    unique_by=lambda row: row[:3],  # a message may have several values
)


def _near(left: Relation, right: Relation, span: Span | None) -> bool:
    if left[0] != right[0] or left[1:3] == right[1:3]:
        return False
    if span is None:
        return True
    return left[3] is not None and right[3] is not None and -span[0] <= right[3] - left[3] <= span[1]


@settings(max_examples=settings.default.max_examples // 20, suppress_health_check=list(HealthCheck))
@given(
    left=RELATIONS,
    right=RELATIONS,
    span=st.none() | st.tuples(st.sampled_from([0, 1, 3, 10**18]), st.sampled_from([0, 1, 7])),
)
def test_pairs_are_those_of_each_with_each(
    spark: SparkSession, left: list[Relation], right: list[Relation], span: Span | None
) -> None:
    """Every pair that is near enough once, and no other; and what is without a pair is all the rest."""
    one, other = side(spark, left), side(spark, right)
    pairs = paired(one, other, ["key_0"], span).collect()
    found = [(row.key_0, row.left_stream, row.left_offset, row.right_stream, row.right_offset) for row in pairs]
    assert sorted(found) == sorted((*a[:3], *b[1:3]) for a in left for b in right if _near(a, b, span))
    alone = without(one, other, ["key_0"], span).collect()
    expected = [a[:3] for a in left if not any(_near(a, b, span) for b in right)]
    assert sorted((row.key_0, row.left_stream, row.left_offset) for row in alone) == sorted(expected)


def test_of_several_keys_each_value_counts_with_each(spark: SparkSession) -> None:
    """A message with two students and two rooms has four pairs of them; one without a room has none."""
    values = [("student", "a"), ("student", "b"), ("room", "1"), ("room", "2"), ("other", "x")]
    rows = [(*value, "exams", 0, None) for value in values] + [("student", "a", "exams", 1, None)]
    schema = "key string, value string, stream string, stream_offset long, time timestamp"
    table = spark.createDataFrame(rows, schema)
    found = keyed(table, ["student", "room"]).collect()
    assert sorted((row.key_0, row.key_1, row.offset) for row in found) == [
        (student, room, 0) for student in "ab" for room in "12"
    ]


def test_a_value_that_all_messages_carry_costs_no_products(spark: SparkSession) -> None:
    """100,000 messages of one value on either side give candidates of near times alone."""
    count = 100_000
    row = spark.range(count).select(
        F.lit("hot").alias("key_0"), F.col("id").alias("offset"), (F.col("id") * 10).alias("time_us")
    )
    pairs = paired(row.withColumn("stream", F.lit("l")), row.withColumn("stream", F.lit("r")), ["key_0"], (10, 0))
    assert pairs.count() == 2 * count - 1


def _orders(*numbers: int, time: float = 0, **more: str) -> list[dict[str, Any]]:
    return [{"order_id": f"o{n}", "relatum_time": round((time + n) * SECOND_US)} | more for n in numbers]


def test_recorded_messages_are_paired(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, other_stream: str
) -> None:
    """Two real streams, whole and near in time, with payloads."""
    streams = {stream_name: _orders(1, 2, 3, 2), other_stream: _orders(2, 4, time=10) + _orders(3, time=60)}
    record(amqp_url, engine, streams, ["order_id"])
    options: dict[str, Any] = {"on": "order_id", "database": database_url, "broker": amqp_url}
    rows = related_pairs(spark, stream_name, other_stream, **options).collect()
    assert sorted((row.value, row.left_offset, row.right_offset) for row in rows) == [
        ("o2", 1, 0),
        ("o2", 3, 0),
        ("o3", 2, 2),
    ]
    joined = related_pairs(spark, [stream_name], other_stream, after=10, payloads=True, **options)
    assert joined.columns == [
        *("value", "left_stream", "left_offset", "left_time", "right_stream", "right_offset", "right_time"),
        *("left_value", "left_headers", "left_properties", "left_status"),
        *("right_value", "right_headers", "right_properties", "right_status"),
    ]
    rows = joined.collect()
    assert sorted((row.left_offset, bytes(row.right_value)) for row in rows) == [
        (1, f"{other_stream} 0".encode()),
        (3, f"{other_stream} 0".encode()),
    ]
    assert {row.left_status for row in rows} == {row.right_status for row in rows} == {"found"}
    assert related_pairs(spark, stream_name, other_stream, before=60, **options).count() == 0


def test_several_keys_must_all_be_equal(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, other_stream: str
) -> None:
    """A list of keys gives an array of values; a message that lacks one of them takes no part."""
    streams = {
        stream_name: [*_orders(1, shop="x"), *_orders(2, shop="y"), *_orders(3)],
        other_stream: [*_orders(1, shop="x"), *_orders(2, shop="x"), *_orders(3)],
    }
    record(amqp_url, engine, streams, ["order_id", "shop"])
    options: dict[str, Any] = {"database": database_url, "broker": amqp_url, "payloads": True}
    (row,) = related_pairs(spark, stream_name, other_stream, on=["shop", "order_id"], **options).collect()
    assert (row.value, row.left_offset, row.right_offset) == (["x", "o1"], 0, 0)
    assert row.left_status == row.right_status == "found"


def test_a_side_may_be_a_frame_or_the_other_side(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """Frames of places, with duplicates and nulls; and a stream with itself, where no message is its own pair."""
    record(amqp_url, engine, {stream_name: _orders(1, 1, 2)}, ["order_id"])
    options: dict[str, Any] = {"on": "order_id", "database": database_url, "broker": amqp_url}
    rows = related_pairs(spark, stream_name, stream_name, **options).collect()
    assert sorted((row.left_offset, row.right_offset) for row in rows) == [(0, 1), (1, 0)]
    places = [(stream_name, 0, "x"), (stream_name, 0, "y"), (None, 1, "z"), (stream_name, 99, "z")]
    frame = spark.createDataFrame(places, "stream string, stream_offset int, note string")
    rows = related_pairs(spark, frame, stream_name, **options).collect()
    assert [(row.left_offset, row.right_offset) for row in rows] == [(0, 1)]
    with pytest.raises(InvalidInput, match="left="):
        related_pairs(spark, frame.drop("stream"), stream_name, **options)


def test_both_sides_are_of_one_state(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, other_stream: str
) -> None:
    """What is recorded after the call is not in the result, whenever that is used; nor after a snapshot's beginning."""
    options: dict[str, Any] = {"on": "order_id", "broker": amqp_url}
    record(amqp_url, engine, {stream_name: _orders(1, 2), other_stream: _orders(1)}, ["order_id"])
    with snapshot(database_url) as state:
        early = related_pairs(spark, stream_name, other_stream, database=database_url, **options)
        record(amqp_url, engine, {stream_name: _orders(1), other_stream: _orders(1, 2)}, ["order_id"])
        assert early.count() == 1
        assert related_pairs(spark, stream_name, other_stream, snapshot=state, **options).count() == 1
    assert related_pairs(spark, stream_name, other_stream, database=database_url, **options).count() == 5


def test_what_is_not_there_is_named(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, other_stream: str
) -> None:
    """A stream that was never recorded and a key that is not defined; a recorded stream without rows gives none."""
    record(amqp_url, engine, {stream_name: _orders(1), other_stream: []}, ["order_id"])
    options: dict[str, Any] = {"database": database_url, "broker": amqp_url}
    assert related_pairs(spark, stream_name, other_stream, on="order_id", **options).count() == 0
    assert related_pairs(spark, other_stream, stream_name, on="order_id", **options).count() == 0
    with pytest.raises(StreamNotFound):
        related_pairs(spark, "no-such-stream", stream_name, on="order_id", **options)
    with pytest.raises(KeyNotDefined):
        related_pairs(spark, stream_name, stream_name, on="no-such-key", **options)
