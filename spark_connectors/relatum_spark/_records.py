"""A record's parts, read in one pass where it has one of the forms that RabbitMQ and stream clients write.

Decoding a message into Python objects, and those into columns, takes some thirty microseconds. Nearly all records are
a few sections with short constructors and maps of short text, which are read here with few objects in between. A record
of another form is an `UnusualRecord`: the caller then decodes it as `Message`, so nothing is guessed here.

Source: as of `relatum.wire._amqp10`.
"""

import base64
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from struct import Struct
from struct import error as struct_error
from typing import Any, Final, NamedTuple

from relatum.errors import UndecodableMessage
from relatum.headers import TIME_HEADER
from relatum.limits import TIME_US_MAX, TIME_US_MIN
from relatum.reading import Message, Properties, header_value, is_header, property_text, reply_to_text
from relatum.uuid7 import time_us_of
from relatum.wire import Opaque, amqp10
from relatum_spark._schema import PROPERTY_NAMES

_U32: Final = Struct(">I").unpack_from
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND: Final = timedelta(seconds=1)

_NAMES_MAX: Final = 4096
"""Header names remembered; a publisher that invents new ones for each message only loses speed."""

_LEADS_MAX: Final = 1024
"""First sections remembered."""

_LEAD_BYTES_MAX: Final = 1024
"""Bytes of first sections that are remembered; a publisher's usual ones are smaller."""

_TIME_NAME: Final = TIME_HEADER.encode()
_TIME_SLOT: Final = {_TIME_NAME: 0}
_CREATED: Final = 9
_REPLY_TO: Final = 4

_PLACES: Final = (
    *("message_id", "user_id", "", "", "reply_to", "correlation_id"),
    *("content_type", "content_encoding", "", "timestamp", "app_id"),
)
"""The properties at the places of AMQP 1.0's list; "" where AMQP 0.9.1 has none."""


class UnusualRecord(Exception):
    """The record has a form that is not read here."""


Parts = tuple[int, int, int, int, int]
"""Where the sections `header` and message annotations end, which come first; where the values of properties,
application properties and data begin (-1: not there); where the data ends."""


def parts_of(raw: bytes) -> Parts:
    """Find the sections of a record; one with other constructors, in another order or there twice is unusual."""
    lead_end = data_end = position = 0
    properties = application = data = -1
    latest = 0x6F
    size = len(raw)
    try:
        while position < size:
            if raw[position] or raw[position + 1] != 0x53:
                raise UnusualRecord
            section, start = raw[position + 2], position + 3
            code = raw[start]
            if code == 0xC1 or code == 0xC0 or code == 0xA0:
                position = start + 2 + raw[start + 1]
            elif code == 0xB0 or code == 0xD1 or code == 0xD0:
                position = start + 5 + _U32(raw, start + 1)[0]
            else:
                raise UnusualRecord
            if section <= latest:
                raise UnusualRecord
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
                raise UnusualRecord
    except (IndexError, struct_error):
        raise UnusualRecord from None
    if position != size or not size:
        raise UnusualRecord
    return lead_end, properties, application, data, data_end


def body_at(raw: bytes, data: int, data_end: int) -> bytes:
    """Return the body, from where its section's value begins and ends."""
    if data < 0:
        return b""
    code = raw[data]
    if code == 0xA0:
        return raw[data + 2 : data_end]
    if code == 0xB0:
        return raw[data + 5 : data_end]
    raise UnusualRecord


def may_be_stamped(records: Sequence[bytes]) -> bool:
    """Whether one of some records may have the header `relatum_time`: a search costs less than their maps."""
    return _TIME_NAME in b"".join(records)


def stamp_at(raw: bytes, application: int) -> Any:
    """Return the header `relatum_time` among the application properties."""
    found: list[Any] = [None]
    try:
        amqp10.pick(raw, application, _TIME_SLOT, found)
    except (UndecodableMessage, IndexError):
        raise UnusualRecord from None
    return found[0]


def time_of(stamped: Any, found: dict[str, Any], chunk_us: int | None) -> int | None:
    """Return a message's time, as `message_time` finds it: the header's, a property's, an id's, or the chunk's."""
    if type(stamped) is int and TIME_US_MIN <= stamped <= TIME_US_MAX:
        return stamped
    time_us = found.get("timestamp")
    if time_us is None:
        time_us = time_us_of(found.get("message_id"))
    return chunk_us if time_us is None else time_us


def _moment_us(value: Any) -> int | None:
    """The property `timestamp` in microseconds: whole seconds, as everywhere."""
    return (value - _EPOCH) // _SECOND * 1_000_000 if isinstance(value, datetime) else None


