"""Pairs of messages that share a value, and the nearest in time: against each with each, and pandas."""

import random
from datetime import timedelta
from typing import Any

import pandas as pd
import pytest
import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession

from relatum.errors import KeyNotDefined, StreamNotFound
from relatum_spark import as_of, related_pairs, snapshot
from tests.support.spark_joins import SECOND_US, Relation, fill, record

CASES = 60
"""Small cases of one job: values are of one case alone."""

Message = tuple[str, int]
Span = tuple[int, int] | None


def _cases(seed: int) -> tuple[list[Relation], list[Message], list[Message]]:
    """Relations of many cases, and the messages of either side: ties, times before 1970 and none, empty sides.

    A message has several values at times, and may be on both sides.
    """
    chance = random.Random(seed)
    relations: list[Relation] = []
    sides: tuple[list[Message], list[Message]] = ([], [])
    for case in range(CASES):
        for place in range(chance.randrange(16)):
            message = (chance.choice(["s-2", "s-10", "t"]), 100 * case + place)
            time_us = chance.choice([None, *range(-3, 12)])
            values = chance.sample("abc", chance.choice([1, 1, 2]))
            relations += [("k", f"{case} {value}", *message, time_us) for value in values]
            for side in chance.choice([(0,), (1,), (0, 1)]):
                sides[side].append(message)
    return relations, *sides


@pytest.fixture
def cases(database_url: str) -> tuple[list[Relation], list[Message], list[Message]]:
    """The cases, in the table."""
    made = _cases(7)
    fill(database_url, made[0])
    return made


def _frame(spark: SparkSession, messages: list[Message]) -> DataFrame:
    return spark.createDataFrame(messages, "stream string, offset long")


def _near(left: Relation, right: Relation, span: Span) -> bool:
    if left[1] != right[1] or left[2:4] == right[2:4]:
        return False
    if span is None:
        return True
    return left[4] is not None and right[4] is not None and -span[0] <= right[4] - left[4] <= span[1]


def test_pairs_are_those_of_each_with_each(
    spark: SparkSession, database_url: str, cases: tuple[list[Relation], list[Message], list[Message]]
) -> None:
    """Every pair that is near enough once, and no other, whatever the span."""
    relations, left, right = cases
    lefts, rights = ([row for row in relations if row[2:4] in set(side)] for side in (left, right))
    spans: list[Span] = [None, (0, 0), (3, 1), (0, 7), (10**18, 7)]
    for span in spans:
        options: dict[str, Any] = {}
        if span is not None:
            options = dict(zip(("before", "after"), (timedelta(microseconds=each) for each in span), strict=True))
        sides = _frame(spark, left), _frame(spark, right)
        pairs = related_pairs(spark, *sides, on="k", database=database_url, partitions=2, **options).collect()
        found = [(row.value, row.left_stream, row.left_offset, row.right_stream, row.right_offset) for row in pairs]
        assert sorted(found) == sorted((*a[1:4], *b[2:4]) for a in lefts for b in rights if _near(a, b, span)), span


def _pandas(left: list[Relation], right: list[Relation], tolerance: int | None, **options: Any) -> dict[Any, Any]:
    """By left value and place the right place that pandas finds."""
    frames = []
    for relations in (left, right):
        # Messages of one time in the order of partition and offset, `s-2` before `s-10`.
        timed = sorted(
            (row for row in relations if row[4] is not None), key=lambda row: (row[4], len(row[2]), *row[2:4])
        )
        names = ["key", "value", "stream", "offset", "time"]
        frames.append(pd.DataFrame(timed, columns=names).astype({"time": "int64", "offset": "int64"}))
    merged = pd.merge_asof(*frames, on="time", by="value", suffixes=("_left", "_right"), tolerance=tolerance, **options)
    found: dict[Any, Any] = {(row[1], *row[2:4]): None for row in left}
    for row in merged.itertuples():
        if not pd.isna(row.stream_right):
            found[row.value, row.stream_left, row.offset_left] = (row.stream_right, int(row.offset_right))
    return found


def test_the_nearest_is_that_of_pandas(
    spark: SparkSession, database_url: str, cases: tuple[list[Relation], list[Message], list[Message]]
) -> None:
    """Ties, duplicates, empty sides, values on one side only, times before 1970: many cases in one job.

    A message without a time is kept without a match on the left, and is no match for anything on the right.
    """
    relations, left, right = cases
    lefts, rights = ([row for row in relations if row[2:4] in set(side)] for side in (left, right))
    wanted: list[tuple[Any, int | None, bool]] = [
        *((direction, None, True) for direction in ("backward", "forward", "nearest")),
        *(("backward", 1, False), ("forward", 3, False), ("nearest", 1, False), ("nearest", 0, True)),
    ]
    for direction, tolerance, exact in wanted:
        joined = as_of(
            spark,
            _frame(spark, left),
            _frame(spark, right),
            on="k",
            direction=direction,
            tolerance=None if tolerance is None else timedelta(microseconds=tolerance),
            allow_exact_matches=exact,
            database=database_url,
            partitions=2,
        )
        found = {
            (row.value, row.left_stream, row.left_offset): row.right_stream and (row.right_stream, row.right_offset)
            for row in joined.collect()
        }
        expected = _pandas(lefts, rights, tolerance, direction=direction, allow_exact_matches=exact)
        assert found == expected, (direction, tolerance, exact)


