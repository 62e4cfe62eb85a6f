"""Publishing to serialization contexts through pika and aio-pika, against a real broker and database."""

import asyncio
import pickle
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aio_pika
import pika
import pytest
import sqlalchemy as sa
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum.contexts import ContextOptions, SerializationContexts, verify
from relatum.contexts.placement._entries import Placed
from relatum.contexts.placement._publication_requests import Adopt
from relatum.errors import (
    BrokerUnavailable,
    ConfigurationError,
    ContextMoving,
    DatabaseUnavailable,
    InvalidInput,
    PublishOutcomeUnknown,
    PublishRejected,
    SuperStreamConflict,
    SuperStreamNotFound,
)
from relatum.headers import PLACED_HEADER
from relatum.reading import TimeSource
from relatum.superstreams import Layout
from tests.support import LIMIT_S, broker_connection, unique_name
from tests.support.affinity import CONTEXTS, Faces, Partitions
from tests.support.proxy import Proxy
from tests.support.routing import HeldMove, consumed, of_context, other_than, sleeping_task

WAIT_S = 3.0
"""Seconds for which routers wait here for what a test withholds."""


@pytest.fixture(params=["blocking", "asyncio"])
def faces(request: pytest.FixtureRequest, layout: Layout, amqp_url: str, database_url: str) -> Faces:
    """Routers of each face."""
    return Faces(request.param, amqp_url, layout.super_stream, database_url, CONTEXTS)


@pytest.fixture
def partitions(layout: Layout, amqp_url: str) -> Partitions:
    """What lies in the partitions."""
    return Partitions(amqp_url, layout, CONTEXTS)


@pytest.fixture
def contexts(layout: Layout, database_url: str, amqp_url: str) -> Iterator[SerializationContexts]:
    """The one who moves contexts."""
    with SerializationContexts(layout.super_stream, database_url, broker=amqp_url) as opened:
        yield opened


@pytest.fixture
def home(layout: Layout) -> str:
    """The partition where "x" is placed."""
    return layout.route("x").stream


@pytest.fixture
def target(layout: Layout, home: str) -> str:
    """Another one."""
    return other_than(layout, home)


def unreachable(url: str) -> str:
    """The URL of a database where nothing answers."""
    with Proxy.to(url) as proxy:
        return proxy.url(url)


# --- where messages go --------------------------------------------------------------------------------------------


def test_a_context_goes_where_its_name_hashes_to(faces: Faces, layout: Layout, partitions: Partitions) -> None:
    """Without other wishes a context is placed as RabbitMQ's own clients route its name as a key."""
    names = [f"account {number}" for number in range(12)]
    with faces.opened() as router:
        for name in names:
            router.publish(name.encode(), name)
    for stream, bodies in partitions.bodies().items():
        assert [body.decode() for body in bodies] == [name for name in names if layout.route(name).stream == stream]


def test_the_message_arrives_as_it_was_but_for_one_header(
    channel: BlockingChannel, layout: Layout, database_url: str, partitions: Partitions, home: str
) -> None:
    """Body, properties and headers arrive as given, with the placement added; the caller's object stays as it was."""
    given = of_context("x", content_type="text/plain", correlation_id="17", message_id="m")
    given.headers["more"] = 5
    before = dict(given.headers)
    with relatum.ContextRouter(layout.super_stream, database_url) as router:
        router.publish(channel, "text", given)
    assert given.headers == before
    (message,) = partitions.messages()[home]
    assert message.body == b"text"
    assert (message.properties.content_type, message.properties.correlation_id) == ("text/plain", "17")
    placed = Placed.parse(message.headers[PLACED_HEADER])
    assert placed is not None
    assert (placed.session, placed.number) == (router.session, 1)
    assert {name: value for name, value in message.headers.items() if name != PLACED_HEADER} == before


