"""Joins by values: pairs, the nearest in time, messages without one, conversations; against pandas and naive code."""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession

from relatum.errors import ConfigurationError, InvalidInput, KeyNotDefined, StreamNotFound, StreamReplaced
from relatum.recording import set_record_time
from relatum_spark import as_of, conversations, related_pairs, snapshot, unmatched
from tests.support import declare_stream, delete_stream, publish_plain
from tests.support.place import Place
from tests.support.spark_joins import SECOND_US, Headers, Relation, Sides, fill, orders

CASES = 40
"""Small cases of one job: values are of one case alone."""

Message = tuple[str, int]
Span = tuple[int, int] | None


class Cases:
    """Relations of many cases, and the messages of either side: ties, times before 1970 and none, empty sides.

    A message has several values at times, and may be on both sides.
    """

    def __init__(self, spark: SparkSession, database: str, prefix: str) -> None:
        chance = random.Random(7)
        self.streams = [f"{prefix}-2", f"{prefix}-10", f"{prefix}t"]
        relations: list[Relation] = []
        sides: tuple[list[Message], list[Message]] = ([], [])
        for case in range(CASES):
            for place in range(chance.randrange(16)):
                message = (chance.choice(self.streams), 16 * case + place)
                time_us = chance.choice([None, *range(-3, 12)])
                values = chance.sample("abc", chance.choice([1, 1, 2]))
                relations += [("k", f"{case} {value}", *message, time_us) for value in values]
                for side in chance.choice([(0,), (1,), (0, 1)]):
                    sides[side].append(message)
        fill(database, relations)
        self.end = max(row[3] for row in relations) + 1
        self.frames = [spark.createDataFrame(side, "stream string, offset long") for side in sides]
        self.left, self.right = ([row for row in relations if row[2:4] in set(side)] for side in sides)
        self.options: dict[str, Any] = {"on": "k", "database": database, "partitions": 2}


@pytest.fixture
def cases(spark: SparkSession, place: Place) -> Iterator[Cases]:
    """The cases, in the table, and their streams, as yet empty."""
    made = Cases(spark, place.database, place.stream)
    for stream in made.streams:
        declare_stream(place.amqp, stream)
    yield made
    for stream in made.streams:
        delete_stream(place.amqp, stream)


def _near(left: Relation, right: Relation, span: Span) -> bool:
    if left[1] != right[1] or left[2:4] == right[2:4]:
        return False
    if span is None:
        return True
    return left[4] is not None and right[4] is not None and -span[0] <= right[4] - left[4] <= span[1]


SPANS: list[Span] = [None, (3, 1), (0, 0), (10**18, 7)]


def _arguments(span: Span) -> dict[str, timedelta]:
    lengths = () if span is None else (timedelta(microseconds=each) for each in span)
    return dict(zip(("before", "after"), lengths, strict=False))


@pytest.mark.differs
def test_pairs_are_those_of_each_with_each(spark: SparkSession, cases: Cases, place: Place) -> None:
    """Every pair that is near enough comes once, and no other; the rest is each left value that has no pair."""
    for stream in cases.streams:
        publish_plain(place.amqp, stream, [b"x"] * cases.end, confirm=False)
    left, right = cases.frames
    for number, span in enumerate(SPANS):
        pairs = related_pairs(spark, left, right, **_arguments(span), **cases.options).collect()
        found = [(row.value, row.left_stream, row.left_offset, row.right_stream, row.right_offset) for row in pairs]
        expected = [(*a[1:4], *b[2:4]) for a in cases.left for b in cases.right if _near(a, b, span)]
        assert sorted(found) == sorted(expected), span
        if number < 2:
            alone = unmatched(spark, left, right, broker=place.amqp, **_arguments(span), **cases.options).collect()
            rest = [a[1:4] for a in cases.left if not any(_near(a, b, span) for b in cases.right)]
            assert sorted((row.value, row.left_stream, row.left_offset) for row in alone) == sorted(rest), span
            assert {row.status for row in alone} == {"absent"}
    assert unmatched(spark, left, right.limit(0), broker=place.amqp, **cases.options).count() == len(cases.left)


