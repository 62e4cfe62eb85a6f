"""Publishing to serialization contexts through aio-pika, against a real broker and database."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import aio_pika
import pytest

import relatum
from relatum.contexts import ContextOptions, SerializationContexts, verify
from relatum.contexts.placement._publication_requests import Adopt
from relatum.errors import (
    ConfigurationError,
    ContextMoving,
    DatabaseUnavailable,
    PublishOutcomeUnknown,
    PublishRejected,
    SuperStreamNotFound,
)
from relatum.headers import PLACED_HEADER
from relatum.superstreams import Layout
from tests.support import LIMIT_S, in_a_loop, unique_name
from tests.support.proxy import Proxy
from tests.support.routing import HeldMove, consumed, in_partitions, other_than


def of_context(name: str, body: bytes = b"", **properties: Any) -> aio_pika.Message:
    """A message of a context."""
    return aio_pika.Message(body, headers={"serialization_context": name}, **properties)


def sleeping(exchange_of: Any, meanwhile: Callable[[], Awaitable[None]]) -> None:
    """Let the channel's next publish happen only after something else has: its publisher sleeps just before it."""
    get_exchange = exchange_of.get_exchange

    async def get_sleeper(*args: Any, **kwargs: Any) -> Any:
        exchange_of.get_exchange = get_exchange
        exchange = await get_exchange(*args, **kwargs)
        publish = exchange.publish

        async def publish_later(*args: Any, **kwargs: Any) -> Any:
            await meanwhile()
            return await publish(*args, **kwargs)

        exchange.publish = publish_later
        return exchange

    exchange_of.get_exchange = get_sleeper


@pytest.mark.parametrize("connect", [aio_pika.connect, aio_pika.connect_robust])
@pytest.mark.parametrize("is_intercepted", [False, True])
async def test_contexts_go_where_they_are_placed(
    layout: Layout, amqp_url: str, database_url: str, connect: Any, is_intercepted: bool
) -> None:
    """By a channel, by one of its exchanges, and as an exchange: each message goes to its context's partition."""
    async with await connect(amqp_url) as connection:
        if is_intercepted:
            relatum.intercept(connection)
        channel = await connection.channel()
        async with relatum.AsyncContextRouter(layout.super_stream, database_url) as router:
            message = of_context("x", b"1", correlation_id="17")
            await router.publish(channel, message)
            assert message.headers == {"serialization_context": "x"}
            await router.publish(channel.default_exchange, of_context("x", b"2"))
            await router.exchange(channel).publish(of_context("x", b"3"), "ignored")
    messages = in_partitions(amqp_url, layout)[layout.route("x").stream]
    assert [each.body for each in messages] == [b"1", b"2", b"3"]
    assert messages[0].properties.correlation_id == "17"
    assert all(PLACED_HEADER in each.headers for each in messages)


async def test_tasks_of_a_context_go_in_the_order_they_called(layout: Layout, amqp_url: str, database_url: str) -> None:
    """A hundred tasks begun at once publish ten contexts: each context is in the order the tasks were begun."""
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        async with relatum.AsyncContextRouter(layout.super_stream, database_url) as router:
            tasks = [router.publish(channel, of_context(f"{n % 10}", b"%d" % n)) for n in range(100)]
            await asyncio.gather(*tasks)
    found = consumed(layout.super_stream, database_url, amqp_url, 100)
    assert found == {str(name): [b"%d" % n for n in range(name, 100, 10)] for name in range(10)}


async def test_messages_without_a_context_need_no_database(layout: Layout, amqp_url: str, database_url: str) -> None:
    """Without the header, messages are spread over the partitions, with PostgreSQL away and without confirms."""
    with Proxy.to(database_url) as proxy:
        nowhere = proxy.url(database_url)
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel(publisher_confirms=False)
        async with relatum.AsyncContextRouter(layout.super_stream, nowhere) as router:
            for _ in range(6):
                await router.publish(channel, aio_pika.Message(b""))
            with pytest.raises(ConfigurationError, match="confirms"):
                await router.publish(channel, of_context("x"))
            with pytest.raises(DatabaseUnavailable):
                await router.publish(await connection.channel(), of_context("x"))
    assert [len(messages) for messages in in_partitions(amqp_url, layout).values()] == [2, 2, 2]


