"""Cursors: where the next page begins, as plain values in one text. Only a cursor from an answer is accepted."""

import base64
import binascii
import json
from datetime import UTC, datetime
from typing import Any, Final

from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX

WRONG_CURSOR: Final = "this cursor is invalid: take `next` of the previous page"


def cursor_of(*values: str | int | datetime | None) -> str:
    """Return the values as a cursor."""
    return base64.urlsafe_b64encode(json.dumps(values, default=datetime.isoformat).encode()).decode()


def read_cursor(text: str, *kinds: type) -> list[Any] | None:
    """Return the values of a cursor, each of the given type, no number below 0; None without a cursor.

    A value of type `datetime` may be None.

    Raises:
        InvalidInput: the cursor comes from no answer.
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