def test_routers_that_place_a_context_at_the_same_moment_agree(
    layout: Layout, database_url: str, amqp_url: str, partitions: Partitions
) -> None:
    """Eight routers of random beginnings publish the first messages of the same contexts: each is in one partition."""
    names = [f"device {number}" for number in range(20)]
    together = threading.Barrier(8)

    def publish(number: int) -> None:
        faces = Faces("blocking", amqp_url, layout.super_stream, database_url, CONTEXTS)
        with faces.opened(balance="round_robin") as face:
            face.router.open(face.channel)
            together.wait(90)
            for name in names:
                face.publish(b"%d" % number, name)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(publish, range(8)))
    assert all(len(partitions.of_set(name)) == 1 for name in names)


def test_added_partitions_move_no_context(
    faces: Faces, contexts: SerializationContexts, layout: Layout, amqp_url: str
) -> None:
    """A context goes on where it was when partitions are added, and new ones are placed there, too."""
    names = [f"account {number}" for number in range(30)]
    with faces.opened() as router:
        for name in names:
            router.publish(b"before", name)
        added = contexts.add_partitions(2)
        for name in [*names, *(f"new {number}" for number in range(30))]:
            router.publish(b"after", name)
    found = Partitions(amqp_url, Layout.numbered(layout.super_stream, 5), CONTEXTS)
    assert all(list(found.of_set(name).values()) == [[b"before", b"after"]] for name in names)
    assert all(found.bodies()[stream] for stream in added)


def test_messages_without_a_context_need_no_database(faces: Faces, partitions: Partitions, database_url: str) -> None:
    """Without the header, messages are spread over the partitions, with PostgreSQL away and without confirms."""
    nowhere = unreachable(database_url)
    with faces.opened(nowhere, has_confirms=False) as plain, faces.opened(nowhere) as router:
        for number in range(6):
            plain.publish(b"%d" % number)
        with pytest.raises(ConfigurationError, match="confirms"):
            plain.publish(b"", "x")
        with pytest.raises(DatabaseUnavailable):
            router.publish(b"", "x")
    assert [len(bodies) for bodies in partitions.bodies().values()] == [2, 2, 2]


@pytest.mark.parametrize("keys", [(), ("serialization_context",)])
def test_it_takes_an_exchanges_place_on_intercepted_channels(
    layout: Layout, database_url: str, amqp_url: str, partitions: Partitions, home: str, keys: tuple[str, ...]
) -> None:
    """`basic_publish` with the router as the exchange publishes through the interceptor, stamped as all messages."""
    with broker_connection(amqp_url) as connection, relatum.ContextRouter(layout.super_stream, database_url) as router:
        relatum.intercept(connection, keys=keys)
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish(router, "", b"1", of_context("x"))
        channel.basic_publish(exchange=router, routing_key="", body=b"2", properties=of_context("x"), mandatory=True)
        router.publish(channel, b"keyed", routing_key="hello1")
    messages = partitions.messages()[home]
    assert [each.body for each in messages if each.body != b"keyed"] == [b"1", b"2"]
    assert all(PLACED_HEADER in each.headers for each in messages if each.body != b"keyed")
    assert all(each.time_source is TimeSource.MESSAGE_ID for each in messages)
    assert partitions.where(b"keyed") == layout.route("hello1").stream


@pytest.mark.parametrize("connect", [aio_pika.connect, aio_pika.connect_robust])
@pytest.mark.parametrize("is_intercepted", [False, True])
async def test_any_channel_of_aio_pika_will_do(
    layout: Layout, amqp_url: str, database_url: str, partitions: Partitions, connect: Any, is_intercepted: bool
) -> None:
    """By a channel, by one of its exchanges, and as an exchange: each message goes to its context's partition."""
    async with await connect(amqp_url) as connection:
        if is_intercepted:
            relatum.intercept(connection)
        channel = await connection.channel()
        async with relatum.AsyncContextRouter(layout.super_stream, database_url) as router:
            message = task_message("x", b"1", correlation_id="17")
            await router.publish(channel, message)
            assert message.headers == {"serialization_context": "x"}
            await router.publish(channel.default_exchange, task_message("x", b"2"))
            await router.exchange(channel).publish(task_message("x", b"3"), "ignored")
    messages = [each for found in partitions.messages().values() for each in found]
    assert [each.body for each in messages] == [b"1", b"2", b"3"]
    assert messages[0].properties.correlation_id == "17"
    assert all(PLACED_HEADER in each.headers for each in messages)


