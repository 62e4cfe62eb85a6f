"""Intercepted kombu connections and pools against a real broker."""

import copy
import gc
import logging
import select
import threading
import time
import weakref
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import amqp
import kombu
import pytest
import sqlalchemy as sa
from amqp import spec
from kombu import Connection, Exchange, Producer, Queue, pools

import relatum
from relatum.errors import (
    ConfigurationError,
    HeadersRefused,
    InvalidRelationshipKey,
    NotAStream,
    PublishNacked,
    PublishOutcomeUnknown,
    PublishRejected,
    PublishUnroutable,
    UsedAfterFork,
)
from relatum.ids import MessageId
from relatum.reading import StreamReader
from relatum.uuid7 import time_us_of
from relatum_consumer import Relations
from tests.support import broker_connection, unique_name, wait_recorded, wait_until
from tests.support.forking import in_child
from tests.support.proxy import Proxy

CONFIRMS = {"confirm_publish": True}

TOO_LARGE = 1 << 46
"""Bytes that no machine has for the stack of a thread: none is started."""


@pytest.fixture
def connection(amqp_url: str) -> Iterator[Connection]:
    """A connection with confirms, not intercepted yet, and not open."""
    with Connection(amqp_url, transport_options=CONFIRMS) as connection:
        yield connection
        relatum.release(connection)


@pytest.fixture
def queue(amqp_url: str) -> Iterator[str]:
    """The name of a new classic queue."""
    name = unique_name()
    with broker_connection(amqp_url) as connection:
        connection.channel().queue_declare(name, durable=True)
        yield name
        connection.channel().queue_delete(name)


def get(connection: Connection, queue: str) -> Any:
    """The next message of a queue, as kombu gives it."""
    with connection.channel() as channel:
        got = wait_until(lambda: channel.basic_get(queue, no_ack=True), what="a message")
        return channel.message_to_python(got)


def test_the_connection_stays_what_it_is(connection: Connection) -> None:
    """The same object comes back, of the same class, not opened by us, and its channels are kombu's own."""
    assert relatum.intercept(connection) is connection
    assert type(connection) is Connection
    assert not connection.connected
    assert type(connection.channel()) is kombu.transport.pyamqp.Channel


def test_messages_get_what_they_lack(connection: Connection, queue: str) -> None:
    """What a producer publishes arrives with an id that says the time; all else is as it was."""
    with Connection(**dict(connection._info())) as bare:
        Producer(bare).publish({"a": 1}, routing_key=queue, headers={"order_id": "1"}, app_id="shop", priority=3)
        expected = get(bare, queue)
    relatum.intercept(connection, keys=["order_id"])
    Producer(connection).publish({"a": 1}, routing_key=queue, headers={"order_id": "1"}, app_id="shop", priority=3)
    message = get(connection, queue)
    assert message.payload == {"a": 1}
    assert abs(time_us_of(message.properties.pop("message_id")) - time.time() * 1e6) < 60e6
    assert message.properties == expected.properties
    assert relatum.statistics(connection).published == 1


def test_a_message_of_an_id_of_the_callers_gets_a_time(connection: Connection, queue: str) -> None:
    """Its id is not known to say the time, so a header does."""
    Producer(relatum.intercept(connection)).publish("", routing_key=queue, message_id="mine")
    message = get(connection, queue)
    assert message.properties["message_id"] == "mine"
    assert abs(message.headers["relatum_time"] - time.time() * 1e6) < 60e6


def test_the_callers_objects_are_not_changed(connection: Connection, queue: str) -> None:
    """Headers given to a producer, and a message of py-amqp's, may serve for many; a subclass keeps its class."""

    class Marked(amqp.Message):
        def _serialize_properties(self) -> Any:
            self.properties["type"] = "marked"
            return super()._serialize_properties()

    channel = relatum.intercept(connection).channel()
    headers = {"a": {"b": [1]}}
    before = copy.deepcopy(headers)
    Producer(channel).publish("x", routing_key=queue, headers=headers, message_id="mine")
    assert headers == before
    ids = []
    for message in (amqp.Message("text"), Marked("text")):
        for _ in range(2):
            channel.basic_publish(message, routing_key=queue)
        assert message.properties == {}
    get(connection, queue)
    for _ in range(4):
        got = get(connection, queue)
        ids.append((got.properties["message_id"], got.properties.get("type")))
    assert len(dict(ids)) == 4
    assert [kind for _, kind in ids] == [None, None, "marked", "marked"]


