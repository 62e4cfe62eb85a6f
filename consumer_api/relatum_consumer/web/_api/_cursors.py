"""Where the next page begins: plain values as one text, which is read only as a page before gave it."""

import base64
import binascii
import json
from typing import Any

from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX


def cursor_of(*values: str | int) -> str:
    """The values as a cursor."""
    return base64.urlsafe_b64encode(json.dumps(values).encode()).decode()


def read_cursor(text: str, *kinds: type) -> list[Any] | None:
    """The values of a cursor, each of its kind, and no number below 0; None where there is none.

    Raises:
        InvalidInput: no page before gave it.
    """
    if not text:
        return None
    try:
        given = json.loads(base64.urlsafe_b64decode(text.encode()))
    except (ValueError, binascii.Error, RecursionError):
        given = None
    is_whole = isinstance(given, list) and [type(each) for each in given] == list(kinds)
    if not is_whole or not all(0 <= each <= INTEGER_MAX for each in given if isinstance(each, int)):
        raise InvalidInput("this cursor is none that a page before gave")
    return given  # type: ignore[no-any-return]
