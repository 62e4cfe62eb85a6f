"""Connected messages, against a union-find."""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from pyspark.sql import SparkSession

from relatum.errors import InvalidInput, KeyNotDefined, StreamNotFound
from relatum_spark import conversations
from tests.support.spark_joins import SECOND_US, Headers, Sides, fill

Row = tuple[str, str, str, int]
"""A key, a value, a stream and an offset."""


def _found(spark: SparkSession, database: str, keys: Sequence[str], **options: Any) -> dict[tuple[str, int], str]:
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
    assert _found(spark, database_url, keys) == _union_find(rows)
    assert _found(spark, database_url, keys, max_value_size=3) == _union_find(rows, 3)
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
    # What is not there is named; a recorded stream without the key gives none.
    assert conversations(sides.spark, "invoice_id", streams=sides.left, **options).count() == 0
    with pytest.raises(StreamNotFound):
        conversations(sides.spark, "order_id", streams="no-such-stream", **options)
    with pytest.raises(KeyNotDefined):
        conversations(sides.spark, ["order_id", "no-such-key"], **options)
