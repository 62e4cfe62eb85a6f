"""Clients whose connections are intercepted, behind one blocking face, so that each behaviour is written down once."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import aio_pika
import pika
from aio_pika import exceptions as of_aio
from aiormq.exceptions import ChannelClosed
from pika import exceptions as theirs
from pika.adapters.blocking_connection import BlockingConnection

import relatum
from tests.support import broker_connection, unique_name, wait_until
from tests.support.callbacks import open_channel, running

CLIENTS = ("pika", "pika callbacks", "aio-pika", "aio-pika robust")
"""Of callback connections, confirms and errors come later: `relatum.publish` has their receipts."""

CONFIRMING = ("pika", "aio-pika", "aio-pika robust")
"""Clients whose publish ends when the broker has answered."""


class Errors(NamedTuple):
    unroutable: type[Exception]
    nacked: type[Exception]
    refused: type[Exception]
    lost: type[Exception]


class _Pika:
    """A connection of pika, not intercepted yet; what is called is called on its thread."""

    errors = Errors(theirs.UnroutableError, theirs.NackError, theirs.ChannelClosedByBroker, theirs.AMQPConnectionError)
    short_strings: ClassVar = (
        *("content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "message_id", "type"),
        *("user_id", "app_id", "cluster_id"),
    )

    def __init__(self, connection: Any, call: Callable[..., Any]) -> None:
        self.connection = connection
        self._call = call

    def intercept(self, **options: Any) -> Any:
        return self._call(relatum.intercept, self.connection, **options)

    def channel(self, *, confirms: bool = True) -> Any:
        if not isinstance(self.connection, BlockingConnection):
            return open_channel(self.connection, self._call)
        channel = self.connection.channel()
        if confirms:
            channel.confirm_delivery()
        return channel

    def message(self, body: bytes = b"", **fields: Any) -> Any:
        return body, pika.BasicProperties(**fields) if fields else None

    def state(self, message: Any) -> Any:
        return message[0], message[1] and dict(vars(message[1]))

    def publish(self, channel: Any, message: Any, to: str, *, exchange: str = "") -> Any:
        return self._call(channel.basic_publish, exchange, to, *message, mandatory=True)

    def receipt(self, channel: Any, message: Any, to: str) -> Any:
        return self._call(relatum.publish, channel, "", to, *message)

    def result(self, waiting: Any) -> Any:
        return waiting

    def returned(self, error: Any) -> Any:
        return error.messages[0].properties


class _AioPika:
    errors = Errors(of_aio.PublishError, of_aio.DeliveryError, ChannelClosed, of_aio.AMQPConnectionError)
    short_strings: ClassVar = tuple(name for name in _Pika.short_strings if name not in ("expiration", "cluster_id"))

    def __init__(self, runner: asyncio.Runner, connection: Any) -> None:
        self.connection = connection
        self._run = runner.run

    def intercept(self, **options: Any) -> Any:
        return relatum.intercept(self.connection, **options)

    def channel(self, *, confirms: bool = True) -> Any:
        return self._run(self._channel(confirms))

    async def _channel(self, confirms: bool) -> Any:
        return await self.connection.channel(publisher_confirms=confirms, on_return_raises=confirms)

    def message(self, body: bytes = b"", **fields: Any) -> Any:
        return aio_pika.Message(body, **fields)

    def state(self, message: Any) -> Any:
        return message.body, message.info()

    def publish(self, channel: Any, message: Any, to: str, *, exchange: str = "") -> Any:
        return self._run(self._publish(channel, message, to, exchange))

    async def _publish(self, channel: Any, message: Any, to: str, exchange: str) -> Any:
        target = channel.default_exchange
        if exchange:
            target = await channel.get_exchange(exchange, ensure=False)
        return await target.publish(message, to)

    def receipt(self, channel: Any, message: Any, to: str) -> Any:
        return self._run(relatum.publish_async(channel, message, to))

    def result(self, waiting: Any) -> Any:
        return self._run(waiting)

    def returned(self, error: Any) -> Any:
        return error.message.header.properties


Line: TypeAlias = _Pika | _AioPika


@dataclass(frozen=True)
class Queue:
    channel: Any
    name: str

    def get(self) -> tuple[pika.BasicProperties, bytes]:
        """The next message. One that went out without a confirm may still be on its way."""

        def next_one() -> tuple[Any, ...] | None:
            got = self.channel.basic_get(self.name, auto_ack=True)
            return got if got[0] is not None else None

        _, properties, body = wait_until(next_one, what="a message")
        return properties, body


@contextmanager
def new_queue(amqp_url: str) -> Iterator[Queue]:
    with broker_connection(amqp_url) as connection:
        queue = Queue(connection.channel(), unique_name())
        queue.channel.queue_declare(queue.name)
        yield queue
        queue.channel.queue_delete(queue.name)


@contextmanager
def open_line(client: str, url: str, *, heartbeat_s: int | None = None) -> Iterator[Line]:
    """A connection of a client. It may be lost when it is left."""
    if heartbeat_s is not None:
        url = f"{url}?heartbeat={heartbeat_s}"
    if client == "pika":
        connection = BlockingConnection(pika.URLParameters(url))
        yield _Pika(connection, lambda function, *args, **kwargs: function(*args, **kwargs))
        relatum.release(connection)
        if connection.is_open:
            connection.close()
    elif client == "pika callbacks":
        with running(url) as (callbacks, on_thread):
            on_thread(relatum.release, callbacks)
            yield _Pika(callbacks, on_thread)
    else:
        is_robust = client == "aio-pika robust"
        connecting = aio_pika.connect_robust(url, reconnect_interval=0.1) if is_robust else aio_pika.connect(url)
        with asyncio.Runner() as runner:
            line = _AioPika(runner, runner.run(connecting))
            yield line
            relatum.release(line.connection)
            if is_robust:
                # A connection that is closed while it reconnects leaves a socket open.
                runner.run(line.connection.ready())
            runner.run(line.connection.close())
