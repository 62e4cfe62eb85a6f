"""The values that a key has, and when messages had one; through both faces."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from relatum.errors import InvalidInput, KeyNotDefined, StreamNotFound
from relatum.keys import KeyDefinition
from relatum_consumer import Relations
from relatum_consumer.lookups import Times
from relatum_consumer.lookups._limits import TIMES_ROWS_MAX
from tests.support import publish_plain, recording, wait_recorded

KEYS = [KeyDefinition("order_id"), KeyDefinition("number", type="integer"), KeyDefinition("at", source=("a", "b"))]
ORDERS = ["a", "a", "ab", "ab%", "ab_", "abc", "aé", "a\U0001f600", "b", "東", "ab", "B"]


@pytest.fixture
def recorded(amqp_url: str, engine: sa.Engine, stream_name: str, other_stream: str) -> None:
    """Two streams with the same values."""
    for name in (stream_name, other_stream):
        publish_plain(amqp_url, name, [(b"", {"order_id": each, "number": n}) for n, each in enumerate(ORDERS)])
    with recording(amqp_url, engine, stream_name, other_stream, keys=KEYS):
        for name in (stream_name, other_stream):
            wait_recorded(amqp_url, engine, name)


@pytest.mark.usefixtures("recorded")
def test_values_begin_with_the_prefix_and_come_in_order_each_once(relations: Relations) -> None:
    """By their bytes; nothing of a prefix is a pattern; so many as are asked for, and none where none begins so."""
    whole = sorted(set(ORDERS), key=str.encode)
    for prefix in ("", "a", "ab", "ab%", "ab_", "b", "東", "a\U0001f600", "c", "abcd", "'", "A", "B"):
        expected = tuple(each for each in whole if each.startswith(prefix))
        assert relations.values("order_id", prefix) == expected, prefix
        for limit in (1, 2, 1_000):
            assert relations.values("order_id", prefix, limit=limit) == expected[:limit]
    assert relations.values("number", "1") == ("1", "10", "11")


def test_values_of_streams_that_are_not_meant_are_passed_over(
    relations: Relations, engine: sa.Engine, recorded: None, stream_name: str, other_stream: str
) -> None:
    """Those of other virtual hosts, and of streams that were replaced; what another stream has too stays."""

    def change(name: str, change: str) -> None:
        with engine.begin() as connection:
            connection.execute(sa.text(f"UPDATE relatum.streams SET {change} WHERE name = :name"), {"name": name})

    expected = relations.values("order_id")
    change(stream_name, "vhost = 'other'")
    assert relations.values("order_id") == expected
    change(other_stream, "replaced_at = now()")
    assert relations.values("order_id") == ()


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"key": "nope"}, KeyNotDefined),
        ({"key": "at"}, InvalidInput),
        ({"key": "order_id", "prefix": None}, InvalidInput),
        ({"key": "order_id", "prefix": "a\0"}, InvalidInput),
        ({"key": "order_id", "prefix": "\udc80"}, InvalidInput),
        ({"key": "order_id", "prefix": "é" * 513}, InvalidInput),
        ({"key": "order_id", "limit": 0}, InvalidInput),
        ({"key": "order_id", "limit": 1_001}, InvalidInput),
    ],
)
def test_what_cannot_be_asked_is_said(relations: Relations, asked: dict[str, Any], error: type[Exception]) -> None:
    """A key that is not there, or has several parts; no text, or too much of it; no number."""
    with pytest.raises(error):
        relations.values(**asked)


def test_times_count_what_is_in_each_span(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, other_stream: str
) -> None:
    """From the first message to the last, of the streams and the span of time that are meant; none is left out."""
    seconds = {stream_name: [0, 0, 1, 9, 59], other_stream: [59, 20]}
    for name, each in seconds.items():
        given = [(b"", {"order_id": "a", "relatum_time": 1_000_000 * second}) for second in each]
        publish_plain(amqp_url, name, [*given, (b"", {"order_id": "b", "relatum_time": 0})])
    with recording(amqp_url, engine, stream_name, other_stream, keys=KEYS):
        for name in (stream_name, other_stream):
            wait_recorded(amqp_url, engine, name)
    assert relations.times("order_id", "nobody") == Times((), 0, is_whole=True)
    whole = relations.times("order_id", "a", spans=6)
    assert [(each.number, each.count) for each in whole.spans] == [(0, 4), (2, 1), (5, 2)]
    assert (whole.count, whole.is_whole) == (7, True)
    for order in ("oldest", "newest"):
        for spans in (1, 7, 1_000):
            found = relations.times("order_id", "a", spans=spans, order=order)
            assert found.count == 7
            for each in found.spans:
                assert len(relations.find("order_id", "a", since=each.since, until=each.until)) == each.count
    assert relations.times("order_id", "a", streams=other_stream).count == 2
    start = datetime(1970, 1, 1, tzinfo=UTC)
    bounded = relations.times("order_id", "a", since=start + timedelta(seconds=1), until=start + timedelta(seconds=59))
    assert bounded.count == 3
    with pytest.raises(StreamNotFound):
        relations.times("order_id", "a", streams=f"{other_stream}-none")
    with pytest.raises(InvalidInput):
        relations.times("order_id", "a", spans=0)


@pytest.mark.differs
def test_more_rows_than_are_looked_at_are_said_to_be(relations: Relations, engine: sa.Engine, recorded: None) -> None:
    """So many are counted, the oldest or the newest of them, and it is no whole; however often it is asked."""
    fill = (
        "INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value) "
        "SELECT n, n, stream_id, key_id, 'many' FROM generate_series(1, :most + 1) n, "
        "(SELECT min(stream_id) AS stream_id FROM relatum.streams) s, "
        "(SELECT key_id FROM relatum.keys WHERE name = 'order_id') k"
    )
    with engine.begin() as connection:
        connection.execute(sa.text(fill), {"most": TIMES_ROWS_MAX})
    # A session plans a statement anew for its first ten executions, and keeps a plan for any values then.
    for order, first in [("oldest", 1), ("newest", 2)] * 12:
        found = relations.times("order_id", "many", order=order)
        assert (found.count, found.is_whole) == (TIMES_ROWS_MAX, False)
        assert found.spans[0].since == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=first)
