"""Serial consumers against a real broker and database: order across moves, shares, positions, exactly once."""

import asyncio
import re
import threading
import time
from contextlib import aclosing, nullcontext
from typing import Any

import pytest
import sqlalchemy as sa

from relatum import errors, metrics
from relatum.contexts import AsyncSerialConsumer, SerialBatch, SerialConsumer, forget_consumer
from relatum.reading import StreamReader
from relatum.superstreams import add_partition
from tests.support import cancel, declare_stream, delete_stream, wait_until
from tests.support.commits import bodies_written, written
from tests.support.proxy import Proxy
from tests.support.serial_consuming import Stage, bodies, consume

KEEPS_ALL = """
CREATE FUNCTION keep_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'nothing is given back'; END $$;
CREATE TRIGGER keeps_all BEFORE UPDATE ON relatum.serial_positions
FOR EACH ROW WHEN (OLD.holder IS NOT NULL AND NEW.holder IS NULL) EXECUTE FUNCTION keep_all();
"""
"""Fails what gives a partition back, with an error that is none of Relatum's."""

IDLE = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
HOLDERS = "SELECT DISTINCT holder FROM relatum.serial_positions"
PARTITIONS = 2

pytestmark = pytest.mark.usefixtures("quick_rhythm")


def batch_of(consumer: Any, stream: str) -> Any:
    batch = consumer.next_batch(90.0)
    assert batch is not None
    assert batch.partition == stream
    return batch


def test_a_moved_context_waits_for_its_source_and_no_other_does(stage: Stage) -> None:
    """What a context has in its target is held until its source is consumed up to the fence; others continue."""
    bed = stage.bed
    with stage.consumer(batch_s=0) as member:
        bed.publish(0, "a", "a1")
        source = batch_of(member, bed.streams[0])
        bed.publish(0, "a", "a2")
        bed.move(["a"], 0, 1)
        bed.publish(1, "a", "a3")
        bed.publish(1, "b", "b1")
        bed.publish(1, "a", "a4")
        assert consume(member, 1) == ["b1"]
        wait_until(lambda: stage.holds() == 1, what="the hold is stored")
        assert member.next_batch(0.3) is None
        source.acknowledge()
        assert consume(member, 1) == ["a2"]
        assert consume(member, 2) == ["a3", "a4"]
        bed.publish(1, "a", "a5")
        assert consume(member, 1) == ["a5"]
        wait_until(lambda: stage.holds() == 0, what="the hold is gone")
        assert sum(member.statistics().pause_s.counts) == 1


@pytest.mark.parametrize("is_noted", [False, True])
def test_floors_outlive_what_made_them(stage: Stage, is_noted: bool) -> None:
    """A member that begins behind a fence passes over a stray: known from the database, or read again in the stream."""
    bed = stage.bed
    bed.publish(0, "a", "a1")
    stale = bed._epochs["a"]
    move = bed.begin(["a"], 0, 1)
    with stage.consumer() as first:
        consume(first, 1)
        move.publish_fence()
        wait_until(lambda: stage.position(0) == bed.end(0) + 1, what="the fence is passed")
    if is_noted:
        move.fence()
        move.mark()
    bed.publish(0, "a", "stray", epoch=stale)
    bed.publish_plain(0, "plain")
    with stage.consumer() as second:
        assert consume(second, 1) == ["plain"]


def test_what_is_written_in_the_transaction_is_written_once(stage: Stage) -> None:
    """The application's rows and the position are committed together, or neither is; a block must not commit itself."""
    bed = stage.bed
    written.create(stage.engine)
    bed.publish(0, "a", "a1")
    with stage.consumer() as member:
        batch = batch_of(member, bed.streams[0])

        def fail() -> None:
            with batch.transaction() as connection:
                connection.execute(sa.insert(written), [{"body": body} for body in bodies(batch)])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        batch.give_back()
        again = batch_of(member, bed.streams[0])
        assert again.messages == batch.messages
        with again.transaction() as connection:
            connection.execute(sa.insert(written), [{"body": body} for body in bodies(again)])
        assert again.is_acknowledged
        bed.publish(0, "a", "a2")
        third = batch_of(member, bed.streams[0])
        with pytest.raises(errors.ConfigurationError, match="ended the transaction"), third.transaction() as connection:
            connection.commit()
    assert bodies_written(stage.engine) == ["a1"]
    assert stage.position(0) == 1


