"""AMQP 1.0, by rabbitmq-amqp-python-client: the only module that imports it, once somebody has such a connection.

A connection's `publisher` is stood in for, and each publisher's `publish`, as attributes of the very objects; so it is
with asyncio's connections, whose publishers publish by one of these in a thread. What is handed on stands in for the
message: the client asks it to send itself, and it sends the stamped bytes. Consumers are not touched.
"""

import asyncio
import re
from collections.abc import Iterator
from functools import lru_cache
from time import monotonic
from typing import Any, Final
from urllib.parse import unquote
from weakref import WeakSet

from rabbitmq_amqp_python_client import AmqpMessageRejectedException, AsyncConnection, ConnectionClosed, Message
from rabbitmq_amqp_python_client.qpid.proton._exceptions import Timeout
from rabbitmq_amqp_python_client.qpid.proton._utils import LinkDetached, SendException

from relatum.errors import PublishError, PublishNacked, PublishOutcomeUnknown, PublishRejected, PublishUnroutable
from relatum.processes import of_one_process
from relatum.publishing._interception import ATTRIBUTE, Interception
from relatum.publishing._locate import Locator, Sent
from relatum.publishing._publish_errors import outcome
from relatum.publishing._receipt import AsyncReceipt, Receipt
from relatum.publishing._settle import Unsettled, final_at
from relatum.publishing.clients._attributes import Late, Renewal, put, put_back
from relatum.publishing.clients._encoded_messages import Ready, are_plain, plainly_ready, ready

NAME: Final = "amqp10"
"""The client, as metrics name it."""

IS_OF_PROCESSES: Final = False
"""Whether it is made before processes are forked off that publish."""

_ADDRESSES_MAX: Final = 1024
"""Addresses of which exchange and routing key are remembered."""

_HEARTBEAT_S: Final = 60
"""RabbitMQ's own default: the client asks for none, and the broker alone closes a silent connection."""

_SHORT_LIST: Final = 0xC0
_EMPTY_PROPERTIES: Final = b"\0\x53\x73\x45"
"""How the client encodes the properties of a message that has none."""

_PASSWORD: Final = re.compile(r"(?<=//)([^/:@\s]*):\S*(?=@)")
"""The password in a connection's URL, which the client's errors name as it is."""

_RENEWS: Final = "refresh_token"
"""The method by which a connection tells the broker a new token, and which keeps it nowhere."""

_NO_EXCHANGE: Final = "no exchange "
"""How RabbitMQ's text begins where a message's address names an exchange that is not there."""

_REFUSALS: Final = frozenset(
    {"amqp:decode-error", "amqp:not-found", "amqp:unauthorized-access", "amqp:link:message-size-exceeded"}
)
"""Why RabbitMQ ends a link for a message that it does not take."""


@lru_cache(_ADDRESSES_MAX)
def destination_of(address: Any) -> tuple[str, str]:
    """Exchange and routing key of an address: `/queues/NAME`, `/exchanges/NAME` or `/exchanges/NAME/KEY`.

    Source: RabbitMQ 4, AMQP 1.0 addresses version 2.
    """
    kind, *names = str(address or "").lstrip("/").split("/")
    exchange, key = [unquote(name) for name in [*names, "", ""][:2]]
    return ("", exchange) if kind == "queues" else (exchange, key)


def plain_one(interception: Interception, message: Any, raw: bytes) -> Ready | None:
    """What is sent for a message that is plain application properties and a body; None for any that may be more."""
    headers, body = message.application_properties or {}, message.body
    if not (type(message) is Message and type(body) is bytes and type(headers) is dict and are_plain(headers)):
        return None
    # The client writes a header always, and then, where there are no annotations, the properties.
    begin = 5 + raw[4] if raw[3] == _SHORT_LIST else 4
    end = begin + len(_EMPTY_PROPERTIES)
    if raw[begin:end] != _EMPTY_PROPERTIES:
        return None
    return plainly_ready(interception, raw, headers, body, begin=begin, end=end)


