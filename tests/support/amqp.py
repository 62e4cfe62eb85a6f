"""AMQP 1.0 made by hand: values, and the sections of a message."""

import struct
from datetime import datetime
from typing import Any


def text(value: str) -> bytes:
    data = value.encode()
    return b"\xa1" + bytes([len(data)]) + data if len(data) < 256 else b"\xb1" + struct.pack(">I", len(data)) + data


def listed(*items: bytes) -> bytes:
    content = b"".join(items)
    return b"\xd0" + struct.pack(">II", len(content) + 4, len(items)) + content


def mapped(*items: bytes) -> bytes:
    return b"\xd1" + listed(*items)[1:]


def encode(value: Any) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"\x40", True: b"\x41", False: b"\x42"}[value]
    if isinstance(value, str):
        return text(value)
    if isinstance(value, int):
        return b"\x81" + struct.pack(">q", value)
    if isinstance(value, float):
        return b"\x82" + struct.pack(">d", value)
    if isinstance(value, datetime):
        return b"\x83" + struct.pack(">q", int(value.timestamp() * 1000))
    if isinstance(value, bytes):
        is_short = len(value) < 256
        return (b"\xa0" + bytes([len(value)]) if is_short else b"\xb0" + struct.pack(">I", len(value))) + value
    if isinstance(value, list):
        return listed(*map(encode, value))
    assert isinstance(value, dict)
    return mapped(*(encode(part) for pair in value.items() for part in pair))


def section(code: int, value: bytes) -> bytes:
    return b"\x00\x53" + bytes([code]) + value
