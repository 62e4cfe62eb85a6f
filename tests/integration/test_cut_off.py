"""Members that reach PostgreSQL and not the broker leave their share to those that reach both, and come back."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from relatum.contexts import AsyncSerialConsumer, SerialConsumer, SerialOptions
from tests.support import wait_until
from tests.support.leases import LEASE_S
from tests.support.proxy import Proxy
from tests.support.serial_consuming import SerialBed, serial_bed

PARTITIONS = 4

pytestmark = pytest.mark.usefixtures("quick_rhythm", "quick_cut")


@pytest.fixture
def quick_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that has not reached the broker for a second is cut off."""
    monkeypatch.setattr("relatum.following._reach.CUT_OFF_S", 1.0)


@pytest.fixture
def bed(amqp_url: str, engine: sa.Engine) -> Iterator[SerialBed]:
    """A super stream of four partitions."""
    with serial_bed(amqp_url, engine, PARTITIONS) as bed:
        yield bed


def cut(proxy: Proxy) -> None:
    """Let nothing come through."""
    proxy.accepts = False
    proxy.cut()


class Consumed:
    """What serial consumers were handed, and the partitions' messages as they were published."""

    def __init__(self, bed: SerialBed, database_url: str) -> None:
        self._bed = bed
        self._database_url = database_url
        self._lock = threading.Lock()
        self._published = 0
        self.bodies: dict[str, list[str]] = {stream: [] for stream in bed.streams}

    def consumer(self, face: Any, broker_url: str) -> Any:
        """A member, by a way to the broker of its own."""
        options = SerialOptions(lease_s=LEASE_S)
        return face(self._bed.name, "test", options, database=self._database_url, broker=broker_url)

    def note(self, batch: Any) -> None:
        """Note what a batch has."""
        with self._lock:
            self.bodies[batch.partition] += [message.body.decode() for message in batch]

    async def note_async(self, batch: Any) -> None:
        """The same, in a loop."""
        self.note(batch)

    def publish(self) -> None:
        """Some messages to each partition."""
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


@contextmanager
def running(consumed: Consumed, face: type, broker_url: str) -> Iterator[Any]:
    """A member that runs in a thread of its own."""
    consumer, stop, started = consumed.consumer(face, broker_url), threading.Event(), threading.Event()

    def run() -> None:
        with consumer:
            started.set()
            consumer.run(consumed.note, stop)

    async def run_async() -> None:
        async with consumer:
            ended = asyncio.Event()
            started.set()
            running = asyncio.create_task(consumer.run(consumed.note_async, ended))
            await asyncio.to_thread(stop.wait)
            ended.set()
            await running

    target = run if face is SerialConsumer else lambda: asyncio.run(run_async())
    thread = threading.Thread(target=target, name="member")
    thread.start()
    try:
        assert started.wait(90)
        yield consumer
    finally:
        stop.set()
        thread.join(90)
        assert not thread.is_alive()


def wait_shares(*consumers: Any, of: list[int]) -> None:
    """Wait until members have so many partitions."""
    wait_until(lambda: [len(consumer.partitions) for consumer in consumers] == of, what=f"shares of {of}")


@pytest.mark.parametrize("face", [SerialConsumer, AsyncSerialConsumer])
def test_partitions_of_a_serial_consumer_that_is_cut_off_are_taken_over(
    face: type, bed: SerialBed, database_url: str, stream_url: str
) -> None:
    """The other member consumes all, once and in order, until the first reaches the broker again."""
    consumed = Consumed(bed, database_url)
    with (
        Proxy.to(stream_url) as proxy,
        running(consumed, face, proxy.url(stream_url)) as first,
        running(consumed, face, stream_url) as second,
    ):
        wait_shares(first, second, of=[2, 2])
        consumed.publish()
        consumed.wait()
        cut(proxy)
        wait_shares(first, second, of=[0, 4])
        consumed.publish()
        consumed.wait()
        proxy.accepts = True
        wait_shares(first, second, of=[2, 2])
        consumed.publish()
        consumed.wait()
    assert Counter(map(len, consumed.bodies.values())) == {9: PARTITIONS}


def test_a_batch_in_hand_is_acknowledged_before_others_have_its_partition(
    bed: SerialBed, database_url: str, stream_url: str
) -> None:
    """A member that is cut off keeps its lease for as long as its application works on what it was handed."""
    consumed = Consumed(bed, database_url)
    with Proxy.to(stream_url) as proxy, consumed.consumer(SerialConsumer, proxy.url(stream_url)) as first:
        wait_shares(first, of=[4])
        with running(consumed, SerialConsumer, stream_url) as second:
            wait_shares(first, second, of=[2, 2])
            bed.publish(bed.streams.index(first.partitions[0]), "c", "in hand")
            batch = first.next_batch(90)
            cut(proxy)
            wait_until(lambda: first._member._reach.is_cut_off, what="it is cut off")
            consumed.publish()
            wait_until(lambda: sum(map(len, consumed.bodies.values())) == 6, what="the second's own are consumed")
            assert first.next_batch(0) is None
            assert len(second.partitions) == 2
            batch.acknowledge()
            wait_shares(first, second, of=[0, 4])
            consumed.wait()