def properties_at(raw: bytes, position: int) -> dict[str, Any]:
    """Return the properties in AMQP 1.0's list that are set, `timestamp` in microseconds."""
    # One that counts more than it holds counts as absent.
    if raw[position] != 0xC0 or raw[position + 2] >= raw[position + 1]:
        raise UnusualRecord
    at, end = position + 3, position + 2 + raw[position + 1]
    found: dict[str, Any] = {}
    try:
        for place in range(min(raw[position + 2], len(_PLACES))):
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
                value = _moment_us(value)
            elif place == _REPLY_TO:
                value = reply_to_text(value)
            elif type(value) is not str:
                value = property_text(value)
            if value is not None:
                found[_PLACES[place]] = value
    except (IndexError, UnicodeDecodeError, UndecodableMessage):
        raise UnusualRecord from None
    if at > end:
        raise UnusualRecord
    found.pop("", None)
    return found


def set_properties(properties: Properties) -> dict[str, Any]:
    """The properties that are set, `timestamp` in microseconds. A priority that no column can hold counts as none."""
    found = {name: value for name in PROPERTY_NAMES if (value := getattr(properties, name)) is not None}
    if "timestamp" in found:
        found["timestamp"] = _moment_us(found["timestamp"])
    if not -(2**31) <= found.get("priority", 0) < 2**31:
        del found["priority"]
    return found


class Lead(NamedTuple):
    """What the sections `header` and message annotations say: the same in message after message of one publisher."""

    properties: dict[str, Any]
    headers: dict[str, str | None]
    """Headers that RabbitMQ 3.13 and later keep as annotations."""
    may_have_type: bool
    """The property `type` may be among the annotations; else it may be among the application properties."""


NO_LEAD: Final = Lead({}, {}, False)


class HeaderReader:
    """Reads headers, and remembers what repeats: their names, and what the first two sections say."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self._leads: dict[bytes, Lead] = {}

    def lead(self, start: bytes) -> Lead:
        """Return what the sections `header` and message annotations say; `start` is the record up to their end."""
        if len(start) > _LEAD_BYTES_MAX:
            return _read_lead(start)
        found = self._leads.get(start)
        if found is None:
            if len(self._leads) >= _LEADS_MAX:
                self._leads.clear()
            found = self._leads[start] = _read_lead(start)
        return found

    def headers(self, raw: bytes, application: int, basic: dict[str, Any]) -> dict[str, str | None]:
        """Return the headers among the application properties, as text.

        `basic` gets what else is there as it is: `x-basic-…`, and the header `relatum_time` once more.
        """
        names = self._names
        headers: dict[str, str | None] = {}
        try:
            if raw[application] == 0xC1:
                count, at, end = raw[application + 2], application + 3, application + 2 + raw[application + 1]
            else:
                count, at, end = amqp10.entries_of(raw, application, "map")
            for _ in range(count >> 1):
                if raw[at] != 0xA1:
                    raise UnusualRecord
                value = at + 2 + raw[at + 1]
                key = raw[at + 2 : value]
                if raw[value] == 0xA1 and (name := names.get(key)) is not None:
                    at = value + 2 + raw[value + 1]
                    headers[name] = raw[value + 2 : at].decode()
                else:
                    at = self._other(raw, key, value, headers, basic)
        except (IndexError, UnicodeDecodeError, UndecodableMessage):
            raise UnusualRecord from None
        if at != end or count & 1 or len(headers) + len(basic) - (TIME_HEADER in basic) != count >> 1:
            raise UnusualRecord
        return headers

    def _other(self, raw: bytes, key: bytes, at: int, headers: dict[str, str | None], basic: dict[str, Any]) -> int:
        """Read a value that is no short text, or whose name is new; return where it ends."""
        value, end = amqp10.decode_value(raw, at)
        name = self._names.get(key)
        if name is None:
            name = str(key, "utf-8")
            if not is_header(name):
                basic[name] = value
                return end
            if len(self._names) < _NAMES_MAX:
                self._names[key] = name
        if name == TIME_HEADER:
            basic[name] = value
        headers[name] = str(value) if type(value) is int else header_text(header_value(value))
        return end


def _read_lead(start: bytes) -> Lead:
    """Let `Message` read the sections."""
    message = Message.from_record("", 0, start)
    return Lead(
        set_properties(message.properties),
        {name: header_text(value) for name, value in message.headers.items()},
        b"x-basic-type" in start,
    )


# --- headers as text --------------------------------------------------------------------------------------


def header_text(value: Any) -> str | None:
    """Return a header's value, as `Message.headers` has it, as text.

    Text stays itself, whole numbers are decimal, booleans `true` and `false`: what a text key's canonical value is, so
    that the column joins with the relationship table. Floats are as Python writes them, moments ISO 8601, bytes that
    are no UTF-8 base64, lists and tables JSON of these. None stays None.
    """
    kind = type(value)
    if kind is str or value is None:
        return value  # type: ignore[no-any-return]
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return str(value)
    plain = _plain(value)
    return plain if isinstance(plain, str) else _ENCODER.encode(plain)


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """The value in types that JSON has."""
    if isinstance(value, Opaque):
        return _base64(value.data)
    if isinstance(value, dict):
        return {_name(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _base64(bytes(value))
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _name(name: Any) -> str:
    """A table's key: AMQP 1.0 allows any value there."""
    return header_text(name) or ""


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