async def test_what_is_no_channel_and_no_super_stream_is_refused(amqp_url: str, database_url: str) -> None:
    """Each is an error of its own, and nothing is sent."""
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(unique_name(), database_url) as router,
    ):
        with pytest.raises(ConfigurationError, match="channel"):
            await router.publish(object(), of_context("x"))  # type: ignore[arg-type]
        with pytest.raises(SuperStreamNotFound):
            await router.publish(await connection.channel(), of_context("x"))
        relatum.intercept(connection, database=database_url)
        with pytest.raises(ConfigurationError, match="receipt"):
            await relatum.publish_async(router.exchange(await connection.channel()), of_context("x"), "")  # type: ignore[arg-type]
        relatum.release(connection)


async def test_a_stray_is_taken_into_its_context(layout: Layout, amqp_url: str, database_url: str) -> None:
    """A task that slept across a whole move, between placement and send, breaks no order and loses nothing."""
    target = other_than(layout, layout.route("x").stream)
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(layout.super_stream, database_url) as router,
    ):
        channel = await connection.channel()
        await router.publish(channel, of_context("x", b"1"))
        with SerializationContexts(layout.super_stream, database_url, broker=amqp_url) as contexts:

            async def meanwhile() -> None:
                await asyncio.to_thread(contexts.move, ["x"], target)

            sleeping(channel, meanwhile)
            await router.publish(channel, of_context("x", b"2"))
        await router.publish(channel, of_context("x", b"3"))
    assert [each.body for each in in_partitions(amqp_url, layout)[target]][-1] == b"3"
    assert consumed(layout.super_stream, database_url, amqp_url, 3) == {"x": [b"1", b"2", b"3"]}


async def test_a_moving_context_waits_and_its_task_can_be_cancelled(
    layout: Layout, amqp_url: str, database_url: str
) -> None:
    """A cancelled wait sends nothing; one that lasts too long is `ContextMoving`; other contexts go on."""
    target = other_than(layout, layout.route("x").stream)
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(layout.super_stream, database_url, ContextOptions(timeout_s=3.0)) as router,
    ):
        channel = await connection.channel()
        await router.publish(channel, of_context("x", b"1"))
        with (
            SerializationContexts(layout.super_stream, database_url, broker=amqp_url) as contexts,
            HeldMove(contexts, ["x"], target, "fenced") as move,
        ):
            await asyncio.to_thread(move.begin)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await router.publish(channel, of_context("x", b"cancelled"))
            with pytest.raises(ContextMoving):
                await router.publish(channel, of_context("x", b"never"))
            await router.publish(channel, of_context("another", b"other"))
            await asyncio.to_thread(move.go)
        await router.publish(channel, of_context("x", b"2"))
    found = consumed(layout.super_stream, database_url, amqp_url, 3)
    assert found == {"x": [b"1", b"2"], "another": [b"other"]}


async def test_a_stray_of_a_move_that_stands_still_is_settled_later(
    layout: Layout, amqp_url: str, database_url: str
) -> None:
    """Its outcome is unknown at first; `settle`, awaited when the move has ended, takes it in."""
    target = other_than(layout, layout.route("x").stream)
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(layout.super_stream, database_url, ContextOptions(timeout_s=3.0)) as router,
    ):
        channel = await connection.channel()
        await router.publish(channel, of_context("x", b"1"))
        with (
            SerializationContexts(layout.super_stream, database_url, broker=amqp_url) as contexts,
            HeldMove(contexts, ["x"], target, "fenced") as move,
        ):
            sleeping(channel, lambda: asyncio.to_thread(move.begin))
            with pytest.raises(PublishOutcomeUnknown) as caught:
                await router.publish(channel, of_context("x", b"2"))
            with pytest.raises(PublishOutcomeUnknown):
                await caught.value.settle(0.05)
            await asyncio.to_thread(move.go)
            assert await caught.value.settle() == ()
        await router.publish(channel, of_context("x", b"3"))
    assert consumed(layout.super_stream, database_url, amqp_url, 3) == {"x": [b"1", b"2", b"3"]}


