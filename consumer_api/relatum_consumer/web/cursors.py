"""Where the next page begins: plain values as one text, which is read only as a page before gave it."""

import base64
import binascii
import json
from datetime import UTC, datetime
from typing import Any, Final

from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX

WRONG_CURSOR: Final = "this cursor is none that a page before gave"


def cursor_of(*values: str | int | datetime | None) -> str:
    """The values as a cursor."""
    return base64.urlsafe_b64encode(json.dumps(values, default=datetime.isoformat).encode()).decode()


def read_cursor(text: str, *kinds: type) -> list[Any] | None:
    """The values of a cursor, each of its kind, and no number below 0; None where there is no cursor.

    A value of the kind `datetime` may be None.

    Raises:
        InvalidInput: no page before gave it.
    """
    if not text:
        return None
    try:
        given = json.loads(base64.urlsafe_b64decode(text.encode()))
        return [_value(kind, value) for kind, value in zip(kinds, given, strict=True)]
    except (ValueError, TypeError, OverflowError, binascii.Error, RecursionError):
        raise InvalidInput(WRONG_CURSOR) from None


def _value(kind: type, value: Any) -> Any:
    if kind is datetime:
        return None if value is None else datetime.fromisoformat(value).astimezone(UTC)
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= INTEGER_MAX):
        raise ValueError
    return value