def test_a_value_that_all_messages_carry_costs_no_products(spark: SparkSession, database_url: str) -> None:
    """20,000 messages of one value on either side: hundreds of millions of pairs, and joins of seconds."""
    count = 20_000
    fill(database_url, (("k", "hot", side, n, n * 10 + 5 * (side == "l")) for side in ("l", "r") for n in range(count)))
    options: dict[str, Any] = {"on": "k", "database": database_url, "partitions": 2}
    near = timedelta(microseconds=5)
    assert related_pairs(spark, "l", "r", before=near, **options).count() == count
    joined = as_of(spark, "l", "r", direction="nearest", tolerance=near, **options)
    assert joined.where("right_offset = left_offset").count() == count


def _times(*seconds: float, **keys: str) -> list[dict[str, Any]]:
    return [{"relatum_time": round(second * SECOND_US)} | keys for second in seconds]


def _orders(*numbers: int, time: float = 0, **more: str) -> list[dict[str, Any]]:
    return [{"order_id": f"o{n}", "relatum_time": round((time + n) * SECOND_US)} | more for n in numbers]


def test_recorded_messages_are_paired(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, other_stream: str
) -> None:
    """Two real streams: by one key near in time, with payloads; by two keys; and a stream with itself."""
    streams = {
        stream_name: [*_orders(1, 2, 3, shop="x"), *_orders(2, shop="y")],
        other_stream: [*_orders(2, 4, time=10, shop="y"), *_orders(3, time=60)],
    }
    record(amqp_url, engine, streams, ["order_id", "shop"])
    options: dict[str, Any] = {"database": database_url, "broker": amqp_url}
    joined = related_pairs(spark, [stream_name], other_stream, on="order_id", after=10, payloads=True, **options)
    assert joined.columns == [
        *("value", "left_stream", "left_offset", "left_time", "right_stream", "right_offset", "right_time"),
        *("left_value", "left_headers", "left_properties", "left_status"),
        *("right_value", "right_headers", "right_properties", "right_status"),
    ]
    rows = joined.collect()
    assert sorted((row.value, row.left_offset, bytes(row.right_value)) for row in rows) == [
        ("o2", 1, f"{other_stream} 0".encode()),
        ("o2", 3, f"{other_stream} 0".encode()),
    ]
    assert {row.left_status for row in rows} == {row.right_status for row in rows} == {"found"}
    # A list of keys gives an array of values; a message that lacks one of them takes no part.
    both = related_pairs(spark, stream_name, other_stream, on=["shop", "order_id"], payloads=True, **options).collect()
    assert [(row.value, row.left_offset, row.right_offset, row.left_status) for row in both] == [
        (["y", "o2"], 3, 0, "found")
    ]
    places = [(stream_name, 1, "x"), (stream_name, 1, "y"), (None, 1, "z"), (stream_name, 99, "z")]
    frame = spark.createDataFrame(places, "stream string, stream_offset int, note string")
    rows = related_pairs(spark, frame, stream_name, on="order_id", **options).collect()
    assert [(row.left_offset, row.right_offset) for row in rows] == [(1, 3)]


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


def test_recorded_messages_meet_the_weather_before_them(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, other_stream: str
) -> None:
    """Two real streams, with payloads: each flight with the last observation of its airport, at most so old."""
    flights = [*_times(100, 200, 300, origin="EWR"), *_times(150, origin="JFK"), *_times(50, origin="LGA")]
    weather = [*_times(90, 190, 200, 201, origin="EWR"), *_times(20, 160, origin="JFK")]
    record(amqp_url, engine, {stream_name: flights, other_stream: weather}, ["origin"])
    options: dict[str, Any] = {"database": database_url, "broker": amqp_url}
    joined = as_of(spark, stream_name, other_stream, on="origin", tolerance=100, payloads=True, **options)
    assert joined.columns[:4] == ["value", "left_stream", "left_offset", "left_time"]
    rows = {row.left_offset: row for row in joined.collect()}
    assert {n: row.right_offset for n, row in rows.items()} == {0: 0, 1: 2, 2: 3, 3: None, 4: None}
    assert all(row.left_status == "found" for row in rows.values())
    assert bytes(rows[2].right_value) == f"{other_stream} 3".encode()
    assert rows[2].right_headers["origin"] == rows[2].value == "EWR"
    assert (rows[2].left_time.timestamp(), rows[2].right_time.timestamp()) == (300, 201)
    assert (rows[4].right_time, rows[4].right_value, rows[4].right_status) == (None, None, None)
    # Without a key all messages count, of streams as of frames; and a message can be its own match.
    frame = spark.createDataFrame([(other_stream, n) for n in (0, 5, 77)], "stream string, offset long")
    by_time = as_of(spark, stream_name, frame, on=None, direction="forward", **options)
    assert by_time.columns[0] == "left_stream"
    assert {row.left_offset: row.right_offset for row in by_time.collect()} == {0: 5, 1: None, 2: None, 3: 5, 4: 0}
    itself = as_of(spark, stream_name, stream_name, on=None, allow_exact_matches=False, **options)
    assert {row.left_offset: row.right_offset for row in itself.collect()} == {0: 4, 1: 3, 2: 1, 3: 0, 4: None}


def test_what_is_not_there_is_named(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, other_stream: str
) -> None:
    """A stream that was never recorded and a key that is not defined; a recorded stream without rows gives none."""
    record(amqp_url, engine, {stream_name: _orders(1), other_stream: []}, ["order_id"])
    options: dict[str, Any] = {"database": database_url, "broker": amqp_url}
    assert related_pairs(spark, stream_name, other_stream, on="order_id", **options).count() == 0
    for join in (related_pairs, as_of):
        for on in ("order_id", *([None] if join is as_of else [])):
            with pytest.raises(StreamNotFound):
                join(spark, stream_name, "no-such-stream", on=on, **options)
        with pytest.raises(KeyNotDefined):
            join(spark, stream_name, stream_name, on="no-such-key", **options)
