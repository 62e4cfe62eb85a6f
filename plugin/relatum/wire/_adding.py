"""A `message_id` and headers added to an encoded AMQP 1.0 message; all else of it stays, byte for byte. Pure."""

from collections.abc import Mapping
from struct import Struct
from typing import Any, Final

from relatum.wire import _amqp10 as amqp10

_LIST8: Final = 0xC0
_LIST32: Final = 0xD0
_MAP8: Final = 0xC1
_MAP32: Final = 0xD1
_NO_BODY: Final = b"\xa0\0"
_SMALL_MAX: Final = 0xFF
_LARGE: Final = Struct(">BII").pack
_LONG: Final = Struct(">Bq").pack
_TEXT8: Final = Struct(">BB").pack
_TEXT32: Final = Struct(">BI").pack
_ID_LENGTH: Final = 36
"""Characters of an id of ours; most of others' have as many."""
_ID_BEGINS: Final = bytes((0, 0x53, amqp10.PROPERTIES, _LIST8, _ID_LENGTH + 3, 1, 0xA1, _ID_LENGTH))
_APPLICATION_PROPERTIES_BEGIN: Final = bytes((0, 0x53, amqp10.APPLICATION_PROPERTIES))
_DATA8_BEGINS: Final = bytes((0, 0x53, amqp10.DATA, 0xA0))
_DATA32_BEGINS: Final = bytes((0, 0x53, amqp10.DATA, 0xB0))

Added = str | bool | int
"""What is added: texts, flags, and integers within 64 bits."""


def with_added(
    raw: bytes, sections: list[amqp10.Section], message_id: str | None, headers: Mapping[str, Added]
) -> bytes:
    """The message with these added; and with an empty body, where it has none.

    A message without a body ends RabbitMQ's connections to AMQP 0.9.1 consumers of the stream (seen with 3.10 and 4.3).

    - `raw`, `sections`: The message and its sections, as `find_sections` gives them.
    - `message_id`: For a message that has none; None adds none.
    - `headers`: Application properties that it does not have.

    Raises:
        UndecodableMessage: the section that is to take them is broken.
    """
    if message_id is not None:
        raw, sections = _with_section(raw, sections, amqp10.PROPERTIES, _properties(raw, sections, message_id))
    if headers:
        applied = _application_properties(raw, sections, headers)
        raw, sections = _with_section(raw, sections, amqp10.APPLICATION_PROPERTIES, applied)
    if not any(amqp10.DATA <= code <= amqp10.VALUE for code, _, _ in sections):
        raw, _ = _with_section(raw, sections, amqp10.DATA, _NO_BODY)
    return raw


def id_section(message_id: str) -> bytes:
    """A section of properties that has nothing but an id: what a message without any begins with then."""
    data = message_id.encode()
    if len(data) == _ID_LENGTH:
        return _ID_BEGINS + data
    return b"\0\x53%c" % amqp10.PROPERTIES + _compound(_LIST8, 1, _encoded(message_id))


def plain_message(headers: Mapping[str, Any], body: bytes) -> bytes | None:
    """A message that is nothing but application properties and a body, each in its shortest form.

    None where there is a property that is no text.
    """
    pieces: list[bytes] = []
    for name, value in headers.items():
        if type(value) is not str:
            return None
        for text in (name, value):
            data = text.encode()
            size = len(data)
            pieces.append(_TEXT8(0xA1, size) if size <= _SMALL_MAX else _TEXT32(0xB1, size))
            pieces.append(data)
    size = len(body)
    begin = _DATA8_BEGINS + bytes((size,)) if size <= _SMALL_MAX else _DATA32_BEGINS + size.to_bytes(4)
    if not pieces:
        return begin + body
    return _APPLICATION_PROPERTIES_BEGIN + _compound(_MAP8, 2 * len(headers), b"".join(pieces)) + begin + body


def _with_section(
    raw: bytes, sections: list[amqp10.Section], code: int, value: bytes
) -> tuple[bytes, list[amqp10.Section]]:
    """The message with that value for a section of it, be it there or not; and its sections."""
    present = _last(sections, code)
    if present is None:
        # rstream writes delivery annotations at the end: what comes first of what belongs behind says where.
        at = behind = next((place for place, section in enumerate(sections) if section[0] > code), len(sections))
        begin = end = sections[at - 1][2] if at else 0
        value = b"\0\x53%c" % code + value
        start = begin + 3
    else:
        at, behind = sections.index(present), sections.index(present) + 1
        _, begin, end = present
        start = begin
    grown = len(value) - (end - begin)
    moved = [(each, first + grown, last + grown) for each, first, last in sections[behind:]]
    return raw[:begin] + value + raw[end:], [*sections[:at], (code, start, end + grown), *moved]


def _last(sections: list[amqp10.Section], code: int) -> amqp10.Section | None:
    """The section readers go by, where there are several."""
    return next((section for section in reversed(sections) if section[0] == code), None)


def _properties(raw: bytes, sections: list[amqp10.Section], message_id: str) -> bytes:
    """The value of the properties section, with that id first."""
    given = _encoded(message_id)
    last = _last(sections, amqp10.PROPERTIES)
    if last is None:
        return _compound(_LIST8, 1, given)
    count, at, end = amqp10.entries_of(raw, last[1], "list")
    if not count:
        return _compound(_LIST8, 1, given)
    return _compound(_LIST8, count, given + raw[amqp10.end_of_value(raw, at) : end])


def _application_properties(raw: bytes, sections: list[amqp10.Section], headers: Mapping[str, Added]) -> bytes:
    """The value of the section of application properties, with these last."""
    added = b"".join([_encoded(name) + _encoded(value) for name, value in headers.items()])
    last = _last(sections, amqp10.APPLICATION_PROPERTIES)
    if last is None:
        return _compound(_MAP8, 2 * len(headers), added)
    count, at, end = amqp10.entries_of(raw, last[1], "map")
    return _compound(_MAP8, count + 2 * len(headers), raw[at:end] + added)


def _compound(small: int, count: int, content: bytes) -> bytes:
    """A list or a map, in its short form where it fits."""
    if len(content) + 1 <= _SMALL_MAX and count <= _SMALL_MAX:
        return bytes((small, len(content) + 1, count)) + content
    return _LARGE(_LIST32 if small == _LIST8 else _MAP32, len(content) + 4, count) + content


def _encoded(value: Added) -> bytes:
    if isinstance(value, bool):
        return b"\x41" if value else b"\x42"
    if isinstance(value, int):
        return _LONG(0x81, value)
    data = value.encode()
    if len(data) <= _SMALL_MAX:
        return bytes((0xA1, len(data))) + data
    return _TEXT32(0xB1, len(data)) + data
