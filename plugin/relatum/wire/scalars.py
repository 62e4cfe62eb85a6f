"""AMQP 1.0's scalar values: numbers, timestamps, text, binary. See `_amqp10`."""

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from struct import Struct
from typing import Any, Final, NamedTuple
from uuid import UUID

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Opaque(NamedTuple):
    """A value without a plain Python type: decimals, timestamps outside `datetime`, values too deep or too many."""

    kind: str
    data: bytes


def text_of(data: bytes) -> str | bytes:
    """Decode text; return the bytes if they are not UTF-8."""
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        return data


def _moment(data: bytes) -> datetime | Opaque:
    try:
        return _EPOCH + timedelta(milliseconds=int.from_bytes(data, "big", signed=True))
    except OverflowError:
        return Opaque("timestamp", data)


def _character(data: bytes) -> str | Opaque:
    code = int.from_bytes(data, "big")
    # Half a surrogate pair is not a character, and no text can hold it.
    if code > sys.maxunicode or 0xD800 <= code <= 0xDFFF:
        return Opaque("char", data)
    return chr(code)


def _unsigned(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


_FLOAT: Final = Struct(">f").unpack
_DOUBLE: Final = Struct(">d").unpack

SCALARS: Final[dict[int, Callable[[bytes], Any]]] = {
    0x40: lambda data: None,
    0x41: lambda data: True,
    0x42: lambda data: False,
    0x43: lambda data: 0,
    0x44: lambda data: 0,
    0x45: lambda data: [],
    0x50: _unsigned,
    0x51: _signed,
    0x52: _unsigned,
    0x53: _unsigned,
    0x54: _signed,
    0x55: _signed,
    0x56: lambda data: data != b"\0",
    0x60: _unsigned,
    0x61: _signed,
    0x70: _unsigned,
    0x71: _signed,
    0x72: lambda data: _FLOAT(data)[0],
    0x73: _character,
    0x74: lambda data: Opaque("decimal", data),
    0x80: _unsigned,
    0x81: _signed,
    0x82: lambda data: _DOUBLE(data)[0],
    0x83: _moment,
    0x84: lambda data: Opaque("decimal", data),
    0x94: lambda data: Opaque("decimal", data),
    0x98: lambda data: UUID(bytes=data),
}
"""Decoders of values of fixed width, by constructor."""

TEXTS: Final[dict[int, Callable[[bytes], Any]]] = {
    0xA0: bytes,
    0xA1: text_of,
    0xA3: text_of,
    0xB0: bytes,
    0xB1: text_of,
    0xB3: text_of,
}
"""Decoders of values of variable width, by constructor; they get the bytes after the size."""
