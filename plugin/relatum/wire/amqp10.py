"""Decodes AMQP 1.0 messages as streams store them: finds sections without decoding them, and decodes on demand.

RabbitMQ stores every message of a stream in AMQP 1.0's encoding, regardless of the protocol that published it. A reader
that needs only a header must not pay for the body, and the recorder reads two or three values of each message. So
sections are found by their descriptors and sizes, and maps are searched without decoding other entries. Invalid bytes
raise `UndecodableMessage`, and no other error.

Source: OASIS AMQP 1.0, part 1 (types) and part 3.2 (message format).
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from struct import Struct, unpack
from struct import error as struct_error
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

from relatum.errors import UndecodableMessage

HEADER: Final = 0x70
DELIVERY_ANNOTATIONS: Final = 0x71
MESSAGE_ANNOTATIONS: Final = 0x72
PROPERTIES: Final = 0x73
APPLICATION_PROPERTIES: Final = 0x74
DATA: Final = 0x75
SEQUENCE: Final = 0x76
VALUE: Final = 0x77
FOOTER: Final = 0x78

_NESTING_MAX: Final = 64
"""Maximum levels of nested values that are decoded. Deeper values become `Opaque`: a message may have 2,000 levels."""

VALUES_MAX: Final = 131_072
"""Maximum values of one map, list or section, nested values included; a map entry counts as two. Headers of AMQP 0.9.1
have fewer (131,064 bytes). An AMQP 1.0 message may contain sixteen million empty lists of one byte, each of which
becomes an object of 64 bytes."""

SECTIONS_MAX: Final = 4096
"""Maximum sections of a message. RabbitMQ writes up to six; other clients may write many data sections."""

_U32: Final = Struct(">I").unpack_from
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SECTION_NAMES: Final = {
    b"amqp:header:list": HEADER,
    b"amqp:delivery-annotations:map": DELIVERY_ANNOTATIONS,
    b"amqp:message-annotations:map": MESSAGE_ANNOTATIONS,
    b"amqp:properties:list": PROPERTIES,
    b"amqp:application-properties:map": APPLICATION_PROPERTIES,
    b"amqp:data:binary": DATA,
    b"amqp:amqp-sequence:list": SEQUENCE,
    b"amqp:amqp-value:*": VALUE,
    b"amqp:footer:map": FOOTER,
}


Section: TypeAlias = tuple[int, int, int]
"""A section's code, the position of its value's constructor, and its end. It is a plain tuple, because creating a named
tuple takes longer than finding the section, and is not compiled."""

_FIXED: Final = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}
WIDTHS: Final = [_FIXED.get(code >> 4, -1 if code >> 4 in (0xA, 0xC, 0xE) else -4) for code in range(256)]
"""The number of bytes after each constructor from 0x40 on; -1 and -4: a size field of 1 or 4 bytes gives the number."""


def end_of_value(raw: bytes, position: int) -> int:
    """Return the end of the value whose constructor is at the position."""
    try:
        code = raw[position]
        if code < 0x40:
            if code != 0:
                raise UndecodableMessage(f"an AMQP 1.0 value has the unknown constructor 0x{code:02x}")
            return _end_of_described(raw, position)
        width = WIDTHS[code]
        if width >= 0:
            end = position + 1 + width
        elif width == -1:
            end = position + 2 + raw[position + 1]
        else:
            end = position + 5 + _U32(raw, position + 1)[0]
    except (IndexError, struct_error):
        raise UndecodableMessage("an AMQP 1.0 value is truncated") from None
    if end > len(raw):
        raise UndecodableMessage("an AMQP 1.0 value is truncated")
    return end


def _end_of_described(raw: bytes, position: int) -> int:
    """Skip nested descriptors in a loop, not by recursion, because the sender decides how many there are."""
    while raw[position] == 0:
        descriptor = position + 1
        if raw[descriptor] == 0:
            raise UndecodableMessage("an AMQP 1.0 descriptor is itself described")
        position = end_of_value(raw, descriptor)
    return end_of_value(raw, position)


def find_sections(raw: bytes) -> list[Section]:
    """Return a message's sections in order, not decoded."""
    found: list[Section] = []
    find_head(raw, found)
    return found


