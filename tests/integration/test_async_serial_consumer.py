"""The asyncio face of serial consumers: the same promises as the blocking one, in one event loop."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
import sqlalchemy as sa

from relatum import errors
from relatum.contexts import AsyncSerialBatch, AsyncSerialConsumer, SerialOptions
from relatum.store import serial_members, serial_positions
from tests.support import wait_until
from tests.support.leases import LEASE_S
from tests.support.serial_consuming import SerialBed, serial_bed

written = sa.Table("consumed", sa.MetaData(), sa.Column("body", sa.Text))


pytestmark = pytest.mark.usefixtures("quick_rhythm")


@pytest.fixture
def bed(amqp_url: str, engine: sa.Engine) -> Iterator[SerialBed]:
    """A super stream of two partitions."""
    with serial_bed(amqp_url, engine) as bed:
        yield bed


def consumer(bed: SerialBed, database_url: str, amqp_url: str, **options: Any) -> AsyncSerialConsumer:
    """A consumer of the name "test"."""
    told = SerialOptions(**{"lease_s": LEASE_S, **options})
    return AsyncSerialConsumer(bed.name, "test", told, database=database_url, broker=amqp_url)


async def consume(consumer: AsyncSerialConsumer, count: int) -> list[str]:
    """So many messages, acknowledged as they come; fails where they do not come."""
    found: list[str] = []
    while len(found) < count:
        batch = await consumer.next_batch(90.0)
        assert batch is not None, f"{count} messages were to come; these came: {found}"
        found.extend(message.body.decode() for message in batch)
        await batch.acknowledge()
    assert len(found) == count, found
    return found


async def test_a_moved_context_waits_for_its_source(bed: SerialBed, database_url: str, amqp_url: str) -> None:
    """What a context has in its target comes when its source is consumed; other contexts do not wait."""
    async with consumer(bed, database_url, amqp_url, batch_s=0) as member:
        bed.publish(0, "a", "a1")
        source = await member.next_batch(90.0)
        assert source is not None
        bed.move(["a"], 0, 1)
        bed.publish(1, "a", "a2")
        bed.publish(1, "b", "b1")
        assert await consume(member, 1) == ["b1"]
        assert await member.next_batch(0.2) is None
        await source.acknowledge()
        assert await consume(member, 1) == ["a2"]
        assert sorted(member.partitions) == sorted(bed.streams)
        assert (await member.status()).lag == 0
        assert sum(member.statistics().pause_s.counts) == 1


async def test_what_is_written_in_the_transaction_is_written_once(
    bed: SerialBed, database_url: str, amqp_url: str, engine: sa.Engine
) -> None:
    """The application's rows and the position are committed together, or neither is."""
    written.create(engine)
    bed.publish(0, "a", "a1")
    async with consumer(bed, database_url, amqp_url) as member:
        batch = await member.next_batch(90.0)
        assert batch is not None

        async def write(connection: sa.Connection) -> None:
            await asyncio.to_thread(connection.execute, sa.insert(written), {"body": "a1"})

        async def fail() -> None:
            async with batch.transaction() as connection:
                await write(connection)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        async with batch.transaction() as connection:
            await write(connection)
        assert batch.is_acknowledged
    with engine.connect() as connection:
        assert list(connection.scalars(sa.select(written.c.body))) == ["a1"]


async def test_a_cancelled_transaction_is_rolled_back(
    bed: SerialBed, database_url: str, amqp_url: str, engine: sa.Engine
) -> None:
    """A task that is cancelled inside the block leaves nothing behind; the batch can be consumed again."""
    written.create(engine)
    bed.publish(0, "a", "a1")
    async with consumer(bed, database_url, amqp_url) as member:
        batch = await member.next_batch(90.0)
        assert batch is not None
        inside = asyncio.Event()

        async def hang() -> None:
            async with batch.transaction() as connection:
                await asyncio.to_thread(connection.execute, sa.insert(written), {"body": "a1"})
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(hang())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await batch.acknowledge()
    with engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(written)) == 0


