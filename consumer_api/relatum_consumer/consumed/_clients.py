"""What each client's messages say, in the form in which a recorder would see them.

A client is known by the names of its classes' modules: none is imported.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID

from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX
from relatum.reading import Message, Properties, parts_of_delivery

TAKEN: Final = (
    "look-ups take a message that was read (relations.read(stream, offset)), or consumed with pika (the tuple "
    "(method, properties, body)), aio-pika (IncomingMessage), FastStream (RabbitMessage), or rstream (the "
    "tuple (message, message_context))"
)

_OFFSET: Final = "x-stream-offset"
_DELIVERY: Final = 3
_OF_STREAM: Final = 2
_NAMES: Final = tuple(each.name for each in fields(Properties))

_PLAIN: Final = (str, int, float, bytes, datetime)
"""Types of headers that reach a stream by every version of the broker, unchanged."""

_SAID: Final = (str, int, float, bytes, datetime, timedelta, UUID, type(None))
"""Types of properties as clients give them. A mock is none of them."""


class Strange(Exception):
    """What no client gives, in words that show no message."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A message of which nobody says where it lies.

    Attributes:
        message: What it says.
        offset: Its offset, where it was consumed from a stream whose name is not known.
    """

    message: Message
    offset: int | None = None


def taken(given: Any) -> Message | Taken | None:
    """A message as a client gave it; None where it is none. One whose place is known is a message that was read.

    Raises:
        InvalidInput: It is of a client, and cannot be asked about.
        Exception: It says what no client gives; `Strange` among them.
    """
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
        # Streams are not read by `basic_get`: what says an offset there, its publisher copied from elsewhere.
        return _delivered(given[1], bytes(given[2]), is_of_queue=type(given[0]).__name__ == "GetOk")
    if len(given) == _OF_STREAM:
        message, context = given
        stream, offset = getattr(context, "stream", None), _offset(getattr(context, "offset", None))
        if isinstance(stream, str) and stream and offset is not None:
            return Message.from_record(stream, offset, _octets(message), getattr(context, "timestamp", None))
    return None


def _octets(value: Any) -> bytes:
    """A body, or a message that encodes itself. Of a number, or of numbers, `bytes` would make something, too."""
    if not isinstance(value, bytes | bytearray | memoryview) and not hasattr(type(value), "__bytes__"):
        raise Strange(f"a body is bytes, not {type(value).__name__}")
    return bytes(value)


def _delivered(properties: Any, body: bytes, *, is_of_queue: bool = False) -> Taken:
    """A message of AMQP 0.9.1. What a stream drops of headers is dropped: a recorder would not see it."""
    given = properties.headers or {}
    headers = {name: value for name, value in given.items() if name.startswith("x-") or not _is_nested(value)}
    values = {name: getattr(properties, name, None) for name in _NAMES}
    for name, value in values.items():
        if not isinstance(value, _SAID):
            raise Strange(f"its property {name} is {type(value).__name__}")
    said = SimpleNamespace(headers=headers, **values)
    offset = None if is_of_queue else _offset(given.get(_OFFSET))
    decode = partial(parts_of_delivery, said, body)
    return Taken(Message("", -1, None, None, decode), offset)


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _offset(value: Any) -> int | None:
    """An offset that the broker said, and not a publisher."""
    is_one = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INTEGER_MAX
    return int(value) if is_one else None


def _of_aio_pika(message: Any) -> Taken:
    values = {name: getattr(message, name) for name in _NAMES}
    if isinstance(message.expiration, int | float):
        # In seconds: AMQP has a text of milliseconds, and so has a recorder.
        values["expiration"] = str(round(message.expiration * 1_000))
    return _delivered(_said(values, message.headers), _octets(message.body))


def _of_faststream(message: Any) -> Message | Taken | None:
    return taken(message.raw_message)


def but_body(message: Message) -> Hashable:
    """What all copies of a message have in common, and few others, but for the body.

    The broker adds headers named `x-…`, and leaves tables out of streams.
    """
    properties, headers = message.properties, message.headers.items()
    plain = {(name, value) for name, value in headers if isinstance(value, _PLAIN) and not name.startswith("x-")}
    # "Not a number" equals nothing, not even itself.
    plain = {each for each in plain if each[1] == each[1]}
    return properties.message_id, properties.correlation_id, properties.type, frozenset(plain)


def _said(properties: Mapping[str, Any], headers: Mapping[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{**properties, "headers": dict(headers)})


_CLIENTS: Final[dict[tuple[str, str], Callable[[Any], Message | Taken | None]]] = {
    ("aio_pika", "IncomingMessage"): _of_aio_pika,
    ("faststream", "StreamMessage"): _of_faststream,
}
"""By the package and the name of a class."""


__all__ = ["TAKEN", "Strange", "Taken", "but_body", "taken"]
