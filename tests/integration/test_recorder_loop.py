"""A recorder works in one loop: nothing that it does keeps its lease, or other streams, from their turn."""

import time

from relatum.recording import Recorder
from tests.support import new_streams, wait_until
from tests.support._raw_publisher import RawPublisher, uncompressed
from tests.support._recording import running
from tests.support.amqp import encode, section
from tests.support.loop_guard import TURN_MAX_S
from tests.support.place import Place
from tests.support.standstill import locked, somebody_waits

LEASE_S = 5.0
"""As by default: what a machine that is busy with other tests keeps, too."""

RECORD = section(0x74, encode({"order_id": "o1"})) + section(0x75, encode(b""))
"""A message as AMQP 1.0 has it."""


def holder_of(place: Place) -> str | None:
    """Who holds the stream; a member whose lease has run out goes by another name."""
    query = "SELECT s.lease_holder FROM relatum.streams s JOIN relatum.recorder_members m ON m.holder = s.lease_holder "
    found = place.sql(query + "WHERE m.lease_expires_at > clock_timestamp()")
    return str(found[0][0]) if found else None


def test_a_recorder_that_catches_up_gives_way_and_keeps_its_lease(place: Place, longest: dict[str, float]) -> None:
    """A recorder that catches up has no long step in its loop, keeps its lease, and records other streams meanwhile."""
    with RawPublisher(place.stream_url, place.stream) as publisher:
        for _ in range(10):
            publisher.publish(*[uncompressed([RECORD] * 2000)] * 5)
    with new_streams(place.amqp, 1) as (other,):
        recorder = Recorder(place.amqp, place.database, [place.stream, other], keys=["order_id"], lease_s=LEASE_S)
        with running(recorder):
            holder = wait_until(lambda: holder_of(place), what="the stream held")
            place.put((b"", {"order_id": 2}), to=other)
            place.wait_recorded(other)
            assert place.recorded_to() < 100_000
            place.wait_recorded()
            assert holder_of(place) == holder, longest
    assert len(place.rows()) == 100_000
    assert max(longest.values()) < TURN_MAX_S, longest


def test_a_locked_table_takes_no_lease(place: Place) -> None:
    """A recorder that waits for a locked table keeps its lease."""
    place.put((b"", {"order_id": 1}))
    recorder = Recorder(place.amqp, place.database, [place.stream], keys=["order_id"], lease_s=LEASE_S)
    with running(recorder):
        place.wait_recorded()
        holder = holder_of(place)
        with locked(place.database, "relationships"):
            place.put((b"", {"order_id": 2}))
            somebody_waits(place.database)
            until = time.monotonic() + 2 * LEASE_S
            wait_until(lambda: time.monotonic() >= until or holder_of(place) != holder, what="leases to run out")
            assert holder_of(place) == holder
        place.wait_recorded()
    assert place.values() == ["1", "2"]
