"""Decodes a message from a stream's record or an AMQP 0.9.1 delivery, with its time and the time's source. Pure."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias
from urllib.parse import unquote
from uuid import UUID

from relatum.common.limits import TIME_US_MAX, TIME_US_MIN
from relatum.common.uuid7 import time_us_of
from relatum.errors import UndecodableMessage
from relatum.reading._message_values import Properties, TimeSource
from relatum.wire import amqp10

try:
    from pika.compat import long
except ImportError:
    # Releases of pika after 1.4 read 64-bit numbers as plain integers, and write a type by the number's size.
    long = int

pika_long: type[int] = long
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
SECOND: Final = timedelta(seconds=1)
MICROSECOND: Final = timedelta(microseconds=1)

_NOT_HEADERS: Final = frozenset({"x-exchange", "x-routing-key", "x-stream-offset", "x-death", "x-cc"})
_NOT_HEADERS_PREFIX: Final = "x-basic-"
_QUEUE_ADDRESS: Final = "/queues/"
_AMQP_BODY: Final = "amqp-1.0"
"""The `type` that RabbitMQ sets for AMQP 0.9.1 consumers if a body exists only in AMQP 1.0: it is then encoded."""
_IDS_IN_HEADERS: Final = {"message_id": "x-message-id", "correlation_id": "x-correlation-id"}
"""Where RabbitMQ shows AMQP 0.9.1 consumers an AMQP 1.0 id that is no short text: binary, or too long."""
_SHORT_TEXT_MAX: Final = 255
"""Bytes of an AMQP 0.9.1 property."""
_TYPE: Final = {b"x-basic-type": 0}
_ABSENT: Final[Any] = object()
_APPLIED_PROPERTIES: Final = frozenset({"x-basic-type", "x-basic-app-id"})
_HEADER_FIELDS: Final = 3
"""The fields read of AMQP 1.0's header: durable, priority, ttl."""
_PROPERTY_FIELDS: Final = 11
"""The fields read of its properties, from `message-id` to `group-id`."""


_NONE: Final = Properties()
Parts: TypeAlias = tuple[dict[str, Any], Properties, bytes, bool]
"""Headers, properties, body, and whether it is an AMQP message."""


def message_time(stamped: Any, timestamp: Any, message_id: Any, chunk_ms: int | None) -> tuple[int | None, TimeSource]:
    """Return a message's time in microseconds, and its source.

    Args:
        stamped: The header `relatum_time`; ignored unless it is a moment in microseconds.
        timestamp: The property `timestamp`; only whole seconds are used, since AMQP 0.9.1 shows no more.
        message_id: The property `message_id`; ignored unless an intercepted connection made it.
        chunk_ms: When the chunk was written; None if unknown.
    """
    if type(stamped) is int and TIME_US_MIN <= stamped <= TIME_US_MAX:
        return stamped, TimeSource.HEADER
    if timestamp is not None and (second := whole_second(timestamp)) is not None:
        return (second - EPOCH) // MICROSECOND, TimeSource.PROPERTY
    if (time_us := time_us_of(message_id)) is not None:
        return time_us, TimeSource.MESSAGE_ID
    if chunk_ms is not None and 0 <= chunk_ms * 1000 <= TIME_US_MAX:
        return chunk_ms * 1000, TimeSource.CHUNK
    return None, TimeSource.UNKNOWN


def whole_second(value: Any) -> datetime | None:
    """Cut to whole seconds, as AMQP 0.9.1 does, so that deliveries and records agree."""
    if not isinstance(value, datetime):
        return None
    moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return EPOCH + (moment - EPOCH) // SECOND * SECOND


def parts_of_record(raw: bytes) -> Parts:
    try:
        sections = amqp10.find_sections(raw)
        return _decode_sections(raw, sections)
    except UndecodableMessage:
        return {}, _NONE, bytes(raw), False


def body_of_record(raw: bytes) -> bytes:
    try:
        return amqp10.body_of(raw, amqp10.find_sections(raw))
    except UndecodableMessage:
        return bytes(raw)


