"""Members that reach PostgreSQL and not the broker leave their share to those that reach both, and come back."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from relatum import Broker, MessageId
from relatum.collecting import Collected
from relatum.contexts import SerialConsumer, SerialOptions
from tests.support import delete_stream, new_streams, wait_until
from tests.support.collectors import (
    COLLECTED,
    FORWARDED,
    SUCCEEDED,
    Collecting,
    Consumer,
    Gate,
    StoreMember,
    is_attached,
    wait_status,
)
from tests.support.leases import LEASE_S
from tests.support.place import FailingPlace, Place
from tests.support.serial_consuming import SerialBed, serial_bed
from tests.support.threads import beside

PARTITIONS = 4

CUT = "broker refused"

pytestmark = pytest.mark.usefixtures("quick_rhythm", "quick_cut")


@pytest.fixture
def quick_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that has not reached the broker for a second is cut off."""
    monkeypatch.setattr("relatum.reading.following._follower.CUT_OFF_S", 1.0)
    monkeypatch.setattr("relatum.reading.following._follower.RETURN_S", 0.5)


@pytest.fixture
def lines(place: Place) -> Iterator[list[FailingPlace]]:
    made = [FailingPlace(place, "blocking") for _ in range(2)]
    yield made
    for each in made:
        each.close()


@pytest.fixture
def bed(place: Place) -> Iterator[SerialBed]:
    with serial_bed(place.amqp, place.engine, PARTITIONS) as bed:
        yield bed


class Consumed:
    """What serial consumers were handed, and the partitions' messages as they were published."""

    def __init__(self, bed: SerialBed, database_url: str) -> None:
        self._bed = bed
        self._database_url = database_url
        self._lock = threading.Lock()
        self._published = 0
        self.bodies: dict[str, list[str]] = {stream: [] for stream in bed.streams}

    def consumer(self, broker: Broker) -> SerialConsumer:
        options = SerialOptions(lease_s=LEASE_S)
        return SerialConsumer(self._bed.name, "test", options, database=self._database_url, broker=broker)

    @contextmanager
    def running(self, broker: Broker) -> Iterator[SerialConsumer]:
        stop = threading.Event()
        with self.consumer(broker) as consumer, beside(consumer.run, self._note, stop, stop=stop.set):
            yield consumer

    def _note(self, batch: Any) -> None:
        with self._lock:
            self.bodies[batch.partition] += [message.body.decode() for message in batch]

    def publish(self) -> None:
        for partition in range(PARTITIONS):
            self._bed.publish(partition, f"c{partition}", *(str(self._published + n) for n in range(3)))
        self._published += 3

    def wait(self) -> None:
        """Each was handed out once, and in order."""
        wanted = [str(n) for n in range(self._published)]
        wait_until(
            lambda: all(len(bodies) >= len(wanted) for bodies in self.bodies.values()), what="all are handed out"
        )
        assert self.bodies == dict.fromkeys(self._bed.streams, wanted)


def test_partitions_of_a_serial_consumer_that_is_cut_off_are_taken_over(
    place: Place, bed: SerialBed, lines: list[FailingPlace]
) -> None:
    """A member takes over the partitions of one that is cut off; both come back, also after both were cut off."""
    consumed = Consumed(bed, place.database)

    def goes_on(*shares: int) -> None:
        wait_until(lambda: (len(first.partitions), len(second.partitions)) == shares, what=f"shares of {shares}")
        consumed.publish()
        consumed.wait()

    def nobody_has_a_lease() -> bool:
        return not place.sql("SELECT holder FROM relatum.serial_members")

    line, other = lines
    with consumed.running(line.broker) as first, consumed.running(other.broker) as second:
        goes_on(2, 2)
        with line.fault(CUT):
            goes_on(0, 4)
        goes_on(2, 2)
        with line.fault(CUT), other.fault(CUT):
            wait_until(nobody_has_a_lease, what="none has a lease", every_s=0.1)
        goes_on(2, 2)


def test_a_batch_in_hand_is_acknowledged_before_others_have_its_partition(
    place: Place, bed: SerialBed, lines: list[FailingPlace]
) -> None:
    """A member that is cut off keeps its lease for as long as its application works on what it was handed."""
    consumed = Consumed(bed, place.database)
    line, other = lines
    with consumed.consumer(line.broker) as first, consumed.running(other.broker) as second:
        wait_until(lambda: len(first.partitions) == len(second.partitions) == 2, what="shares")
        bed.publish(bed.streams.index(first.partitions[0]), "c", "in hand")
        batch = first.next_batch(90)
        assert batch is not None
        with line.fault(CUT):
            wait_until(lambda: first._member._reach.is_cut_off, what="it is cut off")
            consumed.publish()
            wait_until(lambda: sum(map(len, consumed.bodies.values())) == 6, what="the second's own are consumed")
            assert first.next_batch(0) is None
            assert len(second.partitions) == 2
            batch.acknowledge()
            wait_until(lambda: len(second.partitions) == PARTITIONS, what="all are taken over")
            consumed.wait()


@contextmanager
def late(consumer: SerialConsumer) -> Iterator[threading.Event]:
    """Its next word of what is its own does not come before the end, unless it is cut off; set once it asks."""
    member, asks, goes_on = consumer._member, threading.Event(), threading.Event()
    share = member.store.share

    def held_up(reach: Any, *, is_busy: bool) -> Any:
        if not reach.is_cut_off:
            asks.set()
            assert goes_on.wait(90)
        return share(reach, is_busy=is_busy)

    member.store.share = held_up  # type: ignore[method-assign]
    try:
        yield asks
    finally:
        goes_on.set()


