"""A fast, one-pass decoder for records in the usual form, as RabbitMQ and stream clients write them.

Nearly all records are a few sections with short constructors and maps of short text. This decoder takes a few
microseconds for a record; `Message` takes thirty. Records of any other form are decoded by `Message`.

Source: see `relatum.wire.amqp10`.
"""

import base64
import json
from dataclasses import fields
from datetime import datetime
from struct import Struct
from struct import error as struct_error
from typing import Any, Final, TypeAlias

from relatum.common.headers import TIME_HEADER
from relatum.errors import UndecodableMessage
from relatum.reading import Message, Properties, header_value, is_header, message_time, property_text, reply_to_text
from relatum.wire import amqp10
from relatum.wire.amqp10 import Opaque

PROPERTY_NAMES: Final = tuple(field.name for field in fields(Properties))
"""The fields of the column `properties`, in order."""

_U32: Final = Struct(">I").unpack_from

_NAMES: Final[dict[bytes, str]] = {}
_NAMES_MAX: Final = 4096
"""Maximum cached header names; further names are decoded more slowly."""

_LEADS: Final[dict[bytes, tuple[dict[str, str | None], dict[str, Any]]]] = {}
_LEADS_MAX: Final = 1024
_LEAD_BYTES_MAX: Final = 1024
"""Maximum cached leading sections, and maximum bytes of each; most are smaller."""

_REPLY_TO: Final = 4
_CREATED: Final = 9
_PLACES: Final = (
    *("message_id", "user_id", "", "", "reply_to", "correlation_id"),
    *("content_type", "content_encoding", "", "timestamp", "app_id"),
)
"""The properties in the order of AMQP 1.0's list; "" for those that AMQP 0.9.1 does not have."""

Row: TypeAlias = tuple[int | None, bytes, dict[str, str | None], dict[str, Any]]
"""A message's time in microseconds, its body, its headers as text, and its properties that are set."""


class _UnusualRecord(Exception):
    """The record has an unusual form."""


_UNUSUAL: Final = (_UnusualRecord, UndecodableMessage, UnicodeDecodeError, IndexError, struct_error)


def read_record(raw: bytes, chunk_ms: int | None) -> Row:
    """Decode a record; `chunk_ms` is the time when the broker wrote its chunk."""
    try:
        return _read_usual(raw, chunk_ms)
    except _UNUSUAL:
        message = Message.from_record("", 0, raw, chunk_ms)
        headers, properties = _headers_and_properties(message)
        return message.time_us, message.body, headers, properties


def _read_usual(raw: bytes, chunk_ms: int | None) -> Row:
    lead_end, listed, application, data, data_end = _parts_of(raw)
    lead_headers, lead_properties = _lead(raw[:lead_end])
    found = lead_properties.copy()
    if listed >= 0:
        _read_properties(raw, listed, found)
    headers: dict[str, str | None] = {}
    time_header = _read_headers(raw, application, lead_end, headers, found) if application >= 0 else None
    if lead_headers:
        headers |= lead_headers
    time_us, _ = message_time(time_header, found.get("timestamp"), found.get("message_id"), chunk_ms)
    return time_us, _body_at(raw, data, data_end), headers, found


def _parts_of(raw: bytes) -> tuple[int, int, int, int, int]:
    """Find the sections of a record. Other constructors, another order or repeated sections are unusual.

    Returns:
        The end of the leading sections (`header` and message annotations); the starts of the values of properties,
        application properties and data (-1: missing); the end of the data.
    """
    lead_end = data_end = position = 0
    properties = application = data = -1
    latest = 0x6F
    size = len(raw)
    while position < size:
        if raw[position] or raw[position + 1] != 0x53:
            raise _UnusualRecord
        section, start = raw[position + 2], position + 3
        code = raw[start]
        if code == 0xC1 or code == 0xC0 or code == 0xA0:
            position = start + 2 + raw[start + 1]
        elif code == 0xB0 or code == 0xD1 or code == 0xD0:
            position = start + 5 + _U32(raw, start + 1)[0]
        else:
            raise _UnusualRecord
        if section <= latest:
            raise _UnusualRecord
        latest = section
        if section == 0x75:
            data, data_end = start, position
        elif section == 0x74:
            application = start
        elif section == 0x73:
            properties = start
        elif section == 0x72 or section == 0x70:
            lead_end = position
        else:
            raise _UnusualRecord
    if position != size or not size:
        raise _UnusualRecord
    return lead_end, properties, application, data, data_end


