"""What only the asyncio collector has: executors of both kinds, cancellation, its end. Else: `test_collector`."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pika
import pytest
import sqlalchemy as sa

from relatum import AsyncMessageCollector, Broker, Outcome
from relatum.collecting import Bulk, ExecutorOptions
from relatum.errors import ConfigurationError
from relatum.reading import Message
from tests.support import LIMIT_S, cancel, wait_until
from tests.support.collectors import COLLECTED, SUCCEEDED, UNKNOWN, Collecting
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.threads import Threads

Apart = Callable[..., AsyncMessageCollector]


@pytest.fixture
def collecting(place: Place) -> Collecting:
    return Collecting(place, AsyncMessageCollector)


@pytest.fixture
def apart(collecting: Collecting) -> Apart:
    """Makes collectors that follow no stream: messages are given to them."""
    return lambda executor, **options: collecting.collector(executor, streams=[], broker=None, **options)


async def write(bulk: Bulk) -> None:
    """Write each message's id in the transaction that was joined, if any."""
    for each in bulk.messages if bulk.connection is not None else ():
        row = {"body": each.message_id}
        await asyncio.to_thread(bulk.connection.execute, sa.text("INSERT INTO ledger VALUES (:body)"), row)


def messages(count: int, type_: str = "order") -> list[Message]:
    properties = pika.BasicProperties(type=type_)
    return [Message.from_amqp("made", offset, properties, b"%d" % offset) for offset in range(count)]


@asynccontextmanager
async def no_task_left() -> AsyncIterator[None]:
    """At the end no task of a collector may be left."""
    before = asyncio.all_tasks()
    yield
    assert not (left := asyncio.all_tasks() - before), left


@pytest.fixture(autouse=True)
def _no_thread_left(earlier: Threads) -> Iterator[None]:
    yield
    assert not [thread.name for thread in earlier.begun() if thread.name.startswith("relatum-billing")]


