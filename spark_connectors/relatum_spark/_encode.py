"""Encoding messages in AMQP 1.0, in the layout that RabbitMQ itself uses for messages published over AMQP 0.9.1.

A publisher of the stream protocol sends a message as the stream stores it. Properties without a field in AMQP 1.0 are
encoded as the broker's version encodes them, so that consumers of AMQP 0.9.1 get them. RabbitMQ up to 3.12 stores no
header section (3.10 closes the channel if a message has one), and keeps priority, expiration and other properties under
its own names.

Source: OASIS AMQP 1.0, parts 1 and 3.2; rabbit_msg_record.erl (3.12), mc_amqpl.erl (3.13); compared byte by byte with
messages stored by 3.10 and 4.3.
"""

import struct
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from relatum.common.headers import NAME_BYTES_MAX
from relatum.common.limits import INTEGER_MAX, INTEGER_MIN
from relatum.errors import HeadersRefused, InvalidInput
from relatum.keys import microseconds
from relatum.reading import is_header
from relatum.wire import amqp10

_TTL_MAX: Final = 0xFFFFFFFF  # milliseconds, a uint in AMQP 1.0
_SYMBOLS: Final = ("content_type", "content_encoding")
NEW_LAYOUT_SINCE: Final = (3, 13)
"""The first version with the message layout of 4.x."""

_RULES: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "delivery_mode": (lambda value: value in (1, 2), "1 or 2"),
    "priority": (lambda value: 0 <= value <= 255, "a number from 0 to 255"),
    "expiration": (lambda value: value.isdecimal() and int(value) <= _TTL_MAX, "milliseconds in decimal digits"),
}
"""The check of each property's value, and its description in errors."""

_NULL: Final = b"\x40"
_LONG: Final = struct.Struct(">Bq").pack
_DOUBLE: Final = struct.Struct(">Bd").pack
_UINT: Final = struct.Struct(">BI").pack
_COUNTED: Final = struct.Struct(">BII").pack


class Content(NamedTuple):
    """The user's part of a message, encoded in sections."""

    head: bytes  # the sections before the properties
    fields: list[bytes]  # the values of the properties
    pairs: bytes  # names and values of the application properties
    pair_count: int
    data: bytes

    def parts(self) -> tuple[bytes, ...]:
        """Return the bytes that identify the content."""
        return (self.head, *self.fields, self.pairs, self.data)

    def message(self, message_id: str, added: Mapping[str, Any]) -> bytes:
        """Return the whole message, with added headers; `message_id` is the user's if there is one."""
        pairs, count = self.pairs, self.pair_count
        for name, value in added.items():
            pairs += _name(name) + encode_value(value)
            count += 1
        fields = [encode_value(message_id), *self.fields[1:]]
        sections = self.head + _section(amqp10.PROPERTIES, _compound(0xC0, len(fields), b"".join(fields)))
        if count:
            sections += _section(amqp10.APPLICATION_PROPERTIES, _compound(0xC1, count * 2, pairs))
        return sections + self.data


