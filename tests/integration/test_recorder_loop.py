"""A recorder works in one loop: nothing that it does keeps its lease, or other streams, from their turn."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from relatum.headers import RECEIPT_HEADER
from relatum.ids import MessageId
from relatum.recording import EmbeddedRecorder, Recorder
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
    """However much there is to read: no step of the loop takes long, and nobody else could have had the stream."""
    with RawPublisher(place.stream_url, place.stream) as publisher:
        for _ in range(10):
            publisher.publish(*[uncompressed([RECORD] * 2000)] * 5)
    recorder = Recorder(place.amqp, place.database, [place.stream], keys=["order_id"], lease_s=LEASE_S)
    with running(recorder):
        holder = wait_until(lambda: holder_of(place), what="the stream held")
        place.wait_recorded()
        assert holder_of(place) == holder, longest
    assert len(place.rows()) == 100_000
    assert max(longest.values()) < TURN_MAX_S, longest


def test_a_locked_table_takes_no_lease(place: Place) -> None:
    """What is committed, pruned and looked after waits for a table, over all connections but the lease's own."""
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


@pytest.fixture
def embedded(place: Place) -> Iterator[EmbeddedRecorder]:
    """A recorder beside a publisher, of a stream that it has found."""
    recorder = EmbeddedRecorder(place.broker, place.database)
    with closing(recorder):
        recorder.record(place.stream)
        place.put(b"first")
        place.wait_recorded()
        yield recorder


def told(recorder: EmbeddedRecorder, place: Place, receipt: str, listener: Callable[[MessageId], None]) -> None:
    """Publish a message, of which a listener is told as it is recorded."""
    recorder.subscribe(receipt, listener)
    place.put((b"", {RECEIPT_HEADER: receipt}))


def test_a_recorder_is_closed_by_a_listener_of_its_own(place: Place, embedded: EmbeddedRecorder) -> None:
    """It does not wait for itself: it ends in the time that closing has, with all recorded."""
    took_s: list[float] = []

    def close(_: MessageId) -> None:
        begun = time.monotonic()
        embedded.close()
        took_s.append(time.monotonic() - begun)

    told(embedded, place, "mine", close)
    wait_until(lambda: took_s, what="its end")
    assert took_s[0] < 5.0
    place.wait_recorded()


def test_a_listener_that_fails_ends_no_recording(place: Place, embedded: EmbeddedRecorder) -> None:
    """Its defect is said; the stream is recorded on, by the same session."""

    def fail(_: MessageId) -> None:
        raise KeyError("a defect of the listener")

    came = list[MessageId]()
    told(embedded, place, "fail", fail)
    told(embedded, place, "goes", came.append)
    wait_until(lambda: came, what="the next message's listener")
    place.wait_recorded()
    assert embedded.statistics().streams[place.stream].reconnects == 0


def test_a_stream_that_is_behind_keeps_no_other_waiting(place: Place) -> None:
    """A lone message of another stream is recorded while one catches up."""
    with new_streams(place.amqp, 1) as (other,):
        recorder = Recorder(place.amqp, place.database, [place.stream, other], keys=["order_id"])
        with running(recorder):
            place.put((b"", {"order_id": 1}), to=other)
            place.wait_recorded(other)
            with RawPublisher(place.stream_url, place.stream) as publisher:
                for _ in range(10):
                    publisher.publish(*[uncompressed([RECORD] * 2000)] * 5)
            place.put((b"", {"order_id": 2}), to=other)
            place.wait_recorded(other)
            assert place.recorded_to() < 100_000
            place.wait_recorded()