def _body_at(raw: bytes, data: int, data_end: int) -> bytes:
    """Return the body, given the start and the end of its section's value."""
    if data < 0:
        return b""
    code = raw[data]
    if code == 0xA0:
        return raw[data + 2 : data_end]
    if code == 0xB0:
        return raw[data + 5 : data_end]
    raise _UnusualRecord


def _read_properties(raw: bytes, position: int, found: dict[str, Any]) -> None:
    """Add the properties that are set in AMQP 1.0's list."""
    count, at, end = amqp10.entries_of(raw, position, "list")
    for place in range(min(count, len(_PLACES))):
        code = raw[at]
        if code == 0x40:
            at += 1
            continue
        if code == 0xA1:
            value: Any = raw[at + 2 : at + 2 + raw[at + 1]].decode()
            at += 2 + raw[at + 1]
        else:
            value, at = amqp10.decode_value(raw, at)
        if place == _CREATED:
            # AMQP 0.9.1 has whole seconds only.
            value = value.replace(microsecond=0) if isinstance(value, datetime) else None
        elif place == _REPLY_TO:
            value = reply_to_text(value)
        elif type(value) is not str:
            value = property_text(value)
        if value is not None and _PLACES[place]:
            found[_PLACES[place]] = value
    if at > end:
        raise _UnusualRecord


def _read_headers(
    raw: bytes, application: int, lead_end: int, headers: dict[str, str | None], properties: dict[str, Any]
) -> Any:
    """Add the headers from the application properties; return the value of `relatum_time`.

    RabbitMQ up to 3.12 also keeps two properties there.
    """
    if raw[application] == 0xC1:
        count, at, end = raw[application + 2], application + 3, application + 2 + raw[application + 1]
    else:
        count, at, end = amqp10.entries_of(raw, application, "map")
    time_header, others = None, 0
    for _ in range(count >> 1):
        if raw[at] != 0xA1:
            raise _UnusualRecord
        start = at + 2 + raw[at + 1]
        key = raw[at + 2 : start]
        name = _NAMES.get(key)
        if name is not None and raw[start] == 0xA1:
            at = start + 2 + raw[start + 1]
            headers[name] = raw[start + 2 : at].decode()
            continue
        value, at = amqp10.decode_value(raw, start)
        name = key.decode()
        if name == TIME_HEADER:
            time_header = value
        if is_header(name):
            headers[name] = header_text(header_value(value))
            if len(_NAMES) < _NAMES_MAX:
                _NAMES[key] = name
            continue
        others += 1
        if name == "x-basic-app-id":
            properties["app_id"] = property_text(value)
        elif name == "x-basic-type":
            if b"x-basic-type" in raw[:lead_end]:
                raise _UnusualRecord
            properties["type"] = property_text(value)
    if at != end or count & 1 or len(headers) + others != count >> 1:
        raise _UnusualRecord
    return time_header


def _lead(start: bytes) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Decode the leading sections, with a cache: many messages of a publisher have equal leading sections.

    RabbitMQ 3.13 and later keep some headers as annotations.
    """
    found = _LEADS.get(start)
    if found is None:
        found = _headers_and_properties(Message.from_record("", 0, start))
        if len(_LEADS) < _LEADS_MAX and len(start) <= _LEAD_BYTES_MAX:
            _LEADS[start] = found
    return found


def _headers_and_properties(message: Message) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Return a message's headers as text, and its set properties without a priority over 32 bits."""
    properties = message.properties
    found = {name: value for name in PROPERTY_NAMES if (value := getattr(properties, name)) is not None}
    if not -(2**31) <= found.get("priority", 0) < 2**31:
        del found["priority"]
    return {name: header_text(value) for name, value in message.headers.items()}, found


# --- headers as text --------------------------------------------------------------------------------------


def header_text(value: Any) -> str | None:
    """Convert a header's value in `Message.headers` to text.

    Text is unchanged, whole numbers are decimal, booleans `true` and `false`. These equal the canonical values of a
    text key, so the column joins with the relationship table. Floats are in Python's notation, datetimes in ISO 8601,
    bytes other than UTF-8 in base64, lists and tables in JSON of these. None stays None.
    """
    kind = type(value)
    if kind is str or value is None:
        return value  # type: ignore[no-any-return]
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return str(value)
    plain = _json_value(value)
    return plain if isinstance(plain, str) else _ENCODER.encode(plain)


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _json_value(value: Any) -> Any:
    if isinstance(value, Opaque):
        return _base64(value.data)
    if isinstance(value, dict):
        return {_name(name): _json_value(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(each) for each in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _base64(bytes(value))
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _name(name: Any) -> str:
    """Convert a table's key to text: AMQP 1.0 allows any value there."""
    return header_text(name) or ""


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
