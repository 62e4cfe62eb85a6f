"""Routers of contexts and of affinity sets, through pika and aio-pika: where messages go, refusals, and moves."""

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aio_pika
import pika
import pytest
import sqlalchemy as sa
from pamqp.commands import Basic
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum import Broker, errors
from relatum.common.headers import PLACED_HEADER
from relatum.contexts import ContextOptions, SerializationContexts
from relatum.contexts._partition_log import Placed
from relatum.reading import TimeSource
from relatum.superstreams import Layout
from tests.support import LIMIT_S, broker_connection, unique_name, until_answered, wait_until
from tests.support.affinity import CONTEXTS, SETS, Face, Faces, Partitions
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.publishing import lose_confirm
from tests.support.routing import HeldMove, confirming, consumed, of_context, other_than, sleeping, sleeping_task

WAIT_S = 3.0
"""Seconds for which routers wait here for what a test withholds."""


@pytest.fixture(params=[("blocking", CONTEXTS), ("asyncio", CONTEXTS)], ids=" ".join)
def faces(request: pytest.FixtureRequest, layout: Layout, amqp_url: str, database_url: str) -> Faces:
    face, header = request.param
    return Faces(face, amqp_url, layout, database_url, header)


both_kinds = pytest.mark.parametrize("faces", [("blocking", CONTEXTS), ("asyncio", SETS)], indirect=True, ids=" ".join)
"""Contexts and affinity sets are placed by the same router."""


@pytest.fixture
def partitions(layout: Layout, amqp_url: str) -> Partitions:
    return Partitions(amqp_url, layout, CONTEXTS)


@pytest.fixture
def home(layout: Layout) -> str:
    return layout.route("x").stream


@dataclass(frozen=True)
class Moves:
    """Routers of a face, and the context "x", which goes from `home` to `target`."""

    faces: Faces
    contexts: SerializationContexts
    home: str
    engine: sa.Engine

    @property
    def target(self) -> str:
        return other_than(self.faces.layout, self.home)

    def router(self, **options: Any) -> AbstractContextManager[Face]:
        """A router that waits a while for what is withheld."""
        return self.faces.opened(timeout_s=WAIT_S, **options)

    def held(self, state: str) -> HeldMove:
        return HeldMove(self.contexts, ["x"], self.target, state, self.engine)

    def assert_consumed(self, *bodies: bytes) -> None:
        """A consumer gets these of "x", and nothing else."""
        faces = self.faces
        found = consumed(faces.layout.super_stream, faces.database_url, faces.amqp_url, len(bodies))
        assert found == {"x": list(bodies)}

    @asynccontextmanager
    async def in_loop(self) -> AsyncIterator[tuple[relatum.AsyncContextRouter, Any]]:
        async with (
            await aio_pika.connect(self.faces.amqp_url) as connection,
            relatum.AsyncContextRouter(self.faces.layout.super_stream, self.faces.database_url) as router,
        ):
            yield router, await connection.channel()


@pytest.fixture
def moves(faces: Faces, contexts: SerializationContexts, home: str, engine: sa.Engine) -> Moves:
    return Moves(faces, contexts, home, engine)


of_tasks = pytest.mark.parametrize("faces", [("asyncio", CONTEXTS)], indirect=True, ids=" ".join)


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


@both_kinds
def test_routers_that_place_a_name_at_the_same_moment_agree(faces: Faces) -> None:
    """Routers that publish the first messages of the same names at once place each name in one partition."""
    publishers, names = 6, [f"name {number}" for number in range(15)]
    together = threading.Barrier(publishers)
    blocking = replace(faces, face="blocking")

    def publish(number: int) -> None:
        with blocking.opened(balance="round_robin") as router:
            together.wait(90)
            for name in names:
                router.publish(b"%d" % number, name)

    with ThreadPoolExecutor(publishers) as threads:
        list(threads.map(publish, range(publishers)))
    for name in names:
        (bodies,) = faces.partitions.of_set(name).values()
        assert sorted(bodies) == [b"%d" % number for number in range(publishers)]


