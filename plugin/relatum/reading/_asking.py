"""Asking about many streams, of which one that cannot be read must stop no other."""

from relatum.errors import BrokerUnavailable, ConnectionLost, RelatumError, StreamUnavailable
from relatum.reading._batches import StreamBounds
from relatum.reading._reader import StreamReader


def bounds_or_error(reader: StreamReader, stream: str) -> StreamBounds | RelatumError:
    """A stream's ends, or why this one cannot be read: not there, a queue, no permission, no leader, bad data.

    Raises:
        BrokerUnavailable: it is not about this stream: no other could be asked, either.
    """
    try:
        return reader.bounds(stream)
    except RelatumError as error:
        if is_of_all(error):
            raise
        return error


def is_of_all(error: RelatumError) -> bool:
    """Whether an error that one stream met is the broker's, so that the others need not be asked."""
    return isinstance(error, BrokerUnavailable) and not isinstance(error, (StreamUnavailable, ConnectionLost))
