"""What only the asyncio face of the message collector has: executors of both kinds, cancellation, and its end.

Everything that both faces do is tested in `test_collector`.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pika
import pytest
import sqlalchemy as sa

from relatum import AsyncMessageCollector, Outcome, OutcomeStatus
from relatum.collecting import Bulk, ExecutorOptions
from relatum.errors import ConfigurationError
from relatum.reading import Message
from tests.support import LIMIT_S, publish_plain, wait_until
from tests.support.threads import Threads


def messages(count: int, type_: str = "order") -> list[Message]:
    """Messages made by hand."""
    properties = pika.BasicProperties(type=type_)
    return [Message.from_amqp("made", offset, properties, b"%d" % offset) for offset in range(count)]


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine; at its end no task and no thread of a collector may be left."""

    async def guarded() -> None:
        async with asyncio.timeout(240):
            await coroutine
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    asyncio.run(guarded())
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("relatum-test")]


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float = LIMIT_S) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110 - what is waited for may be in a database
            await asyncio.sleep(0.01)


async def until_succeeded(collector: AsyncMessageCollector, *ids: str) -> None:
    """Wait until messages have succeeded."""

    async def have() -> bool:
        return {(await collector.outcome(each)).status for each in ids} == {OutcomeStatus.SUCCEEDED}

    await until(have)


def test_coroutine_functions_run_in_the_loop_and_plain_ones_in_threads(database_url: str) -> None:
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

    async def main() -> None:
        collector = AsyncMessageCollector("test", database=database_url)
        collector.register_executor("object", Noting(), ExecutorOptions(max_age_s=0.01))
        collector.register_executor("coroutine", coroutine, ExecutorOptions(max_age_s=0.01))
        collector.register_executor("plain", plain, ExecutorOptions(max_age_s=0.01))
        collector.register_result_handler(handler)
        async with collector:
            for number, type_ in enumerate(("object", "coroutine", "plain")):
                assert await collector.collect(messages(number + 1, type_)[number])
            await until_succeeded(collector, "made:0", "made:1", "made:2")

    run(main())
    assert (places["object"], places["coroutine"]) == (threading.main_thread(), threading.main_thread())
    assert places["plain"] is not threading.main_thread()
    assert sorted(told) == ["collected"] * 3 + ["succeeded"] * 3


def test_a_cancelled_collect_has_taken_nothing(database_url: str) -> None:
    """Cancelled while it waits for room, a message is as if it had never been given."""

    async def main() -> None:
        opened = asyncio.Event()

        async def wait(bulk: Bulk) -> None:
            await opened.wait()

        collector = AsyncMessageCollector("test", database=database_url)
        collector.register_executor("order", wait, ExecutorOptions(bulk_messages=1, queue_bulks=1))
        async with collector:
            first, second, third = messages(3)
            assert await collector.collect_many([first]) == [True]
            await collector.flush()
            assert await collector.collect(second)
            await collector.flush()
            waiting = asyncio.create_task(collector.collect(third))
            await asyncio.sleep(0.05)
            held = collector.held_messages
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert collector.held_messages == held == 2
            opened.set()
            await until_succeeded(collector, "made:0", "made:1")
            assert (await collector.outcome("made:2")).status is OutcomeStatus.UNKNOWN

    run(main())


@pytest.mark.parametrize("joins", [False, True])
def test_a_cancelled_close_leaves_nothing_but_what_others_take_over(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, joins: bool
) -> None:
    """The executor is cancelled, what it wrote is rolled back, and the next start consumes its messages at once."""
    publish_plain(amqp_url, stream_name, [(b"x", pika.BasicProperties(type="order", message_id="a"))])
    options: dict[str, Any] = {"database": database_url, "broker": amqp_url, "streams": [stream_name]}
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE ledger (body text)"))

    async def write(bulk: Bulk) -> None:
        if bulk.connection is not None:
            await asyncio.to_thread(bulk.connection.execute, sa.text("INSERT INTO ledger VALUES ('a')"))

    async def main() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def for_ever(bulk: Bulk) -> None:
            await write(bulk)
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        collector = AsyncMessageCollector("test", **options)
        collector.register_executor("order", for_ever, ExecutorOptions(max_age_s=0.01, joins_transaction=joins))
        await collector.start()
        await begun.wait()
        closing = asyncio.create_task(collector.close())
        await asyncio.sleep(0.05)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert ended.is_set()
        successor = AsyncMessageCollector("test", **options)
        successor.register_executor("order", write, ExecutorOptions(max_age_s=0.01, joins_transaction=joins))
        async with successor:
            await until_succeeded(successor, "a")
            assert (await successor.outcome("a")).attempts == 2

    run(main())
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM ledger")).scalar_one() == int(joins)


def test_a_cancelled_start_gives_its_membership_back(database_url: str, engine: sa.Engine) -> None:
    """Cancelled at any moment, a start has left no member whose lease others would have to wait for."""

    async def main() -> None:
        for delay_s in (0, 0.001, 0.003, 0.01, 0.02):
            collector = AsyncMessageCollector("test", database=database_url)
            collector.register_executor("order", lambda bulk: None)
            starting = asyncio.create_task(collector.start())
            await asyncio.sleep(delay_s)
            starting.cancel()
            try:
                await starting
            except asyncio.CancelledError:
                with pytest.raises(ConfigurationError, match="does not run"):
                    await collector.collect(messages(1)[0])
            else:
                await collector.close()

        def members() -> int:
            with engine.connect() as connection:
                return int(connection.execute(sa.text("SELECT count(*) FROM relatum.collector_members")).scalar_one())

        async def none_is_left() -> bool:
            return await asyncio.to_thread(members) == 0

        await until(none_is_left)

    run(main())