@pytest.mark.parametrize(
    ("kind", "header"), [(relatum.AsyncContextRouter, CONTEXTS), (relatum.AsyncAffinityRouter, SETS)]
)
async def test_tasks_publish_a_name_in_the_order_they_began(
    layout: Layout, database_url: str, amqp_url: str, kind: Any, header: str
) -> None:
    """A hundred publishes begun at once to ten names: each name is in one partition, in their order."""
    async with await aio_pika.connect(amqp_url) as connection, kind(layout.super_stream, database_url) as router:
        orders = router.exchange(await connection.channel())
        messages = [aio_pika.Message(b"%02d" % n, headers={header: str(n % 10)}) for n in range(100)]
        await asyncio.gather(*(orders.publish(message) for message in messages))
    for name in range(10):
        (bodies,) = Partitions(amqp_url, layout, header).of_set(str(name)).values()
        assert bodies == [b"%02d" % n for n in range(name, 100, 10)]


@both_kinds
def test_messages_of_no_name_need_neither_database_nor_confirms(faces: Faces, database_url: str) -> None:
    """Messages without a name are spread over the partitions; one with a name needs the database and confirms."""
    with Proxy.to(database_url) as proxy:
        nowhere = proxy.url(database_url)
    with faces.opened(nowhere, has_confirms=False) as plain, faces.opened(nowhere) as router:
        for number in range(6):
            plain.publish(b"%d" % number)
        with pytest.raises(errors.ConfigurationError):
            plain.publish(b"", "x")
        with pytest.raises(errors.DatabaseUnavailable):
            router.publish(b"", "x")
    assert [len(bodies) for bodies in faces.partitions.bodies().values()] == [2, 2, 2]


@both_kinds
def test_another_header_or_a_missing_super_stream_is_refused(faces: Faces, layout: Layout) -> None:
    """A router with another header, or of a super stream that does not exist, raises an error that names it."""
    missing = unique_name()
    with (
        faces.opened() as router,
        faces.opened(header="account") as other,
        faces.opened(super_stream=missing) as nowhere,
    ):
        router.publish(b"", "x")
        with pytest.raises(errors.SuperStreamConflict) as conflict:
            other.publish(b"", account="x")
        with pytest.raises(errors.SuperStreamNotFound) as not_found:
            nowhere.publish(b"", "x")
    assert (conflict.value.super_stream, not_found.value.super_stream) == (layout.super_stream, missing)


def test_a_context_goes_where_its_name_hashes_to_and_stays(faces: Faces, contexts: SerializationContexts) -> None:
    """A context is placed where RabbitMQ's clients route its name, and stays there when partitions are added."""
    names = [f"account {number}" for number in range(30)]
    with faces.opened() as router:
        for name in names:
            router.publish(b"before", name)
        added = contexts.add_partitions(2)
        for name in [*names, *(f"new {number}" for number in range(30))]:
            router.publish(b"after", name)
    found = Partitions(faces.amqp_url, Layout.numbered(faces.layout.super_stream, 5), CONTEXTS)
    assert all(found.of_set(name) == {faces.layout.route(name).stream: [b"before", b"after"]} for name in names)
    assert all(found.bodies()[stream] for stream in added)


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


@pytest.mark.parametrize(("connect", "is_intercepted"), [(aio_pika.connect, False), (aio_pika.connect_robust, True)])
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


async def test_what_gives_no_confirms_is_refused(layout: Layout, database_url: str, amqp_url: str) -> None:
    """Neither another connection of pika nor a non-channel will do, nor a router where a receipt is requested."""
    with (
        broker_connection(amqp_url) as bare,
        relatum.ContextRouter(layout.super_stream, database_url) as blocking,
        pytest.raises(errors.ConfigurationError, match="BlockingChannel"),
    ):
        blocking.publish(bare._impl, b"", of_context("x"))
    async with (
        await aio_pika.connect(amqp_url) as connection,
        relatum.AsyncContextRouter(unique_name(), database_url) as router,
    ):
        with pytest.raises(errors.ConfigurationError, match="channel"):
            await router.publish(object(), task_message("x"))  # type: ignore[arg-type]
        relatum.intercept(connection, database=database_url)
        with pytest.raises(errors.ConfigurationError, match="receipt"):
            await relatum.publish_async(router.exchange(await connection.channel()), task_message("x"), "")  # type: ignore[arg-type]
        relatum.release(connection)


