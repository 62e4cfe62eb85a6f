"""Members that reach PostgreSQL and not the broker leave their share to those that reach both, and come back."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pika
import pytest
import sqlalchemy as sa

from relatum.collecting import Bulk, ExecutorOptions, Failure, MessageCollector, OutcomeStatus
from relatum.contexts import AsyncSerialConsumer, SerialConsumer, SerialOptions
from relatum.reading import StreamReader
from relatum.store import serial_members
from tests.support import declare_stream, delete_stream, publish_plain, wait_until
from tests.support.collectors import AsyncCollectorFace, a_loop
from tests.support.leases import LEASE_S
from tests.support.proxy import Proxy
from tests.support.serial_consuming import SerialBed, serial_bed

PARTITIONS = 4

pytestmark = pytest.mark.usefixtures("quick_rhythm", "quick_cut")


@pytest.fixture
def quick_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that has not reached the broker for a second is cut off."""
    monkeypatch.setattr("relatum.following._reach.CUT_OFF_S", 1.0)
    monkeypatch.setattr("relatum.following._reach.RETURN_S", 0.5)


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


@pytest.mark.parametrize("face", [SerialConsumer, AsyncSerialConsumer])
def test_partitions_of_a_serial_consumer_that_is_cut_off_are_taken_over(
    face: type, bed: SerialBed, database_url: str, stream_url: str, engine: sa.Engine
) -> None:
    """The other consumes all, once and in order, until the first is back; where both were away, both come back."""
    consumed = Consumed(bed, database_url)

    def goes_on(*shares: int) -> None:
        wait_until(lambda: (len(first.partitions), len(second.partitions)) == shares, what=f"shares of {shares}")
        consumed.publish()
        consumed.wait()

    def nobody_has_a_lease() -> bool:
        with engine.connect() as connection:
            return not connection.scalars(sa.select(serial_members.c.holder)).all()

    with (
        Proxy.to(stream_url) as line,
        Proxy.to(stream_url) as other,
        running(consumed, face, line.url(stream_url)) as first,
        running(consumed, face, other.url(stream_url)) as second,
    ):
        goes_on(2, 2)
        cut(line)
        goes_on(0, 4)
        line.accepts = True
        goes_on(2, 2)
        cut(line)
        cut(other)
        wait_until(nobody_has_a_lease, what="none has a lease")
        line.accepts = other.accepts = True
        goes_on(2, 2)


def test_a_batch_in_hand_is_acknowledged_before_others_have_its_partition(
    bed: SerialBed, database_url: str, stream_url: str
) -> None:
    """A member that is cut off keeps its lease for as long as its application works on what it was handed."""
    consumed = Consumed(bed, database_url)
    with (
        Proxy.to(stream_url) as proxy,
        consumed.consumer(SerialConsumer, proxy.url(stream_url)) as first,
        running(consumed, SerialConsumer, stream_url) as second,
    ):
        wait_until(lambda: len(first.partitions) == len(second.partitions) == 2, what="shares")
        bed.publish(bed.streams.index(first.partitions[0]), "c", "in hand")
        batch = first.next_batch(90)
        cut(proxy)
        wait_until(lambda: first._member._reach.is_cut_off, what="it is cut off")
        consumed.publish()
        wait_until(lambda: sum(map(len, consumed.bodies.values())) == 6, what="the second's own are consumed")
        assert first.next_batch(0) is None
        assert len(second.partitions) == 2
        batch.acknowledge()
        wait_until(lambda: len(second.partitions) == PARTITIONS, what="all are taken over")
        consumed.wait()


