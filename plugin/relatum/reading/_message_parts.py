"""Decodes a stream's record or an AMQP 0.9.1 delivery into the parts of a message. No I/O."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias
from urllib.parse import unquote
from uuid import UUID

from relatum.common.headers import TIME_HEADER
from relatum.common.limits import TIME_US_MAX, TIME_US_MIN
from relatum.common.uuid7 import time_us_of
from relatum.errors import UndecodableMessage
from relatum.reading._message_values import Properties, TimeSource
from relatum.wire import amqp10

try:
    from pika.compat import long
except ImportError:
    # Releases of pika after 1.4 read 64-bit numbers as plain integers, and write the type that fits the number.
    long = int

pika_long: type[int] = long
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
SECOND: Final = timedelta(seconds=1)
MICROSECOND: Final = timedelta(microseconds=1)

_NOT_HEADERS: Final = frozenset({"x-exchange", "x-routing-key", "x-stream-offset", "x-death", "x-cc"})
_NOT_HEADERS_PREFIX: Final = "x-basic-"
_QUEUE_ADDRESS: Final = "/queues/"
_AMQP_BODY: Final = "amqp-1.0"
"""The `type` that RabbitMQ sets for AMQP 0.9.1 consumers if the body is AMQP 1.0 sections, still encoded."""
_IDS_IN_HEADERS: Final = {"message_id": "x-message-id", "correlation_id": "x-correlation-id"}
"""Headers in which RabbitMQ gives AMQP 0.9.1 consumers an AMQP 1.0 id that is binary, or too long for a property."""
_SHORT_TEXT_MAX: Final = 255
"""Maximum bytes of a text property of AMQP 0.9.1."""
_TYPE: Final = {b"x-basic-type": 0}
_ID: Final = {0: 1}
_ID_AND_CREATED: Final = {0: 1, 9: 2}
"""Indexes in the list of properties: `message-id` and `creation-time`."""
_TIME: Final = {TIME_HEADER.encode(): 0}
_APPLIED_PROPERTIES: Final = frozenset({"x-basic-type", "x-basic-app-id"})
_HEADER_FIELDS: Final = 3
"""The number of fields to read of AMQP 1.0's header section: durable, priority, ttl."""
_PROPERTY_FIELDS: Final = 11
"""The number of fields to read of its properties section: `message-id` to `group-id`."""

_NONE: Final = Properties()
Parts: TypeAlias = tuple[dict[str, Any], Properties, bytes, bool]
"""Headers, properties, body, and whether it is an AMQP message."""


def message_time(stamped: Any, timestamp: Any, message_id: Any, chunk_ms: int | None) -> tuple[int | None, TimeSource]:
    """Return a message's time in microseconds, and its source.

    Args:
        stamped: The header `relatum_time`; ignored unless it is a valid time in microseconds.
        timestamp: The property `timestamp`; only whole seconds are used, since AMQP 0.9.1 has no fractions.
        message_id: The property `message_id`; ignored unless an intercepted connection created it.
        chunk_ms: When the chunk was written, milliseconds since 1970, UTC; None if unknown.
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
    """Return a time without its fraction of a second, as AMQP 0.9.1 gives it, so that deliveries and records agree."""
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
    """Return the properties `type` and `message_id` of a record. Decoding all takes five times as long."""
    found: list[Any] = [None, None]
    try:
        annotations, properties, application = amqp10.find_head(raw)
        if application >= 0:
            amqp10.pick(raw, application, _TYPE, found)
        if annotations >= 0:
            amqp10.pick(raw, annotations, _TYPE, found)
        if properties >= 0:
            amqp10.pick_list(raw, properties, _ID, found)
    except UndecodableMessage:
        readable = parts_of_record(raw)[1]
        return readable.type, readable.message_id
    return property_text(found[0]), property_text(found[1])


def time_of_record(raw: bytes, chunk_ms: int | None) -> tuple[int | None, TimeSource]:
    """Return a record's time and its source. Decoding all takes twice as long."""
    found: list[Any] = [None, None, None]
    try:
        _, properties, application = amqp10.find_head(raw)
        if application >= 0:
            amqp10.pick(raw, application, _TIME, found)
        if properties >= 0:
            amqp10.pick_list(raw, properties, _ID_AND_CREATED, found)
    except UndecodableMessage:
        headers, readable, _, _ = parts_of_record(raw)
        found = [headers.get(TIME_HEADER), readable.message_id, readable.timestamp]
    return message_time(found[0], found[2], property_text(found[1]), chunk_ms)