async def test_a_cancelled_adoption_is_not_overtaken(layout: Layout, amqp_url: str, database_url: str) -> None:
    """A task that is cancelled at any moment of taking in a stray leaves its context in order for the next one."""
    home = layout.route("x").stream
    streams = [home, other_than(layout, home)]
    chance = random.Random(5)
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(layout.super_stream, database_url) as router,
    ):
        channel = await connection.channel()
        await router.publish(channel, of_context("x", b"0"))
        with SerializationContexts(layout.super_stream, database_url, broker=amqp_url) as contexts:
            for number in range(1, 6):

                async def meanwhile(target: str = streams[number % 2]) -> None:
                    sleeper = asyncio.current_task()
                    assert sleeper is not None
                    await asyncio.to_thread(contexts.move, ["x"], target)
                    asyncio.get_running_loop().call_later(chance.random() * 0.06, sleeper.cancel)

                sleeping(channel, meanwhile)
                task = asyncio.create_task(router.publish(channel, of_context("x", b"%d" % number)))
                await asyncio.wait([task])
                await router.publish(channel, of_context("x", b"%d after" % number))
    told = [b"0", *(b"%d after" % number for number in range(1, 6))]
    # A task that is cancelled before its message was looked for may leave a stray that does not count.
    total = verify(layout.super_stream, broker=amqp_url, database=database_url).messages
    found = consumed(layout.super_stream, database_url, amqp_url, total)["x"]
    assert [body for body in found if body in told] == told
    rest = [body for body in found if body not in told]
    assert all(found.index(body) < found.index(body + b" after") for body in rest)


async def test_a_stray_whose_look_was_cancelled_is_not_overtaken(
    layout: Layout, amqp_url: str, database_url: str
) -> None:
    """The next message need not look, since a session holds and knows where the context is; the stray comes first."""
    target = other_than(layout, layout.route("x").stream)
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(layout.super_stream, database_url) as router,
    ):
        channel = await connection.channel()
        publications, look = router._core.publications, router._generation
        while not publications.session.holds():
            await router.publish(channel, of_context("x", b"before"))

        async def cancelled_look() -> int:
            router._generation = look
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            return await look()

        async def meanwhile() -> None:
            await asyncio.to_thread(contexts.move, ["x"], target)
            while (known := publications.cache.get("x")) is None or known.placement.stream != target:
                await asyncio.to_thread(router._core.look)
            router._generation = cancelled_look  # type: ignore[assignment]

        with SerializationContexts(layout.super_stream, database_url, broker=amqp_url) as contexts:
            sleeping(channel, meanwhile)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.create_task(router.publish(channel, of_context("x", b"stray")))
        await router.publish(channel, of_context("x", b"after"))
    total = verify(layout.super_stream, broker=amqp_url, database=database_url).messages
    assert consumed(layout.super_stream, database_url, amqp_url, total)["x"][-2:] == [b"stray", b"after"]


async def test_an_adoption_is_waited_for_however_often_its_task_is_cancelled(
    layout: Layout, amqp_url: str, database_url: str
) -> None:
    """Were it left under way, the next message would not find it, and would take the stray in a second time."""
    target = other_than(layout, layout.route("x").stream)
    is_there, may_go = threading.Event(), threading.Event()
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(layout.super_stream, database_url) as router,
    ):
        channel = await connection.channel()
        await router.publish(channel, of_context("x", b"before"))
        performers = router._core._performers
        adopt = performers[Adopt]

        def held(request: Adopt) -> None:
            performers[Adopt] = adopt
            is_there.set()
            assert may_go.wait(LIMIT_S)
            adopt(request)

        with SerializationContexts(layout.super_stream, database_url, broker=amqp_url) as contexts:
            performers[Adopt] = held
            sleeping(channel, lambda: asyncio.to_thread(contexts.move, ["x"], target))
            task = asyncio.create_task(router.publish(channel, of_context("x", b"stray")))
            assert await asyncio.to_thread(is_there.wait, LIMIT_S)
            after = asyncio.create_task(router.publish(channel, of_context("x", b"after")))
            for _ in range(20):
                task.cancel()
                await asyncio.sleep(0)
            has_left = task.done()
            may_go.set()
            await asyncio.wait([task])
            await after
        assert task.cancelled()
    assert not has_left
    assert consumed(layout.super_stream, database_url, amqp_url, 3) == {"x": [b"before", b"stray", b"after"]}


