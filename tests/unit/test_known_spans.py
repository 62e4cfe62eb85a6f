"""Of which spans of time all is known: edges, several streams, lives of a stream, and what is lost meanwhile."""

from datetime import UTC, datetime
from typing import Any

import pytest

from relatum.keys import KeyDefinition
from relatum.limits import INTEGER_MAX
from relatum.reading import StreamBounds
from relatum_consumer._known_spans import ALWAYS, Known, _intersection, _low, _union, still
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.proof import Evidence
from relatum_consumer.lookups.servers import Servers


def of_spans(*spans: tuple[int, int]) -> Known:
    return Known("payments", 100, spans, Evidence(("payments",), ends={"payments": StreamBounds(0, 8)}))


@pytest.mark.parametrize(
    ("low", "high", "is_held"),
    [(11, 19, True), (10, 15, False), (15, 20, False), (15, 35, False), (31, 39, True), (20, 25, False), (1, 2, False)],
)
def test_a_span_is_held_between_its_ends(low: int, high: int, is_held: bool) -> None:
    """What came just at an end may lie on the other side of it; a gap is not bridged."""
    assert of_spans((10, 20), (30, 40)).holds(low, high) is is_held


def test_nothing_is_known_of_nothing() -> None:
    """Where no span is known, none is held, and no moment is reached."""
    assert of_spans().until == ALWAYS
    assert not of_spans().holds(1, 2)
    assert of_spans((ALWAYS, 100)).holds(ALWAYS + 1, 99)


def test_all_streams_must_know() -> None:
    """Of several streams, what each of them knows; of one, a range does not reach into the time of the next."""
    assert _intersection([(0, 10), (20, 30)], [(5, 25)]) == [(5, 10), (20, 25)]
    assert _intersection([(0, 10)], []) == []
    assert _union([(20, 30), (0, 25), (40, 40)]) == [(0, 20), (20, 30)]


def test_a_stream_is_known_from_its_beginning_on() -> None:
    """Its first life is known wholly; of a later one what it holds itself, or from when it was first seen."""
    assert _low((0, 9), 1, 50, 70) == ALWAYS
    assert _low((0, 9), 2, 50, 70) == 50
    assert _low((0, 9), 2, 50, 40) == 40
    assert _low((0, 0), 2, 50, None) == 50
    assert _low((3, 9), 1, 50, 70) == 70
    assert _low((3, 9), 1, 50, None) > INTEGER_MAX - 2


@pytest.mark.parametrize(("key_id", "spans"), [(1, ((ALWAYS, 100),)), (2, ())])
def test_a_key_that_was_defined_anew_proves_nothing(key_id: int, spans: tuple[tuple[int, int], ...]) -> None:
    """Its rows may be gone; while it is the same, and the stream retains what it did, all is known still."""
    rows = [(key_id, "order_id", ["header:order_id"], "text", datetime.now(UTC), None, False)]

    class Broker:
        def bounds(self, _: str) -> StreamBounds:
            return StreamBounds(0, 8)

    reader: Any = Broker()
    servers = Servers(lambda _, given: [] if "vhost" in given else rows, lambda: reader)
    found = still(Catalog(servers, "/"), of_spans((ALWAYS, 100)), KeyDefinition("order_id", key_id=1))
    assert found.spans == spans