def hands_nothing_out(consumer: SerialConsumer) -> bool:
    are_read = [following.due_at for following in consumer._member.followings]
    wait_until(lambda: all(due_at() is not None for due_at in are_read), what="all are read")
    return consumer.next_batch(1.0) is None


def test_who_is_back_hands_nothing_out_before_it_is_known_whose_it_is(
    place: Place, bed: SerialBed, lines: list[FailingPlace]
) -> None:
    """Another may have taken the partitions in the meantime, and consumed what the one that was cut off reads then."""
    consumed = Consumed(bed, place.database)
    with consumed.consumer(lines[0].broker) as consumer:
        wait_until(lambda: len(consumer.partitions) == PARTITIONS, what="all partitions")
        with ExitStack() as stack:
            with lines[0].fault(CUT):
                wait_until(lambda: consumer._member._reach.is_cut_off, what="it is cut off")
                asks = stack.enter_context(late(consumer))
                consumed.publish()
            assert asks.wait(90)
            assert hands_nothing_out(consumer)
        assert consumer.next_batch(90) is not None


def test_nothing_is_handed_out_after_the_end_of_a_lease(place: Place, bed: SerialBed) -> None:
    """As of a process that was suspended, or has no answer of PostgreSQL: others may have the partitions."""
    consumed, options = Consumed(bed, place.database), SerialOptions(lease_s=1.0)
    with SerialConsumer(bed.name, "test", options, database=place.database, broker=place.amqp) as consumer:
        wait_until(lambda: len(consumer.partitions) == PARTITIONS, what="all partitions")
        with late(consumer) as asks:
            assert asks.wait(90)
            time.sleep(1.0)  # Not a wait for a condition: the lease lasts this long, and has then expired.
            consumed.publish()
            assert hands_nothing_out(consumer)
        assert consumer.next_batch(90) is not None


def test_the_stream_of_a_collector_that_is_cut_off_is_taken_over(
    place: Place, lines: list[FailingPlace], caplog: pytest.LogCaptureFixture
) -> None:
    """A collector that is cut off consumes what it holds, and follows its stream again once the other has ended."""
    caplog.set_level("INFO", "relatum.collector")
    gate, consumer, collecting = Gate(), Consumer(), Collecting(place)
    options = {"bulk_messages": 1, "lease_s": LEASE_S}
    line, other = lines
    with collecting.collector(gate, broker=line.broker, **options) as first, gate.closed():
        collecting.put(*"ab")
        wait_status(first, FORWARDED, "a")
        wait_status(first, COLLECTED, "b")
        with line.fault(CUT), collecting.collector(consumer, broker=other.broker, **options) as second:
            collecting.put("c")
            wait_status(second, SUCCEEDED, "c")
            gate.opened.set()
            wait_status(second, SUCCEEDED, *"abc")
            stream = first._shared.following.streams[place.stream]
            wait_until(lambda: stream.is_standing_by, what="the first stands by")
            assert (caplog.text.count("is unavailable"), caplog.text.count("is back")) == (1, 0)
        collecting.put("d")
        wait_status(first, SUCCEEDED, "d")
    assert caplog.text.count("is back") == 1
    assert (gate.bodies, consumer.bodies) == (["a", "b", "d"], ["c"])


def test_a_collector_that_is_cut_off_takes_over_no_messages(place: Place, lines: list[FailingPlace]) -> None:
    """It could not read their bodies; it takes some over once it is back, and follows a stream."""
    collecting, lapse = (
        Collecting(place),
        "UPDATE relatum.collector_members SET lease_expires_at = now() WHERE member_id = ",
    )
    leases, lease = set[Any](), "SELECT lease_expires_at FROM relatum.collector_members WHERE member_id = "
    dead, other = (StoreMember(place.database, lease_s=LEASE_S) for _ in range(2))
    with collecting.collector(Consumer(), broker=lines[0].broker, lease_s=LEASE_S) as collector:
        wait_until(lambda: is_attached(collector, place.stream), what="the stream followed")
        with lines[0].fault(CUT):
            wait_until(lambda: other.follow(place.stream, 0), what="the stream left to the other member")
            dead.add([Collected(MessageId(place.stream, 0), "a", "order", 1, None)])
            place.sql(f"{lapse}{dead.member}")
            renewed = f"{lease}{collector._shared.member}"
            wait_until(lambda: leases.update(place.sql(renewed)) or len(leases) > 8, what="time to take it over")
            assert place.sql("SELECT member_id FROM relatum.collected_messages") == [(dead.member,)]
        other.close()
        collecting.put("a")
        wait_status(collector, SUCCEEDED, "a")


def test_a_collector_whose_stream_goes_while_it_is_cut_off_takes_over_again(
    place: Place, lines: list[FailingPlace]
) -> None:
    """That its own stream is missing shows that the broker is back: it takes over messages of other streams."""
    collecting, dead = Collecting(place), StoreMember(place.database, lease_s=LEASE_S)
    lapse = f"UPDATE relatum.collector_members SET lease_expires_at = now() WHERE member_id = {dead.member}"
    collector = collecting.collector(Consumer(), broker=lines[0].broker, lease_s=LEASE_S)
    with new_streams(place.amqp, 1) as [other], collector:
        wait_until(lambda: is_attached(collector, place.stream), what="the stream followed")
        with lines[0].fault(CUT):
            wait_until(lambda: collector._shared.following.is_cut_off, what="it is cut off")
            delete_stream(place.amqp, place.stream)
        collecting.put("a", to=other)
        dead.add([Collected(MessageId(other, 0), "a", "order", 1, None)])
        place.sql(lapse)
        wait_status(collector, SUCCEEDED, "a")
