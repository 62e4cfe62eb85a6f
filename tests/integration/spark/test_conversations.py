"""Connected messages, against a union-find."""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession

from relatum.errors import InvalidInput, KeyNotDefined, StreamNotFound
from relatum_spark import conversations
from tests.support.spark_joins import SECOND_US, fill, record

Row = tuple[str, str, str, int]
"""A key, a value, a stream and an offset."""


def _found(spark: SparkSession, database: str, rows: Iterable[Row], **options: Any) -> dict[tuple[str, int], str]:
    """By message the id of its conversation, of rows that are put into the table."""
    listed = list(rows)
    fill(database, ((*row, 0) for row in listed))
    keys = sorted({row[0] for row in listed})
    found = conversations(spark, keys, members=True, database=database, partitions=2, **options).collect()
    ids = {(row.stream, row.offset): row.id for row in found}
    assert len(ids) == len(found), "each message once"
    return ids


def _union_find(rows: Iterable[Row], max_value_size: int | None = None) -> dict[tuple[str, int], str]:
    """By message the id of its conversation."""
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


def _random_rows(chance: random.Random, messages: int, values: int) -> list[Row]:
    """Messages with up to three keys, in three streams, offsets with gaps."""
    places = [(f"s{chance.randrange(3)}", offset) for offset in chance.sample(range(10 * messages), messages)]
    rows = [
        (f"k{key}", f"v{chance.randrange(values)}", *place)
        for place in places
        for key in chance.sample(range(3), chance.randint(1, 3))
    ]
    chance.shuffle(rows)
    return rows


@pytest.mark.parametrize(
    ("values", "max_value_size"),
    [(1200, None), (400, 3)],
    ids=["one large and many small or alone", "popular values left out"],
)
def test_conversations_are_those_of_a_union_find(
    spark: SparkSession, database_url: str, values: int, max_value_size: int | None
) -> None:
    """From values everybody shares to values nobody does; with a limit, popular values connect nothing."""
    rows = _random_rows(random.Random(values), 1000, values)
    assert _found(spark, database_url, rows, max_value_size=max_value_size) == _union_find(rows, max_value_size)


def _chain(offsets: Sequence[int]) -> list[Row]:
    """Messages that share a value with the one before and the one after alone."""
    return [(f"k{n % 2}", f"v{n}", "s", offset) for n, pair in enumerate(pairwise(offsets)) for offset in pair]


def test_long_chains_settle_in_few_rounds(
    spark: SparkSession, database_url: str, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    """Hundreds of messages in a row, in random order; what needs more rounds than are allowed is an error."""
    offsets = list(range(1000 if is_long else 200))
    random.Random(3).shuffle(offsets)
    monkeypatch.setattr("relatum_spark._conversations.ROUNDS_MAX", 14)
    assert set(_found(spark, database_url, _chain(offsets)).values()) == {"s@0"}
    monkeypatch.setattr("relatum_spark._conversations.ROUNDS_MAX", 1)
    with pytest.raises(InvalidInput, match="1 rounds"):
        conversations(spark, ["k0", "k1"], database=database_url)


def test_messages_are_connected_by_a_value_of_one_key(spark: SparkSession, database_url: str) -> None:
    """The order 7 and the customer 7 have nothing to do with each other.

    An id is the first member's: `a` before `b`, and offset 9 before 10, as far as offsets reach.
    """
    last = 2**62
    rows = [("order", "7", "s", 0), ("customer", "7", "s", 1), ("customer", "7", "s", 2)]
    rows += [("k", "v", "b", 3), ("k", "v", "a", 10), ("k", "v", "a", 9), ("k", "w", "a", last)]
    expected = {("s", 0): "s@0", ("s", 1): "s@1", ("s", 2): "s@1"}
    expected |= {("b", 3): "a@9", ("a", 10): "a@9", ("a", 9): "a@9", ("a", last): f"a@{last}"}
    assert _found(spark, database_url, rows) == expected


def test_recorded_conversations(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str, other_stream: str
) -> None:
    """Real streams: an order leads to an invoice, that to a payment; sizes, streams, first and last times."""
    orders: list[dict[str, Any]] = [{"order_id": "o1"}, {"order_id": "o2"}, {"other": "x"}]
    invoices: list[dict[str, Any]] = [{"order_id": "o1", "invoice_id": "i1"}, {"invoice_id": "i1"}]
    for number, headers in enumerate([*orders, *invoices]):
        headers["relatum_time"] = number * SECOND_US
    record(amqp_url, engine, {stream_name: orders, other_stream: invoices}, ["order_id", "invoice_id"])
    first, second = sorted([stream_name, other_stream])
    found = conversations(spark, ["order_id", "invoice_id"], database=database_url)
    assert found.columns == ["id", "size", "streams", "first", "last"]
    rows = {row.size: row for row in found.collect()}
    assert (rows[3].id, rows[3].streams) == (f"{first}@0", [first, second])
    assert (rows[3].first.timestamp(), rows[3].last.timestamp()) == (0, 4)
    assert (rows[1].id, rows[1].streams) == (f"{stream_name}@1", [stream_name])
    assert set(rows) == {1, 3}
    members = conversations(spark, ["order_id", "invoice_id"], members=True, database=database_url)
    assert members.columns == ["id", "stream", "offset", "timestamp"]
    assert members.where(members.id == rows[3].id).count() == 3
    one = conversations(spark, "invoice_id", streams=other_stream, database=database_url)
    assert [(row.size, row.streams) for row in one.collect()] == [(2, [other_stream])]


def test_what_is_not_there_is_named(
    spark: SparkSession, amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """A stream that was never recorded, a key that is not defined."""
    record(amqp_url, engine, {stream_name: []}, ["order_id"])
    with pytest.raises(StreamNotFound):
        conversations(spark, "order_id", streams="no-such-stream", database=database_url)
    with pytest.raises(KeyNotDefined):
        conversations(spark, ["order_id", "no-such-key"], database=database_url)
    assert conversations(spark, "order_id", streams=stream_name, database=database_url).count() == 0
