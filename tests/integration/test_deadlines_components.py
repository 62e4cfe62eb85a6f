"""Routers, receipts, outcomes, consumers and commands end in time where PostgreSQL does not answer."""

import asyncio
import threading
from collections.abc import Iterator

import aio_pika
import pytest
import sqlalchemy as sa
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum.collecting import ExecutorOptions, MessageCollector, Outcomes
from relatum.contexts import ContextOptions, SerialConsumer, SerialOptions
from relatum.errors import DatabaseUnavailable, NotRecordedInTime
from relatum.recording import prune, status
from relatum.store import Database, make_engine
from relatum_migrations import upgrade
from tests.support import broker_connection, publish_plain, until_answered, wait_until
from tests.support.affinity import Blocking
from tests.support.proxy import Proxy
from tests.support.release_0_4 import make_release_0_4
from tests.support.routing import of_context
from tests.support.serial_consuming import serial_bed
from tests.support.standstill import in_time, locked, nobody_waits, silent_database
from tests.support.super_streams import super_stream

TIMEOUT_S = 0.5
"""Seconds of the calls here."""


@pytest.fixture
def name(amqp_url: str, stream_url: str) -> Iterator[str]:
    """A new super stream's."""
    with super_stream(amqp_url, stream_url, 2) as made:
        yield made.super_stream


# --- routers --------------------------------------------------------------------------------------------------------


def test_a_router_does_not_wait_for_a_database_that_stands_still(
    name: str, channel: BlockingChannel, database_url: str
) -> None:
    """A new name fails in time, with nothing sent, and closing waits for nothing."""
    with Proxy.to(database_url) as proxy:
        router = relatum.ContextRouter(name, proxy.url(database_url), ContextOptions(timeout_s=TIMEOUT_S))
        until_answered(lambda: router.publish(channel, b"1", of_context("known")))
        proxy.mode = "frozen"
        with in_time(3 * TIMEOUT_S), pytest.raises(DatabaseUnavailable):
            router.publish(channel, b"2", of_context("unknown"))
        with in_time(1.0):
            router.close()


def test_known_sets_go_on_while_the_database_stands_still(
    name: str, channel: BlockingChannel, database_url: str
) -> None:
    """With the options users have, a message of a known affinity set waits for a look of a second, and is published."""
    with Proxy.to(database_url) as proxy, relatum.AffinityRouter(name, proxy.url(database_url)) as router:
        publisher = Blocking(router, channel)
        publisher.publish(b"1", "known")
        proxy.mode = "frozen"
        with in_time(2.0):
            for _ in range(3):
                publisher.publish(b"2", "known")
        # Closing sees to it that what went unchecked counts.
        proxy.mode = "pass"


def test_a_router_is_not_opened_on_a_listener_that_never_speaks(name: str, channel: BlockingChannel) -> None:
    """Opening ends with the router's own time-out."""
    with (
        silent_database() as url,
        relatum.ContextRouter(name, url, ContextOptions(timeout_s=TIMEOUT_S)) as router,
        in_time(TIMEOUT_S),
        pytest.raises(DatabaseUnavailable),
    ):
        router.publish(channel, b"1", of_context("a"))


def _message(context: str) -> aio_pika.Message:
    return aio_pika.Message(b"1", headers=dict(of_context(context).headers))


async def test_a_cancelled_publication_lets_go_of_the_database(name: str, amqp_url: str, database_url: str) -> None:
    """A task that is cancelled while its context is placed leaves no statement that waits for a lock."""
    connection = await aio_pika.connect(amqp_url)
    async with connection, relatum.AsyncContextRouter(name, database_url) as router:
        channel = await connection.channel()
        await router.publish(channel, _message("known"))
        with locked(database_url, "placements"):
            with in_time(TIMEOUT_S), pytest.raises(TimeoutError):
                await asyncio.wait_for(router.publish(channel, _message("new")), TIMEOUT_S)
            await asyncio.to_thread(nobody_waits, database_url)


