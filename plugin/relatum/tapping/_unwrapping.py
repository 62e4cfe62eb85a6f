"""A message as it was published, out of the firehose's copy of it: its bytes are moved, not decoded. No I/O.

pika takes fractions of numbers, and ends its connection at some values; other clients write numbers anew in another
type, or add an id. So properties stay as they are on the wire.

Source: AMQP 0.9.1, 4.2.5.5 and 4.2.6.1, with RabbitMQ's types of fields; rabbit_trace.erl;
https://www.rabbitmq.com/docs/firehose.
"""

from collections.abc import Iterator
from decimal import Decimal
from typing import Final, NamedTuple

_CONTENT_TYPE: Final = 1 << 15
_CONTENT_ENCODING: Final = 1 << 14
_HEADERS: Final = 1 << 13
_MORE_FLAGS: Final = 1

_TEXTS: Final = frozenset(
    {
        b"content_type",
        b"content_encoding",
        b"correlation_id",
        b"reply_to",
        b"expiration",
        b"message_id",
        b"type",
        b"app_id",
    }
)
_PLACES: Final = (
    (b"content_type", _CONTENT_TYPE),
    (b"content_encoding", _CONTENT_ENCODING),
    (b"headers", _HEADERS),
    (b"delivery_mode", 1 << 12),
    (b"priority", 1 << 11),
    (b"correlation_id", 1 << 10),
    (b"reply_to", 1 << 9),
    (b"expiration", 1 << 8),
    (b"message_id", 1 << 7),
    (b"timestamp", 1 << 6),
    (b"type", 1 << 5),
    (b"app_id", 1 << 3),
)
"""The properties that are carried, in their order, with their flags. Not `user_id`: the broker takes that of the user
who publishes alone."""

_WIDTHS: Final = dict(zip(b"tbBsuUIifLlTdDV", (1, 1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 8, 8, 5, 0), strict=True))
"""Bytes of a field's value by its type; all others begin with their size in four bytes."""

_SIZED: Final = frozenset(b"SxAF")
_TABLE, _ARRAY, _TEXT, _DECIMAL = b"FASD"
_NESTING_MAX: Final = 32


class Unwrapped(NamedTuple):
    """A message as it was published: its routing key, and its properties as they stand in a content header."""

    routing_key: str
    properties: bytes


def unwrapped(properties: bytes) -> Unwrapped | None:
    """The message that a copy of the firehose's is of; its body is the copy's. None of what is no such copy.

    Args:
        properties: The copy's properties, from their flags on.
    """
    try:
        headers = dict(_fields(properties, _headers_at(properties)))
        wrapped_at, keys_at = headers[b"properties"], headers[b"routing_keys"]
        if properties[wrapped_at] != _TABLE or properties[keys_at] != _ARRAY:
            return None
        keys_end = _end(properties, keys_at)
        routing_key = _content(properties, keys_at + 5) if keys_end > keys_at + 5 else b""
        return Unwrapped(routing_key.decode(errors="replace"), _moved(properties, wrapped_at))
    except (IndexError, KeyError, ValueError):
        return None


def _headers_at(properties: bytes) -> int:
    """Where the table of headers begins."""
    flags = int.from_bytes(properties[:2], "big")
    if flags & _MORE_FLAGS or not flags & _HEADERS:
        raise ValueError("no headers")
    at = 2
    for flag in (_CONTENT_TYPE, _CONTENT_ENCODING):
        if flags & flag:
            at += 1 + properties[at]
    return at


def _moved(raw: bytes, wrapped_at: int) -> bytes:
    """Properties out of a table of them."""
    given = dict(_fields(raw, wrapped_at + 1))
    flags, pieces = 0, []
    for name, flag in _PLACES:
        at = given.get(name)
        if at is None:
            continue
        value = raw[at + 1 : _end(raw, at)]
        if name in _TEXTS:
            text = value[4:]
            piece = bytes((len(text),)) + text
        elif name == b"headers":
            piece = _plain(raw, at, 0)[1:] if b"D" in value else value
        else:
            # The firehose writes each number as a signed one of four bytes.
            piece = int.from_bytes(value, "big").to_bytes(8 if name == b"timestamp" else 1, "big")
        flags |= flag
        pieces.append(piece)
    return flags.to_bytes(2, "big") + b"".join(pieces)


def _fields(raw: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """A table's fields: the name of each, and where its type stands; `start` is where the table's size is."""
    at, end = start + 4, start + 4 + _size(raw, start)
    if end > len(raw):
        raise ValueError("a table that ends too early")
    while at < end:
        value = at + 1 + raw[at]
        yield raw[at + 1 : value], value
        at = _end(raw, value)


def _size(raw: bytes, at: int) -> int:
    return int.from_bytes(raw[at : at + 4], "big")


def _end(raw: bytes, at: int) -> int:
    """Where the value ends whose type stands at a position."""
    kind = raw[at]
    end = at + 5 + _size(raw, at + 1) if kind in _SIZED else at + 1 + _WIDTHS[kind]
    if end > len(raw):
        raise ValueError("a value that ends too early")
    return end


def _content(raw: bytes, at: int) -> bytes:
    """The bytes of a text."""
    if raw[at] != _TEXT:
        raise ValueError("no text")
    return raw[at + 5 : _end(raw, at)]


def _plain(raw: bytes, at: int, depth: int) -> bytes:
    """A value, its type first, with decimal numbers as texts: who publishes those to a stream loses the connection."""
    kind, end = raw[at], _end(raw, at)
    if kind == _DECIMAL:
        number = Decimal(int.from_bytes(raw[at + 2 : end], "big", signed=True)).scaleb(-raw[at + 1])
        text = f"{number:f}".encode()
        return b"S" + len(text).to_bytes(4, "big") + text
    if kind not in (_TABLE, _ARRAY) or depth == _NESTING_MAX:
        return raw[at:end]
    pieces: list[bytes] = []
    if kind == _TABLE:
        for name, value in _fields(raw, at + 1):
            pieces += bytes((len(name),)), name, _plain(raw, value, depth + 1)
    else:
        value = at + 5
        while value < end:
            pieces.append(_plain(raw, value, depth + 1))
            value = _end(raw, value)
    content = b"".join(pieces)
    return raw[at : at + 1] + len(content).to_bytes(4, "big") + content