async def test_tasks_of_a_context_go_in_the_order_they_called(layout: Layout, amqp_url: str, database_url: str) -> None:
    """A hundred tasks begun at once publish ten contexts: each context is in the order the tasks were begun."""
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        async with relatum.AsyncContextRouter(layout.super_stream, database_url) as router:
            await asyncio.gather(*(router.publish(channel, task_message(f"{n % 10}", b"%d" % n)) for n in range(100)))
    found = consumed(layout.super_stream, database_url, amqp_url, 100)
    assert found == {str(name): [b"%d" % n for n in range(name, 100, 10)] for name in range(10)}


# --- refusals -----------------------------------------------------------------------------------------------------


def test_another_connection_of_pika_is_refused(layout: Layout, database_url: str, amqp_url: str) -> None:
    """Nothing is sent where the client would not tell that the broker has the message."""
    with (
        broker_connection(amqp_url) as connection,
        relatum.ContextRouter(layout.super_stream, database_url) as router,
        pytest.raises(ConfigurationError, match="BlockingChannel"),
    ):
        router.publish(connection._impl, b"", of_context("x"))


async def test_what_is_no_channel_of_aio_pika_is_refused(amqp_url: str, database_url: str) -> None:
    """Nor does a receipt tell of a router, which does more than to publish one message."""
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(unique_name(), database_url) as router,
    ):
        with pytest.raises(ConfigurationError, match="channel"):
            await router.publish(object(), task_message("x"))  # type: ignore[arg-type]
        relatum.intercept(connection, database=database_url)
        with pytest.raises(ConfigurationError, match="receipt"):
            await relatum.publish_async(router.exchange(await connection.channel()), task_message("x"), "")  # type: ignore[arg-type]
        relatum.release(connection)


def test_a_closed_router_sends_nothing(faces: Faces, partitions: Partitions) -> None:
    """Neither messages of a context nor others, although it knows the partitions still."""
    with faces.opened() as router:
        router.publish(b"", "x")
        router.close()
        for name in (None, "x", "y"):
            with pytest.raises(ConfigurationError, match="closed"):
                router.publish(b"", name)
    assert sum(map(len, partitions.bodies().values())) == 1


@pytest.mark.parametrize("name", ["", 17, "a\0b", "x" * 1025, b"bytes"])
def test_what_cannot_name_a_context_is_refused(faces: Faces, partitions: Partitions, name: Any) -> None:
    """A name that is no text of 1 to 1,024 bytes without NUL is refused before anything is sent."""
    with faces.opened() as router, pytest.raises(InvalidInput, match="nothing was sent"):
        router.publish(b"", name)
    assert not any(partitions.messages().values())


def test_names_are_taken_up_to_their_limit(faces: Faces, layout: Layout, partitions: Partitions) -> None:
    """A name of 1,024 bytes, and one beyond ASCII, are contexts like others."""
    with faces.opened() as router:
        for name in ("x" * 1024, "Ωμέγα 🛩"):
            router.publish(b"", name)
            assert partitions.of_set(name) == {layout.route(name).stream: [b""]}


def test_a_super_stream_has_one_header(faces: Faces, layout: Layout) -> None:
    """A router that names contexts by another header than the others is refused, and nothing is sent."""
    with faces.opened() as router, faces.opened(header="account") as other:
        router.publish(b"", "x")
        with pytest.raises(SuperStreamConflict) as caught:
            other.publish(b"", account="x")
    assert caught.value.super_stream == layout.super_stream


def test_a_super_stream_must_be_there(faces: Faces) -> None:
    """Where the broker has no super stream of that name, the error names it."""
    name = unique_name()
    with faces.opened(super_stream=name) as router, pytest.raises(SuperStreamNotFound) as caught:
        router.publish(b"", "x")
    assert caught.value.super_stream == name