def test_a_closed_router_sends_nothing(faces: Faces, partitions: Partitions) -> None:
    """A closed router refuses messages of known, of new and of no contexts."""
    with faces.opened() as router:
        router.publish(b"", "x")
        router.close()
        for name in (None, "x", "y"):
            with pytest.raises(errors.ConfigurationError, match="closed"):
                router.publish(b"", name)
    assert sum(map(len, partitions.bodies().values())) == 1


def test_a_publisher_that_slept_through_several_moves_breaks_no_order(moves: Moves) -> None:
    """A message that slept through moves away and back comes after what others published in the meantime."""
    others = replace(moves.faces, face="blocking")

    def meanwhile() -> None:
        moves.contexts.move(["x"], moves.target)
        with others.opened() as awake:
            awake.publish(b"2", "x")
        moves.contexts.move(["x"], moves.home)

    with moves.router() as router:
        router.publish(b"1", "x")
        router.sleep_before_next(meanwhile)
        router.publish(b"3", "x")
    moves.assert_consumed(b"1", b"2", b"3")


def test_a_moving_context_is_waited_for_and_no_other(moves: Moves) -> None:
    """During a move its context raises `ContextMoving` and sends nothing, but for a message ahead of the fence."""
    with moves.router() as router:
        router.publish(b"1", "x")
        with moves.held("fencing") as move:
            router.sleep_before_next(move.begin)
            router.publish(b"2", "x")
            with pytest.raises(errors.ContextMoving) as caught:
                router.publish(b"never", "x")
            router.publish(b"other", "another")
        assert (caught.value.context, caught.value.move_id) == ("x", moves.contexts.moves(latest=1)[0].move_id)
        router.publish(b"3", "x")
    bodies = moves.faces.partitions.bodies()
    assert not any(b"never" in each for each in bodies.values())
    assert bodies[moves.target][-1] == b"3"


def test_a_stray_of_a_move_that_stands_still_is_settled_later(moves: Moves) -> None:
    """A stray's outcome is unknown until `settle` adopts it, and nothing of its context overtakes it."""
    with moves.router() as router:
        router.publish(b"1", "x")
        with moves.held("fenced") as move:
            router.sleep_before_next(move.begin)
            with pytest.raises(errors.PublishOutcomeUnknown) as caught:
                router.publish(b"2", "x")
            with pytest.raises(errors.PublishOutcomeUnknown):
                router.settle(caught.value, 0.05)
            with pytest.raises(errors.ContextMoving):
                router.publish(b"never", "x")
            assert pickle.loads(pickle.dumps(caught.value)).in_stream is None
        assert router.settle(caught.value) == ()
        router.publish(b"3", "x")
    moves.assert_consumed(b"1", b"2", b"3")


def test_settling_may_take_longer_than_publishing(
    layout: Layout, place: Place, contexts: SerializationContexts, home: str
) -> None:
    """A search for a stray, of a partition that grew while the publisher slept, has the seconds that `settle` has."""
    with Proxy.to(place.stream_url) as line, confirming(place.amqp) as channel:
        broker = Broker(place.amqp, stream_url=line.url(place.stream_url))
        with relatum.ContextRouter(
            layout.super_stream, place.database, ContextOptions(timeout_s=0.5), broker=broker
        ) as r:

            def meanwhile() -> None:
                contexts.move(["x"], other_than(layout, home))
                line.mode = "frozen"

            r.publish(channel, b"1", of_context("x"))
            sleeping(channel, meanwhile)
            with pytest.raises(errors.PublishOutcomeUnknown) as caught:
                r.publish(channel, b"2", of_context("x"))
            thaw = threading.Timer(2.0, setattr, (line, "mode", "pass"))
            thaw.start()
            assert caught.value.settle(LIMIT_S) == ()
            thaw.join()