async def until_succeeded(collector: AsyncMessageCollector, *ids: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while {(await collector.outcome(each)).status for each in ids} != {SUCCEEDED}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_coroutine_functions_run_in_the_loop_and_plain_ones_in_threads(apart: Apart) -> None:
    """Each kind of executor and handler is called where it belongs, with the same results."""
    places: dict[str, threading.Thread] = {}
    told: list[str] = []

    class Noting:
        async def __call__(self, bulk: Bulk) -> None:
            places["object"] = threading.current_thread()

    async def coroutine(bulk: Bulk) -> None:
        places["coroutine"] = threading.current_thread()

    def plain(bulk: Bulk) -> None:
        places["plain"] = threading.current_thread()

    async def handler(outcome: Outcome) -> None:
        await asyncio.sleep(0)
        told.append(outcome.status.value)

    collector = apart(plain)
    for type_, executor in (("object", Noting()), ("coroutine", coroutine)):
        collector.register_executor(type_, executor, ExecutorOptions(max_age_s=0.01))
    collector.register_result_handler(handler)
    async with no_task_left(), collector:
        for number, type_ in enumerate(("object", "coroutine", "order")):
            assert await collector.collect(messages(number + 1, type_)[number])
        await until_succeeded(collector, "made:0", "made:1", "made:2")
    here = threading.current_thread()
    assert (places["object"], places["coroutine"], places["plain"] is here) == (here, here, False)
    assert sorted(told) == ["collected"] * 3 + ["succeeded"] * 3


async def test_a_cancelled_collect_has_taken_nothing(apart: Apart) -> None:
    """Cancelled while it waits for room, a message is as if it had never been given."""
    opened = asyncio.Event()

    async def wait(bulk: Bulk) -> None:
        await opened.wait()

    async with no_task_left(), apart(wait, bulk_messages=1, queue_bulks=1) as collector:
        first, second, third = messages(3)
        assert await collector.collect_many([first]) == [True]
        await collector.flush()
        assert await collector.collect(second)
        await collector.flush()
        waiting = asyncio.create_task(collector.collect(third))
        await asyncio.sleep(0.05)
        held = collector.statistics().held_messages
        await cancel(waiting)
        assert collector.statistics().held_messages == held == 2
        opened.set()
        await until_succeeded(collector, "made:0", "made:1")
        assert (await collector.outcome("made:2")).status is UNKNOWN


async def test_collects_that_are_cancelled_at_any_moment_lose_nothing(apart: Apart) -> None:
    """What one of them has taken is stored and consumed once; given again, so is all else."""
    seen: list[str] = []
    chance, given = random.Random(7), messages(300)
    collector = apart(lambda bulk: seen.extend(each.message_id for each in bulk.messages), bulk_messages=10)
    async with no_task_left(), collector:
        for message in given:
            collecting = asyncio.create_task(collector.collect(message))
            await asyncio.sleep(chance.choice((0, 0, 0.0002, 0.001)))
            collecting.cancel()
            await asyncio.wait([collecting])
        assert await collector.collect_many(given) == [True] * len(given)
        await collector.flush()
        await until_succeeded(collector, *(f"made:{number}" for number in range(len(given))))
    assert sorted(seen) == sorted(f"made:{number}" for number in range(len(given)))


async def test_a_run_waits_for_a_broker_that_is_away_when_it_starts(collecting: Collecting, place: Place) -> None:
    """A start that failed leaves nothing behind, and may be repeated."""
    place.put((b"0", pika.BasicProperties(type="order")))
    stop, taken = asyncio.Event(), list[Any]()
    with Proxy.to(place.stream_url) as proxy:
        proxy.accepts = False
        broker = Broker(place.amqp, stream_url=proxy.url(place.stream_url))
        collector = collecting.collector(lambda bulk: taken.extend(bulk.messages), broker=broker)
        running = asyncio.create_task(collector.run(stop))
        await asyncio.to_thread(wait_until, lambda: proxy.refused, what="a start that failed")
        proxy.accepts = True
        await asyncio.to_thread(wait_until, lambda: taken, what="the message")
        pool = collector._shared.store._database.pool
        await asyncio.to_thread(wait_until, lambda: pool.idle, what="connections kept between statements")
        stop.set()
        await running


@pytest.mark.parametrize("joins", [False, True])
async def test_a_cancelled_close_leaves_nothing_but_what_others_take_over(
    collecting: Collecting, ledger: Callable[[], list[str]], joins: bool
) -> None:
    """The executor is cancelled, what it wrote is rolled back, and the next start consumes its messages at once."""
    collecting.put("a")
    begun, ended = asyncio.Event(), asyncio.Event()

    async def for_ever(bulk: Bulk) -> None:
        await write(bulk)
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with no_task_left():
        collector = collecting.collector(for_ever, joins_transaction=joins)
        await collector.start()
        await begun.wait()
        closing = asyncio.create_task(collector.close())
        await asyncio.sleep(0.05)
        await cancel(closing)
        assert ended.is_set()
        async with collecting.collector(write, joins_transaction=joins) as successor:
            await until_succeeded(successor, "a")
            assert (await successor.outcome("a")).attempts == 2
    assert ledger() == ["a"] * joins


async def test_an_executor_that_refuses_its_cancellation_does_not_keep_close(
    apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` returns although a cancelled executor goes on."""
    monkeypatch.setattr("relatum.collecting._collector_loop.END_S", 0.2)
    monkeypatch.setattr("relatum.collecting._async_collector.END_S", 0.2)
    begun, gate, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def refuse(bulk: Bulk) -> None:
        begun.set()
        while not gate.is_set():
            with suppress(asyncio.CancelledError):
                await gate.wait()
        ended.set()

    collector = apart(refuse, bulk_messages=1)
    await collector.start()
    assert await collector.collect(messages(1)[0])
    await begun.wait()
    assert not await asyncio.wait_for(collector.close(timeout_s=0), LIMIT_S)
    gate.set()
    await ended.wait()


async def test_a_cancelled_start_gives_its_membership_back(apart: Apart, place: Place) -> None:
    """A start that is cancelled at any moment leaves no member behind."""
    async with no_task_left():
        for delay_s in (0, 0.001, 0.003, 0.01, 0.02):
            collector = apart(lambda bulk: None)
            starting = asyncio.create_task(collector.start())
            await asyncio.sleep(delay_s)
            starting.cancel()
            try:
                await starting
            except asyncio.CancelledError:
                with pytest.raises(ConfigurationError, match="not running"):
                    await collector.collect(messages(1)[0])
            else:
                await collector.close()

    members = "SELECT member_id FROM relatum.collector_members"
    await asyncio.to_thread(wait_until, lambda: not place.sql(members), what="no member left")


async def test_joined_executors_may_use_threads_as_many_as_they_are(
    collecting: Collecting, ledger: Callable[[], list[str]]
) -> None:
    """Workers that wait for executors in the loop, which wait for threads, never wait for one another."""
    ids = [str(number) for number in range(40)]
    collecting.put(*ids)
    options: dict[str, Any] = {"bulk_messages": 1, "workers": 16, "queue_bulks": len(ids), "joins_transaction": True}
    async with no_task_left(), collecting.collector(write, **options) as collector:
        await until_succeeded(collector, *ids)
    assert ledger() == sorted(ids)


class Stop(BaseException):
    """An error of an application that is no `Exception`."""


@pytest.mark.parametrize("error", [asyncio.CancelledError, Stop])
async def test_what_is_cancelled_by_itself_has_failed_as_by_any_other_error(
    apart: Apart, error: type[BaseException]
) -> None:
    """A `CancelledError` of its own is an executor's failed attempt, and other handlers are still called."""
    attempts: list[int] = []
    told: list[tuple[str, str]] = []

    async def cancelled(bulk: Bulk) -> None:
        attempts.append(bulk.messages[0].attempts)
        if len(attempts) == 1:
            raise error

    async def cancelled_handler(outcome: Outcome) -> None:
        raise error

    collector = apart(cancelled, bulk_messages=2, max_age_s=1.0, backoff_s=0.01)
    collector.register_result_handler(cancelled_handler)
    collector.register_result_handler(lambda outcome: told.append((outcome.message_id, outcome.status.value)))
    async with no_task_left(), collector:
        assert await collector.collect_many(messages(2)) == [True, True]
        await until_succeeded(collector, "made:0", "made:1")
    assert attempts == [1, 2]
    assert sorted(told) == [(each, status) for each in ("made:0", "made:1") for status in ("collected", "succeeded")]


async def test_an_executor_that_ends_while_its_loop_is_checked_has_succeeded(
    apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that arrives as a check of the loop begins is not taken for a time-out of the executor."""
    monkeypatch.setattr("relatum.collecting._async_collector.LOOP_CHECK_S", 0.0)

    async def sleep(bulk: Bulk) -> None:
        await asyncio.sleep(0.001)

    async with no_task_left(), apart(sleep, bulk_messages=1, attempts=1) as collector:
        await collector.collect_many(messages(200))
        outcomes = collector.statistics().types["order"].outcomes
        while sum(outcomes.values()) < 200:
            await asyncio.sleep(0.01)
            outcomes = collector.statistics().types["order"].outcomes
    assert outcomes == {"succeeded": 200}


async def test_executors_and_handlers_may_flush_and_close(apart: Apart) -> None:
    """What would wait for itself does not: the collector closes behind an executor that asked for it."""
    answers: list[bool] = []

    async def close(bulk: Bulk) -> None:
        answers.append(await collector.close())

    async def flush(outcome: Outcome) -> None:
        if outcome.status is COLLECTED:
            answers.append(await collector.collect(messages(2)[1]))
            await collector.flush()

    async with no_task_left():
        collector = apart(close, bulk_messages=1, max_age_s=1.0)
        collector.register_result_handler(flush, message_id="made:0")
        await collector.start()
        assert await collector.collect(messages(1)[0])
        await until_succeeded(collector, "made:0")
        assert await collector.close()
    assert answers[:2] == [True, False]


def test_a_loop_that_ends_first_leaves_messages_as_they_are(collecting: Collecting, earlier: Threads) -> None:
    """The end of the event loop is not a failed attempt of a running executor, and ends the collector's threads."""
    collecting.put("a")
    begun = asyncio.Event()

    async def for_ever(bulk: Bulk) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        await collecting.collector(for_ever).start()
        await begun.wait()

    asyncio.run(main())
    wait_until(lambda: not earlier.begun(), what="the collector's threads ended")
    query = "SELECT state, attempts, reason FROM relatum.collected_messages"
    assert collecting.place.sql(query) == [("forwarded", 1, None)]