def test_mistakes_raise_what_kombu_raises(connection: Connection, queue: str) -> None:
    """A call that py-amqp does not take fails as it does without us, before anything is sent."""
    channel = connection.channel()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (("no message",), {}),
        ((amqp.Message(""),), {"nonsense": 1}),
        ((amqp.Message("", application_headers=[1]),), {}),
        ((amqp.Message("", application_headers={"a": object()}),), {}),
        ((amqp.Message("", reply_to="x" * 256),), {}),
    ]

    def errors() -> list[type[BaseException]]:
        found = []
        for args, kwargs in calls:
            sent = channel.connection.bytes_sent
            with pytest.raises(Exception) as caught:
                channel.basic_publish(*args, routing_key=queue, **kwargs)
            assert channel.connection.bytes_sent == sent
            found.append(type(caught.value))
        return found

    channel.basic_publish(amqp.Message(""), routing_key=queue)
    bare = errors()
    relatum.intercept(connection)
    assert errors() == bare
    assert relatum.statistics(connection).published == 0


def test_channels_that_are_open_already_are_covered(connection: Connection, queue: str) -> None:
    """So is the one that kombu opens by itself, and all of the connection that comes after this one."""
    early, default = connection.channel(), connection.default_channel
    relatum.intercept(connection)
    for channel in (early, default, connection.connection.channel()):
        channel.basic_publish(amqp.Message(""), routing_key=queue)
        assert get(connection, queue).properties["message_id"]
    connection.close()
    Producer(connection).publish("", routing_key=queue)
    assert get(connection, queue).properties["message_id"]


def test_a_lost_connection_is_opened_again_and_goes_on(amqp_url: str, queue: str) -> None:
    """A producer that may retry publishes over the next connection, through us again."""
    with Proxy.to(amqp_url) as proxy, Connection(proxy.url(amqp_url), transport_options=CONFIRMS) as connection:
        producer = Producer(relatum.intercept(connection))
        producer.publish("1", routing_key=queue)
        proxy.reset()
        producer.publish("2", routing_key=queue, retry=True, retry_policy={"interval_start": 0})
        assert [bool(get(connection, queue).properties["message_id"]) for _ in range(2)] == [True, True]


def test_a_connection_that_was_lost_before_is_the_clients_own_error(amqp_url: str, queue: str) -> None:
    """py-amqp notices as it is about to publish: nothing was sent, so nothing is unknown."""
    with Proxy.to(amqp_url) as proxy, Connection(proxy.url(amqp_url), transport_options=CONFIRMS) as connection:
        channel = relatum.intercept(connection).channel()
        channel.basic_publish(amqp.Message(""), routing_key=queue)
        proxy.cut()
        wait_until(lambda: select.select([channel.connection.sock], [], [], 1)[0], what="the end of the connection")
        with pytest.raises(connection.connection_errors) as caught:
            channel.basic_publish(amqp.Message(""), routing_key=queue)
        assert not isinstance(caught.value, PublishOutcomeUnknown)


def test_a_bad_key_is_refused_before_anything_is_sent(connection: Connection, queue: str) -> None:
    """Neither a bad key nor bombs of headers reach the broker; the channel stays usable."""
    channel = relatum.intercept(connection, keys=["order_id"]).channel()
    producer = Producer(channel)
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"in": deep}
    sent = channel.connection.bytes_sent
    with pytest.raises(InvalidRelationshipKey):
        producer.publish("", routing_key=queue, headers={"order_id": [1]})
    for headers in (deep, {"a": "x" * 200_000}, {str(n): n for n in range(5000)}):
        with pytest.raises(HeadersRefused):
            producer.publish("", routing_key=queue, headers=headers)
    assert channel.connection.bytes_sent == sent
    producer.publish("", routing_key=queue)


def test_skipped_values_are_published(connection: Connection, queue: str, caplog: pytest.LogCaptureFixture) -> None:
    """With on_invalid="skip" the message goes out as it is."""
    producer = Producer(relatum.intercept(connection, keys=["order_id"], on_invalid="skip"))
    with caplog.at_level(logging.WARNING):
        producer.publish("", routing_key=queue, headers={"order_id": {"a": 1}})
    assert get(connection, queue).headers["order_id"] == {"a": 1}
    assert "order_id" in caplog.text


