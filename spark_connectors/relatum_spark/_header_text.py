"""A header's value as text, for the column `headers`."""

import base64
import json
from datetime import datetime
from typing import Any, Final

from relatum.wire import Opaque


def header_text(value: Any) -> str | None:
    """The text of a header's value, as `Message.headers` has it.

    Text is itself, whole numbers are decimal, booleans `true` and `false`: what a text key's canonical value is, so
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
