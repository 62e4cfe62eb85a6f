"""Finding out what a super stream is made of: by the stream protocol where it answers, else as far as AMQP can tell."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pika import BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from relatum.errors import (
    BrokerUnavailable,
    ProtocolError,
    ReadTimeout,
    SuperStreamConflict,
    SuperStreamNotFound,
)
from relatum.headers import NAME_BYTES_MAX
from relatum.reading import NOT_BY_STREAMS, BrokerAddress, StreamReader
from relatum.superstreams._connections import TIMEOUT_S, blocking_connection
from relatum.superstreams._layout import Layout, checked_stream_name

NOT_FOUND: Final = 404
"""AMQP's reply code for a queue or an exchange that is not there."""

_NONE: Final = re.compile(r"no (queue|exchange) '")
"""In the text of a 404: the broker knows nothing of that name. Texts seen with RabbitMQ 3.10.8 and 4.3.6."""


@contextmanager
def stream_reader(address: BrokerAddress) -> Iterator[StreamReader | None]:
    """A reader over the stream protocol; None where the same broker does not answer by it.

    Raises:
        BrokerUnavailable, ProtocolError, ReadTimeout: nobody answers where it was said to be. AMQP 0.9.1 may tell other
            partitions, and who goes by those sends messages elsewhere, so a broker that starts is no reason to ask it.
    """
    if address.stream_port is None:
        yield None
        return
    try:
        reader = StreamReader.open(address, timeout_s=TIMEOUT_S)
    except (BrokerUnavailable, ProtocolError, ReadTimeout, *NOT_BY_STREAMS):
        if not address.stream_port_guessed:
            raise
        # Whether AMQP 0.9.1 answers is for the caller to find out: it may have a connection of its own.
        yield None
        return
    with reader:
        yield reader


def described(source: Any, address: BrokerAddress, name: str) -> Layout:
    """The layout of a super stream.

    Raises:
        InvalidInput: none can have that name; nothing was asked.
        SuperStreamNotFound: there is none.
        SuperStreamConflict: a partition's binding key cannot be told.
        BrokerUnavailable, ProtocolError, ReadTimeout: nobody answers where the stream protocol was said to be.
    """
    checked_stream_name(name)
    with stream_reader(address) as reader:
        if reader is not None:
            return described_by_protocol(reader, name)
    with blocking_connection(source, address) as connection:
        return _described_by_amqp(connection, name)


def described_by_protocol(reader: StreamReader, name: str) -> Layout:
    """The layout as the stream protocol tells it: Partitions gives the streams, Route checks each one's binding key.

    Where Route is not known to be safe (before RabbitMQ 4.3), names tell the keys, and other names are a conflict.
    """
    streams = reader.bound(name)
    if not streams:
        raise SuperStreamNotFound(f"There is no super stream {name!r}.", super_stream=name)
    return Layout.of(
        name, ((stream, _binding_key(reader, name, stream, place)) for place, stream in enumerate(streams))
    )


def _binding_key(reader: StreamReader, name: str, stream: str, place: int) -> str:
    """The key by which the exchange leads to a stream. The broker does not tell it, only whether a key is one."""
    # As RabbitMQ's tools name partitions; then what somebody may have chosen who bound streams of other names.
    for key in dict.fromkeys((stream.removeprefix(f"{name}-"), str(place), stream)):
        routes = reader.routes(name, key)
        if routes is None and stream == f"{name}-{key}":
            return key
        if stream in (routes or ()):
            return key
    raise SuperStreamConflict(
        f"Stream {stream!r} is a partition of {name!r} by a binding key that cannot be told: give the layout yourself.",
        super_stream=name,
        reason=f"binding key of {stream}",
    )


def _described_by_amqp(connection: BlockingConnection, name: str) -> Layout:
    if not exchange_exists(connection, name):
        raise SuperStreamNotFound(f"There is no super stream {name!r}.", super_stream=name)
    partitions = 0
    while queue_exists(connection, f"{name}-{partitions}"):
        partitions += 1
    if not partitions:
        raise SuperStreamNotFound(
            f"There is an exchange {name!r}, but no stream {f'{name}-0'!r}. Partitions of other names are told by the "
            "stream protocol alone: give its URL.",
            super_stream=name,
        )
    return Layout.numbered(name, partitions)


def exchange_exists(connection: BlockingConnection, name: str) -> bool:
    """Whether there is an exchange of that name."""
    return _exists(connection, lambda channel: channel.exchange_declare(name, passive=True))


def queue_exists(connection: BlockingConnection, name: str) -> bool:
    """Whether there is a queue or stream of that name."""
    return _exists(connection, lambda channel: channel.queue_declare(name, passive=True))


def bound_streams(connection: BlockingConnection, address: BrokerAddress, exchange: str) -> list[str]:
    """Streams that are bound to an exchange: by AMQP alone, the one that a super stream's first partition would be.

    Raises: as `described`, where the stream protocol was said to be somewhere.
    """
    with stream_reader(address) as reader:
        if reader is not None:
            return reader.bound(exchange)
    first = f"{exchange}-0"
    return [first] if len(first.encode()) <= NAME_BYTES_MAX and queue_exists(connection, first) else []


def _exists(connection: BlockingConnection, ask: Any) -> bool:
    # A channel of its own: the broker closes the channel where the answer is no.
    channel = connection.channel()
    try:
        ask(channel)
    except ChannelClosedByBroker as error:
        if error.reply_code != NOT_FOUND:
            raise
        # A node that starts says 404, too, of streams that it has not started yet: "home node … is down".
        return _NONE.search(error.reply_text) is None
    channel.close()
    return True