@pytest.mark.parametrize(
    ("faces", "when_away", "goes_on"),
    [
        (("blocking", SETS), "known", True),
        (("asyncio", SETS), "known", True),
        (("asyncio", CONTEXTS), "wait", False),
        (("blocking", CONTEXTS), "fail", False),
    ],
    indirect=["faces"],
)
def test_known_names_go_on_without_the_database(faces: Faces, database_url: str, when_away: str, goes_on: bool) -> None:
    """With "known", a known name's messages are published; else they are a retryable error, as a new name's are."""
    with Proxy.to(database_url) as proxy:
        options = {"when_database_away": when_away, "timeout_s": 0.5}
        with faces.opened(proxy.url(database_url), **options) as router:
            until_answered(lambda: router.publish(b"1", "s1"))
            proxy.accepts = False
            proxy.reset()
            if goes_on:
                router.publish(b"2", "s1")
            with pytest.raises(errors.DatabaseUnavailable):
                router.publish(b"x", "s2")
            if not goes_on:
                # A message may be confirmed before its database is seen to be down: then its place is not known.
                with pytest.raises((errors.DatabaseUnavailable, errors.PublishOutcomeUnknown)):
                    wait_until(lambda: router.publish(b"2", "s1") and False, what="the end of what was read before")
            proxy.accepts = True
            until_answered(lambda: router.publish(b"3", "s1"))
            until_answered(lambda: router.publish(b"4", "s2"))
    (bodies,) = faces.partitions.of_set("s1").values()
    assert (bodies[0], bodies[-1]) == (b"1", b"3")
    assert (b"2" in bodies) or not goes_on
    assert list(faces.partitions.of_set("s2").values()) == [[b"4"]]


def test_a_database_that_goes_away_after_the_confirm_leaves_the_outcome_unknown(faces: Faces, home: str) -> None:
    """No result comes before the check; `settle` does it when PostgreSQL is back, and nothing is sent twice."""
    options = {"timeout_s": WAIT_S, "trust_clock": False}
    with Proxy.to(faces.database_url) as proxy, faces.opened(proxy.url(faces.database_url), **options) as router:
        router.publish(b"1", "x")

        def go_away() -> None:
            proxy.accepts = False
            proxy.reset()

        router.sleep_before_next(go_away)
        with pytest.raises(errors.PublishOutcomeUnknown) as caught:
            router.publish(b"2", "x")
        assert caught.value.in_stream is None
        proxy.accepts = True
        assert router.settle(caught.value) == ()
    assert faces.partitions.bodies()[home] == [b"1", b"2"]


def test_a_router_settles_in_the_stream_it_knows(
    layout: Layout, home: str, amqp_url: str, stream_url: str, database_url: str
) -> None:
    """Settling looks in the partition that the router chose, and is an error while the stream port is away."""
    with (
        Proxy.to(amqp_url) as proxy,
        Proxy.to(stream_url) as alone,
        relatum.ContextRouter(layout.super_stream, database_url, broker=amqp_url) as router,
    ):
        connection = pika.BlockingConnection(pika.URLParameters(proxy.url(amqp_url)))
        channel = relatum.intercept(connection, broker=Broker(amqp_url, stream_url=alone.url(stream_url))).channel()
        channel.confirm_delivery()
        router.publish(channel, b"1", of_context("x"))
        lose_confirm(proxy, amqp_url, home)
        with pytest.raises(errors.PublishOutcomeUnknown) as caught:
            router.publish(channel, b"2", of_context("x"))
        alone.accepts = False
        with pytest.raises(errors.BrokerUnavailable):
            caught.value.settle(0.5)
        alone.accepts = True
        (place,) = caught.value.settle()
    assert place.stream == home


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_confirm_that_does_not_come_is_settled_from_the_stream(moves: Moves, is_moved: bool) -> None:
    """A message without a confirm is found in the stream ahead of a fence, and counts as rejected behind it."""
    with Proxy.to(moves.faces.amqp_url) as proxy:

        def meanwhile() -> None:
            if is_moved:
                moves.contexts.move(["x"], moves.target)
            lose_confirm(proxy, moves.faces.amqp_url, moves.home)

        with moves.router(through=proxy.url(moves.faces.amqp_url)) as router:
            router.publish(b"1", "x")
            router.sleep_before_next(meanwhile)
            with pytest.raises(errors.PublishOutcomeUnknown) as caught:
                router.publish(b"2", "x")
            if is_moved:
                with pytest.raises(errors.PublishRejected):
                    router.settle(caught.value)
            else:
                assert [place.stream for place in router.settle(caught.value)] == [moves.home]
    expected = [b"1"] if is_moved else [b"1", b"2"]
    moves.assert_consumed(*expected)