@pytest.mark.parametrize(
    "options",
    [
        {"check_s": 0.05},
        {"check_s": -1},
        {"timeout_s": -1},
        {"timeout_s": float("nan")},
        {"contexts_max": 0},
        {"header": ""},
        {"balance": "fairest"},
        {"when_database_away": "known"},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    """Each wrong option is an error before a router is made."""
    with pytest.raises(ConfigurationError):
        ContextOptions(**options)


@pytest.mark.parametrize("router", [relatum.ContextRouter, relatum.AsyncContextRouter])
def test_wrong_arguments_are_told_when_the_router_is_made(router: Any, database_url: str) -> None:
    """A URL of no PostgreSQL or no broker, and what cannot be the name of a super stream."""
    with pytest.raises(ConfigurationError, match="PostgreSQL"):
        router("orders", "sqlite://")
    with pytest.raises(ConfigurationError):
        router("orders", "postgresql://nobody@127.0.0.1:1/none", broker="http://host")
    for name in ("", None, "a\nb"):
        with pytest.raises(InvalidInput, match="super stream"):
            router(name, database_url)


# --- moves --------------------------------------------------------------------------------------------------------


def test_a_stray_is_taken_into_its_context(
    faces: Faces,
    contexts: SerializationContexts,
    layout: Layout,
    partitions: Partitions,
    home: str,
    target: str,
    amqp_url: str,
    database_url: str,
) -> None:
    """A publisher that slept across a whole move, between placement and send, breaks no order and loses nothing."""
    with faces.opened(timeout_s=WAIT_S) as router:
        router.publish(b"1", "x")
        router.sleep_before_next(lambda: contexts.move(["x"], target))
        router.publish(b"2", "x")
        router.publish(b"3", "x")
    bodies = partitions.bodies()
    assert (bodies[home][0], bodies[home][-1], bodies[target][-1]) == (b"1", b"2", b"3")
    assert consumed(layout.super_stream, database_url, amqp_url, 3) == {"x": [b"1", b"2", b"3"]}


def test_a_publisher_that_slept_through_several_moves_breaks_no_order(
    faces: Faces,
    contexts: SerializationContexts,
    layout: Layout,
    home: str,
    target: str,
    amqp_url: str,
    database_url: str,
) -> None:
    """Away, on, and back to where it was: the late message still comes after what others published meanwhile."""
    others = Faces("blocking", amqp_url, layout.super_stream, database_url, CONTEXTS)

    def meanwhile() -> None:
        contexts.move(["x"], target)
        with others.opened() as awake:
            awake.publish(b"2", "x")
        contexts.move(["x"], home)

    with faces.opened(timeout_s=WAIT_S) as router:
        router.publish(b"1", "x")
        router.sleep_before_next(meanwhile)
        router.publish(b"3", "x")
    assert consumed(layout.super_stream, database_url, amqp_url, 3) == {"x": [b"1", b"2", b"3"]}


@pytest.mark.parametrize("state", ["fencing", "fenced"])
def test_a_moving_context_is_waited_for_and_no_other(
    faces: Faces,
    contexts: SerializationContexts,
    partitions: Partitions,
    target: str,
    engine: sa.Engine,
    state: str,
) -> None:
    """While a move stands still, its context ends as `ContextMoving` with nothing sent; others are published to."""
    with faces.opened(timeout_s=WAIT_S) as router:
        router.publish(b"1", "x")
        with HeldMove(contexts, ["x"], target, state, engine) as move:
            move.begin()
            with pytest.raises(ContextMoving) as caught:
                router.publish(b"never", "x")
            router.publish(b"other", "another")
        assert (caught.value.context, caught.value.move_id) == ("x", contexts.moves(latest=1)[0].move_id)
        router.publish(b"2", "x")
    bodies = partitions.bodies()
    assert not any(b"never" in each for each in bodies.values())
    assert bodies[target][-1] == b"2"


def test_a_message_before_the_fence_is_told_while_the_move_stands_still(
    faces: Faces, contexts: SerializationContexts, target: str, engine: sa.Engine
) -> None:
    """The partition itself tells that a message lies before the fence: nobody waits for the mover."""
    with faces.opened(timeout_s=WAIT_S) as router:
        router.publish(b"1", "x")
        with HeldMove(contexts, ["x"], target, "fencing", engine) as move:
            router.sleep_before_next(move.begin)
            router.publish(b"2", "x")


def test_a_stray_of_a_move_that_stands_still_is_settled_later(
    faces: Faces,
    contexts: SerializationContexts,
    layout: Layout,
    target: str,
    amqp_url: str,
    database_url: str,
    engine: sa.Engine,
) -> None:
    """Its outcome is unknown, and pickles; nothing of the context overtakes it; `settle` takes it in."""
    with faces.opened(timeout_s=WAIT_S) as router:
        router.publish(b"1", "x")
        with HeldMove(contexts, ["x"], target, "fenced", engine) as move:
            router.sleep_before_next(move.begin)
            with pytest.raises(PublishOutcomeUnknown) as caught:
                router.publish(b"2", "x")
            with pytest.raises(PublishOutcomeUnknown):
                router.settle(caught.value, 0.05)
            with pytest.raises(ContextMoving):
                router.publish(b"never", "x")
            assert pickle.loads(pickle.dumps(caught.value)).in_stream is None
        assert router.settle(caught.value) == ()
        router.publish(b"3", "x")
    assert consumed(layout.super_stream, database_url, amqp_url, 3) == {"x": [b"1", b"2", b"3"]}


def test_order_holds_under_publishers_and_moves(
    contexts: SerializationContexts, layout: Layout, amqp_url: str, database_url: str
) -> None:
    """Threads, and tasks, that share a router publish contexts while these are moved about: each stays in order."""
    count, chance = 40, random.Random(17)

    def publish(router: relatum.ContextRouter, thread: int) -> None:
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for number in range(count):
                for letter in "ab":
                    router.publish(channel, b"%d" % number, of_context(f"{thread} {letter}"))

    async def publish_tasks() -> None:
        async def publish_one(router: relatum.AsyncContextRouter, channel: Any, name: str) -> None:
            for number in range(count):
                await router.publish(channel, task_message(name, b"%d" % number))

        connection = await aio_pika.connect(amqp_url)
        async with connection, relatum.AsyncContextRouter(layout.super_stream, database_url) as router:
            channel = await connection.channel()
            await asyncio.gather(*(publish_one(router, channel, f"task {number}") for number in range(8)))

    with (
        relatum.ContextRouter(layout.super_stream, database_url) as router,
        ThreadPoolExecutor(4) as threads,
    ):
        published = [threads.submit(publish, router, thread) for thread in range(3)]
        published.append(threads.submit(asyncio.run, publish_tasks()))
        while not all(each.done() for each in published):
            known = [each.context for each in contexts.assignments()]
            contexts.move(chance.sample(known, min(2, len(known))), chance.choice([each.stream for each in layout]))
        for each in published:
            each.result()
    names = [*(f"{thread} {letter}" for thread in range(3) for letter in "ab"), *(f"task {n}" for n in range(8))]
    found = consumed(layout.super_stream, database_url, amqp_url, len(names) * count)
    assert found == {name: [b"%d" % number for number in range(count)] for name in names}


# --- what goes away -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when_database_away", ["wait", "fail"])
def test_without_the_database_nothing_is_sent(
    faces: Faces, partitions: Partitions, home: str, database_url: str, when_database_away: Any
) -> None:
    """A context's message is refused while PostgreSQL is away, and goes out when it is back."""
    with Proxy.to(database_url) as proxy:
        options = {"timeout_s": WAIT_S, "when_database_away": when_database_away, "check_s": 0}
        with faces.opened(proxy.url(database_url), **options) as router:
            router.publish(b"1", "x")
            proxy.accepts = False
            proxy.reset()
            # What it has looked up just before serves a moment longer.
            router.router._core.publications._checked_at = None
            with pytest.raises(DatabaseUnavailable):
                router.publish(b"never", "x")
            proxy.accepts = True
            router.publish(b"2", "x")
    assert partitions.bodies()[home] == [b"1", b"2"]


def test_a_database_that_goes_away_after_the_confirm_leaves_the_outcome_unknown(
    faces: Faces, partitions: Partitions, home: str, database_url: str
) -> None:
    """The caller is not told before the check; `settle` does it when PostgreSQL is back, and nothing is sent twice."""
    with Proxy.to(database_url) as proxy, faces.opened(proxy.url(database_url), timeout_s=WAIT_S) as router:
        router.publish(b"1", "x")

        def go_away() -> None:
            proxy.accepts = False
            proxy.reset()

        router.sleep_before_next(go_away)
        with pytest.raises(PublishOutcomeUnknown) as caught:
            router.publish(b"2", "x")
        assert caught.value.in_stream is None
        proxy.accepts = True
        assert router.settle(caught.value) == ()
    assert partitions.bodies()[home] == [b"1", b"2"]


def test_a_router_settles_in_the_stream_it_knows(
    layout: Layout, home: str, amqp_url: str, stream_url: str, database_url: str
) -> None:
    """The router knows the partition. While the stream port is away, settling says so."""
    with (
        Proxy.to(amqp_url) as proxy,
        Proxy.to(stream_url) as alone,
        relatum.ContextRouter(layout.super_stream, database_url, broker=amqp_url) as router,
    ):
        connection = pika.BlockingConnection(pika.URLParameters(proxy.url(amqp_url)))
        channel = relatum.intercept(connection, broker_url=amqp_url, stream_url=alone.url(stream_url)).channel()
        channel.confirm_delivery()
        router.publish(channel, b"1", of_context("x"))
        proxy.mode = "blackhole_replies"
        connection._impl.ioloop.call_later(0.3, proxy.reset)
        with pytest.raises(PublishOutcomeUnknown) as caught:
            router.publish(channel, b"2", of_context("x"))
        alone.accepts = False
        with pytest.raises(BrokerUnavailable):
            caught.value.settle(0.5)
        alone.accepts = True
        (place,) = caught.value.settle()
    assert place.stream == home


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_confirm_that_does_not_come_is_settled_from_the_stream(
    faces: Faces,
    contexts: SerializationContexts,
    layout: Layout,
    home: str,
    target: str,
    amqp_url: str,
    database_url: str,
    is_moved: bool,
) -> None:
    """It is found where it lies before the fence; behind it, it counts as rejected, and may be published again."""
    with Proxy.to(amqp_url) as proxy:

        def meanwhile() -> None:
            if is_moved:
                contexts.move(["x"], target)
            proxy.mode = "blackhole_replies"
            threading.Timer(0.3, proxy.reset).start()

        with faces.opened(through=proxy.url(amqp_url), timeout_s=WAIT_S) as router:
            router.publish(b"1", "x")
            router.sleep_before_next(meanwhile)
            with pytest.raises(PublishOutcomeUnknown) as caught:
                router.publish(b"2", "x")
            if is_moved:
                with pytest.raises(PublishRejected):
                    router.settle(caught.value)
            else:
                assert [place.stream for place in router.settle(caught.value)] == [home]
    expected = [b"1"] if is_moved else [b"1", b"2"]
    assert consumed(layout.super_stream, database_url, amqp_url, len(expected)) == {"x": expected}


# --- tasks that are cancelled -------------------------------------------------------------------------------------


def task_message(name: str, body: bytes = b"", **properties: Any) -> aio_pika.Message:
    """A message of a context."""
    return aio_pika.Message(body, headers={"serialization_context": name}, **properties)


async def test_a_wait_for_a_moving_context_can_be_cancelled(
    contexts: SerializationContexts,
    layout: Layout,
    target: str,
    amqp_url: str,
    database_url: str,
    engine: sa.Engine,
) -> None:
    """It sends nothing, and the next message goes to the target."""
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(layout.super_stream, database_url) as router,
    ):
        channel = await connection.channel()
        await router.publish(channel, task_message("x", b"1"))
        with HeldMove(contexts, ["x"], target, "fenced", engine) as move:
            await asyncio.to_thread(move.begin)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await router.publish(channel, task_message("x", b"cancelled"))
            await asyncio.to_thread(move.go)
        await router.publish(channel, task_message("x", b"2"))
    assert consumed(layout.super_stream, database_url, amqp_url, 2) == {"x": [b"1", b"2"]}


async def test_a_cancelled_adoption_is_not_overtaken(
    contexts: SerializationContexts, layout: Layout, home: str, target: str, amqp_url: str, database_url: str
) -> None:
    """A task that is cancelled at any moment of taking in a stray leaves its context in order for the next one."""
    chance = random.Random(5)
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(layout.super_stream, database_url) as router,
    ):
        channel = await connection.channel()
        await router.publish(channel, task_message("x", b"0"))
        for number in range(1, 6):

            async def meanwhile(to: str = (home, target)[number % 2]) -> None:
                sleeper = asyncio.current_task()
                assert sleeper is not None
                await asyncio.to_thread(contexts.move, ["x"], to)
                asyncio.get_running_loop().call_later(chance.random() * 0.06, sleeper.cancel)

            sleeping_task(channel, meanwhile)
            task = asyncio.create_task(router.publish(channel, task_message("x", b"%d" % number)))
            await asyncio.wait([task])
            await router.publish(channel, task_message("x", b"%d after" % number))
    told = [b"0", *(b"%d after" % number for number in range(1, 6))]
    # A task that is cancelled before its message was looked for may leave a stray that does not count.
    total = verify(layout.super_stream, broker=amqp_url, database=database_url).messages
    found = consumed(layout.super_stream, database_url, amqp_url, total)["x"]
    assert [body for body in found if body in told] == told
    rest = [body for body in found if body not in told]
    assert all(found.index(body) < found.index(body + b" after") for body in rest)


