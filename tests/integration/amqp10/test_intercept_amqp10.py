"""Intercepted connections of rabbitmq-amqp-python-client against RabbitMQ 4."""

import asyncio
import pickle
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import pika
import pytest
import sqlalchemy as sa
from rabbitmq_amqp_python_client import (
    AddressHelper,
    AmqpMessageRejectedException,
    ArgumentOutOfRangeException,
    AsyncEnvironment,
    Connection,
    Environment,
    Message,
    OutcomeState,
    Publisher,
    ValidationCodeException,
)
from rabbitmq_amqp_python_client.qpid.proton._exceptions import ConnectionException, Timeout
from rabbitmq_amqp_python_client.qpid.proton._utils import LinkDetached, SendException

import relatum
from relatum.errors import (
    ConfigurationError,
    HeadersRefused,
    InvalidRelationshipKey,
    PublishError,
    PublishNacked,
    PublishOutcomeUnknown,
    PublishRejected,
    PublishUnroutable,
)
from relatum.keys import KeyDefinition
from relatum.publishing.clients._amqp10 import destination_of
from relatum.reading import Message as Read
from relatum.reading import StreamReader, TimeSource
from relatum.uuid7 import time_us_of
from relatum_consumer import Relations
from tests.support import (
    broker_connection,
    publish_plain,
    rows_of,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.proxy import Proxy
from tests.support.unnoticed import looks


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    """A bare connection, open."""
    with Environment(uri=url) as environment:
        connection = environment.connection()
        connection.dial()
        yield connection


def to(stream: str) -> str:
    """The address of a stream."""
    return AddressHelper.queue_address(stream)


def assert_no_password(error: Exception) -> None:
    """The client's error names the connection's URL; whatever is logged of it shows the user alone."""
    shown = "".join(traceback.format_exception(error))
    assert "amqp://guest@127" in shown, shown
    assert ":guest@" not in shown


def read(url: str, stream: str, count: int) -> list[Read]:
    """What lies in a stream, once so many messages do."""
    with StreamReader.open(url) as reader:

        def found() -> list[Read]:
            messages = list(reader.iterate(stream))
            return messages if len(messages) >= count else []

        messages = wait_until(found)
    assert len(messages) == count
    return messages


def state(message: Message) -> tuple[Any, ...]:
    """What a message says."""
    return (message.id, message.application_properties, message.annotations, message.body, message.address)


@pytest.mark.parametrize("is_early", [False, True])
def test_messages_get_what_they_lack(amqp_url: str, stream_name: str, is_early: bool) -> None:
    """Connections and publishers stay what they are; a message arrives with an id and a time; the caller's does not."""
    with connected(amqp_url) as connection:
        before = set(vars(connection))
        # One of the two alone: the client takes a second publisher to one address for the same link.
        early = connection.publisher(to(stream_name)) if is_early else None
        looked = looks(connection)
        assert relatum.intercept(connection, keys=["order_id"]) is connection
        assert looks(connection) == looked
        publisher = early or connection.publisher(to(stream_name))
        assert type(publisher) is Publisher
        plain = Message(body=b"plain")
        keyed = Message(
            body=b"keyed", application_properties={"order_id": "1", "n": 3}, annotations={"x-a": 1}, correlation_id="c"
        )
        own = Message(body=b"own", id="mine")
        states = [state(message) for message in (plain, keyed, own)]
        for message in (plain, keyed, own):
            assert publisher.publish(message).remote_state == OutcomeState.ACCEPTED
        assert [state(message) for message in (plain, keyed, own)] == states
        assert relatum.statistics(connection).published == 3
        relatum.release(connection)
        assert set(vars(connection)) == before
        assert "publish" not in vars(publisher)
        publisher.publish(Message(body=b"bare"))
    got, keyed_got, own_got, bare = read(amqp_url, stream_name, 4)
    assert [message.body for message in (got, keyed_got, own_got)] == [b"plain", b"keyed", b"own"]
    assert time_us_of(got.properties.message_id or "")
    assert dict(got.headers) == {}
    assert dict(keyed_got.headers) == {"order_id": "1", "n": 3, "x-a": 1}
    assert keyed_got.properties.correlation_id == "c"
    assert (own_got.properties.message_id, set(own_got.headers)) == ("mine", {"relatum_time"})
    sources = [message.time_source for message in (got, keyed_got, own_got)]
    assert sources == [TimeSource.MESSAGE_ID, TimeSource.MESSAGE_ID, TimeSource.HEADER]
    assert bare.properties.message_id is None


def test_keys_are_as_of_the_other_clients(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """One definition, and one value, whether AMQP 1.0 or pika published it: of headers, properties and bodies."""
    keys = [
        KeyDefinition("order_id", type="integer"),
        KeyDefinition("device", source="header:x-device"),
        KeyDefinition("reply", source="property:correlation_id"),
        KeyDefinition("sku", source="body:$.order.sku"),
        KeyDefinition("customer", source=lambda body: body.decode().partition("customer ")[2] or None),
    ]
    headers, body = {"order_id": "042", "x-device": "d1"}, b'{"order": {"sku": 7}}'
    with connected(amqp_url) as connection:
        relatum.intercept(connection, database=database_url, keys=keys)
        publisher = connection.publisher(to(stream_name))
        applied, annotations = {"order_id": "042"}, {"x-device": "d1"}
        publisher.publish(
            Message(body=body, application_properties=applied, annotations=annotations, correlation_id="c1")
        )
        publisher.publish(Message(body=b"customer Ada"))
        properties = pika.BasicProperties(headers=headers, correlation_id="c1")
        publish_plain(amqp_url, stream_name, [(body, properties)])
        wait_recorded(amqp_url, engine, stream_name)
        relatum.release(connection)
    rows = set(rows_of(engine, stream_name))
    expected = {("order_id", "42"), ("device", "d1"), ("reply", "c1"), ("sku", "7")}
    assert rows == {(*row, offset) for row in expected for offset in (0, 2)} | {("customer", "Ada", 1)}


def test_an_exchange_with_a_queue_and_a_stream_is_recorded(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """The recorder beside the connection finds the stream that is bound to the exchange; the queue has its messages."""
    name, orders = unique_name("exchange/ä b"), 5
    with broker_connection(amqp_url) as bare:
        channel = bare.channel()
        channel.exchange_declare(name, "topic")
        channel.queue_declare(name, exclusive=True)
        channel.queue_bind(name, name, "order.#")
        channel.queue_bind(stream_name, name, "#")
        with connected(amqp_url) as connection:
            relatum.intercept(connection, database=database_url, keys=["order_id"])
            publisher = connection.publisher()
            for number in range(orders):
                # Not by AddressHelper: it writes "ä" in Latin-1, which RabbitMQ does not take.
                message = Message(body=b"%d" % number, application_properties={"order_id": f"o{number % 2}"})
                message.address = f"/exchanges/{quote(name, safe='')}/order.new"
                publisher.publish(message)
            wait_until(lambda: len(rows_of(engine, stream_name)) == orders, what="rows")
            relatum.release(connection)
        assert channel.queue_declare(name, passive=True).method.message_count == orders
        channel.exchange_delete(name)
    with Relations(amqp_url, database_url) as relations:
        first = relations.find("order_id", "o0").messages
        assert [message.body for message in first] == [b"0", b"2", b"4"]
        assert [message.body for message in relations.related(first[0])] == [b"2", b"4"]


def test_bad_keys_and_headers_are_refused(amqp_url: str, stream_name: str) -> None:
    """Nothing of them reaches the broker, and the publisher stays usable."""
    with connected(amqp_url) as connection:
        relatum.intercept(connection, keys=["order_id"])
        publisher = connection.publisher(to(stream_name))
        with pytest.raises(InvalidRelationshipKey):
            publisher.publish(Message(body=b"", application_properties={"order_id": 1.5}))
        with pytest.raises(HeadersRefused):
            publisher.publish(Message(body=b"", application_properties={f"h{n}": "v" * 200 for n in range(2000)}))
        publisher.publish(Message(body=b"good"))
        assert relatum.statistics(connection).published == 1
    assert [message.body for message in read(amqp_url, stream_name, 1)] == [b"good"]


def test_what_the_client_checks_it_says_itself(amqp_url: str, stream_name: str) -> None:
    """A wrong address, body or flag is the client's own error, and nothing counts as sent."""
    with connected(amqp_url) as connection:
        relatum.intercept(connection, keys=["order_id"])
        publisher, without = connection.publisher(to(stream_name)), connection.publisher()
        addressed = AddressHelper.message_to_address_helper(Message(body=b""), to(stream_name))
        for wrong, message in (
            (ValidationCodeException, addressed),
            (ArgumentOutOfRangeException, Message(body="text")),  # type: ignore[arg-type]
            (ArgumentOutOfRangeException, Message(body=b"", inferred=False)),
        ):
            with pytest.raises(wrong):
                publisher.publish(message)
        with pytest.raises(ValidationCodeException):
            without.publish(Message(body=b""))
        assert relatum.statistics(connection).published == 0


@pytest.mark.parametrize("form", ["uris", "no scheme", "query"])
def test_streams_are_read_where_the_client_is_connected(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, form: str
) -> None:
    """Of several URLs at the one that answered; and by URLs that only the client takes."""
    uri = {"no scheme": amqp_url.partition("//")[2], "query": amqp_url + "?of=another"}.get(form)
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"amqp://guest:guest@127.0.0.1:{server.getsockname()[1]}/"
    with Environment(uri=uri, uris=None if uri else [nobody, amqp_url]) as environment:
        connection = environment.connection()
        connection.dial()
        relatum.intercept(connection, database=database_url, keys=["order_id"])
        publisher = connection.publisher(to(stream_name))
        publisher.publish(Message(body=b"", application_properties={"order_id": "1"}))
        wait_recorded(amqp_url, engine, stream_name)
        relatum.release(connection)
    assert rows_of(engine, stream_name) == [("order_id", "1", 0)]


def test_the_recorder_goes_on_where_the_client_does(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """With several URLs: the client recovers at the next node, and what it publishes there is recorded."""
    with (
        Proxy.to(amqp_url) as first,
        Proxy.to(amqp_url) as second,
        Environment(uris=[first.url(amqp_url), second.url(amqp_url)]) as environment,
    ):
        connection = environment.connection()
        connection.dial()
        relatum.intercept(connection, database=database_url, keys=["order_id"])
        publisher = connection.publisher(to(stream_name))
        publisher.publish(Message(body=b"", application_properties={"order_id": "1"}))
        wait_recorded(amqp_url, engine, stream_name)
        # The client cannot close what was cut, and goes on of itself alone where the broker has closed it.
        connection._conn.close()
        first.accepts = False
        first.cut()
        connection._open_connections(reconnect_handlers=True)
        publisher.publish(Message(body=b"", application_properties={"order_id": "2"}))
        wait_recorded(amqp_url, engine, stream_name)
        relatum.release(connection)
    assert rows_of(engine, stream_name) == [("order_id", "1", 0), ("order_id", "2", 1)]


def test_unroutable_and_rejected_are_both_errors(amqp_url: str) -> None:
    """The client's own errors, which are ours too: released, rejected by a full queue, and no such exchange."""
    with connected(amqp_url) as connection, broker_connection(amqp_url) as bare:
        relatum.intercept(connection)
        name = unique_name()
        channel = bare.channel()
        channel.queue_declare(name, auto_delete=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
        publisher = connection.publisher("/exchanges/amq.direct/" + name)
        with pytest.raises(SendException) as released:
            publisher.publish(Message(body=b""))
        assert isinstance(released.value, PublishUnroutable)
        assert (released.value.in_stream, released.value.state) == (False, OutcomeState.RELEASED)
        for said in ("'amq.direct'", repr(name), "nothing is bound"):
            assert said in str(released.value)
        full = connection.publisher("/queues/" + name)

        def overfill() -> None:
            for _ in range(10):
                full.publish(Message(body=b""))

        with pytest.raises(AmqpMessageRejectedException) as rejected:
            overfill()
        assert isinstance(rejected.value, PublishNacked)
        assert (rejected.value.in_stream, str(rejected.value)) == (False, repr(rejected.value.msg))
        nowhere = AddressHelper.message_to_address_helper(Message(body=b""), "/exchanges/" + name)
        with pytest.raises(AmqpMessageRejectedException, match="no exchange") as refused:
            connection.publisher().publish(nowhere)
        assert isinstance(refused.value, PublishNacked)
        assert refused.value.in_stream is False
        with pytest.raises(LinkDetached, match="decode-error") as broken:
            connection.publisher("/exchanges/amq.fanout").publish(Message(body=b"", annotations={"no-x": 1}))
        assert isinstance(broken.value, PublishRejected)
        assert broken.value.in_stream is False
        assert relatum.statistics(connection).errors == {"unroutable": 1, "nacked": 2, "rejected": 1}
        copied = pickle.loads(pickle.dumps(released.value))
        assert (type(copied), str(copied)) == (type(released.value), str(released.value))
        full.close()
        channel.queue_delete(name)


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_is_not_answered_is_an_unknown_outcome(amqp_url: str, stream_name: str, is_lost: bool) -> None:
    """A time-out, and a connection that ends, are the client's error and ours; the stream settles it."""
    with Proxy.to(amqp_url) as proxy, Environment(uri=proxy.url(amqp_url)) as environment:
        connection = environment.connection()
        connection.dial()
        relatum.intercept(connection, broker_url=amqp_url)
        publisher = connection.publisher(to(stream_name))
        publisher.publish(Message(body=b"first"))
        connection._conn.timeout = 1
        proxy.mode = "blackhole_replies"
        if is_lost:
            connection._conn.timeout = 100
            # The line ends once the broker has the message.

            def cut() -> None:
                read(amqp_url, stream_name, 2)
                proxy.cut()

            threading.Thread(target=cut, name="cut").start()
        with pytest.raises(PublishOutcomeUnknown) as caught:
            publisher.publish(Message(body=b"second"))
        assert isinstance(caught.value, Timeout) is not is_lost
        assert_no_password(caught.value)
        assert caught.value.in_stream is None
        (place,) = caught.value.settle()
        assert place.stream == stream_name
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), PublishOutcomeUnknown)
        assert relatum.statistics(connection).errors == {"unknown": 1}
        proxy.mode = "pass"
        environment.connections().clear()


def test_what_a_lost_connection_is_given_was_not_sent(amqp_url: str, stream_name: str) -> None:
    """The client does not recover from a line that was cut. Only the first publish after that may have arrived."""
    with Proxy.to(amqp_url) as proxy, Environment(uri=proxy.url(amqp_url)) as environment:
        connection = environment.connection()
        connection.dial()
        relatum.intercept(connection, broker_url=amqp_url)
        publisher = connection.publisher(to(stream_name))
        publisher.publish(Message(body=b"first"))
        proxy.cut()
        with pytest.raises(PublishOutcomeUnknown):
            publisher.publish(Message(body=b"second"))
        with pytest.raises(ConnectionException) as caught:
            publisher.publish(Message(body=b"third"))
        assert not isinstance(caught.value, PublishError)
        assert_no_password(caught.value)
        assert relatum.statistics(connection).errors == {"unknown": 1}
        assert relatum.statistics(connection).published == 2
        environment.connections().clear()


@pytest.mark.parametrize("is_early", [False, True])
async def test_asyncio_is_the_same(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, is_early: bool
) -> None:
    """Publishers of asyncio's connections, of before and of later; errors, and release."""
    async with AsyncEnvironment(uri=amqp_url) as environment, await environment.connection() as connection:
        before = set(vars(connection))
        early = await connection.publisher(to(stream_name)) if is_early else None
        looked = looks(connection)
        assert relatum.intercept(connection, database=database_url, keys=["order_id"]) is connection
        assert looks(connection) == looked
        publisher = early or await connection.publisher(to(stream_name))
        message = Message(body=b"one", application_properties={"order_id": "1"})
        assert (await publisher.publish(message)).remote_state == OutcomeState.ACCEPTED
        assert message.id is None
        with pytest.raises(InvalidRelationshipKey):
            await publisher.publish(Message(body=b"", application_properties={"order_id": 1.5}))
        nobody = await connection.publisher("/exchanges/amq.direct/" + unique_name())
        with pytest.raises(PublishUnroutable):
            await nobody.publish(Message(body=b""))
        await asyncio.to_thread(wait_recorded, amqp_url, engine, stream_name)
        await asyncio.to_thread(relatum.release, connection)
        assert set(vars(connection)) == before
        await publisher.publish(Message(body=b"bare"))
    one, bare = read(amqp_url, stream_name, 2)
    assert time_us_of(one.properties.message_id or "")
    assert bare.properties.message_id is None
    assert rows_of(engine, stream_name) == [("order_id", "1", 0)]


def test_a_receipt_tells_the_place(amqp_url: str, database_url: str, stream_name: str) -> None:
    """Of a message without an id, and of one whose id was used before; blocking and with asyncio."""

    async def scenario() -> None:
        async with AsyncEnvironment(uri=amqp_url) as environment, await environment.connection() as connection:
            relatum.intercept(connection, database=database_url)
            publisher = await connection.publisher(to(stream_name))
            receipt = await relatum.publish_async(publisher, Message(body=b"", id="mine"))
            (place,) = await receipt.wait(90)
            assert (place.stream, place.offset) == (stream_name, 2)
            await asyncio.to_thread(relatum.release, connection)

    with connected(amqp_url) as connection:
        publisher = connection.publisher(to(stream_name))
        relatum.intercept(connection)
        with pytest.raises(ConfigurationError, match="database="):
            relatum.publish(publisher, Message(body=b""))
        relatum.release(connection)
        with pytest.raises(ConfigurationError):
            relatum.publish(publisher, Message(body=b""))
        relatum.intercept(connection, database=database_url)
        for offset, message in enumerate((Message(body=b"plain"), Message(body=b"own", id="mine"))):
            (place,) = relatum.publish(publisher, message).wait(90)
            assert (place.stream, place.offset) == (stream_name, offset)
        relatum.release(connection)
    asyncio.run(scenario())


def test_a_reconnected_publisher_stays_intercepted(amqp_url: str, stream_name: str) -> None:
    """The client's recovery gives the same publisher a new link; it goes on through us."""
    with connected(amqp_url) as connection:
        relatum.intercept(connection)
        publisher = connection.publisher(to(stream_name))
        publisher.publish(Message(body=b"one"))
        connection._conn.close()
        connection._open_connections(reconnect_handlers=True)
        publisher.publish(Message(body=b"two"))
    assert all(time_us_of(message.properties.message_id or "") for message in read(amqp_url, stream_name, 2))


@pytest.mark.parametrize("ours_first", [True, False])
def test_instrumentation_of_the_class_composes(
    amqp_url: str, stream_name: str, ours_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever wraps `Publisher.publish` on the class sees each message once, before or after us."""
    seen: list[Any] = []
    original: Callable[..., Any] = Publisher.publish

    def traced(self: Publisher, message: Message) -> Any:
        seen.append(message)
        return original(self, message)

    with connected(amqp_url) as connection:
        publisher = connection.publisher(to(stream_name))
        if ours_first:
            relatum.intercept(connection)
        monkeypatch.setattr(Publisher, "publish", traced)
        relatum.intercept(connection)
        publisher.publish(Message(body=b""))
        assert len(seen) == 1
    (message,) = read(amqp_url, stream_name, 1)
    assert time_us_of(message.properties.message_id or "")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("/queues/a%2Fb", ("", "a/b")),
        ("/exchanges/x", ("x", "")),
        ("/exchanges/x%20y/k%2F1", ("x y", "k/1")),
        (None, ("", "")),
        ("/queues/%FF", ("", "\ufffd")),
    ],
)
def test_addresses(address: str | None, expected: tuple[str, str]) -> None:
    """An address is an exchange and a routing key."""
    assert destination_of(address) == expected
