"""What a name is of which a node says, by the stream protocol, that there is no stream of it."""

import contextlib

from relatum.errors import NotAStream, NotFound, RelatumError, StreamNotFound, StreamUnavailable
from relatum.reading._address import BrokerAddress
from relatum.reading._amqp_blocking import Amqp


def name_missing(error: StreamNotFound, address: BrokerAddress, timeout_s: float) -> NotFound:
    """What a stream that a node does not know is: `NotAStream` for a queue of another kind, as AMQP 0.9.1 says.

    One question, which the queue itself answers: two would find a stream that is deleted and declared again missing
    first, and there then, like a queue.

    Raises:
        StreamUnavailable: There is such a stream after all, or it cannot be said yet.
    """
    if address.amqp_port is None:
        return error
    try:
        with contextlib.closing(Amqp(address, timeout_s=timeout_s)) as amqp:
            amqp.open()
            amqp.probe(error.stream)
    except NotAStream as found:
        return found
    except StreamUnavailable:
        raise
    except RelatumError:
        return error
    raise StreamUnavailable(f"The stream {error.stream!r} was declared just now.", stream=error.stream)
