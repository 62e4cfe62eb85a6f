"""`AsyncRelations` calls `Relations` in threads: their number, which calls hold one, and cancellation."""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from relatum import Broker
from relatum.errors import ConnectionsInUse
from relatum.membership import GROUP_KEY
from relatum_consumer import AsyncRelations, GroupConsumer, Status
from tests.support import cancel, wait_until
from tests.support.forking import in_child
from tests.support.groups import ids, whole_group
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.standstill import SLACK_S, in_time, locked, nobody_waits

KEYS = ["order_id", GROUP_KEY]

LONG_S = 80.0
MANY = 200
SHORT_S = 12.0


@pytest.fixture
def recorded(place: Place) -> Place:
    """With three recorded messages of the order 1."""
    place.put_recorded(*[(b"order", {"order_id": 1})] * 3)
    return place


def few_threads(place: Place, **options: Any) -> AsyncRelations:
    """Lookups over two connections to the broker, so in two threads."""
    return AsyncRelations(place.amqp, place.database, broker_connections_max=2, timeout_s=LONG_S, **options)


def test_one_object_serves_one_event_loop_after_another(recorded: Place) -> None:
    """One `AsyncRelations` works in one event loop after another, also in a forked child."""
    relations = AsyncRelations(recorded.amqp, recorded.database)

    async def ask() -> list[int]:
        message = (await relations.find("order_id", 1))[0]
        waited = await relations.wait_related(message, timeout_s=LONG_S)
        read = [each async for each in relations.read_many([(recorded.stream, 0)])]
        return [each.offset for each in (message, *waited, *read)]  # type: ignore[union-attr]

    assert asyncio.run(ask()) == [0, 1, 2, 0]
    assert asyncio.run(ask()) == [0, 1, 2, 0]
    assert in_child(lambda: asyncio.run(ask())) == [0, 1, 2, 0]
    assert asyncio.run(ask()) == [0, 1, 2, 0]
    asyncio.run(relations.close())


async def test_two_threads_serve_all_methods_at_once(recorded: Place) -> None:
    """All methods called at once, more of them than there are threads, are answered."""
    async with few_threads(recorded) as few:
        message, stream = await few.read(recorded.stream, 0), recorded.stream

        async def many() -> list[Any]:
            return [each async for each in few.read_many([(stream, number) for number in range(3)])]

        async def groups() -> list[Any]:
            return [each async for each in few.groups(stream)]

        asked: list[Any] = [
            *[few.trace(("order_id", 1)) for _ in range(64)],
            *[few.related(message, complete=True) for _ in range(16)],
            *[many() for _ in range(8)],
            *[groups() for _ in range(8)],
            few.find("order_id", 1),
            few.values("order_id"),
            few.keys(),
            few.streams(),
            few.around(message, stream, after_s=60),
            few.window(message, stream, after_s=60),
            few.after(message, stream),
            few.before(message, stream),
            few.nearest(message, stream),
            few.group("ab" * 24),
            few.grouped("ab" * 24, 1),
            few.group_position("ab" * 24),
            few.group_consumers(),
            few.incomplete_groups(older_than=0),
            few.expectations(),
            few.health(timeout_s=LONG_S),
        ]
        with in_time(LONG_S):
            answers = await asyncio.gather(*asked)
        assert [len(answer) for answer in answers[:96]] == [3] * 64 + [2] * 16 + [3] * 8 + [0] * 8
        assert len(few._threads._threads) <= 2


async def test_who_waits_or_iterates_holds_no_thread(recorded: Place) -> None:
    """Lookups are answered while hundreds of calls wait for messages and groups, which hold no thread."""
    async with few_threads(recorded) as few:
        recorded.put_recorded((b"alone", {"order_id": 2}))
        message = await few.read(recorded.stream, 3)
        waits = [asyncio.create_task(few.wait_related(message, timeout_s=LONG_S)) for _ in range(MANY)]
        followed = [few.groups(recorded.stream, follow=True) for _ in range(MANY)]
        groups = [asyncio.create_task(anext(each)) for each in followed]
        while few.statistics().awaiting < MANY:  # noqa: ASYNC110 - counted in other threads
            await asyncio.sleep(0.01)
        for _ in range(20):
            assert (await few.find("order_id", 1)).status is Status.FOUND
        assert len(few._threads._threads) <= 2
        for task in groups:
            task.cancel()
        await asyncio.gather(*groups, return_exceptions=True)
        for each in followed:
            await each.aclose()
        await asyncio.to_thread(recorded.put_recorded, (b"another", {"order_id": 2}))
        assert {(await wait).ids for wait in waits} == {((recorded.stream, 4),)}


async def test_waits_end_by_their_own_time_while_the_database_stands_still(recorded: Place) -> None:
    """Waits end in time as UNPROVEN while PostgreSQL is frozen; longer ones find their message when it continues."""
    recorded.put_recorded((b"alone", {"order_id": 2}))
    with Proxy.to(recorded.database) as proxy:
        url = proxy.url(recorded.database)
        async with AsyncRelations(recorded.amqp, url, broker_connections_max=4, timeout_s=LONG_S) as relations:
            message = await relations.read(recorded.stream, 3)

            async def wait(timeout_s: float) -> tuple[Status, float]:
                began = time.monotonic()
                answer = await relations.wait_related(message, timeout_s=timeout_s)
                return answer.status, time.monotonic() - began

            short = [asyncio.create_task(wait(SHORT_S)) for _ in range(MANY)]
            long = [asyncio.create_task(wait(LONG_S)) for _ in range(MANY)]
            while relations.statistics().awaiting < 2 * MANY:  # noqa: ASYNC110 - counted in other threads
                await asyncio.sleep(0.01)
            proxy.mode = "frozen"
            ended = await asyncio.gather(*short)
            assert {status for status, _ in ended} == {Status.UNPROVEN}
            assert all(SHORT_S <= took_s < SHORT_S + SLACK_S for _, took_s in ended)
            proxy.mode = "pass"
            recorded.put_recorded((b"another", {"order_id": 2}))
            assert {status for status, _ in await asyncio.gather(*long)} == {Status.FOUND}


