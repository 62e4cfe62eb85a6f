"""What a name is of which a node says, by the stream protocol, that there is no stream of it."""

from typing import Final

from pika.exceptions import AMQPError, ChannelClosedByBroker

from relatum.errors import NotAStream, NotFound, RelatumError, StreamNotFound, StreamUnavailable
from relatum.reading._address import BrokerAddress
from relatum.reading._connecting import asking

_NO_QUEUE: Final = "no queue"
"""In the text of a 404: the broker knows the name of no queue."""

_EXCLUSIVE: Final = "exclusive"
"""In the text of a 405: another connection's own queue, which no stream can be."""


def name_missing(error: StreamNotFound, address: BrokerAddress, timeout_s: float) -> NotFound:
    """What a stream that a node does not know is: `NotAStream` for a queue of another kind, as AMQP 0.9.1 says.

    One question, which the queue itself answers, since only streams take a consumer with an offset: two would find a
    stream that is deleted and declared again missing first, and there then, like a queue.

    Only "no queue" says that there is none: a node that starts, or whose cluster does, answers 404 of streams that are
    there, too ("home node ... is down or inaccessible"). Texts seen with RabbitMQ 3.10.8 and 4.3.6.

    Raises:
        StreamUnavailable: There is such a stream after all, or it cannot be said yet.
    """
    if address.amqp_port is None:
        return error
    name = error.stream
    try:
        with asking(address, timeout_s) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=1)
            channel.basic_consume(name, lambda *_: None, arguments={"x-stream-offset": "next"})
    except ChannelClosedByBroker as refused:
        code, text = refused.reply_code, refused.reply_text
    except (AMQPError, RelatumError):
        return error
    else:
        raise StreamUnavailable(f"The stream {name!r} was declared just now.", stream=name)
    if (code == 406 and "x-stream-offset" in text) or (code == 405 and _EXCLUSIVE in text):
        return NotAStream(f"{name!r} is a queue, not a stream.", stream=name)
    if code == 404 and _NO_QUEUE not in text:
        raise StreamUnavailable(f"The stream {name!r} is starting, or the node that has it is away.", stream=name)
    if code in (405, 406):
        raise StreamUnavailable(f"The stream {name!r} has no running replica on this node.", stream=name)
    return error
