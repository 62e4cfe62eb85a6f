"""The values that a key has."""

import pytest

from relatum.errors import InvalidInput, KeyNotDefined
from relatum.keys import KeyDefinition
from relatum_consumer import Relations
from tests.support.place import Place

KEYS = [KeyDefinition("order_id"), KeyDefinition("number", type="integer"), KeyDefinition("at", source=("a", "b"))]
ORDERS = ["a", "a", "ab", "ab%", "ab_", "abc", "aé", "a\U0001f600", "b", "東", "ab", "B"]


def test_values_begin_with_the_prefix(place: Place, relations: Relations, other_stream: str) -> None:
    """Each once, in order of bytes; no pattern; none of other virtual hosts or of streams that were replaced."""
    for name in (place.stream, other_stream):
        place.put(*[(b"", {"order_id": each, "number": n}) for n, each in enumerate(ORDERS)], to=name)
    place.record(place.stream, other_stream)
    whole = sorted(set(ORDERS), key=str.encode)
    for prefix in ("", "a", "ab", "ab%", "ab_", "b", "東", "a\U0001f600", "c", "abcd", "'", "A", "B"):
        expected = tuple(each for each in whole if each.startswith(prefix))
        assert relations.values("order_id", prefix) == expected, prefix
        for limit in (1, 2, 1_000):
            assert relations.values("order_id", prefix, limit=limit) == expected[:limit]
    assert relations.values("number", "1") == ("1", "10", "11")
    # A key that does not exist, or has several parts.
    for key, error in (("nope", KeyNotDefined), ("at", InvalidInput)):
        with pytest.raises(error):
            relations.values(key)
    place.sql("UPDATE relatum.streams SET vhost = 'other' WHERE name = :name", name=place.stream)
    assert relations.values("order_id") == tuple(whole)
    place.sql("UPDATE relatum.streams SET replaced_at = now() WHERE name = :name", name=other_stream)
    assert relations.values("order_id") == ()