def test_a_member_that_lost_its_partition_writes_nothing(stage: Stage) -> None:
    """What a stale member writes with a batch is rolled back; the other member gets the batch."""
    bed = stage.bed
    written.create(stage.engine)
    bed.publish(0, "a", "a1")
    with stage.consumer() as stale:
        batch = batch_of(stale, bed.streams[0])
        # As another member does if it finds the lease lapsed.
        stage.sql("UPDATE relatum.serial_positions SET holder = 'another', version = version + 1")
        with pytest.raises(errors.PartitionLost) as lost, batch.transaction() as connection:
            connection.execute(sa.insert(written), {"body": "a1"})
        assert lost.value.stream == bed.streams[0]
        with pytest.raises(errors.PartitionLost):
            batch.acknowledge()
    assert bodies_written(stage.engine) == []


def test_closing_takes_no_longer_than_it_may(stage: Stage) -> None:
    """Where PostgreSQL does not answer, a consumer closes in time anyway and says so; it leaves when it can."""
    member = stage.made(lease_s=60.0)
    member.start()
    with stage.engine.begin() as connection:
        connection.execute(sa.text("LOCK TABLE relatum.serial_members, relatum.serial_positions"))
        closed: list[bool] = []
        closing = threading.Thread(target=lambda: closed.append(member.close(0.2)), daemon=True)
        closing.start()
        closing.join(90)
        assert closed == [False]
    wait_until(lambda: stage.sql(HOLDERS) == [(None,)], what="partitions given back")