# --- receipts and outcomes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_a_receipt_ends_in_its_time(face: str, amqp_url: str, database_url: str, stream_name: str) -> None:
    """`wait` over a database that never speaks ends as `NotRecordedInTime`: the message is confirmed."""
    with silent_database() as url, broker_connection(amqp_url) as connection:
        relatum.intercept(connection, database=url, recorder="external")
        receipt = relatum.publish(connection.channel(), "", stream_name, b"a")

        async def wait() -> None:
            async with await aio_pika.connect(amqp_url) as other:
                relatum.intercept(other, database=url, recorder="external")
                channel = await other.channel()
                confirmed = await relatum.publish_async(channel, aio_pika.Message(b"a"), stream_name)
                with in_time(2 * TIMEOUT_S), pytest.raises(NotRecordedInTime):
                    await confirmed.wait(TIMEOUT_S)
                await asyncio.to_thread(relatum.release, other)

        if face == "asyncio":
            asyncio.run(wait())
        else:
            with in_time(2 * TIMEOUT_S), pytest.raises(NotRecordedInTime):
                receipt.wait(TIMEOUT_S)
        relatum.release(connection)


def test_outcomes_are_waited_for_in_time(database_url: str) -> None:
    """`wait` on a locked table ends as `DatabaseUnavailable`, on a shared database, too, and leaves no statement."""
    theirs = Database(database_url)
    for database in (database_url, theirs):
        with Outcomes(database) as outcomes, locked(database_url, "collected_messages"):
            with in_time(2 * TIMEOUT_S), pytest.raises(DatabaseUnavailable):
                outcomes.wait("a", TIMEOUT_S)
            nobody_waits(database_url)
    theirs.close()


# --- consumers ------------------------------------------------------------------------------------------------------


def test_a_collector_closes_while_the_database_stands_still(amqp_url: str, database_url: str, stream_name: str) -> None:
    """`close` ends within its time-out and what leaving has, though every thread of the collector asks the database."""
    taken = threading.Event()
    with Proxy.to(database_url) as proxy:
        collector = MessageCollector(
            "frozen", database=proxy.url(database_url), broker=amqp_url, streams=[stream_name], type_of=lambda _: "any"
        )
        collector.register_executor("any", lambda _: taken.set(), ExecutorOptions(bulk_messages=1))
        collector.start()
        publish_plain(amqp_url, stream_name, [(b"a", {})])
        assert taken.wait(90)
        proxy.mode = "frozen"
        publish_plain(amqp_url, stream_name, [(b"b", {})])
        with in_time(1.0 + 10.0):
            collector.close(1.0)


def test_a_serial_consumer_closes_while_the_database_stands_still(
    amqp_url: str, database_url: str, engine: sa.Engine
) -> None:
    """`close` ends within its time-out, and the member's threads end, too."""
    with serial_bed(amqp_url, engine) as bed, Proxy.to(database_url) as proxy:
        consumer = SerialConsumer(
            bed.name, "frozen", SerialOptions(lease_s=1.0), database=proxy.url(database_url), broker=amqp_url
        )
        consumer.start()
        proxy.mode = "frozen"
        with in_time(4.0):
            consumer.close(4.0)
        wait_until(
            lambda: not any("frozen" in thread.name for thread in threading.enumerate()),
            what="the member's threads end",
        )


# --- commands, and what they call -----------------------------------------------------------------------------------


def test_a_migration_waits_for_locks_in_time(empty_database_url: str) -> None:
    """A migration that meets a lock ends with a word on locks, changes nothing, and may be repeated."""
    make_release_0_4(empty_database_url)
    is_locked = pytest.raises(DatabaseUnavailable, match="holds a lock")
    with locked(empty_database_url, "super_streams"), in_time(TIMEOUT_S), is_locked:
        upgrade(empty_database_url, lock_timeout_s=TIMEOUT_S)
    upgrade(empty_database_url)


def test_what_commands_do_once_ends_by_the_urls_limit(amqp_url: str, database_url: str) -> None:
    """`?statement_timeout_s=` in the URL is the limit of what has no time-out of its own."""
    url = f"{database_url}?statement_timeout_s={TIMEOUT_S}"
    with locked(database_url, "streams"):
        for ask in (lambda: status(amqp_url, url), lambda: prune(amqp_url, url, ["x"])):
            with in_time(TIMEOUT_S), pytest.raises(DatabaseUnavailable, match=r"in time \(0\.5 s\)"):
                ask()


def test_the_urls_options_set_the_pool(database_url: str) -> None:
    """`pool_size` and `pool_timeout_s` are the engine's, and libpq is not told of them."""
    engine = make_engine(f"{database_url}?pool_size=1&pool_timeout_s=0.2&statement_timeout_s=0")
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT 1")) == 1
    assert (engine.pool.size(), engine.pool._max_overflow, engine.pool.timeout()) == (1, 1, 0.2)  # type: ignore[attr-defined]
    engine.dispose()