def _pandas(left: list[Relation], right: list[Relation], tolerance: int | None, **options: Any) -> dict[Any, Any]:
    """By left value and place the right place that pandas finds."""
    frames = []
    for relations in (left, right):
        # Messages with the same time are in the order of partition and offset, `s-2` before `s-10`.
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


@pytest.mark.differs
def test_the_nearest_is_that_of_pandas(spark: SparkSession, cases: Cases) -> None:
    """Ties, duplicates, empty sides, times before 1970; a message without a time is kept unmatched on the left."""
    wanted: list[tuple[Any, int | None, bool]] = [
        *(("backward", None, True), ("nearest", None, True)),
        *(("backward", 1, False), ("forward", 3, False), ("nearest", 1, False), ("nearest", 0, True)),
    ]
    for direction, tolerance, exact in wanted:
        options = {"direction": direction, "allow_exact_matches": exact}
        distance = None if tolerance is None else timedelta(microseconds=tolerance)
        joined = as_of(spark, *cases.frames, tolerance=distance, **options, **cases.options)
        found = {
            (row.value, row.left_stream, row.left_offset): row.right_stream and (row.right_stream, row.right_offset)
            for row in joined.collect()
        }
        assert found == _pandas(cases.left, cases.right, tolerance, **options), (direction, tolerance, exact)


def test_a_value_that_all_messages_carry_costs_no_products(spark: SparkSession, database_url: str) -> None:
    """20,000 messages of one value on either side: hundreds of millions of pairs, and joins of seconds."""
    count = 20_000
    fill(database_url, (("k", "hot", side, n, n * 10 + 5 * (side == "l")) for side in ("l", "r") for n in range(count)))
    options: dict[str, Any] = {"on": "k", "database": database_url, "partitions": 2}
    near = timedelta(microseconds=5)
    assert related_pairs(spark, "l", "r", before=near, **options).count() == count
    joined = as_of(spark, "l", "r", direction="nearest", tolerance=near, **options)
    assert joined.where("right_offset = left_offset").count() == count


def test_recorded_messages_are_paired(sides: Sides) -> None:
    """Near in time, by two keys, and with itself; what is recorded after the call or snapshot is not in the result."""
    left = [*orders(1, 2, 3, shop="x"), *orders(2, shop="y")]
    sides.record(left, [*orders(2, 4, time=10, shop="y"), *orders(3, time=60)], ["order_id", "shop"])

    def paired(left: Any, right: Any, on: Any = "order_id", **options: Any) -> DataFrame:
        return related_pairs(sides.spark, left, right, on=on, **(sides.servers | options))

    joined = paired([sides.left], sides.right, after=10, payloads=True)
    assert joined.columns == [
        *("value", "left_stream", "left_offset", "left_time", "right_stream", "right_offset", "right_time"),
        *("left_value", "left_headers", "left_properties", "left_status"),
        *("right_value", "right_headers", "right_properties", "right_status"),
    ]
    rows = joined.collect()
    assert sorted((row.value, row.left_offset, bytes(row.right_value)) for row in rows) == [
        ("o2", 1, f"{sides.right} 0".encode()),
        ("o2", 3, f"{sides.right} 0".encode()),
    ]
    assert {row.left_status for row in rows} == {row.right_status for row in rows} == {"found"}
    # A list of keys gives an array of values; a message that lacks one of them takes no part.
    both = paired(sides.left, sides.right, ["shop", "order_id"], payloads=True).collect()
    assert [(row.value, row.left_offset, row.right_offset, row.left_status) for row in both] == [
        (["y", "o2"], 3, 0, "found")
    ]
    frame = sides.frame(
        [(sides.left, 1, "x"), (sides.left, 1, "y"), (None, 1, "z"), (sides.left, 99, "z")], ", note string"
    )
    rows = paired(frame.withColumnRenamed("offset", "stream_offset"), sides.left).collect()
    assert [(row.left_offset, row.right_offset) for row in rows] == [(1, 3)]
    with snapshot(sides.place.database) as state:
        early = paired(sides.left, sides.right)
        sides.record(orders(1), orders(1, 2))
        assert early.count() == paired(sides.left, sides.right, database=None, snapshot=state).count() == 3
    assert paired(sides.left, sides.right).count() == 7