def type_and_id_in(raw: bytes) -> tuple[str | None, str | None]:
    """Return the properties `type` and `message_id` of a record, for a fifth of the cost of decoding all."""
    message_id = None
    annotated, applied = [_ABSENT], [_ABSENT]
    try:
        sections = amqp10.find_sections(raw)
    except UndecodableMessage:
        return None, None
    for code, start, _ in sections:
        if code == amqp10.PROPERTIES:
            try:
                message_id = amqp10.decode_list(raw, start, 1)[0]
            except UndecodableMessage:
                continue
        elif code == amqp10.MESSAGE_ANNOTATIONS:
            annotated = _picked(raw, start, annotated)
        elif code == amqp10.APPLICATION_PROPERTIES:
            applied = _picked(raw, start, applied)
    kind = annotated[0] if annotated[0] is not _ABSENT else applied[0]
    return None if kind is _ABSENT else property_text(kind), property_text(message_id)


def _picked(raw: bytes, start: int, before: list[Any]) -> list[Any]:
    """Return the type that a map holds; `before` if the map is broken."""
    found = [_ABSENT]
    try:
        amqp10.pick(raw, start, _TYPE, found)
    except UndecodableMessage:
        return before
    return found


def _decode_sections(raw: bytes, sections: list[amqp10.Section]) -> Parts:
    header: list[Any] = []
    listed: list[Any] = []
    annotations: dict[str, Any] = {}
    applied: dict[str, Any] = {}
    for code, start, end in sections:
        # A section that is broken inside counts as absent, here as in the recorder; the others are used. A context
        # manager would take a sixth of the decoding time.
        try:
            if code == amqp10.APPLICATION_PROPERTIES:
                applied = amqp10.decode_map(raw, start)
            elif code == amqp10.PROPERTIES:
                listed = amqp10.decode_list(raw, start, _PROPERTY_FIELDS)
            elif code == amqp10.MESSAGE_ANNOTATIONS:
                annotations = amqp10.decode_map(raw, start)
            elif code == amqp10.HEADER:
                # Sliced, so that a list that exceeds its section is broken, regardless of the bytes that follow.
                header = amqp10.decode_list(raw[:end], start, _HEADER_FIELDS)
        except UndecodableMessage:
            pass
    properties = _properties(header, listed, annotations, applied)
    return _headers(annotations, applied), properties, amqp10.body_of(raw, sections), True


def _properties(
    header: list[Any], listed: list[Any], annotations: dict[str, Any], applied: dict[str, Any]
) -> Properties:
    """Read the properties from where each version stores them.

    RabbitMQ up to 3.12 stores what AMQP 1.0 has no field for as `x-basic-…` in annotations and application properties,
    4.x in the header section, annotations and `group-id` (rabbit_msg_record.erl, mc_amqpl.erl).
    """
    if not (header or listed or annotations) and _APPLIED_PROPERTIES.isdisjoint(applied):
        return _NONE
    at = listed or [None] * _PROPERTY_FIELDS
    durable, priority, ttl = header or [None] * _HEADER_FIELDS
    basic_mode = annotations.get("x-basic-delivery-mode")
    return Properties(
        property_text(at[6]),
        property_text(at[7]),
        2 if durable is True or basic_mode == 2 else 1,
        _integer(priority if priority is not None else annotations.get("x-basic-priority")),
        property_text(at[5]),
        reply_to_text(at[4]),
        property_text(ttl if ttl is not None else annotations.get("x-basic-expiration")),
        property_text(at[0]),
        whole_second(at[9]),
        property_text(annotations.get("x-basic-type", applied.get("x-basic-type"))),
        property_text(at[1]),
        property_text(applied.get("x-basic-app-id", at[10])),
    )