def encode_content(body: bytes, headers: Mapping[str, Any], properties: Mapping[str, Any], *, new: bool) -> Content:
    """Encode the user's part of a message, in the layout of RabbitMQ 3.13 and later (`new`) or of earlier versions.

    Headers are str, int, bool, float, bytes, aware `datetime` or None. Properties have pika's names and contain only
    properties that are set, `timestamp` as an aware `datetime`. Raises `InvalidInput` for values that cannot be sent.
    """
    annotations: list[bytes] = []
    pairs: list[bytes] = []
    for name, value in headers.items():
        if new and name.startswith("x-") and name.isascii():
            annotations += (_symbol(name), encode_value(value))
        else:
            pairs += (_name(name), encode_value(value))
    head, fields = b"", [_NULL]
    if properties:
        _check_properties(properties)
        fields = _fields(properties, new)
        if not new:
            _add_legacy(properties, annotations, pairs)
        elif "type" in properties:
            annotations += (_symbol("x-basic-type"), encode_value(properties["type"]))
    if new:
        head = _header(properties)
    if annotations:
        head += _section(amqp10.MESSAGE_ANNOTATIONS, _compound(0xC1, len(annotations), b"".join(annotations)))
    return Content(head, fields, b"".join(pairs), len(pairs) // 2, amqp10.data_section(body))


def _check_properties(properties: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` for properties that AMQP 0.9.1 cannot carry."""
    for name, value in properties.items():
        if isinstance(value, str) and len(value.encode()) > NAME_BYTES_MAX:
            raise InvalidInput(f"the property {name} may have at most {NAME_BYTES_MAX} bytes; nothing was sent")
        if name in _RULES and not _RULES[name][0](value):
            raise InvalidInput(f"the property {name} must be {_RULES[name][1]}; nothing was sent")


def _fields(given: Mapping[str, Any], new: bool) -> list[bytes]:
    """Return the fields of the properties' section, up to the last one that is set."""
    reply_to, user = given.get("reply_to"), given.get("user_id")
    moment = given.get("timestamp")
    fields = [
        encode_value(given.get("message_id")),
        _NULL if user is None else encode_value(user.encode()),
        _NULL,
        _NULL,
        encode_value(f"/queues/{quote(reply_to, safe='')}" if new and reply_to is not None else reply_to),
        encode_value(given.get("correlation_id")),
        *(_NULL if (text := given.get(name)) is None else _sized(0xA3, text.encode()) for name in _SYMBOLS),
        _NULL,
        _NULL if moment is None else encode_value(moment),
        encode_value(given.get("app_id")) if new else _NULL,
    ]
    while len(fields) > 1 and fields[-1] is _NULL:
        fields.pop()
    return fields


def _add_legacy(given: Mapping[str, Any], annotations: list[bytes], pairs: list[bytes]) -> None:
    """Add the properties that RabbitMQ up to 3.12 keeps under its own names."""
    for name in ("priority", "delivery_mode"):
        if name in given:
            annotations += (_symbol(f"x-basic-{name.replace('_', '-')}"), bytes((0x50, given[name])))
    if "expiration" in given:
        annotations += (_symbol("x-basic-expiration"), encode_value(given["expiration"]))
    for name in ("type", "app_id"):
        if name in given:
            pairs += (encode_value(f"x-basic-{name.replace('_', '-')}"), encode_value(given[name]))


def _header(given: Mapping[str, Any]) -> bytes:
    """Encode the header section: durable, priority, ttl."""
    priority, ttl = given.get("priority"), given.get("expiration")
    fields = (
        encode_value(given.get("delivery_mode") == 2)
        + (_NULL if priority is None else bytes((0x50, priority)))
        + (_NULL if ttl is None else _UINT(0x70, int(ttl)))
    )
    return _section(amqp10.HEADER, _compound(0xC0, 3, fields))


# --- values -----------------------------------------------------------------------------------------------


def encode_value(value: Any) -> bytes:
    """Encode a header's value; raises `HeadersRefused` for a type that `encode_content` does not list."""
    encode = _ENCODERS.get(type(value))
    if encode is None:
        raise HeadersRefused(f"a header's value cannot be a {type(value).__name__}; nothing was sent", reason="type")
    return encode(value)


def _text(value: str) -> bytes:
    try:
        return _sized(0xA1, value.encode())
    except UnicodeEncodeError:
        raise HeadersRefused("a header's text is not valid Unicode; nothing was sent", reason="not_unicode") from None


def _integer(value: int) -> bytes:
    if not INTEGER_MIN <= value <= INTEGER_MAX:
        raise HeadersRefused("a header's number exceeds 64 bits; nothing was sent", reason="out_of_range")
    return _LONG(0x81, value)


def _moment(value: datetime) -> bytes:
    time_ms = microseconds(value) // 1000
    if time_ms < 0:
        # AMQP 0.9.1 has unsigned seconds: such a header ends the connections of consumers that use pika or aio-pika.
        raise HeadersRefused("a time before 1970 cannot be sent; nothing was sent", reason="out_of_range")
    return _LONG(0x83, time_ms)


_ENCODERS: Final[dict[type, Callable[[Any], bytes]]] = {
    type(None): lambda _: _NULL,
    bool: lambda value: b"\x41" if value else b"\x42",
    int: _integer,
    float: lambda value: _DOUBLE(0x82, value),
    str: _text,
    bytes: lambda value: _sized(0xA0, value),
    datetime: _moment,
}


@lru_cache(1024)
def _name(name: str) -> bytes:
    _check_name(name)
    return _text(name)


@lru_cache(1024)
def _symbol(name: str) -> bytes:
    if not name.startswith("x-basic-"):
        _check_name(name)
    return _sized(0xA3, name.encode())


def _check_name(name: str) -> None:
    if not is_header(name):
        raise HeadersRefused(
            f"a header cannot be named {name!r}: RabbitMQ reserves this name; nothing was sent", reason="name"
        )
    if not 1 <= len(name.encode()) <= NAME_BYTES_MAX:
        raise HeadersRefused(f"a header's name must have 1 to {NAME_BYTES_MAX} bytes; nothing was sent", reason="name")


def _sized(code: int, data: bytes) -> bytes:
    """Encode text, binary or a symbol; `code` is the code of the short form."""
    if len(data) <= 255:
        return bytes((code, len(data))) + data
    return _UINT(code + 0x10, len(data)) + data


def _compound(code: int, count: int, items: bytes) -> bytes:
    """Encode a list or a map; `code` is the code of the short form."""
    if len(items) < 255 and count <= 255:
        return bytes((code, len(items) + 1, count)) + items
    return _COUNTED(code + 0x10, len(items) + 4, count) + items


def _section(code: int, value: bytes) -> bytes:
    return b"\0\x53" + bytes((code,)) + value
