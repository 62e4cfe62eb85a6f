"""Single streams on a broker: options, declaration, and existence."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from pika import BlockingConnection
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from relatum.checks import checked_count, checked_text
from relatum.errors import ConfigurationError, InvalidInput, StreamNotFound, SuperStreamConflict
from relatum.limits import INTEGER_MAX
from relatum.reading import BrokerAddress, StreamReader
from relatum.superstreams.connections import blocking_connection

NOT_FOUND: Final = 404
"""AMQP's reply code for a missing queue or exchange."""

_NONE: Final = re.compile(r"no (queue|exchange) '")
"""Found in the text of a 404 if the name is unknown. Texts seen with RabbitMQ 3.10.8 and 4.3.6."""

_PRECONDITION_FAILED: Final = 406


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options with which streams are declared.

    Attributes:
        max_length_bytes: Bytes that a stream keeps at least; the oldest segments beyond are dropped. None: no limit.
        max_age: How long a stream keeps messages at least; whole seconds. None: no limit.
        segment_bytes_max: Maximum bytes of a segment. None: the broker's default, 500,000,000.
        leader_locator: How leaders are placed: "client-local", "balanced" or "least-leaders". None: the broker decides.
        initial_cluster_size: The number of nodes with a replica. None: all nodes.
    """

    max_length_bytes: int | None = None
    max_age: timedelta | None = None
    segment_bytes_max: int | None = None
    leader_locator: str | None = None
    initial_cluster_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_length_bytes", "segment_bytes_max", "initial_cluster_size"):
            value = getattr(self, name)
            if value is not None:
                checked_count(name, value, most=INTEGER_MAX, otherwise=", or None")
        if self.leader_locator is not None:
            checked_text("leader_locator", self.leader_locator)
        if self.max_age is not None and not (
            isinstance(self.max_age, timedelta) and self.max_age >= timedelta(seconds=1)
        ):
            raise InvalidInput(f"max_age= takes a timedelta of at least a second, not {self.max_age!r}.")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for `queue.declare`."""
        wanted = {
            "x-max-length-bytes": self.max_length_bytes,
            "x-max-age": None if self.max_age is None else f"{int(self.max_age.total_seconds())}s",
            "x-stream-max-segment-size-bytes": self.segment_bytes_max,
            "x-queue-leader-locator": self.leader_locator,
            "x-initial-cluster-size": self.initial_cluster_size,
        }
        return {"x-queue-type": "stream"} | {name: value for name, value in wanted.items() if value is not None}


KEPT: Final = StreamOptions(max_length_bytes=5_000_000_000, max_age=timedelta(days=7), segment_bytes_max=50_000_000)
"""The default options of a stream of copies.

Retention drops whole segments, and only when a new one begins: with the broker's default of 500 MB, a quiet stream
would keep its messages for years.
"""


def exchange_exists(connection: BlockingConnection, name: str) -> bool:
    """Whether the exchange exists."""
    return _exists(connection, lambda channel: channel.exchange_declare(name, passive=True))


def queue_exists(connection: BlockingConnection, name: str) -> bool:
    """Whether a queue or stream of this name exists."""
    return _exists(connection, lambda channel: channel.queue_declare(name, passive=True))


def _exists(connection: BlockingConnection, ask: Callable[[BlockingChannel], Any]) -> bool:
    # A separate channel: the broker closes it if the answer is no.
    try:
        with connection.channel() as channel:
            ask(channel)
    except ChannelClosedByBroker as error:
        if error.reply_code != NOT_FOUND:
            raise
        # A starting node also answers 404 for streams that it has not started yet: "home node … is down".
        return _NONE.search(error.reply_text) is None
    return True


def stream_exists(connection: BlockingConnection, address: BrokerAddress, stream: str) -> bool:
    """Whether the stream exists.

    Raises:
        NotAStream: There is a queue of another type with this name.
        AccessRefused: The user may not read the stream, so the answer is unknown.
    """
    if not queue_exists(connection, stream):
        return False
    with StreamReader.open(address) as reader:
        try:
            reader.bounds(stream)
        except StreamNotFound:
            return False
    return True


@contextmanager
def refusals(what: str, super_stream: str | None = None) -> Iterator[None]:
    """Translate the broker's refusals of a declaration.

    Raises:
        SuperStreamConflict: A different object of this name exists; `ConfigurationError` if `super_stream` is None.
        ConfigurationError: The broker does not accept the options.
    """
    try:
        yield
    except ChannelClosedByBroker as error:
        if error.reply_code != _PRECONDITION_FAILED:
            raise
        if "inequivalent" not in error.reply_text:
            raise ConfigurationError(f"The broker does not accept the stream's options: {error.reply_text}") from error
        if super_stream is None:
            raise ConfigurationError(f"{what}: {error.reply_text}") from error
        raise SuperStreamConflict(f"{what}: {error.reply_text}", super_stream=super_stream, reason=what) from error


def declare_stream(
    connection: BlockingConnection, stream: str, options: StreamOptions, super_stream: str | None = None
) -> None:
    """Declare a stream. Raises as `refusals`."""
    what = f"Stream {stream!r} exists with other arguments"
    with refusals(what, super_stream), connection.channel() as channel:
        channel.queue_declare(stream, durable=True, arguments=options.arguments())


def ensure_stream(address: BrokerAddress, stream: str, options: StreamOptions = KEPT) -> None:
    """Declare a stream, by default like a tap's; an existing stream is left unchanged.

    Raises:
        NotAStream: There is a queue of another type with this name.
        AccessRefused: The user may not read the stream, or not declare it.
        BrokerUnavailable: The broker is unavailable; safe to retry.
    """
    with blocking_connection(address, address) as connection:
        if not stream_exists(connection, address, stream):
            declare_stream(connection, stream, options)