def find_head(raw: bytes, found: list[Section] | None = None) -> tuple[int, int, int]:
    """Return the positions of message annotations, properties and application properties; -1 for an absent section.

    The recorder calls this for every message, so sections are collected only if `found` is given.
    """
    annotations = properties = application = -1
    position, size = 0, len(raw)
    widths = WIDTHS
    try:
        for _ in range(SECTIONS_MAX):
            if position >= size:
                break
            if raw[position] != 0:
                raise UndecodableMessage("the message does not consist of AMQP 1.0 sections")
            if raw[position + 1] == 0x53:
                code, start = raw[position + 2], position + 3
            else:
                code, start = _section_code(raw, position + 1)
            if code == APPLICATION_PROPERTIES:
                application = start
            elif code == PROPERTIES:
                properties = start
            elif code == MESSAGE_ANNOTATIONS:
                annotations = start
            elif not HEADER <= code <= FOOTER:
                raise UndecodableMessage(f"no AMQP 1.0 section has the descriptor 0x{code:x}")
            position = start + 2 + raw[start + 1] if widths[raw[start]] == -1 else end_of_value(raw, start)
            if found is not None:
                found.append((code, start, position))
    except IndexError:
        raise UndecodableMessage("an AMQP 1.0 section is truncated") from None
    if position != size or not size:
        raise UndecodableMessage(f"a message is empty, has over {SECTIONS_MAX} AMQP 1.0 sections, or ends inside one")
    return annotations, properties, application


def _section_code(raw: bytes, position: int) -> tuple[int, int]:
    """Decode a descriptor that is a full ulong or a symbol, and return its code and end."""
    end = end_of_value(raw, position)
    if raw[position] == 0x80:
        return int.from_bytes(raw[position + 1 : end], "big"), end
    if raw[position] == 0xA3:
        return _SECTION_NAMES.get(raw[position + 2 : end], 0), end
    raise UndecodableMessage("the descriptor of an AMQP 1.0 section is neither a number nor a symbol")


Entries: TypeAlias = tuple[int, int, int]
"""The items of a list or map: their count (keys and values both count), the position of the first, and the end."""


def entries_of(raw: bytes, position: int, kind: str) -> Entries:
    """Return the items of a `kind` "list" or "map". More than `VALUES_MAX` raise an error with `is_too_much`."""
    end = end_of_value(raw, position)
    code = raw[position]
    small, large = (0xC0, 0xD0) if kind == "list" else (0xC1, 0xD1)
    if code == small and end - position >= 3:
        count, start = raw[position + 2], position + 3
    elif code == large and end - position >= 9:
        count, start = _U32(raw, position + 5)[0], position + 9
    elif code == 0x45 and kind == "list":
        count, start = 0, end
    else:
        raise UndecodableMessage(f"an AMQP 1.0 {kind} was expected, not the constructor 0x{code:02x}")
    if count > end - start or (kind == "map" and count % 2):
        raise UndecodableMessage(f"an AMQP 1.0 {kind} has fewer elements than its count")
    if count > VALUES_MAX:
        raise UndecodableMessage(f"an AMQP 1.0 {kind} has {count} values, more than {VALUES_MAX}", is_too_much=True)
    return count, start, end


