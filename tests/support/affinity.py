"""Routers behind one blocking interface, so that a test runs against both faces; and what lies in the partitions."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import aio_pika
import pika

import relatum
from relatum.contexts import AffinityOptions, ContextOptions
from relatum.reading import Message, StreamReader
from relatum.superstreams import Layout
from tests.support._streams import broker_connection
from tests.support.routing import sleeping, sleeping_task

SETS: Final = "affinity_set"
CONTEXTS: Final = "serialization_context"

_KINDS: Final[dict[str, tuple[Any, Any, Any]]] = {
    SETS: (relatum.AffinityRouter, relatum.AsyncAffinityRouter, AffinityOptions),
    CONTEXTS: (relatum.ContextRouter, relatum.AsyncContextRouter, ContextOptions),
}
"""Blocking and asyncio router, and their options, by the header that names what they place."""


class Face(Protocol):
    """A router on a channel of its own."""

    router: Any
    channel: Any

    def publish(self, body: bytes, name: Any = None, **more: Any) -> Any:
        """Publish a message of a set, or context; `more` are further headers, and the property `message_id`."""

    def settle(self, error: relatum.errors.PublishOutcomeUnknown, timeout_s: float | None = None) -> Any:
        """What the error's `settle` gives."""

    def sleep_before_next(self, meanwhile: Callable[[], Any]) -> None:
        """Let something else happen just before the next message is sent."""

    def close(self) -> None:
        """Close the router; again: nothing."""


def _parted(header: str, name: Any, more: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    headers = dict(more)
    message_id = headers.pop("message_id", None)
    if name is not None:
        headers[header] = name
    return headers, message_id


class Blocking:
    """A router with pika."""

    def __init__(self, router: Any, channel: Any, header: str = SETS) -> None:
        self.router = router
        self.channel = channel
        self._header = header
        self._is_open = True

    def publish(self, body: bytes, name: Any = None, **more: Any) -> Any:
        """See `Face`."""
        headers, message_id = _parted(self._header, name, more)
        return self.router.publish(self.channel, body, pika.BasicProperties(headers=headers, message_id=message_id))

    def settle(self, error: relatum.errors.PublishOutcomeUnknown, timeout_s: float | None = None) -> Any:
        """See `Face`."""
        return error.settle() if timeout_s is None else error.settle(timeout_s)

    def sleep_before_next(self, meanwhile: Callable[[], Any]) -> None:
        """See `Face`."""
        sleeping(self.channel, meanwhile)

    def close(self) -> None:
        """See `Face`."""
        if self._is_open:
            self._is_open = False
            self.router.close()


class Asyncio:
    """An asyncio router with aio-pika, in a loop that runs while something is asked for."""

    def __init__(self, runner: asyncio.Runner, router: Any, channel: Any, header: str) -> None:
        self.runner = runner
        self.router = router
        self.channel = channel
        self._header = header
        self._is_open = True

    def publish(self, body: bytes, name: Any = None, **more: Any) -> Any:
        """See `Face`."""
        headers, message_id = _parted(self._header, name, more)
        message = aio_pika.Message(body, headers=headers, message_id=message_id)
        return self.runner.run(self.router.exchange(self.channel).publish(message))

    def settle(self, error: relatum.errors.PublishOutcomeUnknown, timeout_s: float | None = None) -> Any:
        """See `Face`."""
        return self.runner.run(_awaited(error.settle() if timeout_s is None else error.settle(timeout_s)))

    def sleep_before_next(self, meanwhile: Callable[[], Any]) -> None:
        """See `Face`."""
        sleeping_task(self.channel, lambda: asyncio.to_thread(meanwhile))

    def close(self) -> None:
        """See `Face`."""
        if self._is_open:
            self._is_open = False
            self.runner.run(self.router.close())


async def _awaited(found: Any) -> Any:
    return await found


class Faces:
    """Makes routers of one face.

    Args:
        face: "blocking" or "asyncio".
        amqp_url: The broker.
        super_stream: Where they publish.
        database_url: Where placements are.
        header: What they place: `SETS` or `CONTEXTS`.
    """

    def __init__(self, face: str, amqp_url: str, super_stream: str, database_url: str, header: str = SETS) -> None:
        self.face = face
        self._amqp_url = amqp_url
        self._super_stream = super_stream
        self._database_url = database_url
        self._header = header

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
        """A router, on a connection of its own.

        Args:
            database_url: Another database than the one of all.
            super_stream: Another super stream.
            through: Another URL of the broker; its connection is intercepted, as one whose confirms are settled.
            has_confirms: Whether the channel has publisher confirms.
            options: The router's.
        """
        blocking, asynchronous, kind = _KINDS[self._header]
        arguments = super_stream or self._super_stream, database_url or self._database_url, kind(**options)
        broker = None if through is None else self._amqp_url
        if self.face == "asyncio":
            router = asynchronous(*arguments, broker=broker)
            with asyncio.Runner() as runner:
                yield from self._in_loop(runner, router, through, has_confirms=has_confirms)
            return
        with broker_connection(through or self._amqp_url) as connection:
            if through is not None:
                relatum.intercept(connection, broker_url=self._amqp_url)
            channel = connection.channel()
            if has_confirms:
                channel.confirm_delivery()
            face = Blocking(blocking(*arguments, broker=broker), channel, self._header)
            try:
                yield face
            finally:
                face.close()

    def _in_loop(
        self, runner: asyncio.Runner, router: Any, through: str | None, *, has_confirms: bool
    ) -> Iterator[Face]:
        async def begin() -> tuple[Any, Asyncio]:
            connection = await aio_pika.connect(through or self._amqp_url)
            if through is not None:
                relatum.intercept(connection, broker_url=self._amqp_url)
            channel = await connection.channel(publisher_confirms=has_confirms)
            return connection, Asyncio(runner, router, channel, self._header)

        connection, face = runner.run(begin())
        try:
            yield face
        finally:
            face.close()
            if through is not None:
                relatum.release(connection)
            with contextlib.suppress(ConnectionError):
                runner.run(connection.close())


class Partitions:
    """What lies in the partitions of a super stream.

    Args:
        amqp_url: The broker.
        layout: The super stream.
        header: What is placed there: `SETS` or `CONTEXTS`.
    """

    def __init__(self, amqp_url: str, layout: Layout, header: str = SETS) -> None:
        self._amqp_url = amqp_url
        self._layout = layout
        self._header = header

    def messages(self) -> dict[str, list[Message]]:
        """The messages of each partition."""
        with StreamReader.open(self._amqp_url) as reader:
            return {each.stream: list(reader.iterate(each.stream)) for each in self._layout}

    def bodies(self) -> dict[str, list[bytes]]:
        """The bodies in each partition."""
        return {stream: [each.body for each in messages] for stream, messages in self.messages().items()}

    def of_set(self, name: str | None) -> dict[str, list[bytes]]:
        """The bodies of a set, or context, in each partition that has some of it."""
        found = {
            stream: [message.body for message in messages if message.headers.get(self._header) == name]
            for stream, messages in self.messages().items()
        }
        return {stream: bodies for stream, bodies in found.items() if bodies}

    def where(self, body: bytes) -> str:
        """The partition of the one message that has this body."""
        (stream,) = (stream for stream, bodies in self.bodies().items() for each in bodies if each == body)
        return stream
