"""Publishing to serialization contexts through pika, against a real broker and database."""

import pickle
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum.contexts import ContextOptions, SerializationContexts
from relatum.contexts.placement._entries import Placed
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
from tests.support import broker_connection, unique_name
from tests.support.proxy import Proxy
from tests.support.routing import HeldMove, consumed, in_partitions, of_context, other_than, sleeping


@pytest.fixture
def router(layout: Layout, database_url: str) -> Iterator[relatum.ContextRouter]:
    """A router that waits no longer than seconds."""
    with relatum.ContextRouter(layout.super_stream, database_url, ContextOptions(timeout_s=3.0)) as opened:
        yield opened


@pytest.fixture
def contexts(layout: Layout, database_url: str, amqp_url: str, router: relatum.ContextRouter) -> Iterator[Any]:
    """The one who moves contexts."""
    router.open(amqp_url)
    with SerializationContexts(layout.super_stream, database_url, broker=amqp_url) as opened:
        yield opened


def unreachable(url: str) -> str:
    """The URL of a database where nothing answers."""
    with Proxy.to(url) as proxy:
        return proxy.url(url)


# --- where messages go --------------------------------------------------------------------------------------------


def test_a_context_goes_where_its_name_hashes_to(
    router: relatum.ContextRouter, channel: BlockingChannel, layout: Layout, amqp_url: str
) -> None:
    """Without other wishes a context is placed as RabbitMQ's own clients route its name as a key."""
    names = [f"account {number}" for number in range(12)]
    for name in names:
        router.publish(channel, name.encode(), of_context(name))
    for stream, messages in in_partitions(amqp_url, layout).items():
        assert [each.body.decode() for each in messages] == [
            name for name in names if layout.route(name).stream == stream
        ]


def test_the_message_arrives_as_it_was_but_for_one_header(
    router: relatum.ContextRouter, channel: BlockingChannel, layout: Layout, amqp_url: str
) -> None:
    """Body, properties and headers arrive as given, with the placement added; the caller's object stays as it was."""
    given = of_context("x", content_type="text/plain", correlation_id="17", message_id="m")
    given.headers["more"] = 5
    before = dict(given.headers)
    router.publish(channel, "text", given)
    assert given.headers == before
    (message,) = in_partitions(amqp_url, layout)[layout.route("x").stream]
    assert message.body == b"text"
    assert (message.properties.content_type, message.properties.correlation_id) == ("text/plain", "17")
    placed = Placed.parse(message.headers[PLACED_HEADER])
    assert placed is not None
    assert (placed.session, placed.number) == (router.session, 1)
    assert {name: value for name, value in message.headers.items() if name != PLACED_HEADER} == before


def test_routers_that_place_a_context_at_the_same_moment_agree(
    layout: Layout, database_url: str, amqp_url: str
) -> None:
    """Eight routers of random beginnings publish the first messages of the same contexts: each is in one partition."""
    names = [f"device {number}" for number in range(20)]
    together = threading.Barrier(8)

    def publish(number: int) -> None:
        with (
            broker_connection(amqp_url) as connection,
            relatum.ContextRouter(layout.super_stream, database_url, ContextOptions(balance="round_robin")) as router,
        ):
            channel = connection.channel()
            channel.confirm_delivery()
            router.open(channel)
            together.wait(90)
            for name in names:
                router.publish(channel, b"%d" % number, of_context(name))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(publish, range(8)))
    where: dict[str, set[str]] = {name: set() for name in names}
    for stream, messages in in_partitions(amqp_url, layout).items():
        for message in messages:
            where[message.headers["serialization_context"]].add(stream)
    assert all(len(streams) == 1 for streams in where.values())