def pick(raw: bytes, position: int, wanted: dict[bytes, int], found: list[Any]) -> None:
    """Search a map for `wanted` names in UTF-8, and decode only their values into `found`, at the index of each name.

    If a name occurs twice, the last value counts.
    """
    # RabbitMQ's form of small maps is handled here, which saves a call and a tuple for each message.
    if raw[position] == 0xC1 and raw[position + 1] and not raw[position + 2] & 1:
        count, at, end = raw[position + 2], position + 3, position + 2 + raw[position + 1]
    else:
        count, at, end = entries_of(raw, position, "map")
    widths = WIDTHS
    try:
        for _ in range(count // 2):
            code = raw[at]
            if code == 0xA1 or code == 0xA3:
                value = at + 2 + raw[at + 1]
                slot = wanted.get(raw[at + 2 : value])
            else:
                value = end_of_value(raw, at)
                slot = wanted.get(raw[at + 5 : value]) if code in (0xB1, 0xB3) else None
            code = raw[value]
            if slot is None:
                width = widths[code]
                if code < 0x40:
                    at = end_of_value(raw, value)
                elif width >= 0:
                    at = value + 1 + width
                elif width == -1:
                    at = value + 2 + raw[value + 1]
                else:
                    at = value + 5 + _U32(raw, value + 1)[0]
            elif code == 0xA1:
                at = value + 2 + raw[value + 1]
                found[slot] = text_of(raw[value + 2 : at])
            else:
                found[slot], at = decode_value(raw, value)
    except (IndexError, struct_error):
        raise UndecodableMessage("an AMQP 1.0 map is truncated") from None
    if at != end:
        raise UndecodableMessage("an AMQP 1.0 map's size does not match its content")


def decode_map(raw: bytes, position: int) -> dict[str, Any]:
    """Decode a map. Entries whose keys are not text are omitted, as the broker omits them for AMQP 0.9.1."""
    items, values = _items(raw, position, "map", 0, [VALUES_MAX]), {}
    for index in range(0, len(items), 2):
        key = items[index]
        if isinstance(key, str):
            values[key] = items[index + 1]
    return values


class Opaque(NamedTuple):
    """A value without a Python form: decimal, array, timestamp outside `datetime`, or a value that exceeds a limit."""

    kind: str
    data: bytes


def text_of(data: bytes) -> str | bytes:
    """Decode UTF-8 text. Other bytes are returned unchanged."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _moment(data: bytes) -> datetime | Opaque:
    try:
        return _EPOCH + timedelta(milliseconds=int.from_bytes(data, "big", signed=True))
    except OverflowError:
        return Opaque("timestamp", data)


def _character(data: bytes) -> str | Opaque:
    try:
        return str(data, "utf-32-be")
    except UnicodeDecodeError:
        # A lone surrogate is not a character, and cannot be encoded.
        return Opaque("char", data)


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


_DECODERS: Final[dict[int, Callable[[bytes], Any]]] = {
    **dict.fromkeys((0x43, 0x44, 0x50, 0x52, 0x53, 0x60, 0x70, 0x80), int.from_bytes),
    **dict.fromkeys((0x51, 0x54, 0x55, 0x61, 0x71, 0x81), _signed),
    **dict.fromkeys((0x74, 0x84, 0x94), lambda data: Opaque("decimal", data)),
    **dict.fromkeys((0xA0, 0xB0), bytes),
    **dict.fromkeys((0xA1, 0xA3, 0xB1, 0xB3), text_of),
    0x40: lambda data: None,
    0x41: lambda data: True,
    0x42: lambda data: False,
    0x45: lambda data: [],
    0x56: lambda data: data != b"\0",
    0x72: lambda data: unpack(">f", data)[0],
    0x73: _character,
    0x82: lambda data: unpack(">d", data)[0],
    0x83: _moment,
    0x98: lambda data: UUID(bytes=data),
}
"""Decoders of plain values by constructor. Their argument is the value's bytes, without constructor and size."""


def decode_value(raw: bytes, position: int, depth: int = 0, values_left: list[int] | None = None) -> tuple[Any, int]:
    """Decode any value, and return it with its end.

    `depth`: The number of values that enclose it. `values_left`: A list of the number of values still allowed, which
    this call reduces; None: `VALUES_MAX`. A value that contains more becomes `Opaque`.

    Text that is not UTF-8, which RabbitMQ 3.10 accepts, is returned as `bytes`; a described value as the value itself.
    """
    end = end_of_value(raw, position)
    code = raw[position]
    if code == 0xA1:
        return text_of(raw[position + 2 : end]), end
    decode = _DECODERS.get(code)
    if decode is not None:
        # Binary and text have a size field of one byte or four.
        start = position + (1 if code < 0xA0 else 2 if code < 0xB0 else 5)
        return decode(raw[start:end]), end
    if depth >= _NESTING_MAX:
        return Opaque("nested too deeply", b""), end
    if code == 0:
        while raw[position] == 0:
            position = end_of_value(raw, position + 1)
        return decode_value(raw, position, depth + 1, values_left)[0], end
    # The end is known even if the value cannot be decoded, so the values after it can be read.
    kind = "array" if code in (0xE0, 0xF0) else "broken"
    try:
        if code in (0xC0, 0xD0, 0xC1, 0xD1):
            is_list = code in (0xC0, 0xD0)
            items = _items(raw, position, "list" if is_list else "map", depth + 1, values_left or [VALUES_MAX])
            found: Any = items
            if not is_list:
                pairs = zip(items[::2], items[1::2], strict=True)
                # The `repr` of a key that is not hashable.
                found = {repr(key) if isinstance(key, list | dict) else key: value for key, value in pairs}
            return found, end
    except UndecodableMessage as error:
        if getattr(error, "is_too_much", False):
            kind = "too many values"
    return Opaque(kind, raw[position:end]), end


def _items(raw: bytes, position: int, kind: str, depth: int, values_left: list[int]) -> list[Any]:
    """Decode all items of a list, or all keys and values of a map."""
    count, at, end = entries_of(raw, position, kind)
    # Checked before any object is created.
    if count > values_left[0]:
        raise UndecodableMessage(f"an AMQP 1.0 value contains more than {VALUES_MAX} values", is_too_much=True)
    values_left[0] -= count
    values = []
    for _ in range(count):
        value, at = decode_value(raw, at, depth, values_left)
        values.append(value)
    if at != end:
        raise UndecodableMessage(f"an AMQP 1.0 {kind}'s size does not match its content")
    return values


_BINARY: Final = {0xA0: 2, 0xB0: 5}
"""Bytes before the content of a binary value: constructor and size."""


def body_of(raw: bytes, sections: list[Section]) -> bytes:
    """Return the body: the joined data sections, or the text or binary of a value section, or else the raw sections."""
    # A data section without binary content violates the specification, and is returned undecoded.
    data = [raw[start + _BINARY.get(raw[start], 0) : end] for code, start, end in sections if code == DATA]
    if data:
        return b"".join(data)
    body = [section for section in sections if section[0] in (SEQUENCE, VALUE)]
    if len(body) == 1 and body[0][0] == VALUE:
        value, _ = decode_value(raw, body[0][1])
        if isinstance(value, str):
            return value.encode("utf-8", "surrogatepass")
        if isinstance(value, bytes):
            return value
    return b"".join([raw[start:end] for _, start, end in body])


def pick_list(raw: bytes, position: int, wanted: dict[int, int], found: list[Any]) -> None:
    """Decode the items of a list at the `wanted` indexes into `found`; null, missing or broken items are skipped."""
    count, at, _ = entries_of(raw, position, "list")
    # `try`, because `suppress` takes as long as the items.
    try:
        for index in range(min(count, 1 + max(wanted, default=-1))):
            slot = wanted.get(index)
            if raw[at] == 0x40:  # null
                at += 1
            elif slot is None:
                at = end_of_value(raw, at)
            else:
                found[slot], at = decode_value(raw, at)
    except (UndecodableMessage, IndexError):
        pass


def decode_list(raw: bytes, position: int, size: int) -> list[Any]:
    """Decode the first `size` items of a list. Items after its end, or after a broken item, are None."""
    found: list[Any] = [None] * size
    pick_list(raw, position, {index: index for index in range(size)}, found)
    return found


def data_section(body: bytes) -> bytes:
    """Encode a message that consists of one data section, in the short form if the body fits."""
    size = len(body)
    length = b"\xa0%c" % size if size < 256 else b"\xb0" + size.to_bytes(4)
    return b"\0\x53%c" % DATA + length + body
