"""Messages as clients give them to their consumers, taken as they are by lookups. No input or output.

A client's message is known by the names of its classes' modules: no client is imported here. See docs/adr/0036.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, TypeAlias
from uuid import UUID

from relatum.errors import InvalidInput, RelatumError
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX
from relatum.reading import Message, Properties, parts_of_delivery

__all__ = ["Consumed", "InHand", "in_hand"]

Consumed: TypeAlias = Any
"""A message that a client gave: see docs/clients.md for each of them."""

_TAKEN: Final = (
    "lookups take a message that was read (relations.read(stream, offset)), or consumed with pika (the tuple "
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


class _Strange(Exception):
    """What no client gives, in words that show no message."""


@dataclass(frozen=True, slots=True)
class InHand:
    """A message in hand.

    Attributes:
        message: The message. Where `id` is None, its own id means nothing.
        id: Its place; None where a client does not say it, or the message is in a queue.
        is_copy: Where `id` is None, whether a message of a stream is the same one: the message that was consumed, or
            its copy there.
    """

    message: Message
    id: MessageId | None
    is_copy: Callable[[Message], bool] | None = None


def in_hand(given: Message | Consumed, needed: str = "a message") -> InHand:
    """A message that was read, or consumed with one of the clients; `needed` is what the caller takes, for the error.

    Raises:
        InvalidInput: it is none.
    """
    if isinstance(given, Message):
        return InHand(given, given.id)
    try:
        taken = _of_tuple(given) if type(given) is tuple else _of_object(given)
    except RelatumError:
        raise
    except Exception as error:
        why = str(error) if isinstance(error, _Strange) else type(error).__name__
        wrong = f"{needed} is needed, and this {_kind(given)} cannot be read ({why}): {_TAKEN}"
        raise InvalidInput(wrong) from error
    if taken is None:
        found_none = " (did `find` find nothing? Its answer's status and explanation say why)" if given is None else ""
        raise InvalidInput(f"{needed} is needed, not {_kind(given)}{found_none}: {_TAKEN}")
    return taken


def _kind(given: Any) -> str:
    """Its type, without its content: that may be a message."""
    if type(given) is not tuple:
        return "None" if given is None else type(given).__name__
    kinds = [type(each).__name__ for each in given[:5]]
    return f"tuple ({', '.join(kinds)}{', …' if len(given) > len(kinds) else ''})"


def _of_tuple(given: tuple[Any, ...]) -> InHand | None:
    """What pika's `basic_get` and callbacks, and rstream's callbacks give."""
    if len(given) == _DELIVERY and all(each is None for each in given):
        raise InvalidInput("basic_get gave no message: the queue was empty")
    if len(given) == _DELIVERY and hasattr(given[1], "headers") and isinstance(given[2], bytes | bytearray):
        # Streams are not read by `basic_get`: an offset there was copied from elsewhere by the publisher.
        return _delivered(given[1], bytes(given[2]), is_of_queue=type(given[0]).__name__ == "GetOk")
    if len(given) == _OF_STREAM:
        message, context = given
        stream, offset = getattr(context, "stream", None), _offset(getattr(context, "offset", None))
        if isinstance(stream, str) and stream and offset is not None:
            read = Message.from_record(stream, offset, _octets(message), getattr(context, "timestamp", None))
            return InHand(read, read.id)
    return None


def _of_object(given: Any) -> InHand | None:
    for kind in type(given).__mro__:
        client = kind.__module__.partition(".")[0], kind.__name__
        if client == ("aio_pika", "IncomingMessage"):
            return _of_aio_pika(given)
        if client == ("faststream", "StreamMessage"):
            raw = given.raw_message
            return _of_tuple(raw) if type(raw) is tuple else _of_object(raw)
    return None


def _of_aio_pika(message: Any) -> InHand:
    values = {name: getattr(message, name) for name in _NAMES}
    if isinstance(message.expiration, int | float):
        # In seconds: AMQP has a text of milliseconds, and so has a recorder.
        values["expiration"] = str(round(message.expiration * 1_000))
    return _delivered(SimpleNamespace(**values, headers=dict(message.headers)), _octets(message.body))


def _octets(value: Any) -> bytes:
    """A body, or a message that encodes itself. Of a number, or of numbers, `bytes` would make something, too."""
    if not isinstance(value, bytes | bytearray | memoryview) and not hasattr(type(value), "__bytes__"):
        raise _Strange(f"a body is bytes, not {type(value).__name__}")
    return bytes(value)


def _delivered(properties: Any, body: bytes, *, is_of_queue: bool = False) -> InHand:
    """A message of AMQP 0.9.1. What a stream drops of headers is dropped: a recorder would not see it."""
    given = properties.headers or {}
    headers = {
        name: value
        for name, value in given.items()
        if name.startswith("x-") or not isinstance(value, Mapping | list | tuple)
    }
    values = {name: getattr(properties, name, None) for name in _NAMES}
    for name, value in values.items():
        if not isinstance(value, _SAID):
            raise _Strange(f"its property {name} is {type(value).__name__}")
    decode = partial(parts_of_delivery, SimpleNamespace(headers=headers, **values), body)
    message = Message("", -1, None, None, decode)
    offset = None if is_of_queue else _offset(given.get(_OFFSET))
    own = _mark(message)

    def is_copy(other: Message) -> bool:
        return offset in (None, other.offset) and _mark(other) == own

    return InHand(message, None, is_copy)


def _offset(value: Any) -> int | None:
    """An offset that the broker said, and not a publisher."""
    is_one = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INTEGER_MAX
    return int(value) if is_one else None


def _mark(message: Message) -> Hashable:
    """What all copies of a message have in common, and no other message: without an id, all of its content.

    The broker adds headers named `x-…`, and leaves tables out of streams.
    """
    properties = message.properties
    if properties.message_id:
        return properties.message_id, message.body
    plain = {
        (name, value)
        for name, value in message.headers.items()
        # "Not a number" equals nothing, not even itself.
        if isinstance(value, _PLAIN) and not name.startswith("x-") and value == value
    }
    return None, properties.correlation_id, properties.type, frozenset(plain), message.body