async def test_a_stray_whose_look_was_cancelled_is_not_overtaken(
    contexts: SerializationContexts, layout: Layout, target: str, amqp_url: str, database_url: str
) -> None:
    """The next message need not look, since a session holds and knows where the context is; the stray comes first."""
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(layout.super_stream, database_url) as router,
    ):
        channel = await connection.channel()
        publications, look = router._core.publications, router._generation
        while not publications.session.holds():
            await router.publish(channel, task_message("x", b"before"))

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

        sleeping_task(channel, meanwhile)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(router.publish(channel, task_message("x", b"stray")))
        await router.publish(channel, task_message("x", b"after"))
    total = verify(layout.super_stream, broker=amqp_url, database=database_url).messages
    assert consumed(layout.super_stream, database_url, amqp_url, total)["x"][-2:] == [b"stray", b"after"]


async def test_an_adoption_is_waited_for_however_often_its_task_is_cancelled(
    contexts: SerializationContexts, layout: Layout, target: str, amqp_url: str, database_url: str
) -> None:
    """Were it left under way, the next message would not find it, and would take the stray in a second time."""
    is_there, may_go = threading.Event(), threading.Event()
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(layout.super_stream, database_url) as router,
    ):
        channel = await connection.channel()
        await router.publish(channel, task_message("x", b"before"))
        performers = router._core._performers
        adopt = performers[Adopt]

        def held(request: Adopt) -> None:
            performers[Adopt] = adopt
            is_there.set()
            assert may_go.wait(LIMIT_S)
            adopt(request)

        performers[Adopt] = held
        sleeping_task(channel, lambda: asyncio.to_thread(contexts.move, ["x"], target))
        task = asyncio.create_task(router.publish(channel, task_message("x", b"stray")))
        assert await asyncio.to_thread(is_there.wait, LIMIT_S)
        after = asyncio.create_task(router.publish(channel, task_message("x", b"after")))
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