def test_added_partitions_move_no_context(
    router: relatum.ContextRouter, contexts: Any, channel: BlockingChannel, layout: Layout, amqp_url: str
) -> None:
    """A context goes on where it was when partitions are added, and new ones are placed there, too."""
    names = [f"account {number}" for number in range(30)]
    for name in names:
        router.publish(channel, b"before", of_context(name))
    added = contexts.add_partitions(2)
    for name in [*names, *(f"new {number}" for number in range(30))]:
        router.publish(channel, b"after", of_context(name))
    wider = Layout.numbered(layout.super_stream, 5)
    found = in_partitions(amqp_url, wider)
    for partition in layout:
        old = [each for each in found[partition.stream] if not each.headers["serialization_context"].startswith("new")]
        assert len([each for each in old if each.body == b"before"]) * 2 == len(old)
    assert all(found[stream] for stream in added)


def test_messages_without_a_context_need_no_database(
    layout: Layout, channel: BlockingChannel, amqp_url: str, database_url: str
) -> None:
    """Without the header, messages are spread over the partitions, with no confirms and with PostgreSQL away."""
    with (
        broker_connection(amqp_url) as connection,
        relatum.ContextRouter(layout.super_stream, unreachable(database_url), broker=amqp_url) as router,
    ):
        plain = connection.channel()
        for number in range(6):
            router.publish(plain, b"%d" % number)
        router.publish(plain, b"keyed", routing_key="hello1")
        connection.process_data_events(0)
        with pytest.raises(DatabaseUnavailable):
            router.publish(channel, b"", of_context("x"))
    found = in_partitions(amqp_url, layout)
    assert sorted(len([each for each in messages if each.body != b"keyed"]) for messages in found.values()) == [2, 2, 2]
    assert b"keyed" in [each.body for each in found[layout.route("hello1").stream]]


@pytest.mark.parametrize("keys", [(), ("serialization_context",)])
def test_it_takes_an_exchanges_place_on_intercepted_channels(
    layout: Layout, database_url: str, amqp_url: str, stream_url: str, keys: tuple[str, ...]
) -> None:
    """`basic_publish` with the router as the exchange publishes through the interceptor, stamped as all messages."""
    with broker_connection(amqp_url) as connection, relatum.ContextRouter(layout.super_stream, database_url) as router:
        relatum.intercept(connection, keys=keys)
        channel = connection.channel()
        channel.confirm_delivery()
        channel.basic_publish(router, "", b"1", of_context("x"))
        channel.basic_publish(exchange=router, routing_key="", body=b"2", properties=of_context("x"), mandatory=True)
    messages = in_partitions(amqp_url, layout)[layout.route("x").stream]
    assert [each.body for each in messages] == [b"1", b"2"]
    assert all(PLACED_HEADER in each.headers for each in messages)
    assert all(each.time_source is TimeSource.MESSAGE_ID for each in messages)


# --- refusals -----------------------------------------------------------------------------------------------------


def test_a_channel_without_confirms_is_refused(router: relatum.ContextRouter, layout: Layout, amqp_url: str) -> None:
    """Nothing is sent where the broker would not tell that it has the message."""
    with broker_connection(amqp_url) as connection:
        with pytest.raises(ConfigurationError, match="confirm"):
            router.publish(connection.channel(), b"", of_context("x"))
        with pytest.raises(ConfigurationError, match="BlockingChannel"):
            router.publish(connection._impl, b"", of_context("x"))
    assert not any(in_partitions(amqp_url, layout).values())


def test_a_closed_router_sends_nothing(
    router: relatum.ContextRouter, channel: BlockingChannel, layout: Layout, amqp_url: str
) -> None:
    """Neither messages of a context nor others, although it knows the partitions still."""
    router.publish(channel, b"", of_context("x"))
    router.close()
    for properties in (None, of_context("x"), of_context("y")):
        with pytest.raises(ConfigurationError, match="closed"):
            router.publish(channel, b"", properties)
    assert sum(len(found) for found in in_partitions(amqp_url, layout).values()) == 1


def test_a_router_has_a_super_stream(database_url: str) -> None:
    """What cannot be the name of one is told where the router is made."""
    for name in ("", None, "a\nb"):
        with pytest.raises(InvalidInput, match="super stream"):
            relatum.ContextRouter(name, database_url)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", 17, "a\0b", "x" * 1025, b"bytes"])
