"""The arguments of lookups, checked before any request: names, times, and messages from client libraries. No I/O."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from math import isinf
from types import SimpleNamespace
from typing import Any, Final, Literal, TypeAlias, get_args

from relatum.common.checks import checked_choice, checked_count, checked_name
from relatum.common.ids import MessageId
from relatum.common.limits import INTEGER_MAX, TIME_US_MAX, TIME_US_MIN
from relatum.errors import InvalidInput, RelatumError
from relatum.keys import InvalidValue, moment, timestamp_us
from relatum.reading import Message, Properties, parts_of_delivery

Names: TypeAlias = str | Sequence[str] | None
"""A name, several names, or None."""

Order: TypeAlias = Literal["oldest", "newest", "offset"]
_ORDERS: Final = get_args(Order)


def names_of(argument: str, names: Names) -> tuple[str, ...] | None:
    """Return the names in an argument without duplicates; None for all."""
    if names is None:
        return None
    found = (names,) if isinstance(names, str) or not isinstance(names, Iterable) else tuple(names)
    if not found or not all(isinstance(name, str) for name in found):
        raise InvalidInput(f"{argument}= takes a name, several names, or None for all")
    return tuple(dict.fromkeys(checked_name(argument, name) for name in found))


def check_limit(limit: int | None, order: Order) -> None:
    """Check the `limit=` and `order=` of a lookup."""
    if limit is not None:
        checked_count("limit", limit, otherwise=", or None for all")
    checked_choice("order", order, _ORDERS)


def time_us_of(given: Any, argument: str = "a moment") -> int:
    """Return a datetime in microseconds since 1970, UTC; `argument` is its name in errors."""
    if not isinstance(given, datetime):
        raise InvalidInput(f"{argument} must be a datetime, not {type(given).__name__}")
    try:
        return timestamp_us(given)
    except InvalidValue as error:
        raise InvalidInput(f"{argument} must be between the years 1 and 9999: {error.reason}") from error


def moment_of(time_us: int) -> datetime:
    """Return microseconds since 1970 as a datetime, limited to the years 1 to 9999."""
    return moment(max(TIME_US_MIN, min(time_us, TIME_US_MAX)))


def span_of(since: datetime | None, until: datetime | None) -> tuple[int | None, int | None]:
    """Return the bounds of a time span in microseconds since 1970, UTC; None for no bound."""
    pairs = (("since=", since), ("until=", until))
    low, high = (None if given is None else time_us_of(given, argument) for argument, given in pairs)
    if low is not None and high is not None and low > high:
        raise InvalidInput("since= is later than until=, so no message can be between them: swap the two")
    return low, high


def is_in_span(time_us: int | None, since: int | None, until: int | None) -> bool:
    """Whether a time is from `since` to before `until`; None: no bound. Only an unbounded span has unknown times."""
    if time_us is None:
        return since is None and until is None
    return (since is None or time_us >= since) and (until is None or time_us < until)


Consumed: TypeAlias = Any
"""A message delivered by a client library; docs/clients.md lists them. None is imported: a message is recognized by its
class's module and name."""

_ACCEPTED: Final = (
    "lookups take a message that was read (relations.read(stream, offset)), or consumed with pika (the tuple "
    "(method, properties, body)), aio-pika (IncomingMessage), FastStream (RabbitMessage), or rstream (the "
    "tuple (message, message_context))"
)

_OFFSET: Final = "x-stream-offset"
_DELIVERY: Final = 3
_OF_STREAM: Final = 2
_NAMES: Final = tuple(each.name for each in fields(Properties))

_PLAIN: Final = (str, int, float, bytes, datetime)
"""Types of headers that every broker version stores in a stream unchanged."""


@dataclass(frozen=True, slots=True)
class GivenMessage:
    """The message passed to a lookup.

    If the client does not provide stream and offset, or the message is from a queue, `id` is None, the message's own
    id is a placeholder, and `is_copy` returns whether a message of a stream is this message or a copy of it.
    """

    message: Message
    id: MessageId | None
    is_copy: Callable[[Message], bool] | None = None


