"""Streams declared one by one, beside super streams: for copies of what is published elsewhere."""

from datetime import timedelta
from typing import Final

from pika import BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from relatum.errors import ConfigurationError, StreamNotFound
from relatum.reading import BrokerAddress, StreamReader
from relatum.superstreams._connections import blocking_connection
from relatum.superstreams._description import queue_exists
from relatum.superstreams._stream_options import StreamOptions

KEPT: Final = StreamOptions(max_length_bytes=5_000_000_000, max_age=timedelta(days=7), segment_bytes_max=50_000_000)
"""What a stream of copies keeps where nothing else is asked for.

Retention drops whole segments, and looks when a new one begins: with the broker's own 500 MB a quiet stream would keep
its messages for years.
"""

_PRECONDITION_FAILED: Final = 406


def stream_exists(connection: BlockingConnection, address: BrokerAddress, stream: str) -> bool:
    """Whether there is a stream of that name.

    Raises:
        NotAStream: it is another kind of queue.
        AccessRefused: nobody can say, since this user may not read it.
    """
    if not queue_exists(connection, stream):
        return False
    with StreamReader.open(address) as reader:
        try:
            reader.bounds(stream)
        except StreamNotFound:
            return False
    return True


def declare_stream(connection: BlockingConnection, stream: str, options: StreamOptions) -> None:
    """Declare a stream that is not there.

    Raises:
        ConfigurationError: the broker knows no such options, or somebody has just declared another one of that name.
    """
    channel = connection.channel()
    try:
        channel.queue_declare(stream, durable=True, arguments=options.arguments())
    except ChannelClosedByBroker as error:
        if error.reply_code != _PRECONDITION_FAILED:
            raise
        raise ConfigurationError(f"Stream {stream!r} cannot be declared so: {error.reply_text}") from error
    channel.close()


def ensure_stream(address: BrokerAddress, stream: str, options: StreamOptions = KEPT) -> None:
    """See that there is a stream; one that is there stays as it is, else it is declared like a tap's.

    Raises:
        NotAStream: it is another kind of queue.
        AccessRefused: this user may not read, or not declare it.
        BrokerUnavailable: the broker does not answer.
    """
    with blocking_connection(address, address) as connection:
        if not stream_exists(connection, address, stream):
            declare_stream(connection, stream, options)
