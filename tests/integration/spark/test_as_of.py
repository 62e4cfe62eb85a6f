"""The nearest message in time, against pandas' `merge_asof`."""

from typing import Any

import pandas as pd
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from relatum.errors import KeyNotDefined, StreamNotFound
from relatum_spark import as_of
from relatum_spark._as_of import nearest_of
from tests.support.spark_joins import SECOND_US, Relation, record, side

Case = tuple[list[tuple[str, int]], list[tuple[str, int]]]
"""Left and right messages: values and times."""

MESSAGES = st.lists(st.tuples(st.sampled_from("ab"), st.integers(-3, 12)), max_size=8)

DIRECTIONS = st.sampled_from(["backward", "forward", "nearest"])


def _relations(case: int, messages: list[tuple[str, int]], streams: list[str]) -> list[Relation]:
    """Messages in turn in some streams; the case is a part of the value, so that cases do not meet."""
    return [
        (f"{case} {value}", streams[n % len(streams)], n // len(streams), time)
        for n, (value, time) in enumerate(messages)
    ]


def _pandas(left: list[Relation], right: list[Relation], tolerance: int | None, **options: Any) -> dict[Any, Any]:
    """By left place the right place that pandas finds."""
    names = ["value", "stream", "offset", "time"]
    frames = []
    for relations in (left, right):
        # Messages of one time in the order of partition and offset, `r-2` before `r-10`.
        ordered = sorted(relations, key=lambda row: (row[3], len(row[1]), row[1], row[2]))
        frames.append(pd.DataFrame(ordered, columns=names).astype({"time": "int64", "offset": "int64"}))
    merged = pd.merge_asof(*frames, on="time", by="value", suffixes=("_left", "_right"), tolerance=tolerance, **options)
    found = {}
    for row in merged.itertuples():
        match = None if pd.isna(row.stream_right) else (row.stream_right, int(row.offset_right))
        found[row.value, row.stream_left, row.offset_left] = match
    return found


@settings(max_examples=settings.default.max_examples // 20, suppress_health_check=list(HealthCheck))
@given(
    cases=st.lists(st.tuples(MESSAGES, MESSAGES), min_size=30, max_size=60),
    direction=DIRECTIONS,
    tolerance=st.sampled_from([None, 0, 1, 3]),
    exact=st.booleans(),
)
def test_the_nearest_is_that_of_pandas(
    spark: SparkSession, cases: list[Case], direction: Any, tolerance: int | None, exact: bool
) -> None:
    """Ties, duplicates, empty sides, values on one side only, times before 1970: many cases in one job."""
    left = [row for n, (messages, _) in enumerate(cases) for row in _relations(n, messages, ["l"])]
    right = [row for n, (_, messages) in enumerate(cases) for row in _relations(n, messages, ["r-10", "r-2"])]
    joined = nearest_of(
        side(spark, left), side(spark, right), ["key_0"], direction, tolerance, allow_exact_matches=exact
    )
    found = {
        (row.key_0, row.left_stream, row.left_offset): row.right_stream and (row.right_stream, row.right_offset)
        for row in joined.collect()
    }
    # Places repeat from case to case; with the value they do not.
    assert found == _pandas(left, right, tolerance, direction=direction, allow_exact_matches=exact)


@pytest.mark.parametrize("direction", ["backward", "forward", "nearest"])
def test_messages_without_a_time_match_nothing(spark: SparkSession, direction: Any) -> None:
    """A left one without a time is kept without a match; a right one is no match for anything."""
    left = side(spark, [("a", "l", 0, None), ("a", "l", 1, 5), ("b", "l", 2, 5)])
    right = side(spark, [("a", "r", 0, None), ("a", "r", 1, 5), ("b", "r", 2, None)])
    joined = nearest_of(left, right, ["key_0"], direction, None, allow_exact_matches=True)
    assert {row.left_offset: row.right_offset for row in joined.collect()} == {0: None, 1: 1, 2: None}


def test_a_value_that_all_messages_carry_costs_no_products(spark: SparkSession) -> None:
    """100,000 messages of one value on either side: ten thousand million pairs, and a join of seconds."""
    count = 100_000
    row = spark.range(count).select(
        F.lit("hot").alias("key_0"), F.lit("s").alias("stream"), F.col("id").alias("offset"), "id"
    )
    left = row.withColumn("time_us", F.col("id") * 10 + 5)
    right = row.withColumn("time_us", F.col("id") * 10)
    joined = nearest_of(left, right, ["key_0"], "nearest", 5, allow_exact_matches=True)
    wrong = joined.where("right_offset IS NULL OR right_offset != left_offset")
    assert (joined.count(), wrong.count()) == (count, 0)


def _times(*seconds: float, **keys: str) -> list[dict[str, Any]]:
    return [{"relatum_time": round(second * SECOND_US)} | keys for second in seconds]


def test_recorded_messages_meet_the_weather_before_them(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, other_stream: str
) -> None:
    """Two real streams, with payloads: each flight with the last observation of its airport, at most so old."""
    flights = [*_times(100, 200, 300, origin="EWR"), *_times(150, origin="JFK"), *_times(50, origin="LGA")]
    weather = [*_times(90, 190, 200, 201, origin="EWR"), *_times(20, 160, origin="JFK")]
    record(amqp_url, engine, {stream_name: flights, other_stream: weather}, ["origin"])
    joined = as_of(
        spark,
        stream_name,
        other_stream,
        on="origin",
        tolerance=100,
        payloads=True,
        database=database_url,
        broker=amqp_url,
    )
    assert joined.columns[:4] == ["value", "left_stream", "left_offset", "left_time"]
    rows = {row.left_offset: row for row in joined.collect()}
    assert {n: row.right_offset for n, row in rows.items()} == {0: 0, 1: 2, 2: 3, 3: None, 4: None}
    assert all(row.left_status == "found" for row in rows.values())
    assert bytes(rows[2].right_value) == f"{other_stream} 3".encode()
    assert rows[2].right_headers["origin"] == rows[2].value == "EWR"
    assert (rows[2].left_time.timestamp(), rows[2].right_time.timestamp()) == (300, 201)
    assert (rows[4].right_time, rows[4].right_value, rows[4].right_status) == (None, None, None)


def test_without_a_key_all_messages_count(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, other_stream: str
) -> None:
    """By time alone, messages that carry no key at all are met too, of streams as of frames."""
    record(amqp_url, engine, {stream_name: _times(1, 2, 3), other_stream: _times(1.5, 2, 9)}, ["origin"])
    options: dict[str, Any] = {"on": None, "database": database_url, "broker": amqp_url}
    joined = as_of(spark, stream_name, other_stream, direction="forward", **options)
    assert joined.columns[0] == "left_stream"
    assert {row.left_offset: row.right_offset for row in joined.collect()} == {0: 0, 1: 1, 2: 2}
    frame = spark.createDataFrame(
        [(other_stream, 0), (other_stream, 2), (other_stream, 77)], "stream string, offset long"
    )
    joined = as_of(spark, stream_name, frame, direction="forward", **options)
    assert {row.left_offset: row.right_offset for row in joined.collect()} == {0: 0, 1: 2, 2: 2}


def test_a_message_can_be_its_own_match_as_in_pandas(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """A stream joined to itself matches each message with itself, and with the one before where none at once counts."""
    record(amqp_url, engine, {stream_name: _times(1, 2, 3, host="a")}, ["host"])
    options: dict[str, Any] = {"on": "host", "database": database_url, "broker": amqp_url}
    joined = as_of(spark, stream_name, stream_name, **options)
    assert {row.left_offset: row.right_offset for row in joined.collect()} == {0: 0, 1: 1, 2: 2}
    joined = as_of(spark, stream_name, stream_name, allow_exact_matches=False, **options)
    assert {row.left_offset: row.right_offset for row in joined.collect()} == {0: None, 1: 0, 2: 1}


def test_what_is_not_there_is_named(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """A stream that was never recorded, a key that is not defined, and without a key a stream that is not there."""
    record(amqp_url, engine, {stream_name: _times(1, host="a")}, ["host"])
    options: dict[str, Any] = {"database": database_url, "broker": amqp_url}
    with pytest.raises(StreamNotFound):
        as_of(spark, stream_name, "no-such-stream", on="host", **options)
    with pytest.raises(StreamNotFound):
        as_of(spark, stream_name, "no-such-stream", on=None, **options)
    with pytest.raises(KeyNotDefined):
        as_of(spark, stream_name, stream_name, on="no-such-key", **options)
