"""The values that a key has, and when messages had one."""

import pytest

from relatum.errors import InvalidInput, KeyNotDefined, StreamNotFound
from relatum.keys import KeyDefinition, moment
from relatum_consumer import Relations
from relatum_consumer.lookups.values import TIMES_ROWS_MAX, Times
from tests.support.place import Place

KEYS = [KeyDefinition("order_id"), KeyDefinition("number", type="integer"), KeyDefinition("at", source=("a", "b"))]
ORDERS = ["a", "a", "ab", "ab%", "ab_", "abc", "aé", "a\U0001f600", "b", "東", "ab", "B"]


@pytest.fixture
def recorded(place: Place, other_stream: str) -> None:
    """Two streams with the same values."""
    for name in (place.stream, other_stream):
        place.put(*[(b"", {"order_id": each, "number": n}) for n, each in enumerate(ORDERS)], to=name)
    place.record(place.stream, other_stream)


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
    # A key that is not there, or has several parts.
    for key, error in (("nope", KeyNotDefined), ("at", InvalidInput)):
        with pytest.raises(error):
            relations.values(key)


def test_values_of_streams_that_are_not_meant_are_passed_over(
    place: Place, relations: Relations, recorded: None, other_stream: str
) -> None:
    """Those of other virtual hosts, and of streams that were replaced; what another stream has too stays."""
    expected = relations.values("order_id")
    place.sql("UPDATE relatum.streams SET vhost = 'other' WHERE name = :name", name=place.stream)
    assert relations.values("order_id") == expected
    place.sql("UPDATE relatum.streams SET replaced_at = now() WHERE name = :name", name=other_stream)
    assert relations.values("order_id") == ()


def test_times_count_what_is_in_each_span(place: Place, relations: Relations, other_stream: str) -> None:
    """From the first message to the last, of the streams and the span of time that are meant; none is left out."""
    seconds = {place.stream: [0, 0, 1, 9, 59], other_stream: [59, 20]}
    for name, each in seconds.items():
        given = [(b"", {"order_id": "a", "relatum_time": 1_000_000 * second}) for second in each]
        place.put(*given, (b"", {"order_id": "b", "relatum_time": 0}), to=name)
    place.record(place.stream, other_stream)
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
    assert relations.times("order_id", "a", since=moment(1_000_000), until=moment(59_000_000)).count == 3
    with pytest.raises(StreamNotFound):
        relations.times("order_id", "a", streams=f"{other_stream}-none")


@pytest.mark.differs
def test_more_rows_than_are_looked_at_are_said_to_be(place: Place, relations: Relations, recorded: None) -> None:
    """So many are counted, the oldest or the newest of them, and it is no whole; however often it is asked."""
    fill = (
        "INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value) "
        "SELECT n, n, stream_id, key_id, 'many' FROM generate_series(1, :most + 1) n, "
        "(SELECT min(stream_id) AS stream_id FROM relatum.streams) s, "
        "(SELECT key_id FROM relatum.keys WHERE name = 'order_id') k"
    )
    place.sql(fill, most=TIMES_ROWS_MAX)
    # A session plans a statement anew for its first ten executions, and keeps a plan for any values then.
    for order, first in [("oldest", 1), ("newest", 2)] * 12:
        found = relations.times("order_id", "many", order=order)
        assert (found.count, found.is_whole) == (TIMES_ROWS_MAX, False)
        assert found.spans[0].since == moment(first)