def test_a_partition_is_given_up_between_batches(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """A member that joins gets a partition once its batch is acknowledged, also after giving it back has failed."""
    bed = stage.bed
    bed.publish(0, "a", "a1")
    bed.publish(1, "b", "b1")
    with stage.consumer() as first:
        batches = [first.next_batch(90.0), first.next_batch(90.0)]
        with stage.consumer() as second:
            assert second.next_batch(1.0) is None
            stage.sql(KEEPS_ALL)
            for batch in batches:
                assert batch is not None
                batch.acknowledge()
            wait_until(lambda: "releasing partitions" in caplog.text, what="the error is told")
            assert second.partitions == ()
            stage.sql("DROP TRIGGER keeps_all ON relatum.serial_positions")
            wait_until(lambda: len(second.partitions) == 1, what="a partition was given up")
            assert {*first.partitions, *second.partitions} == set(bed.streams)
            bed.publish(0, "a", "a2")
            bed.publish(1, "b", "b2")
            assert consume(first, 1) + consume(second, 1) in (["a2", "b2"], ["b2", "a2"])


def test_a_new_partition_is_noticed(stage: Stage) -> None:
    """A partition that is added is read from its beginning, and contexts that move there come in order."""
    bed = stage.bed
    bed.publish(0, "a", "a1")
    with stage.consumer() as member:
        assert consume(member, 1) == ["a1"]
        bed.add(add_partition(stage.amqp_url, bed.name))
        bed.move(["a"], 0, 2)
        bed.publish(2, "a", "a2")
        assert consume(member, 1) == ["a2"]
        assert len(member.partitions) == 3


@pytest.mark.parametrize(("start", "consumed"), [("first", 3), ("next", 0)])
def test_a_stream_that_was_declared_again_begins_anew(
    stage: Stage, caplog: pytest.LogCaptureFixture, start: str, consumed: int
) -> None:
    """A partition that was declared again is read from its beginning, which is logged, also before the first batch."""
    bed = stage.bed
    bed.publish(0, "a", "a1", "a2", "a3")
    with stage.consumer(start=start) as member:
        consume(member, consumed)
    delete_stream(stage.amqp_url, bed.streams[0])
    declare_stream(stage.amqp_url, bed.streams[0])
    bed.publish(0, "a", "new")
    with stage.consumer(start=start) as member:
        assert consume(member, 1) == ["new"]
    assert re.search(r"stream '[^']+' replaced", caplog.text)


@pytest.mark.parametrize(
    ("last", "read_s", "again"),
    [(9, 120, "6789"), (14, 120, "6789"), (9, 60, "0123456789"), (9, -3600, "0123456789"), (14, 3600, "0123456789")],
    ids=["other", "ends-before", "all-is-young", "all-is-younger", "all-is-older"],
)
def test_a_stream_that_lost_its_end_is_read_again_from_two_minutes_before(
    stage: Stage, caplog: pytest.LogCaptureFixture, last: int, read_s: int, again: str
) -> None:
    """What is left of the two minutes before the message read last is delivered again; all, where nothing is."""
    bed = stage.bed
    bed.publish(0, "a", *"012345")
    with StreamReader.open(stage.amqp_url) as reader:
        written_ms = reader.read(bed.streams[0], 5).chunk_ms
        # Chunks have their write time in milliseconds.
        wait_until(lambda: time.time() * 1_000 > written_ms + 5, every_s=0.001)
        bed.publish(0, "a", *"6789")
        of_seventh = reader.read(bed.streams[0], 6).chunk_ms
    with stage.consumer() as member:
        consume(member, 10)
    # As if the message at the position had been lost since, and perhaps overwritten.
    stage.sql(
        "UPDATE relatum.serial_positions SET position = :last + 1, last_offset = :last, last_fingerprint = 1, "
        "last_chunk_ms = :chunk_ms",
        last=last,
        chunk_ms=of_seventh + read_s * 1_000,
    )
    with stage.consumer() as member:
        assert consume(member, len(again)) == list(again)
        bed.publish(0, "a", "new")
        assert consume(member, 1) == ["new"]
    assert re.search(r"stream '[^']+' (lost its end|replaced)", caplog.text)


def test_a_handler_that_loses_a_batch_of_another_consumer_gets_its_own_again(stage: Stage) -> None:
    """A handler that consumes from another consumer too, which lost its partition, gets the batch again."""
    stage.bed.publish(0, "a", "a1")
    given: list[bytes] = []
    stop = threading.Event()

    def handle(batch: SerialBatch) -> None:
        given.extend(message.body for message in batch)
        if len(given) == 1:
            raise errors.PartitionLost("another consumer's", stream="another")
        stop.set()

    with stage.consumer() as member:
        ends = threading.Timer(30.0, stop.set)
        ends.start()
        member.run(handle, stop)
        ends.cancel()
    assert given == [b"a1"] * 2


def test_messages_are_acknowledged_as_the_next_are_asked_for(stage: Stage) -> None:
    """Iterating acknowledges a batch when it is done with; one left in the middle is handed out again."""
    bed = stage.bed
    bed.publish(0, "a", "a1", "a2")
    with stage.consumer() as member:
        messages = iter(member.messages(timeout_s=90))
        assert next(messages).body == b"a1"
        messages.close()  # type: ignore[attr-defined]
        assert stage.position(0) == 0
        given: list[bytes] = []

        def are_both() -> bool:
            given.extend(each.body for each in member.messages(timeout_s=0.5))
            return len(given) > 1

        wait_until(are_both, what="both")
        assert given == [b"a1", b"a2"]
        assert stage.position(0) == 2


def test_status_says_how_far_all_members_are(stage: Stage) -> None:
    """The status has each partition's position, lag and holder, and what waits there for how long."""
    bed = stage.bed
    bed.publish(0, "a", "a1")
    with stage.consumer(batch_s=0) as member:
        batch = batch_of(member, bed.streams[0])
        move = bed.move(["a"], 0, 1)
        bed.publish(1, "a", "a2", "a3")
        wait_until(lambda: member.status().partitions[1].position == 3, what="what is held was read")
        source, target = member.status().partitions
        assert (source.position, source.lag, source.holds) == (0, 2, ())
        assert target.holder == source.holder
        (hold,) = target.holds
        assert (hold.move_id, hold.source, hold.held) == (move.move_id, bed.streams[0], 2)
        assert hold.seconds > 0
        assert member.status().lag == 2
    with pytest.raises(errors.PartitionLost):
        batch.acknowledge()
    with stage.consumer() as another:
        assert consume(another, 3) == ["a1", "a2", "a3"]


def test_the_first_consumer_opens_the_super_stream(stage: Stage) -> None:
    """The first consumer sets the header that names contexts; another header or an unknown super stream is refused."""
    stage.sql("DELETE FROM relatum.super_streams")
    stage.bed.publish_plain(0, "plain")
    with stage.consumer(header="account") as member:
        assert consume(member, 1) == ["plain"]
    with pytest.raises(errors.SuperStreamConflict, match="account"), stage.consumer(header="device"):
        pytest.fail("it started")
    with pytest.raises(errors.SuperStreamNotFound):
        SerialConsumer("relatum-test-none", "test", database=stage.database_url, broker=stage.amqp_url).start()


def test_a_name_is_forgotten_when_nobody_uses_it(stage: Stage) -> None:
    """While a member is up its name is kept; forgotten, it begins again, and nothing of it is left."""
    bed = stage.bed
    bed.publish(0, "a", "a1")
    with stage.consumer() as member:
        consume(member, 1)
        with pytest.raises(errors.Conflict, match="close the member"):
            forget_consumer(bed.name, "test", database=stage.database_url)
    stage.sql("UPDATE relatum.super_streams SET vhost = 'elsewhere'")
    with pytest.raises(errors.NotFound, match="'elsewhere'"):
        forget_consumer(bed.name, "test", database=stage.engine.url)
    assert not forget_consumer(bed.name, "tset", database=stage.engine.url)
    assert forget_consumer(bed.name, "test", database=stage.engine.url, vhost="elsewhere")
    assert stage.sql(HOLDERS) == []
    stage.sql("UPDATE relatum.super_streams SET vhost = '/'")
    assert not forget_consumer(bed.name, "test", database=stage.engine.url)
    with stage.consumer() as member:
        assert consume(member, 1) == ["a1"]


def test_a_start_that_failed_may_be_tried_again(stage: Stage) -> None:
    """A consumer that could not start because PostgreSQL was away consumes and is measured once it is back."""
    stage.bed.publish(0, "a", "a1")
    with Proxy.to(stage.database_url) as proxy:
        member = stage.made(database_url=proxy.url(stage.database_url))
        proxy.accepts = False
        with pytest.raises(errors.DatabaseUnavailable):
            member.start()
        proxy.accepts = True
        member.start()
        assert consume(member, 1) == ["a1"]
        gauges = [line for line in metrics.exposition().splitlines() if line.startswith("relatum_serial_partitions{")]
        assert any(stage.bed.name in line for line in gauges)
        assert member.close()


async def test_tasks_consume_as_threads_do(stage: Stage) -> None:
    """A transaction that fails leaves the batch to be consumed again; iterating acknowledges what is done with."""
    written.create(stage.engine)
    stage.bed.publish(0, "a", "a1", "a2")
    async with stage.made(kind=AsyncSerialConsumer, batch_messages=1) as member:
        batch = await member.next_batch(90.0)
        assert batch is not None
        for fails in (True, False):
            with pytest.raises(ZeroDivisionError) if fails else nullcontext():
                async with batch.transaction() as connection:
                    connection.execute(sa.insert(written), {"body": bodies(batch)[0]})
                    assert 1 / (not fails)
        assert batch.is_acknowledged
        with pytest.raises(errors.InvalidInput):
            await batch.acknowledge()
        async with aclosing(member.messages(90.0)) as messages:
            assert (await anext(messages)).body == b"a2"
        assert stage.position(0) == 1
        async for message in member.messages(90.0):
            assert message.body == b"a2"
            await asyncio.to_thread(stage.bed.publish, 0, "a", "a3")
            break
        async with aclosing(member.messages(90.0)) as messages:
            assert [(await anext(messages)).body for _ in range(2)] == [b"a2", b"a3"]
        assert stage.position(0) == 2
    assert bodies_written(stage.engine) == ["a1"]


async def test_a_cancelled_transaction_is_rolled_back(stage: Stage) -> None:
    """A task that is cancelled as the block begins, or inside, leaves nothing behind; the batch can be acknowledged."""
    written.create(stage.engine)
    stage.bed.publish(0, "a", "a1")
    async with stage.made(kind=AsyncSerialConsumer) as member:
        batch = await member.next_batch(90.0)
        assert batch is not None
        beginning = asyncio.create_task(batch.transaction().__aenter__())
        await asyncio.sleep(0)
        await cancel(beginning)
        # The member's own sessions are briefly idle in a transaction.
        await asyncio.to_thread(wait_until, lambda: not stage.sql(IDLE), what="no transaction is left")
        inside = asyncio.Event()

        async def hang() -> None:
            async with batch.transaction() as connection:
                await asyncio.to_thread(connection.execute, sa.insert(written), {"body": "a1"})
                inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(hang())
        await inside.wait()
        await cancel(task)
        await batch.acknowledge()
    assert bodies_written(stage.engine) == []


async def test_tasks_share_a_consumer(stage: Stage) -> None:
    """Tasks that wait side by side get batches of different partitions."""
    async with stage.made(kind=AsyncSerialConsumer) as member:
        tasks = [asyncio.create_task(member.next_batch(90.0)) for _ in range(2)]
        await asyncio.to_thread(stage.bed.publish, 0, "a", "a1")
        await asyncio.to_thread(stage.bed.publish, 1, "b", "b1")
        batches = await asyncio.gather(*tasks)
        assert sorted(message.body for batch in batches if batch for message in batch) == [b"a1", b"b1"]


async def test_a_start_that_is_cancelled_leaves_no_member(stage: Stage) -> None:
    """A task that is cancelled while a consumer starts waits until what it began is ended: others have all at once."""
    member = stage.made(kind=AsyncSerialConsumer, lease_s=60.0)
    starting = asyncio.create_task(member.start())
    await asyncio.sleep(0)
    await cancel(starting)
    assert stage.sql("SELECT FROM relatum.serial_members") == []
    assert stage.sql(HOLDERS) == [(None,)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(f"relatum-{stage.bed.name}")]
    with stage.consumer() as other:
        stage.bed.publish(0, "a", "1")
        assert consume(other, 1) == ["1"]