@pytest.fixture(params=["threads", "asyncio"])
def collectors(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes collectors of a face."""
    if request.param == "threads":
        yield MessageCollector
        return
    with a_loop() as loop:
        yield partial(AsyncCollectorFace, loop)


def order(message_id: str) -> pika.BasicProperties:
    """The properties of a message for collectors."""
    return pika.BasicProperties(type="order", message_id=message_id)


def test_what_a_collector_that_is_cut_off_would_have_to_read_is_taken_over(
    collectors: Any, amqp_url: str, stream_url: str, database_url: str, stream_name: str
) -> None:
    """The other follows the stream, and takes up what the first has no bodies of; what it has, it consumes itself."""
    gate = threading.Event()
    consumed: list[str] = []
    others: list[str] = []
    back: list[str] = []

    def noted(bodies: list[str]) -> Any:
        return lambda bulk: bodies.extend(each.message.body.decode() for each in bulk.messages)

    def wait(bulk: Any) -> None:
        assert gate.wait(90)
        noted(back if proxy.accepts else consumed)(bulk)

    def collector(broker_url: str, executor: Any) -> Any:
        made = collectors(
            name="billing", database=database_url, broker=broker_url, streams=[stream_name], lease_s=LEASE_S
        )
        options = ExecutorOptions(bulk_messages=1, max_age_s=0.01, queue_bulks=1, when_full="spill")
        made.register_executor("order", executor, options)
        return made

    def publish(*ids: str) -> None:
        publish_plain(amqp_url, stream_name, [(each.encode(), order(each)) for each in ids])

    def wait_for(member: Any, status: OutcomeStatus, *ids: str) -> None:
        wait_until(lambda: {member.outcome(each).status for each in ids} == {status}, what=f"{status} of {ids}")

    with Proxy.to(stream_url) as proxy, collector(proxy.url(stream_url), wait) as first:
        publish("a")
        wait_for(first, OutcomeStatus.FORWARDED, "a")
        publish(*"bcdef")
        wait_for(first, OutcomeStatus.COLLECTED, *"bcdef")
        cut(proxy)
        with collector(stream_url, noted(others)) as second:
            publish("g")
            wait_for(second, OutcomeStatus.SUCCEEDED, "g")
            gate.set()
            wait_for(second, OutcomeStatus.SUCCEEDED, *"abcdefg")
            assert consumed == ["a", "b"]
            assert sorted(others) == list("cdefg")
            proxy.accepts = True
        publish("h")
        wait_for(first, OutcomeStatus.SUCCEEDED, "h")
    assert back == ["h"]


def test_dead_letters_of_a_collector_that_is_cut_off_are_published_by_others(
    amqp_url: str, stream_url: str, database_url: str, stream_name: str
) -> None:
    """It stores what succeeded in the same bulk; another executes what failed once more, and publishes that."""
    dead = f"{stream_name}-dead"
    declare_stream(amqp_url, dead)
    called, gate = threading.Event(), threading.Event()
    others: list[str] = []

    def judged(bulk: Bulk) -> list[Failure | None]:
        return [Failure("bad", retry=False) if each.message_id == "bad" else None for each in bulk.messages]

    def wait(bulk: Bulk) -> list[Failure | None]:
        called.set()
        assert gate.wait(90)
        return judged(bulk)

    def note(bulk: Bulk) -> list[Failure | None]:
        others.extend(each.message_id for each in bulk.messages)
        return judged(bulk)

    def collector(executor: Any, broker_url: str, stream_url: str) -> MessageCollector:
        made = MessageCollector(
            "billing",
            database=database_url,
            broker=broker_url,
            stream_url=stream_url,
            streams=[stream_name],
            dead_letter_stream=dead,
            lease_s=LEASE_S,
        )
        made.register_executor("order", executor, ExecutorOptions(bulk_messages=2, max_age_s=60))
        return made

    publish_plain(amqp_url, stream_name, [(b"", order(each)) for each in ("good", "bad")])
    with (
        Proxy.to(amqp_url) as line,
        Proxy.to(stream_url) as streams,
        collector(wait, line.url(amqp_url), streams.url(stream_url)) as first,
    ):
        assert called.wait(90)
        cut(line)
        cut(streams)
        gate.set()
        with collector(note, amqp_url, stream_url) as second:
            wait_until(lambda: second.outcome("bad").status is OutcomeStatus.DEAD, what="it is dead")
            wait_until(lambda: first.outcome("good").status is OutcomeStatus.SUCCEEDED, what="what succeeded is stored")
    assert others == ["bad"]
    with StreamReader.open(amqp_url) as reader:
        assert len(list(reader.iterate(dead))) == 1
    delete_stream(amqp_url, dead)
