"""Finding out what a super stream is made of: by the stream protocol where it answers, else as far as AMQP can tell."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pika import BlockingConnection

from relatum.errors import (
    BrokerUnavailable,
    ProtocolError,
    ReadTimeout,
    SuperStreamConflict,
    SuperStreamNotFound,
)
from relatum.headers import NAME_BYTES_MAX
from relatum.reading import NOT_BY_STREAMS, BrokerAddress, StreamReader
from relatum.superstreams.connections import TIMEOUT_S, blocking_connection
from relatum.superstreams.layout import Layout, checked_stream_name
from relatum.superstreams.streams import exchange_exists, queue_exists


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


def bound_streams(connection: BlockingConnection, address: BrokerAddress, exchange: str) -> list[str]:
    """Streams that are bound to an exchange: by AMQP alone, the one that a super stream's first partition would be.

    Raises: as `described`, where the stream protocol was said to be somewhere.
    """
    with stream_reader(address) as reader:
        if reader is not None:
            return reader.bound(exchange)
    first = f"{exchange}-0"
    return [first] if len(first.encode()) <= NAME_BYTES_MAX and queue_exists(connection, first) else []