def test_a_router_that_is_closed_meanwhile_does_not_know(layout: Layout, database_url: str, amqp_url: str) -> None:
    """Where a router is closed between the confirm and the check, the caller gets an unknown outcome."""
    router = relatum.ContextRouter(layout.super_stream, database_url, ContextOptions(trust_clock=False))
    with broker_connection(amqp_url) as connection:
        channel: Any = connection.channel()
        channel.confirm_delivery()
        publish = channel.basic_publish

        def publish_and_close(*args: Any, **kwargs: Any) -> None:
            publish(*args, **kwargs)
            router.close()

        channel.basic_publish = publish_and_close
        with pytest.raises(errors.PublishOutcomeUnknown, match="the router is closed"):
            router.publish(channel, b"1", of_context("a"))
        with pytest.raises(errors.ConfigurationError, match="the router is closed"):
            router.publish(channel, b"2", of_context("a"))


def test_partitions_are_known_until_the_broker_was_asked_again(layout: Layout, place: Place) -> None:
    """Where one thread finds a partition missing, another that is about to choose one still can."""
    with relatum.ContextRouter(layout.super_stream, place.database, broker=place.amqp) as router:
        core = router._core
        core.open(with_database=False)
        core.has_layout = False
        assert not core.has_layout
        assert core.unnamed("x").stream in {each.stream for each in layout}


async def test_a_task_that_publishes_while_its_router_is_closed_is_told(layout: Layout, place: Place) -> None:
    """Closing is not a cancellation: a task that waits for a thread of the router gets an error it can catch."""
    router = relatum.AsyncContextRouter(layout.super_stream, place.database)
    async with asyncio.timeout(240), await aio_pika.connect(place.amqp) as connection:
        channel = await connection.channel()
        await router.open(connection)
        publishing = [asyncio.create_task(router.publish(channel, task_message(f"c{number}"))) for number in range(200)]
        await asyncio.sleep(0)
        await router.close()
        ends = await asyncio.gather(*publishing, return_exceptions=True)
    assert not [end for end in ends if isinstance(end, asyncio.CancelledError)]
    assert all(isinstance(end, errors.ConfigurationError | errors.PublishOutcomeUnknown | Basic.Ack) for end in ends), (
        set(map(type, ends))
    )


def task_message(name: str, body: bytes = b"", **properties: Any) -> aio_pika.Message:
    return aio_pika.Message(body, headers={"serialization_context": name}, **properties)


@of_tasks
async def test_a_wait_for_a_moving_context_can_be_cancelled(moves: Moves) -> None:
    """A cancelled wait for a move sends nothing, and the next message goes to the target."""
    async with moves.in_loop() as (router, channel):
        await router.publish(channel, task_message("x", b"1"))
        with moves.held("fenced") as move:
            await asyncio.to_thread(move.begin)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await router.publish(channel, task_message("x", b"cancelled"))
            await asyncio.to_thread(move.go)
        await router.publish(channel, task_message("x", b"2"))
    moves.assert_consumed(b"1", b"2")


@of_tasks
async def test_an_adoption_is_waited_for_however_often_its_task_is_cancelled(moves: Moves) -> None:
    """A cancelled task waits for its adoption to end, so that the next message does not adopt the stray again."""
    is_there, may_go = threading.Event(), threading.Event()
    async with moves.in_loop() as (router, channel):
        await router.publish(channel, task_message("x", b"before"))
        adopt = router._core.adopt

        def held(stream: str, adoption: Any) -> None:
            router._core.adopt = adopt
            is_there.set()
            assert may_go.wait(LIMIT_S)
            adopt(stream, adoption)

        router._core.adopt = held
        sleeping_task(channel, lambda: asyncio.to_thread(moves.contexts.move, ["x"], moves.target))
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
    moves.assert_consumed(b"before", b"stray", b"after")