def given_message(given: Message | Consumed, needed: str = "a message") -> GivenMessage:
    """Convert a message that was read, or consumed with a client; `needed` names the argument in errors."""
    if isinstance(given, Message):
        return GivenMessage(given, given.id)
    try:
        message = _of_tuple(given) if type(given) is tuple else _of_object(given)
    except RelatumError:
        raise
    except Exception as error:
        # The error's text is left out: it may contain a part of the message.
        text = f"{needed} is needed, and this {_type_name(given)} cannot be read ({type(error).__name__}): {_ACCEPTED}"
        raise InvalidInput(text) from error
    if message is None:
        hint = " (did `find` find nothing? Its answer's status and explanation say why)" if given is None else ""
        raise InvalidInput(f"{needed} is needed, not {_type_name(given)}{hint}: {_ACCEPTED}")
    return message


def _type_name(given: Any) -> str:
    """Return the argument's type for errors, without its content, which may be a message."""
    if type(given) is not tuple:
        return "None" if given is None else type(given).__name__
    kinds = [type(each).__name__ for each in given[:5]]
    return f"tuple ({', '.join(kinds)}{', …' if len(given) > len(kinds) else ''})"


def _of_tuple(given: tuple[Any, ...]) -> GivenMessage | None:
    """Convert the tuples of pika's `basic_get` and callbacks, and of rstream's callbacks."""
    if len(given) == _DELIVERY and all(each is None for each in given):
        raise InvalidInput("basic_get returned no message, because the queue was empty: check for None first")
    if len(given) == _DELIVERY and hasattr(given[1], "headers") and isinstance(given[2], bytes | bytearray):
        # `basic_get` cannot read streams. An offset header of its message was copied by a publisher: ignore it.
        return _delivered(given[1], bytes(given[2]), is_of_queue=type(given[0]).__name__ == "GetOk")
    if len(given) == _OF_STREAM:
        message, context = given
        stream, offset = getattr(context, "stream", None), _offset(getattr(context, "offset", None))
        if isinstance(stream, str) and stream and offset is not None:
            # `bytes(message)` would also accept a number or a list of numbers.
            read = Message.from_record(stream, offset, message.__bytes__(), getattr(context, "timestamp", None))
            return GivenMessage(read, read.id)
    return None


def _of_object(given: Any) -> GivenMessage | None:
    for kind in type(given).__mro__:
        client = kind.__module__.partition(".")[0], kind.__name__
        if client == ("aio_pika", "IncomingMessage"):
            return _of_aio_pika(given)
        if client == ("faststream", "StreamMessage"):
            raw = given.raw_message
            return _of_tuple(raw) if type(raw) is tuple else _of_object(raw)
    return None


def _of_aio_pika(message: Any) -> GivenMessage:
    values = {name: getattr(message, name) for name in _NAMES}
    if isinstance(message.expiration, int | float):
        # aio_pika has seconds here; AMQP, and so the recorder, has milliseconds as text.
        values["expiration"] = str(round(message.expiration * 1_000))
    return _delivered(SimpleNamespace(**values, headers=dict(message.headers)), message.body)


def _delivered(properties: Any, body: bytes, *, is_of_queue: bool = False) -> GivenMessage:
    """Convert an AMQP 0.9.1 message, without headers that streams drop: the recorder does not see these either."""
    given = properties.headers or {}
    headers = {
        name: value
        for name, value in given.items()
        if name.startswith("x-") or not isinstance(value, Mapping | list | tuple)
    }
    values = {name: getattr(properties, name, None) for name in _NAMES}
    decode = partial(parts_of_delivery, SimpleNamespace(headers=headers, **values), body)
    message = Message("", -1, None, None, decode)
    offset = None if is_of_queue else _offset(given.get(_OFFSET))
    own = _fingerprint(message)

    def is_copy(other: Message) -> bool:
        return offset in (None, other.offset) and own in (_fingerprint(other), _fingerprint(other, has_floats=False))

    return GivenMessage(message, None, is_copy)


def _offset(value: Any) -> int | None:
    """Return the value if it can be an offset, else None: a publisher may set the header to any value."""
    is_offset = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INTEGER_MAX
    return int(value) if is_offset else None


def _fingerprint(message: Message, *, has_floats: bool = True) -> Hashable:
    """Return a value that equals that of a message's copies: message id and body, or without an id all content.

    The content is without headers of the broker (`x-…`) and tables, which streams drop. pika cuts floats to integers.
    """
    properties = message.properties
    if properties.message_id:
        return properties.message_id, message.body
    plain = {
        (name, value if has_floats or not isinstance(value, float) or isinf(value) else int(value))
        for name, value in message.headers.items()
        # NaN does not equal itself.
        if isinstance(value, _PLAIN) and not name.startswith("x-") and value == value
    }
    return None, properties.correlation_id, properties.type, frozenset(plain), message.body
