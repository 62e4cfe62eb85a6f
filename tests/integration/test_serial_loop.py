"""The loop of a serial consumer: what closes it from inside, what fails in it, and what keeps it from its lease."""

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pkgutil import resolve_name
from typing import Any

import pytest
import sqlalchemy as sa

from relatum.contexts import AsyncSerialConsumer, SerialConsumer, SerialOptions
from relatum.errors import PartitionLost
from relatum.store.database import Database
from tests.support import in_a_try, wait_until
from tests.support._raw_publisher import RawPublisher, uncompressed
from tests.support.amqp import encode, section
from tests.support.leases import LEASE_S
from tests.support.loop_guard import TURN_MAX_S
from tests.support.serial_consuming import Stage, bodies, consume, next_batches

pytestmark = pytest.mark.usefixtures("quick_rhythm")

PARTITIONS = 2


def test_a_handler_closes_its_own_consumer(stage: Stage) -> None:
    """A handler closes the consumer that calls it, and the batch in its hands is delivered again."""
    stage.bed.publish(0, "a", "a1")
    consumer, closed = stage.made(batch_s=0), list[bool]()
    consumer.start()
    consumer.run(lambda batch: closed.append(consumer.close(60.0)))
    assert closed == [True]
    with stage.consumer() as another:
        assert consume(another, 1) == ["a1"]


async def test_a_task_closes_its_own_consumer(stage: Stage) -> None:
    """A task closes the consumer that it runs in, without waiting for itself."""
    stage.bed.publish(0, "a", "a1")
    consumer, closed = stage.made(kind=AsyncSerialConsumer, batch_s=0), list[bool]()

    async def close(_: object) -> None:
        closed.append(await consumer.close(60.0))

    await consumer.start()
    await consumer.run(close)
    assert closed == [True]