def test_recorded_messages_meet_the_weather_before_them(sides: Sides) -> None:
    """Two real streams, with payloads: each flight with the last observation of its airport, at most so old."""

    def at(origin: str, *seconds: float) -> list[Headers]:
        return [{"relatum_time": round(second * SECOND_US), "origin": origin} for second in seconds]

    def joined(right: Any, **options: Any) -> DataFrame:
        return as_of(sides.spark, sides.left, right, **options, **sides.servers)

    flights = [*at("EWR", 100, 200, 300), *at("JFK", 150), *at("LGA", 50)]
    sides.record(flights, [*at("EWR", 90, 190, 200, 201), *at("JFK", 20, 160)], ["origin"])
    found = joined(sides.right, on="origin", tolerance=100, payloads=True)
    assert found.columns[:4] == ["value", "left_stream", "left_offset", "left_time"]
    rows = {row.left_offset: row for row in found.collect()}
    assert {n: row.right_offset for n, row in rows.items()} == {0: 0, 1: 2, 2: 3, 3: None, 4: None}
    assert all(row.left_status == "found" for row in rows.values())
    assert bytes(rows[2].right_value) == f"{sides.right} 3".encode()
    assert rows[2].right_headers["origin"] == rows[2].value == "EWR"
    assert (rows[2].left_time.timestamp(), rows[2].right_time.timestamp()) == (300, 201)
    assert (rows[4].right_time, rows[4].right_value, rows[4].right_status) == (None, None, None)
    # Without a key, all messages count, for streams as for frames; and a message can match itself.
    by_time = joined(sides.frame([(sides.right, n) for n in (0, 5, 77)]), on=None, direction="forward")
    assert by_time.columns[0] == "left_stream"
    assert {row.left_offset: row.right_offset for row in by_time.collect()} == {0: 5, 1: None, 2: None, 3: 5, 4: 0}
    itself = joined(sides.left, on=None, allow_exact_matches=False)
    assert {row.left_offset: row.right_offset for row in itself.collect()} == {0: 4, 1: 3, 2: 1, 3: 0, 4: None}


JOINS: list[Callable[..., DataFrame]] = [related_pairs, as_of, unmatched]


def test_what_is_not_there_is_named(sides: Sides) -> None:
    """Streams never recorded and keys not defined are errors; on the right such a stream proves nothing."""
    sides.place.put(*((b"", headers) for headers in orders(1)))
    sides.place.record(keys=["order_id"])
    for join in JOINS:
        for on in ("order_id", *([None] if join is as_of else [])):
            with pytest.raises(StreamNotFound):
                join(sides.spark, sides.left, "no-such-stream", on=on, **sides.servers)
        with pytest.raises(KeyNotDefined):
            join(sides.spark, sides.left, sides.left, on="no-such-key", **sides.servers)
    with pytest.raises(ConfigurationError):
        unmatched(sides.spark, sides.left, sides.right, on="order_id", database=sides.place.database)
    assert _found(_alone(sides)) == [("o1", 0, "absent")]
    publish_plain(sides.place.amqp, sides.right, [b"no key"])
    assert _found(_alone(sides)) == [("o1", 0, "not_recorded_yet")]
    with pytest.raises(StreamNotFound):
        unmatched(sides.spark, sides.right, sides.left, on="order_id", **sides.servers)
    # A recorded stream without rows has no pairs.
    sides.place.record(sides.right)
    assert related_pairs(sides.spark, sides.left, sides.right, on="order_id", **sides.servers).count() == 0