def test_a_key_is_lifted_from_the_body(connection: Connection, queue: str) -> None:
    """As the client encoded it."""
    key = relatum.KeyDefinition("size", lambda body: str(len(body)))
    Producer(relatum.intercept(connection, keys=[key])).publish({"a": 1}, routing_key=queue)
    assert get(connection, queue).headers == {"size": str(len('{"a": 1}'))}


def test_an_unroutable_message_is_both_errors(connection: Connection, amqp_url: str) -> None:
    """py-amqp raises a return where nobody listens; the confirm behind it is not taken for the next message's."""
    full = unique_name()
    channel = relatum.intercept(connection).channel()
    channel.queue_declare(full, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    producer = Producer(channel)
    producer.publish("", routing_key=full)
    for _ in range(3):
        with pytest.raises(amqp.ChannelError) as caught:
            producer.publish("", routing_key=unique_name(), mandatory=True)
        assert isinstance(caught.value, PublishUnroutable)
        assert caught.value.in_stream is False
    with pytest.raises(amqp.exceptions.MessageNacked) as nacked:  # noqa: PT012 - one of them is nacked
        for _ in range(10):
            producer.publish("", routing_key=full)
    assert isinstance(nacked.value, PublishNacked)
    assert nacked.value.in_stream is False
    channel.queue_delete(full)
    assert dict(relatum.statistics(connection).errors) == {"unroutable": 3, "nacked": 1}


def test_a_returned_message_is_shown_as_it_was_published(connection: Connection) -> None:
    """Whoever is told of what came back sees what was published, not what was added."""
    returned: list[dict[str, Any]] = []
    producer = Producer(
        relatum.intercept(connection).channel(),
        on_return=lambda _error, _exchange, _key, message: returned.append(message.properties),
    )
    given = [{}, {"a": 1}, {"relatum_time": 1_000_000}]
    for headers in given:
        producer.publish("", routing_key=unique_name(), mandatory=True, headers=headers)
    producer.publish("", routing_key=unique_name(), mandatory=True, message_id="mine")
    wait_until(lambda: len(returned) == 4 or connection.drain_events(timeout=1), what="all to come back")
    assert [properties.get("application_headers", {}) for properties in returned] == [*given, {}]
    assert [properties.get("message_id") for properties in returned] == [None, None, None, "mine"]


def test_a_missing_exchange_is_a_rejection(connection: Connection, queue: str) -> None:
    """The broker closes the channel, which py-amqp opens again: the message is nowhere, and the next one goes."""
    channel = relatum.intercept(connection).channel()
    with pytest.raises(amqp.NotFound) as caught:
        channel.basic_publish(amqp.Message(""), exchange=unique_name())
    assert isinstance(caught.value, PublishRejected)
    assert caught.value.in_stream is False
    channel.basic_publish(amqp.Message(""), routing_key=queue)
    assert get(connection, queue).properties["message_id"]


def test_an_error_of_an_earlier_message_is_the_clients_own(amqp_url: str, queue: str) -> None:
    """Without confirms, what went wrong with one message is raised where the next one would go: that was not sent."""
    with Connection(amqp_url) as connection:
        channel = relatum.intercept(connection).channel()
        channel.basic_publish(amqp.Message("1"), exchange=unique_name())

        def publish() -> type[BaseException] | None:
            try:
                channel.basic_publish(amqp.Message("2"), routing_key=queue)
            except amqp.NotFound as error:
                return type(error)
            return None

        assert wait_until(publish, what="the error") is amqp.NotFound
        relatum.release(connection)


def test_a_lost_confirm_leaves_the_outcome_unknown(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """The link goes half-open: the message arrives, its confirm does not. The error settles it from the stream."""
    options = {"broker_url": amqp_url, "stream_url": stream_url}
    with Proxy.to(amqp_url) as proxy, Connection(proxy.url(amqp_url), transport_options=CONFIRMS) as connection:
        producer = Producer(relatum.intercept(connection, **options))
        producer.publish("first", routing_key=stream_name)
        proxy.mode = "blackhole_replies"
        with pytest.raises(TimeoutError) as caught:
            producer.publish("second", routing_key=stream_name, confirm_timeout=0.5)
        error = caught.value
        assert isinstance(error, PublishOutcomeUnknown)
        assert error.in_stream is None
        (place,) = error.settle()
        assert place.stream == stream_name
        assert place.offset >= 1
        proxy.mode = "pass"
        relatum.release(connection)


def test_an_unknown_outcome_is_settled_from_the_copy(amqp_url: str, stream_url: str, queue: str) -> None:
    """The stream of copies tells that it arrived; what the stream lacks may be in the queue all the same."""
    stream = unique_name()
    options = {"broker_url": amqp_url, "stream_url": stream_url, "copy_to": stream}
    with Proxy.to(amqp_url) as proxy, Connection(proxy.url(amqp_url), transport_options=CONFIRMS) as connection:
        producer = Producer(relatum.intercept(connection, **options))
        producer.publish("first", routing_key=queue)
        errors = []
        for mode in ("blackhole_replies", "blackhole"):
            proxy.mode = mode
            with pytest.raises(PublishOutcomeUnknown) as caught:
                producer.publish(mode, routing_key=queue, confirm_timeout=0.5)
            errors.append(caught.value)
        proxy.mode = "pass"
        assert errors[0].settle() == (MessageId(stream, 1),)
        with pytest.raises(PublishOutcomeUnknown, match="where it is not looked for"):
            errors[1].settle(0.5)
        relatum.release(connection)
    with broker_connection(amqp_url) as other:
        other.channel().queue_delete(stream)


def test_intercepting_twice_is_once(connection: Connection) -> None:
    """The same options again change nothing; other options are an error."""
    channel = relatum.intercept(connection, keys=["a"]).channel()
    publisher = vars(channel)["basic_publish"]
    relatum.intercept(connection, keys=["a"])
    assert vars(channel)["basic_publish"] is publisher
    with pytest.raises(ConfigurationError, match="release"):
        relatum.intercept(connection, keys=["b"])


@pytest.mark.parametrize("confirms", [True, False])
def test_release_leaves_no_trace(amqp_url: str, queue: str, confirms: bool) -> None:
    """Afterwards connection and channels have the attributes they had, and messages go out bare."""
    with Connection(amqp_url, transport_options={"confirm_publish": confirms}) as connection:
        channel = connection.channel()
        owners = (connection, connection.connection, channel)
        before = [dict(vars(owner)) for owner in owners]
        told = dict(channel._callbacks)
        relatum.intercept(connection)
        late = connection.channel()
        assert channel._callbacks[spec.Basic.Return] != told[spec.Basic.Return]
        assert relatum.release(connection) is connection
        late_ones = vars(late).keys()
        assert [vars(owner).keys() for owner in owners] == [each.keys() for each in before]
        assert channel._callbacks == told
        assert late_ones == before[2].keys()
        assert vars(channel).get("basic_publish") == before[2].get("basic_publish")
        for one in (channel, late, connection.channel()):
            one.basic_publish(amqp.Message(""), routing_key=queue)
            assert "message_id" not in get(connection, queue).properties
        relatum.release(connection)


def test_channels_and_connections_that_ended_are_not_kept(connection: Connection, queue: str) -> None:
    """A program may open one for each message, for months."""
    relatum.intercept(connection)
    ended = []
    for _ in range(3):
        with connection.channel() as channel:
            channel.basic_publish(amqp.Message(""), routing_key=queue)
            ended.append(weakref.ref(channel))
    with connection.clone() as clone:
        Producer(clone).publish("", routing_key=queue)
        ended += [weakref.ref(clone), weakref.ref(clone.connection)]
    del channel, clone
    gc.collect()
    assert [reference() for reference in ended] == [None] * len(ended)


def test_pools_and_clones_are_covered_and_others_are_not(connection: Connection, queue: str) -> None:
    """An equal connection of somebody else's has pools of its own in `kombu.pools`, and they publish bare."""
    relatum.intercept(connection)
    bare = Connection(**dict(connection._info()))

    def publish(producer: Producer) -> bool:
        producer.publish("", routing_key=queue)
        return "message_id" in get(connection, queue).properties

    with pools.producers[connection].acquire(block=True) as producer:
        assert publish(producer)
    with pools.producers[bare].acquire(block=True) as producer:
        assert not publish(producer)
    pool = connection.Pool(2)
    with connection.clone() as clone, pool.acquire() as pooled:
        assert publish(Producer(clone))
        assert publish(Producer(pooled))
        relatum.release(connection)
        assert not publish(Producer(pooled))
    pool.force_close_all()
    with pools.producers[connection].acquire(block=True) as producer:
        assert not publish(producer)
    pools.reset()


@pytest.mark.parametrize("of", ["connections", "producers"])
def test_a_pool_is_intercepted(connection: Connection, queue: str, of: str) -> None:
    """Connections that were opened before, and those to come, publish through us; released, they do not."""
    pool = pools.ProducerPool(connection.Pool(2), limit=2)
    with pool.acquire(block=True) as producer:
        producer.publish("", routing_key=queue)
    get(connection, queue)
    given = pool if of == "producers" else pool.connections
    assert relatum.intercept(given) is given
    taken = [pool.acquire(block=True) for _ in range(2)]
    for producer in taken:
        producer.publish("", routing_key=queue)
        assert get(connection, queue).properties["message_id"]
    relatum.release(given)
    for producer in taken:
        producer.publish("", routing_key=queue)
        assert "message_id" not in get(connection, queue).properties
        producer.release()
    pool.connections.force_close_all()


def test_what_cannot_be_intercepted_is_named(connection: Connection) -> None:
    """A producer, and a transport that has no streams, are errors that say what to give instead."""
    with pytest.raises(ConfigurationError, match=r"Producer"):
        relatum.intercept(Producer(connection))
    with pytest.raises(ConfigurationError, match="pyamqp"):
        relatum.intercept(Connection("memory://"))
    with pytest.raises(ConfigurationError, match="give its connection"):
        relatum.intercept(connection.ChannelPool(1))


def test_what_is_published_to_a_stream_is_recorded(
    connection: Connection, amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """The recorder in this process finds the streams that the connection publishes to, by an exchange too."""
    exchange = Exchange(unique_name("exchange"), type="topic")
    relatum.intercept(connection, database=database_url, keys=["order_id"])
    producer = Producer(connection, exchange=exchange)
    exchange(connection.default_channel).declare()
    with broker_connection(amqp_url) as pika:
        pika.channel().queue_bind(stream_name, exchange.name, "#")
    for number in range(20):
        producer.publish({"n": number}, routing_key="orders", headers={"order_id": str(number % 2)})
    wait_recorded(amqp_url, engine, stream_name)
    with Relations(amqp_url, engine.url) as relations:
        assert [m.offset for m in relations.find("order_id", "1")] == list(range(1, 20, 2))
    relatum.release(connection)
    exchange(connection.default_channel).delete()


@pytest.mark.parametrize("own", [None, ["another"]])
def test_copies_of_messages_to_queues_lie_in_a_stream(
    connection: Connection, amqp_url: str, database_url: str, engine: sa.Engine, queue: str, own: list[str] | None
) -> None:
    """What goes to a queue by the default exchange lies in the stream as well, and its consumers see no difference."""
    stream, headers = unique_name(), {"order_id": "1"} | ({} if own is None else {"BCC": own})
    relatum.intercept(connection, database=database_url, keys=["order_id"], copy_to=stream)
    producer = Producer(connection)
    producer.publish("task", routing_key=queue, headers=headers)
    producer.publish("not copied", exchange=Exchange("amq.direct"), routing_key=queue)
    producer.publish("only once", routing_key=stream)
    with pytest.raises(PublishUnroutable):
        producer.publish("to nobody", routing_key=unique_name(), mandatory=True)
    message = get(connection, queue)
    assert message.headers == {"order_id": "1"}
    wait_recorded(amqp_url, engine, stream)
    with Relations(amqp_url, engine.url) as relations, StreamReader.open(amqp_url) as reader:
        (found,) = relations.find("order_id", "1").messages
        assert found.properties.message_id == message.properties["message_id"]
        assert found.body == message.body.encode()
        assert [each.body for each in reader.iterate(stream)] == [b"task", b"only once"]
    relatum.release(connection)
    with connection.channel() as channel:
        channel.queue_delete(stream)


def test_copies_into_what_is_no_stream_are_refused(connection: Connection, queue: str) -> None:
    """Nothing is sent where copies would pile up in a queue."""
    producer = Producer(relatum.intercept(connection, copy_to=queue))
    for _ in range(2):
        with pytest.raises(NotAStream):
            producer.publish("", routing_key="anywhere")
    relatum.release(connection)
    with pytest.raises(ConfigurationError, match="copy_to"):
        relatum.intercept(connection, copy_to="")


def test_copies_of_decimal_numbers_are_refused(connection: Connection, queue: str) -> None:
    """RabbitMQ would end the connection, after the queue had the message; another goes on after that."""
    stream = unique_name()
    producer = Producer(relatum.intercept(connection, copy_to=stream))
    with pytest.raises(HeadersRefused, match="'price' is a decimal number") as refused:
        producer.publish("", routing_key=queue, headers={"price": Decimal("1.5")})
    assert refused.value.reason == "decimal"
    producer.publish("next", routing_key=queue, headers={"price": "1.5"})
    assert get(connection, queue).payload == "next"
    relatum.release(connection)
    connection.default_channel.queue_delete(stream)


def test_it_publishes_where_no_thread_can_be_started(
    connection: Connection,
    amqp_url: str,
    database_url: str,
    engine: sa.Engine,
    stream_name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As at the end of the interpreter, with Python 3.12: it is said, `release` ends, and the next recorder does it."""
    relatum.intercept(connection, database=database_url, keys=["order_id"])
    usual = threading.stack_size(TOO_LARGE)
    try:
        Producer(connection).publish("", routing_key=stream_name, headers={"order_id": "1"})
        relatum.release(connection)
    finally:
        threading.stack_size(usual)
    assert "this process publishes and records nothing" in caplog.text
    relatum.intercept(connection, database=database_url, keys=["order_id"])
    Producer(connection).publish("", routing_key=stream_name, headers={"order_id": "1"})
    wait_recorded(amqp_url, engine, stream_name)
    with Relations(amqp_url, engine.url) as relations:
        assert [message.offset for message in relations.find("order_id", "1")] == [0, 1]


def test_a_child_has_an_interception_of_its_own(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Intercepted before a fork, a connection works in whichever process opens it; the parent's channels do not."""
    with Connection(amqp_url, transport_options=CONFIRMS) as connection:
        relatum.intercept(connection, database=database_url, keys=["order_id"])

        def publish(value: str) -> int:
            with connection.clone() as clone:
                Producer(clone).publish("", routing_key=stream_name, headers={"order_id": value})
            return relatum.statistics(connection).published

        assert in_child(lambda: publish("child before")) == 1
        assert publish("parent") == 1
        channel = connection.channel()
        channel.basic_publish(amqp.Message(""), routing_key=stream_name)

        def in_the_child() -> int:
            with pytest.raises(UsedAfterFork):
                channel.basic_publish(amqp.Message(""), routing_key=stream_name)
            return publish("child after")

        assert in_child(in_the_child) == 1
        channel.basic_publish(amqp.Message(""), routing_key=stream_name)
        wait_recorded(amqp_url, engine, stream_name)
        with Relations(amqp_url, engine.url) as relations:
            for value in ("child before", "parent", "child after"):
                assert len(relations.find("order_id", value).messages) == 1
        relatum.release(connection)


def test_declared_entities_and_consumers_go_on(connection: Connection) -> None:
    """What kombu's users do besides publishing is as it was: declare, bind, consume, acknowledge."""
    relatum.intercept(connection)
    exchange = Exchange(unique_name("exchange"), type="direct")
    queue = Queue(unique_name(), exchange, routing_key="k")
    seen: list[Any] = []

    def on_message(body: Any, message: Any) -> None:
        seen.append(body)
        message.ack()

    with connection.Consumer(queue, callbacks=[on_message]):
        connection.Producer().publish({"n": 1}, exchange=exchange, routing_key="k", declare=[queue])
        wait_until(lambda: seen or connection.drain_events(timeout=30), what="the message")
    assert seen == [{"n": 1}]
    queue(connection.default_channel).delete()
    exchange(connection.default_channel).delete()
