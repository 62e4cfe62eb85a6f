"""Routers behind one blocking interface, so that a test runs against both faces; and what is in the partitions."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import aio_pika
import pika

import relatum
from relatum.contexts import AffinityOptions, ContextOptions
from relatum.reading import Message
from relatum.superstreams import Layout
from tests.support._recording import reader_of
from tests.support._streams import broker_connection
from tests.support._waiting import result_of
from tests.support.routing import sleeping, sleeping_task

SETS: Final = "affinity_set"
CONTEXTS: Final = "serialization_context"

_KINDS: Final[dict[str, tuple[Any, Any, Any]]] = {
    SETS: (relatum.AffinityRouter, relatum.AsyncAffinityRouter, AffinityOptions),
    CONTEXTS: (relatum.ContextRouter, relatum.AsyncContextRouter, ContextOptions),
}
"""Blocking and asyncio router, and their options, by the header that names what they place."""


@dataclass(frozen=True)
class Face:
    """A router on a channel of its own, in the blocking one's form; an asyncio router has a runner."""

    router: Any
    channel: Any
    _header: str = SETS
    _runner: Any = None

    def publish(self, body: bytes, name: Any = None, **more: Any) -> Any:
        """Publish a message of a set, or context; `more` are further headers, and the property `message_id`."""
        message_id = more.pop("message_id", None)
        headers = more if name is None else {**more, self._header: name}
        if self._runner is None:
            return self.router.publish(self.channel, body, pika.BasicProperties(headers=headers, message_id=message_id))
        message = aio_pika.Message(body, headers=headers, message_id=message_id)
        return result_of(self._runner, self.router.exchange(self.channel).publish(message))

    def settle(self, error: relatum.errors.PublishOutcomeUnknown, *timeout_s: float) -> Any:
        return result_of(self._runner, error.settle(*timeout_s))

    def sleep_before_next(self, meanwhile: Callable[[], Any]) -> None:
        if self._runner is None:
            sleeping(self.channel, meanwhile)
        else:
            sleeping_task(self.channel, lambda: asyncio.to_thread(meanwhile))

    def close(self) -> None:
        result_of(self._runner, self.router.close())


@dataclass(frozen=True)
class Faces:
    """Makes routers of one face, "blocking" or "asyncio", for sets or contexts by `header`."""

    face: str
    amqp_url: str
    layout: Layout
    database_url: str
    header: str = SETS

    @property
    def partitions(self) -> "Partitions":
        return Partitions(self.amqp_url, self.layout, self.header)

    @contextmanager
    def opened(
        self,
        database_url: str | None = None,
        *,
        super_stream: str | None = None,
        through: str | None = None,
        has_confirms: bool = True,
        **options: Any,
    ) -> Iterator[Face]:
        """Open a router on its own connection: `through` another URL intercepted, so that lost confirms are settled."""
        blocking, asynchronous, kind = _KINDS[self.header]
        arguments = super_stream or self.layout.super_stream, database_url or self.database_url, kind(**options)
        broker = None if through is None else self.amqp_url
        with ExitStack() as stack:
            if self.face == "asyncio":
                runner = stack.enter_context(asyncio.Runner())
                connection = runner.run(aio_pika.connect(through or self.amqp_url))
                stack.callback(runner.run, _closed(connection))
                router = asynchronous(*arguments, broker=broker)
            else:
                runner = None
                connection = stack.enter_context(broker_connection(through or self.amqp_url))
                router = blocking(*arguments, broker=broker)
            if through is not None:
                relatum.intercept(connection, broker=self.amqp_url)
                stack.callback(relatum.release, connection)
            if runner is not None:
                channel = runner.run(_channel(connection, has_confirms))
            else:
                channel = connection.channel()
                if has_confirms:
                    channel.confirm_delivery()
            face = Face(router, channel, self.header, runner)
            stack.callback(face.close)
            yield face


async def _channel(connection: Any, has_confirms: bool) -> Any:
    return await connection.channel(publisher_confirms=has_confirms)


async def _closed(connection: Any) -> None:
    with suppress(ConnectionError):
        await connection.close()


@dataclass(frozen=True)
class Partitions:
    """The contents of a super stream's partitions."""

    _amqp_url: str
    _layout: Layout
    _header: str = SETS

    def messages(self) -> dict[str, list[Message]]:
        with reader_of(self._amqp_url) as reader:
            return {each.stream: list(reader.iterate(each.stream)) for each in self._layout}

    def bodies(self) -> dict[str, list[bytes]]:
        return {stream: [each.body for each in messages] for stream, messages in self.messages().items()}

    def of_set(self, name: str | None) -> dict[str, list[bytes]]:
        found = {
            stream: [message.body for message in messages if message.headers.get(self._header) == name]
            for stream, messages in self.messages().items()
        }
        return {stream: bodies for stream, bodies in found.items() if bodies}

    def where(self, body: bytes) -> str:
        (stream,) = (stream for stream, bodies in self.bodies().items() for each in bodies if each == body)
        return stream
