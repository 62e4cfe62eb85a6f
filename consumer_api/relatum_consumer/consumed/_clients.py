"""What each client's messages say, in the form in which a recorder would see them.

A client is known by the names of its classes' modules: none is imported.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX
from relatum.reading import Message, Properties, parts_of_delivery

TAKEN: Final = (
    "look-ups take a message that was read (relations.read(stream, offset)), or consumed with pika (the tuple "
    "(method, properties, body)), aio-pika (IncomingMessage), FastStream (RabbitMessage), kombu (Message), Celery "
    "(task.request), dramatiq (Message), rstream (the tuple (message, message_context)), or RabbitMQ's AMQP 1.0 client "
    "(the event, or its message)"
)

_OFFSET: Final = "x-stream-offset"
_QUEUES: Final = "/queues/"
_DELIVERY: Final = 3
_OF_STREAM: Final = 2
_NAMES: Final = tuple(each.name for each in fields(Properties))

_OF_CELERY: Final = frozenset(
    {"args", "called_directly", "correlation_id", "delivery_info", "headers", "hostname", "kwargs", "properties"}
    | {"reply_to", "_children"}
)
"""What Celery keeps in a task's request beside the headers of its message."""


class _Delivery(NamedTuple):
    """What AMQP 0.9.1 delivers."""

    properties: Any
    body: bytes


@dataclass(frozen=True, slots=True)
class Taken:
    """A message of which nobody says where it lies.

    Attributes:
        message: What it says.
        offset: Its offset, where it was consumed from a stream whose name is not known.
        mark: What all copies of it have in common, where not all that it said is in hand.
    """

    message: Message
    offset: int | None = None
    mark: Callable[[Message], Hashable] | None = None


def taken(given: Any) -> Message | Taken | None:
    """A message as a client gave it; None where it is none. One whose place is known is a message that was read."""
    if type(given) is tuple:
        return _of_tuple(given)
    for kind in type(given).__mro__:
        convert = _CLIENTS.get((kind.__module__.partition(".")[0], kind.__name__))
        if convert is not None:
            return convert(given)
    return None


def _of_tuple(given: tuple[Any, ...]) -> Message | Taken | None:
    if len(given) == _DELIVERY and all(each is None for each in given):
        raise InvalidInput("basic_get gave no message: the queue was empty")
    if len(given) == _DELIVERY and hasattr(given[1], "headers") and isinstance(given[2], bytes | bytearray):
        return _delivered(given[1], bytes(given[2]))
    if len(given) == _OF_STREAM:
        message, context = given
        stream, offset = getattr(context, "stream", None), getattr(context, "offset", None)
        if isinstance(stream, str) and isinstance(offset, int):
            return Message.from_record(stream, offset, bytes(message), getattr(context, "timestamp", None))
    return None


def _delivered(properties: Any, body: bytes, mark: Callable[[Message], Hashable] | None = None) -> Taken:
    """A message of AMQP 0.9.1. What a stream drops of headers is dropped: a recorder would not see it."""
    given = properties.headers or {}
    headers = {name: value for name, value in given.items() if name.startswith("x-") or not _is_nested(value)}
    said = SimpleNamespace(headers=headers, **{name: getattr(properties, name, None) for name in _NAMES})
    offset = given.get(_OFFSET)
    decode = partial(parts_of_delivery, said, body)
    return Taken(Message("", -1, None, None, decode), _offset(offset), mark)


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _offset(value: Any) -> int | None:
    """An offset that the broker said, and not a publisher."""
    is_one = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INTEGER_MAX
    return int(value) if is_one else None


def _of_aio_pika(message: Any) -> Taken:
    return _delivered(message, bytes(message.body))


def _of_faststream(message: Any) -> Message | Taken | None:
    return taken(message.raw_message)


def _of_kombu(message: Any) -> Taken:
    body = message.body
    if isinstance(body, str):
        body = body.encode(message.content_encoding or "utf-8")
    properties = _said(message.properties, message.headers)
    if "compression" in message.headers:
        # It was unpacked here, and lies packed in a stream: no key sees its body, and no copy has it.
        return _delivered(properties, b"", lambda other: _of_headers(other))
    return _delivered(properties, bytes(body or b""))


def _of_celery(request: Any) -> Taken:
    if request.called_directly or request.is_eager or not request.id:
        raise InvalidInput("this task runs without a message: it was called directly, or eagerly")
    headers = {name: value for name, value in vars(request).items() if name not in _OF_CELERY}
    properties = {"correlation_id": request.correlation_id, "reply_to": request.reply_to, **(request.properties or {})}
    # Its body is not in hand: what Celery makes of it is.
    return _delivered(_said(properties, headers), b"", lambda other: _of_headers(other))


def _of_headers(message: Message) -> Hashable:
    """What tells a task's message from all others: a retry is another one, under the same id."""
    headers = message.headers
    return headers.get("task"), headers.get("id", message.properties.message_id), headers.get("retries")


def _of_dramatiq(message: Any) -> Taken:
    return _delivered(_said({}, {}), message.encode(), lambda other: other.body)


def _said(properties: Mapping[str, Any], headers: Mapping[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{**properties, "headers": dict(headers)})


def _of_event(event: Any) -> Message | Taken:
    taken = _of_proton(event.message)
    link = event.link
    address = (link.source.address or link.remote_source.address) if link is not None else None
    if taken.offset is None or not address or not address.startswith(_QUEUES):
        return taken
    return Message.from_record(unquote(address[len(_QUEUES) :]), taken.offset, bytes(event.message.encode()), None)


def _of_proton(message: Any) -> Taken:
    offset = (message.annotations or {}).get(_OFFSET)
    raw = bytes(message.encode())
    return Taken(Message.from_record("", -1, raw), _offset(offset))


_CLIENTS: Final[dict[tuple[str, str], Callable[[Any], Message | Taken | None]]] = {
    ("aio_pika", "IncomingMessage"): _of_aio_pika,
    ("celery", "Context"): _of_celery,
    ("dramatiq", "Message"): _of_dramatiq,
    ("dramatiq", "MessageProxy"): _of_dramatiq,
    ("faststream", "StreamMessage"): _of_faststream,
    ("kombu", "Message"): _of_kombu,
    ("proton", "Event"): _of_event,
    ("proton", "Message"): _of_proton,
    ("rabbitmq_amqp_python_client", "Event"): _of_event,
    ("rabbitmq_amqp_python_client", "Message"): _of_proton,
}
"""By the package and the name of a class."""


__all__ = ["TAKEN", "Taken", "taken"]