class Outgoing:
    """Stands in for a message on its way: the caller's own, but for the bytes that are sent."""

    def __init__(self, message: Any, interception: Interception, publisher: Any, *, asks: bool) -> None:
        self._message = message
        self._interception = interception
        self._asks = asks
        # What the client looks at of each message: to find them here costs it less than `__getattr__`.
        self.address = message.address
        self.body = message.body
        self.inferred = message.inferred
        self.exchange, self.routing_key = destination_of(publisher.address or self.address)
        self.ready: Ready | None = None
        """Once the client has it sent."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    def send(self, sender: Any, tag: Any = None) -> Any:
        """Send as the client's message does, which has checked it by now."""
        message = self._message
        raw = bytes(message.encode())
        plain = None if self._asks else plain_one(self._interception, message, raw)
        self.ready = plain or ready(self._interception, raw, asks=self._asks)
        self._interception.watch(self.exchange, self.routing_key)
        return type(message).send(self, sender, tag)

    def encode(self) -> bytes:
        """What is sent."""
        assert self.ready is not None, "it is encoded while it is sent"
        return self.ready.raw


class Publisher(Late):
    """Stands in for `publish` of one publisher."""

    def __init__(self, publisher: Any, interception: Interception, *, is_async: bool) -> None:
        super().__init__(lambda: publisher, "publish")
        self._publisher = publisher
        self.interception = interception
        self._is_async = is_async
        of_one_process(self, "an intercepted connection")

    def __call__(self, message: Any) -> Any:
        """Publish with what is missing added. Result and what is raised before sending are the client's."""
        if not self.interception.active or not hasattr(message, "encode"):
            return self.__wrapped__(message)
        return self.publish(message)[0]

    def publish(self, message: Any, *, asks: bool = False) -> tuple[Any, Outgoing]:
        """Publish; what the client gives, and what was sent. `asks`: for a receipt."""
        interception = self.interception
        if not interception.has_agreed:
            # It has waited before, but for a connection of asyncio, which publishes in a thread.
            interception.await_agreement(may_wait=True)
        outgoing = Outgoing(message, interception, self._publisher, asks=asks)
        was_lost = self._publisher._conn.disconnected
        began_s = monotonic()
        try:
            delivery = self.__wrapped__(outgoing)
        except Exception as error:
            error.args = tuple(_PASSWORD.sub(r"\1", each) if isinstance(each, str) else each for each in error.args)
            if outgoing.ready is None or was_lost:
                # Not encoded, or with no line left to go by.
                raise
            ended = self._outcome(error, outgoing, outgoing.ready, began_s)
            interception.counts.published += 1
            interception.counts.failed(ended)
            raise ended from error
        interception.counts.published += 1
        return delivery, outgoing

    def with_receipt(self, publisher: Any, message: Any, _routing_key: str = "") -> Any:
        """Publish and wait for the confirm; what gives the places. To be awaited with asyncio's publishers."""
        return self._with_receipt_async(publisher, message) if self._is_async else Receipt(*self._sent(message))

    async def _with_receipt_async(self, publisher: Any, message: Any) -> AsyncReceipt:
        # As the client's own `publish` does: its connection is not safe between threads.
        async with publisher._connection_lock:
            return AsyncReceipt(*await asyncio.to_thread(self._sent, message))

    def _sent(self, message: Any) -> tuple[Sent, Locator]:
        _, outgoing = self.publish(message, asks=True)
        assert outgoing.ready is not None, "it was sent"
        sent = outgoing.ready.sent(outgoing.exchange, outgoing.routing_key)
        assert sent is not None, "it was stamped"
        return sent, self.interception.locator

    def _outcome(self, error: Exception, outgoing: Outgoing, sent_as: Ready, began_s: float) -> PublishError:
        if isinstance(error, AmqpMessageRejectedException):
            # One of several queues may have taken it; where there is no exchange, none has.
            is_nowhere = not outgoing.exchange or error.msg.startswith(_NO_EXCHANGE)
            return outcome(PublishNacked, error, in_stream=False if is_nowhere else None)
        if isinstance(error, SendException):
            unroutable = outcome(PublishUnroutable, error, in_stream=False)
            # The client's own says the number of the state alone.
            unroutable.args = (_why_released(outgoing.exchange, outgoing.routing_key),)
            return unroutable
        if isinstance(error, LinkDetached) and error.condition in _REFUSALS:
            return outcome(PublishRejected, error, in_stream=False)
        fields: dict[str, Any] = {}
        sent = sent_as.sent(outgoing.exchange, outgoing.routing_key, began_s)
        if sent is not None:
            # After a mere time-out the connection lives on, and what was sent may still arrive at any time.
            announced = isinstance(error, LinkDetached | ConnectionClosed)
            until = None if isinstance(error, Timeout) else final_at(_HEARTBEAT_S, announced=announced)
            unsettled = Unsettled(sent, self.interception.locator, until)
            fields["settle"] = unsettled.settle_async if self._is_async else unsettled.settle
        return outcome(PublishOutcomeUnknown, error, in_stream=None, **fields)