@pytest.mark.parametrize("method", ["share", "open", "complete", "commit"])
def test_what_asks_postgresql_is_asked_again_after_a_defect(
    stage: Stage, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A defect in a question to PostgreSQL is logged, and the question is repeated."""
    bed, consumer = stage.bed, stage.made(batch_s=0)
    store, failures = consumer._member.store, [KeyError("first"), KeyError("second")]
    original = getattr(store, method)

    def fail(*args: Any, **options: Any) -> Any:
        if failures and (method != "share" or consumer._is_started):
            raise failures.pop()
        return original(*args, **options)

    setattr(store, method, fail)
    with consumer:
        # Only the loop commits steps without messages: a marker's and a fence's.
        bed.move(["a"], 0, 1)
        bed.publish(1, "a", "a1")
        wait_until(lambda: not failures, what="both defects")
        assert consume(consumer, 1) == ["a1"]
    assert "an unexpected error" in caplog.text


@pytest.mark.parametrize("call", ["_receive", "_committed", "give_back", "_look"])
def test_a_partition_is_opened_anew_after_a_defect_in_the_loop(
    stage: Stage, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a defect in the loop no message is lost, and none comes out of order."""
    bed, consumer = stage.bed, stage.made(batch_s=0, batch_messages=2)
    found = list[str]()
    following = resolve_name("relatum.contexts._partition_following:Following")
    partition = resolve_name("relatum.contexts._serial_partition:Partition")
    owner = {"_receive": consumer._member, "give_back": following}.get(call, partition)
    original, calls = getattr(owner, call), [0]

    def fail(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyError("a defect")
        return original(*args)

    monkeypatch.setattr(owner, call, fail)
    with consumer:
        bed.publish(0, "a", *map(str, range(12)))
        while "11" not in found:
            (batch,) = next_batches(consumer, 1)
            if len(found) in (0, 1) and call == "give_back" and calls[0] < 3:
                batch.give_back()
                continue
            # A message that was in hand when its partition was reopened is delivered again.
            with suppress(PartitionLost):
                batch.acknowledge()
                found += bodies(batch)
    assert calls[0] > 2
    assert found == [str(number) for number in range(12)]


def test_transactions_that_use_up_the_connections_cost_no_lease(stage: Stage) -> None:
    """The lease is renewed over a connection of its own while the application uses up those of its database."""
    options, bed = SerialOptions(lease_s=1.0), stage.bed
    bed.publish(0, "a", "a1")
    bed.publish(1, "b", "b1")

    def is_kept() -> bool:
        with ExitStack() as stack:
            shared = stack.enter_context(closing(Database(stage.engine.url, pool_size=1, connections_max=2)))
            consumer = SerialConsumer(bed.name, "test", options, database=shared, broker=stage.amqp_url)
            stack.enter_context(consumer)
            with suppress(PartitionLost), ExitStack() as transactions:
                for batch in next_batches(consumer, 2):
                    connection = transactions.enter_context(batch.transaction())
                    connection.execute(sa.text("SELECT 1"))
                assert shared.pool.in_use == 2
                time.sleep(2.5)  # Not a wait for a condition: leases expire.
            return (stage.position(0), stage.position(1)) == (1, 1)

    in_a_try(is_kept, 3, what="both leases kept")


def test_a_member_delivers_nothing_after_its_machine_slept(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slept for longer than the lease delivers nothing before it has renewed the lease."""
    stage.bed.publish(0, "a", "a1")
    with stage.consumer(batch_s=0, lease_s=600.0) as consumer:
        next_batches(consumer, 1)[0].give_back()
        clock = time.clock_gettime
        with monkeypatch.context() as asleep:
            asleep.setattr(time, "clock_gettime", lambda which: clock(which) + 3_600)
            assert consumer.next_batch(0) is None
        assert consume(consumer, 1) == ["a1"]


def test_busy_threads_of_the_application_cost_no_lease(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """The lease is renewed while threads of the application keep the interpreter busy."""
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            sum(range(1_000))

    def is_kept() -> bool:
        ended.clear()
        caplog.clear()
        with stage.consumer(lease_s=2.0) as consumer, ThreadPoolExecutor(4) as busy:
            stage.bed.publish(0, "a", "a1")
            assert consume(consumer, 1) == ["a1"]
            try:
                for _ in range(4):
                    busy.submit(spin)
                time.sleep(5.0)  # Not a wait for a condition: leases expire.
            finally:
                ended.set()
        return "lease of a member" not in caplog.text

    in_a_try(is_kept, 3, what="the lease kept")


def test_a_consumer_that_catches_up_gives_way(stage: Stage, stream_url: str, longest: dict[str, float]) -> None:
    """A consumer that has much to read takes no long step in its loop."""
    record = section(0x74, encode({"context_id": "a"})) + section(0x75, encode(b""))
    with RawPublisher(stream_url, stage.bed.streams[0]) as publisher:
        for _ in range(5):
            publisher.publish(*[uncompressed([record] * 2000)] * 5)
    found = 0
    with stage.consumer(lease_s=LEASE_S, batch_messages=10_000) as consumer:
        while found < 50_000:
            (batch,) = next_batches(consumer, 1)
            found += len(batch.messages)
            batch.acknowledge()
    assert max(longest.values()) < TURN_MAX_S, longest


async def test_a_cancelled_wait_takes_no_batch_whenever_it_ends(stage: Stage) -> None:
    """A batch on its way to a task that is cancelled goes to the next one that asks, in its order."""
    chance, found = random.Random(1), list[str]()
    async with stage.made(kind=AsyncSerialConsumer, batch_s=0, batch_messages=1) as consumer:
        await asyncio.to_thread(stage.bed.publish, 0, "a", *map(str, range(40)))
        while len(found) < 40:
            waiting = asyncio.create_task(consumer.next_batch())
            await asyncio.sleep(chance.random() * 0.002)
            waiting.cancel()
            try:
                batch = await waiting
            except asyncio.CancelledError:
                batch = await consumer.next_batch(0) if chance.random() < 0.2 else None
            if batch is not None:
                found += bodies(batch)
                await batch.acknowledge()
    assert found == [str(number) for number in range(40)]
