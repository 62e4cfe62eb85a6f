"""Publishers continue with a new password, and so do their recorders, with every client."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import aio_pika
import dramatiq
import kombu
import pika
import pytest
import sqlalchemy as sa
from celery import Celery
from dramatiq.brokers.rabbitmq import RabbitmqBroker

import relatum
from relatum import Broker
from relatum.errors import AccessRefused
from relatum.local import LocalRabbitMQ
from relatum.reading import AsyncStreamReader, StreamReader
from tests.support import broker_connection, declare_stream, unique_name, wait_recorded, wait_until
from tests.support.rabbitmq_tools import PASSWORD, add_users, as_user, evaluate
from tests.support.threads import Threads

USER = "rotating"

Rotated = tuple[Callable[[str], object], Callable[[str], object]]
"""Publishes to a stream, and sets a new password."""


@dataclass(frozen=True)
class Rotating:
    """A broker with a stream, and its URL by the first password of a user whose password changes."""

    server: LocalRabbitMQ
    url: str
    stream: str

    def change(self, password: str) -> None:
        """Do as `rabbitmqctl change_password`; and end the connections of the stream protocol, which are ours."""
        user = f'<<"{USER}">>, <<"{password}">>, <<"x">>'
        evaluate(self.server, f"ok = rabbit_auth_backend_internal:change_password({user})")
        evaluate(self.server, "[exit(P, kill) || P <- pg_local:get_members(rabbit_stream_connections)]")


@pytest.fixture
def rotating(own_broker: LocalRabbitMQ) -> Iterator[Rotating]:
    add_users(own_broker, {USER: (".*", ".*", ".*")})
    declare_stream(own_broker.broker_url, stream := unique_name())
    yield Rotating(own_broker, as_user(own_broker.broker_url, USER), stream)
    evaluate(own_broker, f'ok = rabbit_auth_backend_internal:delete_user(<<"{USER}">>, <<"x">>)')


def by_celery(stack: ExitStack, url: str, options: Any, *, password: Callable[[], str] | None = None) -> Rotated:
    """An app that is given a connection whose password is a function, as kombu has it for tokens."""
    parts, passwords = urlsplit(url), [PASSWORD]
    asked = password or (lambda: passwords[-1])
    connection = kombu.Connection(hostname=parts.hostname, port=parts.port, userid=USER, password=asked)
    given = kombu.Producer(stack.enter_context(connection))
    app = relatum.intercept(Celery(set_as_current=False), **options)
    stack.callback(relatum.release, app)

    def publish(name: str) -> None:
        with app.producer_or_acquire(given) as producer:
            producer.publish("x", routing_key=name, headers={"k": "1"})

    return publish, passwords.append


def by_aio_pika(stack: ExitStack, url: str, options: Any) -> Rotated:
    """A connection that sends the broker its new password, and keeps it for when it reconnects."""
    runner = stack.enter_context(asyncio.Runner())

    async def connect() -> Any:
        connection = relatum.intercept(await aio_pika.connect_robust(url), **options)
        return connection, await connection.channel()

    async def publish(name: str) -> None:
        await channel.default_exchange.publish(aio_pika.Message(b"x", headers={"k": "1"}), name)

    connection, channel = runner.run(connect())
    stack.callback(lambda: runner.run(connection.close()))
    stack.callback(relatum.release, connection)
    return (lambda name: runner.run(publish(name))), (lambda password: runner.run(connection.update_secret(password)))


def by_pika(stack: ExitStack, url: str, options: Any) -> Rotated:
    """A connection that sends the broker its new password, and keeps it nowhere."""
    connection = relatum.intercept(stack.enter_context(broker_connection(url)), **options)
    stack.callback(relatum.release, connection)
    channel, properties = connection.channel(), pika.BasicProperties(headers={"k": "1"})
    return (
        lambda name: channel.basic_publish("", name, b"x", properties),
        lambda password: connection.update_secret(new_secret=password, reason="rotated"),
    )


def by_new_connections(stack: ExitStack, url: str, options: Any) -> Rotated:
    """Connects again with each password, and releases nothing before the end."""

    def connect(password: str) -> pika.BlockingConnection:
        quoted = url.replace(PASSWORD, quote(password, safe=""))
        connection = relatum.intercept(stack.enter_context(broker_connection(quoted)), **options)
        stack.callback(relatum.release, connection)
        return connection

    def renew(password: str) -> None:
        opened[-1].close()
        opened.append(connect(password))

    opened, properties = [connect(PASSWORD)], pika.BasicProperties(headers={"k": "1"})
    return (lambda name: opened[-1].channel().basic_publish("", name, b"x", properties)), renew


def by_dramatiq(stack: ExitStack, url: str, options: Any) -> Rotated:
    """A broker whose parameters its owner changes, for the next connection."""
    parts, credentials = urlsplit(url), pika.PlainCredentials(USER, PASSWORD)
    broker = RabbitmqBroker(host=parts.hostname, port=parts.port, credentials=credentials, middleware=[])
    stack.callback(broker.close)
    relatum.intercept(broker, copy_to=options["streams"][0], **options)
    stack.callback(relatum.release, broker)
    actor = dramatiq.actor(lambda: None, actor_name="nothing", broker=broker)

    def renew(password: str) -> None:
        broker.parameters.credentials = pika.PlainCredentials(USER, password)

    return (lambda _: actor.send()), renew


@pytest.mark.parametrize("client", [by_celery, by_aio_pika, by_pika, by_new_connections, by_dramatiq])
def test_the_recorder_goes_on_by_the_new_password(
    client: Any, rotating: Rotating, database_url: str, engine: sa.Engine, earlier: Threads
) -> None:
    """After each of two password changes one recorder of the publishing process records what is published."""
    stream, owner = rotating.stream, rotating.server.broker_url
    with ExitStack() as stack:
        publish, renew = client(stack, rotating.url, {"database": database_url, "keys": ["k"], "streams": [stream]})
        publish(stream)
        assert wait_recorded(owner, engine, stream) == 1
        for count, password in enumerate(("second", "thi/rd@"), 2):
            rotating.change(password)
            renew(password)
            publish(stream)
            assert wait_recorded(owner, engine, stream) == count
        recorders = [thread for thread in earlier.begun() if thread.name == "relatum-recorder"]
        assert len(recorders) == 1, "each password has a recorder of its own"


def test_a_function_that_fails_hurts_nobody(
    rotating: Rotating, database_url: str, engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """A failing password function does not disturb publishing; the recorder logs it without its text, and continues."""
    here, fails = threading.current_thread(), [True]

    def password() -> str:
        if fails and threading.current_thread() is not here:
            raise LookupError(f"{PASSWORD} may be in here")
        return PASSWORD

    options = {"database": database_url, "streams": [rotating.stream]}
    with ExitStack() as stack:
        publish, _ = by_celery(stack, rotating.url, options, password=password)
        for _ in range(3):
            publish(rotating.stream)
        said = "The broker's password function raised LookupError"
        wait_until(lambda: said in caplog.text, what="a line")
        assert PASSWORD not in caplog.text
        fails.clear()
        assert wait_recorded(rotating.server.broker_url, engine, rotating.stream) == 3


def test_readers_ask_for_the_password_too(rotating: Rotating) -> None:
    """Blocking and asyncio readers ask for the password, without blocking the event loop."""
    passwords, beats = [PASSWORD], [0]
    broker = Broker(rotating.url, password=lambda: passwords[-1])

    def slow() -> str:
        before = beats[0]
        wait_until(lambda: beats[0] > before, what="the loop's next turn")
        return passwords[-1]

    async def read() -> None:
        async def beat() -> None:
            while True:
                beats[0] += 1
                await asyncio.sleep(0)

        beating = asyncio.create_task(beat())
        async with await AsyncStreamReader.open(Broker(rotating.url, password=slow)) as reader:
            assert (await reader.bounds(rotating.stream)).last is None
        beating.cancel()

    with StreamReader.open(broker) as reader:
        assert reader.bounds(rotating.stream).last is None
        passwords.append("second")
        rotating.change(passwords[-1])
        assert reader.bounds(rotating.stream).last is None
    asyncio.run(read())
    passwords.append("wrong")
    with pytest.raises(AccessRefused) as caught:
        StreamReader.open(broker)
    assert "second" not in str(caught.value)