async def test_order_holds_under_tasks_and_moves(layout: Layout, amqp_url: str, database_url: str) -> None:
    """Tasks publish eight contexts while these are moved about: each stays in order, and nothing is lost or twice."""
    streams = [each.stream for each in layout]
    names = [f"device {number}" for number in range(8)]

    async def publish(router: relatum.AsyncContextRouter, channel: Any, name: str) -> None:
        for number in range(40):
            await router.publish(channel, of_context(name, b"%d" % number))

    chance = random.Random(17)
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(layout.super_stream, database_url) as router,
    ):
        channel = await connection.channel()
        await router.open(connection)
        with SerializationContexts(layout.super_stream, database_url, broker=amqp_url) as contexts:
            tasks = [asyncio.create_task(publish(router, channel, name)) for name in names]
            while not all(task.done() for task in tasks):
                known = [each.context for each in contexts.assignments()]
                wanted = chance.sample(known, min(2, len(known)))
                await asyncio.to_thread(contexts.move, wanted, chance.choice(streams))
            await asyncio.gather(*tasks)
    found = consumed(layout.super_stream, database_url, amqp_url, 8 * 40)
    assert found == {name: [b"%d" % number for number in range(40)] for name in names}


def test_a_database_that_goes_away_after_the_confirm_leaves_the_outcome_unknown(
    layout: Layout, amqp_url: str, database_url: str
) -> None:
    """The task is not told before the check; `settle` does it when PostgreSQL is back, and nothing is sent twice."""

    async def scenario(proxy: Proxy) -> None:
        async with (
            await aio_pika.connect(amqp_url) as connection,
            relatum.AsyncContextRouter(
                layout.super_stream, proxy.url(database_url), ContextOptions(timeout_s=3.0)
            ) as router,
        ):
            channel = await connection.channel()
            await router.publish(channel, of_context("x", b"1"))

            async def go_away() -> None:
                proxy.accepts = False
                proxy.reset()

            sleeping(channel, go_away)
            with pytest.raises(PublishOutcomeUnknown) as caught:
                await router.publish(channel, of_context("x", b"2"))
            proxy.accepts = True
            assert await caught.value.settle() == ()

    with Proxy.to(database_url) as proxy:
        in_a_loop(scenario(proxy))
    messages = in_partitions(amqp_url, layout)[layout.route("x").stream]
    assert [each.body for each in messages] == [b"1", b"2"]


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_confirm_that_does_not_come_is_settled_from_the_stream(
    layout: Layout, amqp_url: str, stream_url: str, database_url: str, is_moved: bool
) -> None:
    """It is found where it lies before the fence; behind it, it counts as rejected, and may be published again."""
    home = layout.route("x").stream

    async def scenario(proxy: Proxy, contexts: SerializationContexts) -> None:
        connection = await aio_pika.connect(proxy.url(amqp_url))
        relatum.intercept(connection, broker_url=amqp_url, stream_url=stream_url)
        channel = await connection.channel()
        async with relatum.AsyncContextRouter(layout.super_stream, database_url, broker=amqp_url) as router:
            await router.publish(channel, of_context("x", b"1"))

            async def meanwhile() -> None:
                if is_moved:
                    await asyncio.to_thread(contexts.move, ["x"], other_than(layout, home))
                proxy.mode = "blackhole_replies"
                asyncio.get_running_loop().call_later(0.3, proxy.reset)

            sleeping(channel, meanwhile)
            with pytest.raises(PublishOutcomeUnknown) as caught:
                await router.publish(channel, of_context("x", b"2"))
            if is_moved:
                with pytest.raises(PublishRejected):
                    await caught.value.settle()
            else:
                assert [place.stream for place in await caught.value.settle()] == [home]
        relatum.release(connection)
        await connection.close()

    async def begin(proxy: Proxy) -> None:
        async with relatum.AsyncContextRouter(layout.super_stream, database_url, broker=amqp_url) as router:
            await router.open()
        with SerializationContexts(layout.super_stream, database_url, broker=amqp_url) as contexts:
            await scenario(proxy, contexts)

    with Proxy.to(amqp_url) as proxy:
        in_a_loop(begin(proxy))
    expected = [b"1"] if is_moved else [b"1", b"2"]
    assert consumed(layout.super_stream, database_url, amqp_url, len(expected)) == {"x": expected}