def test_what_cannot_name_a_context_is_refused(
    router: relatum.ContextRouter, channel: BlockingChannel, layout: Layout, amqp_url: str, name: Any
) -> None:
    """A name that is no text of 1 to 1,024 bytes without NUL is refused before anything is sent."""
    with pytest.raises(InvalidInput, match="nothing was sent"):
        router.publish(channel, b"", pika.BasicProperties(headers={"serialization_context": name}))
    assert not any(in_partitions(amqp_url, layout).values())


def test_names_are_taken_up_to_their_limit(
    router: relatum.ContextRouter, channel: BlockingChannel, layout: Layout, amqp_url: str
) -> None:
    """A name of 1,024 bytes, and one beyond ASCII, are contexts like others."""
    for name in ("x" * 1024, "Ωμέγα 🛩"):
        router.publish(channel, b"", of_context(name))
        found = in_partitions(amqp_url, layout)[layout.route(name).stream]
        assert name in [each.headers["serialization_context"] for each in found]


def test_a_super_stream_has_one_header(
    router: relatum.ContextRouter, channel: BlockingChannel, layout: Layout, database_url: str
) -> None:
    """A router that names contexts by another header than the others is refused, and nothing is sent."""
    router.publish(channel, b"", of_context("x"))
    with (
        relatum.ContextRouter(layout.super_stream, database_url, ContextOptions(header="account")) as other,
        pytest.raises(SuperStreamConflict) as caught,
    ):
        other.publish(channel, b"", pika.BasicProperties(headers={"account": "x"}))
    assert caught.value.super_stream == layout.super_stream


def test_a_super_stream_must_be_there(channel: BlockingChannel, database_url: str) -> None:
    """Where the broker has no super stream of that name, the error names it."""
    name = unique_name()
    with relatum.ContextRouter(name, database_url) as router, pytest.raises(SuperStreamNotFound) as caught:
        router.publish(channel, b"", of_context("x"))
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


def test_a_wrong_database_url_and_a_closed_router_are_refused(
    router: relatum.ContextRouter, channel: BlockingChannel
) -> None:
    """A URL of no PostgreSQL is told when the router is made; a closed router says so."""
    with pytest.raises(ConfigurationError, match="PostgreSQL"):
        relatum.ContextRouter("orders", "sqlite://")
    with pytest.raises(ConfigurationError):
        relatum.ContextRouter("orders", "postgresql://nobody@127.0.0.1:1/none", broker="http://host")
    router.close()
    router.close()
    with pytest.raises(ConfigurationError, match="closed"):
        router.publish(channel, b"", of_context("x"))


# --- moves --------------------------------------------------------------------------------------------------------


def test_a_stray_is_taken_into_its_context(
    router: relatum.ContextRouter,
    contexts: Any,
    channel: BlockingChannel,
    layout: Layout,
    amqp_url: str,
    database_url: str,
) -> None:
    """A publisher that slept across a whole move, between placement and send, breaks no order and loses nothing."""
    home = layout.route("x").stream
    target = other_than(layout, home)
    router.publish(channel, b"1", of_context("x"))
    sleeping(channel, lambda: contexts.move(["x"], target))
    router.publish(channel, b"2", of_context("x"))
    router.publish(channel, b"3", of_context("x"))
    bodies = {stream: [each.body for each in found] for stream, found in in_partitions(amqp_url, layout).items()}
    assert bodies[home][0] == b"1"
    assert bodies[home][-1] == b"2"
    assert bodies[target][-1] == b"3"
    assert consumed(layout.super_stream, database_url, amqp_url, 3) == {"x": [b"1", b"2", b"3"]}


def test_a_publisher_that_slept_through_several_moves_breaks_no_order(
    router: relatum.ContextRouter,
    contexts: Any,
    channel: BlockingChannel,
    layout: Layout,
    amqp_url: str,
    database_url: str,
) -> None:
    """Away, on, and back to where it was: the late message still comes after what others published meanwhile."""
    home = layout.route("x").stream
    target = other_than(layout, home)
    router.publish(channel, b"1", of_context("x"))

    def meanwhile() -> None:
        contexts.move(["x"], target)
        with (
            broker_connection(amqp_url) as connection,
            relatum.ContextRouter(layout.super_stream, database_url) as other,
        ):
            awake = connection.channel()
            awake.confirm_delivery()
            other.publish(awake, b"2", of_context("x"))
        contexts.move(["x"], home)

    sleeping(channel, meanwhile)
    router.publish(channel, b"3", of_context("x"))
    assert consumed(layout.super_stream, database_url, amqp_url, 3) == {"x": [b"1", b"2", b"3"]}