def _alone(sides: Sides, **options: Any) -> DataFrame:
    return unmatched(sides.spark, sides.left, sides.right, on="order_id", **(sides.servers | options))


def _found(frame: DataFrame) -> list[tuple[str, int, str]]:
    return sorted((row.value, row.left_offset, row.status) for row in frame.collect())


def test_what_has_no_counterpart_is_absent_once_all_is_recorded(sides: Sides) -> None:
    """Absent up to recorded ends, unknown past them; a snapshot keeps rows and coverage, the ends are of now."""
    sides.record(orders(1, 2, 3), orders(2))
    alone = _alone(sides, payloads=True)
    assert alone.columns[:5] == ["value", "left_stream", "left_offset", "left_time", "status"]
    assert _found(alone) == [("o1", 0, "absent"), ("o3", 2, "absent")]
    assert {bytes(row.left_value) for row in alone.collect()} == {f"{sides.left} {n}".encode() for n in (0, 2)}
    with snapshot(sides.place.database) as state:
        publish_plain(sides.place.amqp, sides.right, [(b"", {"order_id": "o3"})])
        later, unknown = _alone(sides), [("o1", 0, "not_recorded_yet"), ("o3", 2, "not_recorded_yet")]
        assert _found(later) == unknown
        sides.record()
        assert _found(_alone(sides)) == [("o1", 0, "absent")]
        # The earlier frame still shows the earlier state.
        assert _found(later) == _found(_alone(sides, database=None, snapshot=state)) == unknown


def test_times_prove_nothing_where_they_are_not_recorded(sides: Sides) -> None:
    """Neither with a span; nor are messages named that may be too young."""
    now = time.time()
    sides.record(orders(1, time=now - 10_000) + orders(2, time=now - 50), orders(1, time=now - 9_995))
    assert _found(_alone(sides, within=5)) == [("o2", 1, "absent")]
    assert _found(_alone(sides, within=4, older_than=5_000)) == [("o1", 0, "absent")]
    set_record_time(sides.place.amqp, sides.place.engine.url, sides.right, on=False)
    sides.record(right=orders(7))
    assert _found(_alone(sides, within=5, older_than=0)) == [("o2", 1, "not_recorded_yet")]
    assert _found(_alone(sides)) == [("o2", 1, "absent")]


@pytest.mark.differs
def test_a_replaced_stream_is_named(sides: Sides) -> None:
    """A right stream that was deleted and declared again proves nothing."""
    sides.record(orders(1), orders(2))
    delete_stream(sides.place.amqp, sides.right)
    declare_stream(sides.place.amqp, sides.right)
    publish_plain(sides.place.amqp, sides.right, [b"another"])
    with pytest.raises(StreamReplaced):
        _alone(sides)


Row = tuple[str, str, str, int]
"""A key, a value, a stream and an offset."""


def _members(spark: SparkSession, database: str, keys: Sequence[str], **options: Any) -> dict[tuple[str, int], str]:
    found = conversations(spark, keys, members=True, database=database, partitions=2, **options).collect()
    ids = {(row.stream, row.offset): row.id for row in found}
    assert len(ids) == len(found), "each message once"
    return ids


def _union_find(rows: Iterable[Row], max_value_size: int | None = None) -> dict[tuple[str, int], str]:
    parents: dict[tuple[str, int], tuple[str, int]] = {}
    values = defaultdict(list)
    for key, value, *place in rows:
        values[key, value].append(tuple(place))
        parents.setdefault(tuple(place), tuple(place))

    def root(place: tuple[str, int]) -> tuple[str, int]:
        while parents[place] != place:
            parents[place] = place = parents[parents[place]]
        return place

    for places in values.values():
        if max_value_size is None or len(places) <= max_value_size:
            for place in places:
                first, second = sorted((root(places[0]), root(place)))
                parents[second] = first
    return {place: "{}@{}".format(*root(place)) for place in parents}


LAST = 2**62