def _headers(annotations: dict[str, Any], applied: dict[str, Any]) -> dict[str, Any]:
    headers = {name: header_value(value) for name, value in applied.items() if is_header(name)}
    # From 3.13 on the broker stores headers named `x-…` as annotations, and `CC` as `x-cc`.
    for name, value in annotations.items():
        if name.startswith("x-") and is_header(name):
            headers[name] = header_value(value)
    if "x-cc" in annotations:
        headers["CC"] = header_value(annotations["x-cc"])
    return headers


def is_header(name: str) -> bool:
    """Whether a header is the publisher's, not one that the broker adds."""
    return name not in _NOT_HEADERS and not name.startswith(_NOT_HEADERS_PREFIX)


def header_value(value: Any) -> Any:
    """Decode a header's value. The broker turns long text into binary, and AMQP back: so UTF-8 counts as text."""
    convert = _CONVERSIONS.get(type(value))
    return value if convert is None else convert(value)


def _nested(value: Any, depth: int) -> Any:
    """Decode a table's or an array's values. The depth limit ends a value that contains itself, also when compiled."""
    if depth > _DEPTH_MAX:
        raise RecursionError("a header is nested too deeply")
    if type(value) is dict:
        return {name: _nested(each, depth + 1) for name, each in value.items()}
    if type(value) is list:
        return [_nested(each, depth + 1) for each in value]
    return header_value(value)


def _utf8(value: bytes | bytearray) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return bytes(value)


def property_text(value: Any) -> str | None:
    """Return a property's value as text, as AMQP 0.9.1 shows it."""
    if value is None or type(value) is str:
        return value
    value = header_value(value)
    if value is None or type(value) is str:
        return value
    if isinstance(value, bytes):
        return None  # Not text: the versions of the broker show AMQP 0.9.1 different values, or none.
    return str(value)


def _integer(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None


def reply_to_text(value: Any) -> str | None:
    """Return the property `reply_to` as published: RabbitMQ 4 stores it as an address."""
    text = property_text(value)
    if text is not None and text.startswith(_QUEUE_ADDRESS):
        return unquote(text[len(_QUEUE_ADDRESS) :])
    return text


# --- from an AMQP 0.9.1 delivery --------------------------------------------------------------------------


def parts_of_delivery(properties: Any, body: bytes) -> Parts:
    given: dict[str, Any] = {each.name: getattr(properties, each.name, None) for each in fields(Properties)}
    stamp = given["timestamp"]
    if isinstance(stamp, int):
        # The broker passes on seconds past the year 9999, which no datetime can hold.
        given["timestamp"] = EPOCH + stamp * SECOND if 0 <= stamp <= TIME_US_MAX // 1_000_000 else None
    if given["type"] == _AMQP_BODY:
        with suppress(UndecodableMessage):
            body = amqp10.body_of(body, amqp10.find_sections(body))
            given["type"] = None
    given["timestamp"] = whole_second(given["timestamp"])
    given["delivery_mode"] = 2 if given["delivery_mode"] == 2 else 1
    given["priority"] = _integer(given["priority"])
    for name, value in given.items():
        if name not in ("timestamp", "delivery_mode", "priority"):
            given[name] = property_text(value)
    headers = {name: header_value(value) for name, value in (properties.headers or {}).items() if is_header(name)}
    for name, header in _IDS_IN_HEADERS.items():
        raw = (properties.headers or {}).get(header)
        if given[name] is None and (isinstance(raw, bytes) or len(str(raw)) > _SHORT_TEXT_MAX):
            given[name] = property_text(headers.pop(header))
    return headers, Properties(**given), body, True


_DEPTH_MAX: Final = 1_000
"""The most levels of a header's values; pika's reader ends at about 900."""

_CONVERSIONS: Final[dict[type, Callable[[Any], Any]]] = {
    bytes: _utf8,
    bytearray: _utf8,
    UUID: lambda value: f"urn:uuid:{value}",
    datetime: whole_second,
    dict: lambda value: _nested(value, 1),
    list: lambda value: _nested(value, 1),
    # pika's own type for 64-bit numbers.
    pika_long: int,
}