@pytest.mark.parametrize("state", ["fencing", "fenced"])
def test_a_moving_context_is_waited_for_and_no_other(
    router: relatum.ContextRouter, contexts: Any, channel: BlockingChannel, layout: Layout, amqp_url: str, state: str
) -> None:
    """While a move stands still, its context ends as `ContextMoving` with nothing sent; others are published to."""
    home = layout.route("x").stream
    target = other_than(layout, home)
    router.publish(channel, b"1", of_context("x"))
    with HeldMove(contexts, ["x"], target, state) as move:
        move.begin()
        with pytest.raises(ContextMoving) as caught:
            router.publish(channel, b"never", of_context("x"))
        router.publish(channel, b"other", of_context("another"))
    assert caught.value.context == "x"
    assert caught.value.move_id == contexts.moves(latest=1)[0].move_id
    router.publish(channel, b"2", of_context("x"))
    found = in_partitions(amqp_url, layout)
    bodies = [each.body for messages in found.values() for each in messages]
    assert b"never" not in bodies
    assert found[target][-1].body == b"2"


def test_a_message_before_the_fence_is_told_while_the_move_stands_still(
    router: relatum.ContextRouter, contexts: Any, channel: BlockingChannel, layout: Layout
) -> None:
    """The partition itself tells that a message lies before the fence: nobody waits for the mover."""
    router.publish(channel, b"1", of_context("x"))
    with HeldMove(contexts, ["x"], other_than(layout, layout.route("x").stream), "fencing") as move:
        sleeping(channel, move.begin)
        assert router.publish(channel, b"2", of_context("x")) is None


def test_a_stray_of_a_move_that_stands_still_is_settled_later(
    router: relatum.ContextRouter,
    contexts: Any,
    channel: BlockingChannel,
    layout: Layout,
    amqp_url: str,
    database_url: str,
) -> None:
    """Its outcome is unknown, and pickles; nothing of the context overtakes it; `settle` takes it in."""
    router.publish(channel, b"1", of_context("x"))
    with HeldMove(contexts, ["x"], other_than(layout, layout.route("x").stream), "fenced") as move:
        sleeping(channel, move.begin)
        with pytest.raises(PublishOutcomeUnknown) as caught:
            router.publish(channel, b"2", of_context("x"))
        with pytest.raises(PublishOutcomeUnknown):
            caught.value.settle(0.05)
        with pytest.raises(ContextMoving):
            router.publish(channel, b"never", of_context("x"))
        assert pickle.loads(pickle.dumps(caught.value)).in_stream is None
    assert caught.value.settle() == ()
    router.publish(channel, b"3", of_context("x"))
    assert consumed(layout.super_stream, database_url, amqp_url, 3) == {"x": [b"1", b"2", b"3"]}


def test_order_holds_under_publishers_and_moves(
    router: relatum.ContextRouter, contexts: Any, layout: Layout, amqp_url: str, database_url: str
) -> None:
    """Three threads that share a router publish their contexts while these are moved about: each stays in order."""
    streams = [each.stream for each in layout]
    rest = 60

    def publish(thread: int) -> None:
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for number in range(rest):
                for name in (f"{thread} a", f"{thread} b"):
                    router.publish(channel, b"%d" % number, of_context(name))

    chance = random.Random(17)
    with ThreadPoolExecutor(3) as threads:
        published = [threads.submit(publish, thread) for thread in range(3)]
        while not all(each.done() for each in published):
            known = [each.context for each in contexts.assignments()]
            contexts.move(chance.sample(known, min(2, len(known))), chance.choice(streams))
        for each in published:
            each.result()
    found = consumed(layout.super_stream, database_url, amqp_url, 6 * rest)
    assert found == {f"{thread} {letter}": [b"%d" % n for n in range(rest)] for thread in range(3) for letter in "ab"}