def _why_released(exchange: str, routing_key: str) -> str:
    if not exchange:
        return f"the message lies nowhere: there is no queue or stream {routing_key!r}; declare it, and publish again"
    return (
        f"the message lies nowhere: nothing is bound to the exchange {exchange!r} that takes the routing key "
        f"{routing_key!r}; bind a queue or a stream (`relatum tap` binds one), or mend the key, and publish again"
    )


class _Opener(Late):
    """Stands in for a connection's `publisher`."""

    def __init__(self, connection: Any, interception: Interception) -> None:
        super().__init__(lambda: connection, "publisher")
        self._connection = connection
        self._interception = interception
        self.known: WeakSet[Any] = WeakSet()
        """Publishers that publish by us."""

    def take(self, publisher: Any) -> None:
        """Have a publisher publish by us."""
        present = vars(publisher).get("publish")
        if self._interception.active and not isinstance(present, Publisher):
            is_async = isinstance(self._connection, AsyncConnection)
            put(publisher, "publish", Publisher(publisher, self._interception, is_async=is_async))
            self.known.add(publisher)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        publisher = self.__wrapped__(*args, **kwargs)
        self.take(publisher)
        return publisher


class _AsyncOpener(_Opener):
    """Stands in for an asyncio connection's `publisher`."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        publisher = await self.__wrapped__(*args, **kwargs)
        self.take(publisher._publisher)
        return publisher


def intercept(connection: Any, interception: Interception) -> None:
    """Publish through the interception with all publishers the connection has and will have."""
    setattr(connection, ATTRIBUTE, interception)
    is_async = isinstance(connection, AsyncConnection)
    opener = (_AsyncOpener if is_async else _Opener)(connection, interception)
    put(connection, "publisher", opener)
    inner = _blocking(connection)
    put(inner, _RENEWS, Renewal(inner, _RENEWS, "token"))
    for publisher in _publishers(connection):
        opener.take(publisher)


def may_wait(connection: Any) -> bool:
    """Whether its thread may wait for a server."""
    return not isinstance(connection, AsyncConnection)


def release(connection: Any) -> None:
    """Put back what was there before. What somebody else has wrapped since stays, and passes everything through."""
    opener = vars(connection).get("publisher")
    if isinstance(opener, _Opener):
        for publisher in list(opener.known):
            put_back(publisher, "publish")
        put_back(connection, "publisher")
    put_back(_blocking(connection), _RENEWS)
    delattr(connection, ATTRIBUTE)


def _blocking(connection: Any) -> Any:
    """The connection itself, or the one that asyncio's does all by."""
    return getattr(connection, "_connection", connection)


def _publishers(connection: Any) -> Iterator[Any]:
    if isinstance(connection, AsyncConnection):
        yield from (each._publisher for each in connection._async_publishers if each._publisher is not None)
    else:
        yield from connection._publishers