def _random_rows(chance: random.Random, messages: int, values: int) -> list[Row]:
    """Messages with up to three keys, in three streams, offsets with gaps.

    Values of one key are no values of another; streams come in the order of names, and offset 9 before 10.
    """
    places = [(f"s{chance.randrange(3)}", offset) for offset in chance.sample(range(10 * messages), messages)]
    rows = [
        (f"k{key}", f"v{chance.randrange(values)}", *place)
        for place in places
        for key in chance.sample(range(3), chance.randint(1, 3))
    ]
    rows += [("k0", "x", "s2", 10**6), ("k0", "x", "s1", 10**6 + 10), ("k0", "x", "s1", 10**6 + 9)]
    rows += [("k1", "x", "s2", LAST), ("k1", "x", "s2", LAST + 1)]
    chance.shuffle(rows)
    return rows


def _chain(offsets: Sequence[int]) -> list[Row]:
    """Messages that share a value with the one before and the one after alone."""
    return [(f"k{n % 2}", f"c{n}", "s", offset) for n, pair in enumerate(pairwise(offsets)) for offset in pair]


def test_conversations_are_those_of_a_union_find(
    spark: SparkSession, database_url: str, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    """Whatever the rows, a chain of messages and a size limit included; too many rounds are an error."""
    messages = 1000 if is_long else 100
    chance = random.Random(3)
    chain = chance.sample(range(messages), messages)
    rows = _random_rows(chance, messages, messages * 6 // 5) + _chain(chain)
    fill(database_url, ((*row, 0) for row in rows))
    keys = ["k0", "k1", "k2"]
    assert _union_find(rows, 3) != _union_find(rows)
    monkeypatch.setattr("relatum_spark._conversations.ROUNDS_MAX", 14)
    assert _members(spark, database_url, keys) == _union_find(rows)
    assert _members(spark, database_url, keys, max_value_size=3) == _union_find(rows, 3)
    monkeypatch.setattr("relatum_spark._conversations.ROUNDS_MAX", 1)
    with pytest.raises(InvalidInput, match="1 rounds"):
        conversations(spark, ["k0", "k1"], database=database_url)


def test_recorded_conversations(sides: Sides) -> None:
    """Real streams: an order leads to an invoice, that to a payment; sizes, streams, first and last times."""
    listed: list[dict[str, Any]] = [{"order_id": "o1"}, {"order_id": "o2"}, {"other": "x"}]
    listed += [{"order_id": "o1", "invoice_id": "i1"}, {"invoice_id": "i1"}]
    timed: list[Headers] = [headers | {"relatum_time": n * SECOND_US} for n, headers in enumerate(listed)]
    keys = ["order_id", "invoice_id"]
    sides.record(timed[:3], timed[3:], keys)
    first, second = sorted([sides.left, sides.right])
    options: dict[str, Any] = {"database": sides.place.database}
    all_of_them = conversations(sides.spark, keys, **options)
    assert all_of_them.columns == ["id", "size", "streams", "first", "last"]
    rows = {row.size: row for row in all_of_them.collect()}
    assert (rows[3].id, rows[3].streams) == (f"{first}@0", [first, second])
    assert (rows[3].first.timestamp(), rows[3].last.timestamp()) == (0, 4)
    assert (rows[1].id, rows[1].streams) == (f"{sides.left}@1", [sides.left])
    assert set(rows) == {1, 3}
    members = conversations(sides.spark, "invoice_id", streams=sides.right, members=True, **options)
    assert members.columns == ["id", "stream", "offset", "timestamp"]
    found = {(row.id, row.stream, row.offset) for row in members.collect()}
    assert found == {(f"{sides.right}@0", sides.right, n) for n in range(2)}
    # Missing things are named in the error; a recorded stream without the key gives no rows.
    assert conversations(sides.spark, "invoice_id", streams=sides.left, **options).count() == 0
    with pytest.raises(StreamNotFound):
        conversations(sides.spark, "order_id", streams="no-such-stream", **options)
    with pytest.raises(KeyNotDefined):
        conversations(sides.spark, ["order_id", "no-such-key"], **options)