# --- what goes away -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when_database_away", ["wait", "fail"])
def test_without_the_database_nothing_is_sent(
    layout: Layout, channel: BlockingChannel, amqp_url: str, database_url: str, when_database_away: Any
) -> None:
    """A context's message is refused while PostgreSQL is away, and goes out when it is back."""
    with (
        Proxy.to(database_url) as proxy,
        relatum.ContextRouter(
            layout.super_stream,
            proxy.url(database_url),
            ContextOptions(timeout_s=3.0, when_database_away=when_database_away),
        ) as router,
    ):
        router.publish(channel, b"1", of_context("x"))
        proxy.accepts = False
        proxy.reset()
        router._core.publications._checked_at = None
        with pytest.raises(DatabaseUnavailable):
            router.publish(channel, b"never", of_context("x"))
        proxy.accepts = True
        router.publish(channel, b"2", of_context("x"))
    messages = in_partitions(amqp_url, layout)[layout.route("x").stream]
    assert [each.body for each in messages] == [b"1", b"2"]


def test_a_database_that_goes_away_after_the_confirm_leaves_the_outcome_unknown(
    layout: Layout, channel: BlockingChannel, amqp_url: str, database_url: str
) -> None:
    """The caller is not told before the check; `settle` does it when PostgreSQL is back, and nothing is sent twice."""
    with (
        Proxy.to(database_url) as proxy,
        relatum.ContextRouter(layout.super_stream, proxy.url(database_url), ContextOptions(timeout_s=3.0)) as router,
    ):
        router.publish(channel, b"1", of_context("x"))

        def go_away() -> None:
            proxy.accepts = False
            proxy.reset()

        sleeping(channel, go_away)
        with pytest.raises(PublishOutcomeUnknown) as caught:
            router.publish(channel, b"2", of_context("x"))
        assert caught.value.in_stream is None
        proxy.accepts = True
        assert caught.value.settle() == ()
    messages = in_partitions(amqp_url, layout)[layout.route("x").stream]
    assert [each.body for each in messages] == [b"1", b"2"]


def test_a_router_settles_in_the_stream_it_knows(
    router: relatum.ContextRouter, layout: Layout, amqp_url: str, stream_url: str
) -> None:
    """The router knows the partition. While the stream port is away, settling says so."""
    with Proxy.to(amqp_url) as proxy, Proxy.to(stream_url) as alone:
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
    assert place.stream == layout.route("x").stream


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_confirm_that_does_not_come_is_settled_from_the_stream(
    router: relatum.ContextRouter,
    contexts: Any,
    layout: Layout,
    amqp_url: str,
    stream_url: str,
    database_url: str,
    is_moved: bool,
) -> None:
    """It is found where it lies before the fence; behind it, it counts as rejected, and may be published again."""
    target = other_than(layout, layout.route("x").stream)
    with Proxy.to(amqp_url) as proxy:
        connection = pika.BlockingConnection(pika.URLParameters(proxy.url(amqp_url)))
        channel = relatum.intercept(connection, broker_url=amqp_url, stream_url=stream_url).channel()
        channel.confirm_delivery()
        router.publish(channel, b"1", of_context("x"))

        def meanwhile() -> None:
            if is_moved:
                contexts.move(["x"], target)
            proxy.mode = "blackhole_replies"
            connection._impl.ioloop.call_later(0.3, proxy.reset)

        sleeping(channel, meanwhile)
        with pytest.raises(PublishOutcomeUnknown) as caught:
            router.publish(channel, b"2", of_context("x"))
    if not is_moved:
        assert [place.stream for place in caught.value.settle()] == [layout.route("x").stream]
        assert consumed(layout.super_stream, database_url, amqp_url, 2) == {"x": [b"1", b"2"]}
        return
    with pytest.raises(PublishRejected):
        caught.value.settle()
    assert consumed(layout.super_stream, database_url, amqp_url, 1) == {"x": [b"1"]}