async def cancelled(*calls: Coroutine[Any, Any, Any]) -> None:
    """Begin calls, cancel them while they wait for a server, and see them end."""
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()
    with in_time(1.0):
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_cancelled_calls_free_their_threads(recorded: Place) -> None:
    """Calls that are cancelled while a table is locked free their threads, connections and statements at once."""
    async with few_threads(recorded, database_connections_max=2) as few:
        with locked(recorded.database, "relationships"):
            for _ in range(5):
                await cancelled(*(few.find("order_id", 1) for _ in range(10)))
                with in_time(1.0):
                    assert await few.keys()
            await asyncio.to_thread(nobody_waits, recorded.database)
        assert (await few.find("order_id", 1)).status is Status.FOUND
        assert few.statistics().in_use == 0


async def test_cancelled_reads_free_their_threads(recorded: Place) -> None:
    """Reads that are cancelled while the broker is frozen free their threads and connections at once."""
    with Proxy.to(recorded.stream_url) as proxy:
        broker = Broker(recorded.amqp, stream_url=proxy.url(recorded.stream_url))
        async with AsyncRelations(broker, recorded.database, broker_connections_max=2, timeout_s=LONG_S) as relations:
            assert (await relations.read(recorded.stream, 0)).offset == 0
            proxy.mode = "frozen"
            await cancelled(*(relations.read(recorded.stream, 0) for _ in range(10)))
            with in_time(1.0):
                assert await relations.keys()
            proxy.mode = "pass"
            assert (await relations.read(recorded.stream, 0)).offset == 0
            assert relations.statistics().in_use == 0


async def test_who_finds_no_thread_in_time_is_told(recorded: Place) -> None:
    """A call that gets no thread in time fails with `ConnectionsInUse`, and can be repeated."""
    async with AsyncRelations(recorded.amqp, recorded.database, broker_connections_max=2, timeout_s=3.0) as relations:
        assert await relations.keys()
        gate = threading.Event()
        held = [relations._threads.submit(gate.wait, LONG_S) for _ in range(2)]
        with in_time(3.0), pytest.raises(ConnectionsInUse) as caught:
            await relations.read(recorded.stream, 0)
        assert caught.value.limit == 2
        gate.set()
        assert all(each.result(LONG_S) for each in held)
        assert (await relations.read(recorded.stream, 0)).offset == 0


async def test_iterations_that_stand_still_hold_neither_threads_nor_connections(recorded: Place) -> None:
    """Open iterations hold neither between their steps, and one that is left, dropped or cancelled gives them back."""
    wanted = [(recorded.stream, number % 3) for number in range(10_000)]
    async with few_threads(recorded) as few, contextlib.AsyncExitStack() as stack:
        open_ones = [await stack.enter_async_context(contextlib.aclosing(few.read_many(wanted))) for _ in range(20)]
        for _ in range(2):
            assert len([await anext(each) for each in open_ones]) == 20
            assert (await few.find("order_id", 1)).status is Status.FOUND
            assert few.statistics().in_use == 0
    async with few_threads(recorded) as few:
        for number in range(10):
            async with contextlib.aclosing(few.read_many(wanted)) as messages:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(number * 0.003):
                        async for _ in messages:
                            pass
        async for _ in few.read_many(wanted):
            break
        await asyncio.to_thread(wait_until, lambda: few.statistics().in_use == 0, what="all given back")


@pytest.mark.parametrize("deliveries_max", [None, 100])
async def test_a_task_that_is_cancelled_loses_no_group(place: Place, deliveries_max: int | None) -> None:
    """A task that is cancelled at any moment loses no group: each is given in the end."""
    count, chance = 30, random.Random(1)
    place.put_recorded(*(message for number in range(1, count + 1) for message in whole_group(number, 2)))
    consumer = GroupConsumer("billing", prefetch=3, deliveries_max=deliveries_max)
    given: list[str] = []
    async with (
        AsyncRelations(place.amqp, place.database) as relations,
        relations.groups(place.stream, consumer=consumer, follow=True) as groups,
    ):
        tries = 0
        while len(given) < count:
            tries += 1  # A busy machine needs longer for one switch of threads.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(chance.random() * 0.02 * (1 + tries // 100)):
                    group = await anext(groups)
                    given.append(group.group_id)
        held = groups.statistics().held
        assert (held, sorted(given), groups.statistics().given) == (count, ids(*range(1, count + 1)), count)
    assert place.sql("SELECT DISTINCT state FROM relatum.group_states") == [("ready",)]


async def test_lookups_are_closed_also_if_the_task_that_closes_them_is_cancelled(recorded: Place) -> None:
    """Nobody closes them a second time, and their connections would stay open."""
    relations = AsyncRelations(recorded.amqp, recorded.database)
    await relations.read(recorded.stream, 0)
    reader = relations._relations._reader
    closing = asyncio.create_task(relations.close())
    await asyncio.sleep(0)
    await cancel(closing)
    await asyncio.to_thread(wait_until, lambda: reader.statistics().idle == 0, what="no connection")
