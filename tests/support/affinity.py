"""Routers of affinity sets behind one blocking interface, so that a test runs against both faces."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import aio_pika
import pika

import relatum
from relatum.contexts import AffinityOptions
from relatum.reading import Message, StreamReader
from relatum.superstreams import Layout
from tests.support._streams import broker_connection


class Face(Protocol):
    """A router on a channel of its own."""

    def publish(self, body: bytes, set_name: str | None = None, **more: Any) -> None:
        """Publish a message of a set; `more` are further headers, and the property `message_id`."""

    def close(self) -> None:
        """Close the router; again: nothing."""


def _parted(set_name: str | None, more: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    headers = dict(more)
    message_id = headers.pop("message_id", None)
    if set_name is not None:
        headers["affinity_set"] = set_name
    return headers, message_id


class Blocking:
    """`AffinityRouter` with pika."""

    def __init__(self, router: relatum.AffinityRouter, channel: Any) -> None:
        self.router = router
        self.channel = channel
        self._is_open = True

    def publish(self, body: bytes, set_name: str | None = None, **more: Any) -> None:
        """See `Face`."""
        headers, message_id = _parted(set_name, more)
        self.router.publish(self.channel, body, pika.BasicProperties(headers=headers, message_id=message_id))

    def close(self) -> None:
        """See `Face`."""
        if self._is_open:
            self._is_open = False
            self.router.close()


class Asyncio:
    """`AsyncAffinityRouter` with aio-pika, in a loop that runs while something is asked for."""

    def __init__(self, runner: asyncio.Runner, router: relatum.AsyncAffinityRouter, channel: Any) -> None:
        self.runner = runner
        self.router = router
        self.channel = channel
        self._is_open = True

    def publish(self, body: bytes, set_name: str | None = None, **more: Any) -> None:
        """See `Face`."""
        headers, message_id = _parted(set_name, more)
        message = aio_pika.Message(body, headers=headers, message_id=message_id)
        self.runner.run(self.router.exchange(self.channel).publish(message))

    def close(self) -> None:
        """See `Face`."""
        if self._is_open:
            self._is_open = False
            self.runner.run(self.router.close())


class Faces:
    """Makes routers of one face.

    Args:
        face: "blocking" or "asyncio".
        amqp_url: The broker.
        super_stream: Where they publish.
        database_url: Where placements are.
    """

    def __init__(self, face: str, amqp_url: str, super_stream: str, database_url: str) -> None:
        self.face = face
        self._amqp_url = amqp_url
        self._super_stream = super_stream
        self._database_url = database_url

    @contextmanager
    def opened(self, database_url: str | None = None, **options: Any) -> Iterator[Face]:
        """A router, on a connection of its own."""
        arguments = self._super_stream, database_url or self._database_url
        if self.face == "blocking":
            with broker_connection(self._amqp_url) as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                face = Blocking(relatum.AffinityRouter(*arguments, AffinityOptions(**options)), channel)
                try:
                    yield face
                finally:
                    face.close()
            return
        with asyncio.Runner() as runner:
            yield from self._in_loop(runner, arguments, options)

    def _in_loop(self, runner: asyncio.Runner, arguments: tuple[str, str], options: dict[str, Any]) -> Iterator[Face]:
        async def begin() -> tuple[Any, Asyncio]:
            connection = await aio_pika.connect(self._amqp_url)
            return connection, Asyncio(
                runner, relatum.AsyncAffinityRouter(*arguments, AffinityOptions(**options)), await connection.channel()
            )

        connection, face = runner.run(begin())
        try:
            yield face
        finally:
            face.close()
            runner.run(connection.close())


class Partitions:
    """What lies in the partitions of a super stream.

    Args:
        amqp_url: The broker.
        layout: The super stream.
    """

    def __init__(self, amqp_url: str, layout: Layout) -> None:
        self._amqp_url = amqp_url
        self._layout = layout

    def messages(self) -> dict[str, list[Message]]:
        """The messages of each partition."""
        with StreamReader.open(self._amqp_url) as reader:
            return {each.stream: list(reader.iterate(each.stream)) for each in self._layout}

    def of_set(self, name: str | None) -> dict[str, list[bytes]]:
        """The bodies of a set in each partition that has some of it."""
        found = {
            stream: [message.body for message in messages if message.headers.get("affinity_set") == name]
            for stream, messages in self.messages().items()
        }
        return {stream: bodies for stream, bodies in found.items() if bodies}

    def where(self, body: bytes) -> str:
        """The partition of the one message that has this body."""
        (stream,) = (
            stream for stream, messages in self.messages().items() for message in messages if message.body == body
        )
        return stream