def test_joined_executors_may_use_threads_as_many_as_they_are(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Workers that wait for executors in the loop, which wait for threads, never wait for one another."""
    count = 40
    publish_plain(
        amqp_url,
        stream_name,
        [(b"x", pika.BasicProperties(type="order", message_id=str(number))) for number in range(count)],
    )
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE ledger (body text)"))

    async def write(bulk: Bulk) -> None:
        assert bulk.connection is not None
        for each in bulk.messages:
            row = {"body": each.message_id}
            await asyncio.to_thread(bulk.connection.execute, sa.text("INSERT INTO ledger VALUES (:body)"), row)

    async def main() -> None:
        collector = AsyncMessageCollector("test", database=database_url, broker=amqp_url, streams=[stream_name])
        collector.register_executor(
            "order", write, ExecutorOptions(bulk_messages=1, workers=16, queue_bulks=count, joins_transaction=True)
        )
        async with collector:
            await until_succeeded(collector, *map(str, range(count)))

    run(main())
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(DISTINCT body), count(*) FROM ledger")).one() == (count, count)


def test_an_executor_that_is_cancelled_by_itself_is_a_failed_attempt(database_url: str) -> None:
    """A `CancelledError` of the executor's own is a result, not the end of the worker."""
    attempts: list[int] = []

    async def cancelled(bulk: Bulk) -> None:
        attempts.append(bulk.messages[0].attempts)
        if len(attempts) == 1:
            raise asyncio.CancelledError

    async def main() -> None:
        collector = AsyncMessageCollector("test", database=database_url)
        collector.register_executor("order", cancelled, ExecutorOptions(max_age_s=0.01, backoff_s=0.01))
        async with collector:
            assert await collector.collect(messages(1)[0])
            await until_succeeded(collector, "made:0")

    run(main())
    assert attempts == [1, 2]


def test_a_handler_that_is_cancelled_by_itself_keeps_no_other_from_being_told(database_url: str) -> None:
    """A `CancelledError` of the handler's own is its failure, as any other error."""
    told: list[tuple[str, str]] = []

    async def cancelled(outcome: Outcome) -> None:
        raise asyncio.CancelledError

    async def main() -> None:
        collector = AsyncMessageCollector("test", database=database_url)
        collector.register_executor("order", lambda bulk: None, ExecutorOptions(max_age_s=0.01))
        collector.register_result_handler(cancelled)
        collector.register_result_handler(lambda outcome: told.append((outcome.message_id, outcome.status.value)))
        async with collector:
            assert await collector.collect_many(messages(2)) == [True, True]
            await until_succeeded(collector, "made:0", "made:1")

    run(main())
    assert sorted(told) == [
        ("made:0", "collected"),
        ("made:0", "succeeded"),
        ("made:1", "collected"),
        ("made:1", "succeeded"),
    ]


def test_executors_and_handlers_may_flush_and_close(database_url: str) -> None:
    """What would wait for itself does not: the collector closes behind an executor that asked for it."""
    answers: list[bool] = []

    async def main() -> None:
        collector = AsyncMessageCollector("test", database=database_url)

        async def close(bulk: Bulk) -> None:
            answers.append(await collector.close())

        async def flush(outcome: Outcome) -> None:
            if outcome.status is OutcomeStatus.COLLECTED:
                answers.append(await collector.collect(messages(2)[1]))
                await collector.flush()

        collector.register_executor("order", close, ExecutorOptions(bulk_messages=1))
        collector.register_result_handler(flush, message_id="made:0")
        await collector.start()
        assert await collector.collect(messages(1)[0])
        await until_succeeded(collector, "made:0")
        assert await collector.close()

    run(main())
    assert answers[:2] == [True, False]


def test_run_goes_on_until_it_is_told_to_stop(database_url: str) -> None:
    """`run` starts, and closes in order when the event is set."""
    bodies: list[bytes] = []

    async def note(bulk: Bulk) -> None:
        bodies.extend(each.message.body for each in bulk.messages)

    async def main() -> None:
        collector = AsyncMessageCollector("test", database=database_url)
        collector.register_executor("order", note, ExecutorOptions(max_age_s=600))
        stop = asyncio.Event()
        running = asyncio.create_task(collector.run(stop))
        await asyncio.sleep(0)
        await until(lambda: _started(collector))
        assert await collector.collect_many(messages(2)) == [True, True]
        stop.set()
        await running

    run(main())
    assert bodies == [b"0", b"1"]


async def _started(collector: AsyncMessageCollector) -> bool:
    return collector._is_started


def test_a_loop_that_ends_first_leaves_messages_as_they_are(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, earlier: Threads
) -> None:
    """Whoever ends a loop cancels what runs in it: that is no failed attempt, and all threads of the collector end."""
    publish_plain(amqp_url, stream_name, [(b"x", pika.BasicProperties(type="order", message_id="a"))])
    begun = asyncio.Event()

    async def for_ever(bulk: Bulk) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def main() -> None:
        collector = AsyncMessageCollector("test", database=database_url, broker=amqp_url, streams=[stream_name])
        collector.register_executor("order", for_ever, ExecutorOptions(max_age_s=0.01))
        await collector.start()
        await begun.wait()

    asyncio.run(main())
    wait_until(
        lambda: not [each for each in earlier.begun() if each.name != "relatum-heartbeats"],
        what="the collector's threads ended",
    )
    with engine.connect() as connection:
        row = connection.execute(sa.text("SELECT state, attempts, reason FROM relatum.collected_messages")).one()
    assert tuple(row) == ("forwarded", 1, None)