def _decode_sections(raw: bytes, sections: list[amqp10.Section]) -> Parts:
    header: list[Any] = []
    listed: list[Any] = []
    annotations: dict[str, Any] = {}
    application: dict[str, Any] = {}
    for code, start, end in sections:
        # A broken section counts as absent, as in the recorder; the others are used. `try`, because `suppress` would
        # take a sixth of the decoding time.
        try:
            if code == amqp10.APPLICATION_PROPERTIES:
                application = amqp10.decode_map(raw, start)
            elif code == amqp10.PROPERTIES:
                listed = amqp10.decode_list(raw, start, _PROPERTY_FIELDS)
            elif code == amqp10.MESSAGE_ANNOTATIONS:
                annotations = amqp10.decode_map(raw, start)
            elif code == amqp10.HEADER:
                # The slice makes a list that exceeds its section invalid.
                header = amqp10.decode_list(raw[:end], start, _HEADER_FIELDS)
        except UndecodableMessage:
            pass
    properties = _properties(header, listed, annotations, application)
    return _headers(annotations, application), properties, amqp10.body_of(raw, sections), True


def _properties(
    header: list[Any], listed: list[Any], annotations: dict[str, Any], application: dict[str, Any]
) -> Properties:
    """Return the properties, which RabbitMQ's versions store in different sections.

    Up to 3.12, properties without a field in AMQP 1.0 are `x-basic-…` annotations and application properties; in 4.x
    they are in the header section, annotations and `group-id`. Source: rabbit_msg_record.erl, mc_amqpl.erl.
    """
    if not (header or listed or annotations) and _APPLIED_PROPERTIES.isdisjoint(application):
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
        property_text(annotations.get("x-basic-type", application.get("x-basic-type"))),
        property_text(at[1]),
        property_text(application.get("x-basic-app-id", at[10])),
    )


def _headers(annotations: dict[str, Any], application: dict[str, Any]) -> dict[str, Any]:
    headers = {name: header_value(value) for name, value in application.items() if is_header(name)}
    # From 3.13 on, the broker stores headers named `x-…` as annotations, and `CC` as `x-cc`.
    for name, value in annotations.items():
        if name.startswith("x-") and is_header(name):
            headers[name] = header_value(value)
    if "x-cc" in annotations:
        headers["CC"] = header_value(annotations["x-cc"])
    return headers


def is_header(name: str) -> bool:
    """Whether a header is the publisher's, not the broker's."""
    return name not in _NOT_HEADERS and not name.startswith(_NOT_HEADERS_PREFIX)


def header_value(value: Any) -> Any:
    """Return a header's value as Python types. UTF-8 bytes are text: the broker stores long text as binary."""
    convert = _CONVERSIONS.get(type(value))
    return value if convert is None else convert(value)


def _nested(value: Any, depth: int) -> Any:
    """Return the values of a table or array as Python types. The depth limit catches a value that contains itself."""
    if depth > _DEPTH_MAX:
        raise RecursionError(f"a header has more than {_DEPTH_MAX} nested levels")
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
    """Return a property's value as text, as AMQP 0.9.1 clients receive it."""
    if value is None or type(value) is str:
        return value
    value = header_value(value)
    if value is None or type(value) is str:
        return value
    if isinstance(value, bytes):
        return None  # For bytes that are not text, clients receive different values, depending on the broker's version.
    return str(value)


def _integer(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None


def reply_to_text(value: Any) -> str | None:
    """Return the property `reply_to` as published. RabbitMQ 4 stores it as an address."""
    text = property_text(value)
    if text is not None and text.startswith(_QUEUE_ADDRESS):
        return unquote(text[len(_QUEUE_ADDRESS) :])
    return text


# --- from an AMQP 0.9.1 delivery --------------------------------------------------------------------------


def parts_of_delivery(properties: Any, body: bytes) -> Parts:
    values: dict[str, Any] = {each.name: getattr(properties, each.name, None) for each in fields(Properties)}
    stamp = values["timestamp"]
    if isinstance(stamp, int):
        # The broker delivers seconds after the year 9999, which no datetime can represent.
        values["timestamp"] = EPOCH + stamp * SECOND if 0 <= stamp <= TIME_US_MAX // 1_000_000 else None
    if values["type"] == _AMQP_BODY:
        with suppress(UndecodableMessage):
            body = amqp10.body_of(body, amqp10.find_sections(body))
            values["type"] = None
    values["timestamp"] = whole_second(values["timestamp"])
    values["delivery_mode"] = 2 if values["delivery_mode"] == 2 else 1
    values["priority"] = _integer(values["priority"])
    for name, value in values.items():
        if name not in ("timestamp", "delivery_mode", "priority"):
            values[name] = property_text(value)
    headers = {name: header_value(value) for name, value in (properties.headers or {}).items() if is_header(name)}
    for name, header in _IDS_IN_HEADERS.items():
        raw = (properties.headers or {}).get(header)
        if values[name] is None and (isinstance(raw, bytes) or len(str(raw)) > _SHORT_TEXT_MAX):
            values[name] = property_text(headers.pop(header))
    return headers, Properties(**values), body, True


_DEPTH_MAX: Final = 1_000
"""Maximum nested levels of a header's values. pika decodes about 900."""

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
