"""How a predecessor is named, and how many a router remembers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum import MessageId
from relatum.contexts.affinity._predecessors import Found, Recent, place_in

PARTITIONS = ("orders-0", "orders:1")


@pytest.mark.parametrize(
    ("predecessor", "place"),
    [
        ("orders-0:0", MessageId("orders-0", 0)),
        ("orders-0:9223372036854775807", MessageId("orders-0", 2**63 - 1)),
        ("orders:1:17", MessageId("orders:1", 17)),
        ("orders-2:17", None),
        ("orders-0", None),
        ("orders-0:", None),
        ("orders-0:-1", None),
        ("orders-0:1.5", None),
        ("orders-0:²", None),
        ("urn:uuid:7", None),
        ("", None),
    ],
)
def test_only_an_offset_in_a_partition_is_a_place(predecessor: str, place: MessageId | None) -> None:
    """Whatever names no partition of this super stream is an id, colons or not."""
    assert place_in(predecessor, PARTITIONS) == place


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=100), st.integers(0, 5))
def test_the_messages_used_last_are_remembered(steps: list[tuple[bool, int]], most: int) -> None:
    """At most so many are kept, those that were published or asked for last."""
    recent, used = Recent(most), list[int]()
    for is_new, number in steps:
        if is_new:
            recent.add(str(number), Found(f"set {number}", "orders-0"))
        known = recent.get(str(number))
        if is_new or number in used:
            used = [number, *(other for other in used if other != number)][:most]
        assert (known is not None) == (number in used)
        assert known is None or known.name == f"set {number}"
        assert len(recent) == len(used)