async def test_a_member_that_lost_its_partition_writes_nothing(
    bed: SerialBed, database_url: str, amqp_url: str, engine: sa.Engine
) -> None:
    """A stale member's batch is refused, by acknowledging as by a transaction."""
    bed.publish(0, "a", "a1")
    async with consumer(bed, database_url, amqp_url) as stale:
        batch = await stale.next_batch(90.0)
        assert batch is not None
        with engine.begin() as connection:
            connection.execute(
                sa.update(serial_positions).values(holder="another", version=serial_positions.c.version + 1)
            )
        with pytest.raises(errors.PartitionLost):
            await batch.acknowledge()
        with pytest.raises(errors.PartitionLost):
            async with batch.transaction():
                pass


async def test_messages_are_acknowledged_as_the_next_are_asked_for(
    bed: SerialBed, database_url: str, amqp_url: str
) -> None:
    """Iterating acknowledges a batch when it is done with; one left in the middle is handed out again."""
    bed.publish(0, "a", "a1", "a2")
    async with consumer(bed, database_url, amqp_url) as member:
        async with aclosing(member.messages()) as messages:
            assert (await anext(messages)).body == b"a1"
        given: list[bytes] = []
        while len(given) < 2:
            given += [message.body async for message in member.messages(timeout_s=0.5)]
        assert given == [b"a1", b"a2"]
        assert await member.next_batch(0.1) is None


async def test_run_hands_batches_to_a_coroutine_function(bed: SerialBed, database_url: str, amqp_url: str) -> None:
    """`run` acknowledges what its function did, and ends when it is told to."""
    bed.publish(0, "a", "a1")
    stop, seen = asyncio.Event(), []

    async def handler(batch: AsyncSerialBatch) -> None:
        seen.extend(message.body for message in batch)
        stop.set()

    async with consumer(bed, database_url, amqp_url) as member:
        await member.run(handler, stop)
    assert seen == [b"a1"]


async def test_tasks_share_a_consumer(bed: SerialBed, database_url: str, amqp_url: str) -> None:
    """Tasks that wait side by side get batches of different partitions; a cancelled one has taken none."""
    async with consumer(bed, database_url, amqp_url) as member:
        cancelled = asyncio.create_task(member.next_batch())
        await asyncio.sleep(0)
        cancelled.cancel()
        tasks = [asyncio.create_task(member.next_batch(90.0)) for _ in range(2)]
        await asyncio.to_thread(bed.publish, 0, "a", "a1")
        await asyncio.to_thread(bed.publish, 1, "b", "b1")
        batches = await asyncio.gather(*tasks)
        assert sorted(message.body for batch in batches if batch for message in batch) == [b"a1", b"b1"]


async def test_a_start_that_is_cancelled_leaves_no_member(
    bed: SerialBed, database_url: str, amqp_url: str, engine: sa.Engine
) -> None:
    """A task that is cancelled while a consumer starts waits until what it began is ended: others have all at once."""
    member = consumer(bed, database_url, amqp_url, lease_s=60.0)
    starting = asyncio.create_task(member.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with engine.connect() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(serial_members)) == 0
        assert set(connection.scalars(sa.select(serial_positions.c.holder))) == {None}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(f"relatum-{bed.name}")]
    async with consumer(bed, database_url, amqp_url) as other:
        bed.publish(0, "a", "1")
        assert await consume(other, 1) == ["1"]


async def test_a_transaction_that_is_cancelled_as_it_begins_is_ended(
    bed: SerialBed, database_url: str, amqp_url: str, engine: sa.Engine
) -> None:
    """A task that is cancelled while a transaction begins leaves none behind, and the batch can be acknowledged."""
    async with consumer(bed, database_url, amqp_url) as member:
        bed.publish(0, "a", "1")
        batch = await member.next_batch(90.0)
        assert batch is not None
        beginning = asyncio.create_task(batch.transaction().__aenter__())
        await asyncio.sleep(0)
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
        await asyncio.to_thread(wait_until, lambda: not in_transactions(engine), what="no transaction is left")
        await batch.acknowledge()


def in_transactions(engine: sa.Engine) -> list[int]:
    """The sessions that wait in a transaction for who began it; the member's own threads do so for moments."""
    query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
    with engine.connect() as connection:
        return list(connection.scalars(sa.text(query)))
