"""Limits on headers, checked before a byte is sent. Pure.

They are there for the others: a table nested 900 to 2,000 levels deep is taken by the broker and then kills every
pika and aio-pika reader of the stream, and a header frame over the negotiated size closes the whole connection.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

from relatum.errors import HeadersRefused
from relatum.limits import HEADERS_BYTES_MAX, HEADERS_DEPTH_MAX, HEADERS_MAX

_FRAME_BYTES: Final = 8 + 14
"""Bytes of a header frame beside the properties: frame header and end, then class, weight, body size and flags."""

_ADDED_BYTES: Final = 128
"""Room for what is added afterwards: the time, the receipt and the property `message_id`."""

_SHORT_STRINGS: Final = (
    "content_type",
    "content_encoding",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
"""The properties that are AMQP short strings: a length byte and at most 255 bytes."""

_PROPERTIES_BYTES_MAX: Final = 256 * len(_SHORT_STRINGS) + 10
"""The most that properties other than headers take: the short strings, then mode, priority and timestamp."""

_VALUE_BYTES: Final = 9
"""Bytes of the largest value that is neither text, bytes, table nor array: its type and 8 bytes."""


_SMALL: Final = frozenset((int, bool, type(None)))
"""Types whose values take `_VALUE_BYTES` at most."""


class HeaderLimits:
    """The limits in force on one connection."""

    def __init__(self, frame_bytes_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._bytes_max = HEADERS_BYTES_MAX
        sure = HEADERS_BYTES_MAX
        if frame_bytes_max:
            sure = min(sure, frame_bytes_max - _FRAME_BYTES - _PROPERTIES_BYTES_MAX - _ADDED_BYTES)
        self._sure_bytes = sure
        self.sure_characters = (sure - _VALUE_BYTES - 1) // (_VALUE_BYTES + 5)
        """Characters of text, names and values, that are within every limit, be each a header of its own."""

    def check(self, headers: Mapping[str, Any], read_property: Callable[[Any, str], Any], properties: Any) -> None:
        """Return where the headers can be sent safely.

        Raises:
            HeadersRefused: they are too many, too deep or too large (field `reason`); nothing was sent.
        """
        # Flat headers, and arrays in them, are decided by an upper bound in one pass: four bytes a character at most.
        characters, count = 0, len(headers)
        for name, value in headers.items():
            kind = type(value)
            if type(name) is not str:
                break
            characters += len(name)
            if kind is str or kind is bytes:
                characters += len(value)
            elif kind is list or kind is tuple or (kind is dict and not value):
                count += len(value)
                characters += _characters_in(value)
            elif kind not in _SMALL:
                break
        else:
            if count <= HEADERS_MAX and 4 * characters + count * (_VALUE_BYTES + 1) <= self._sure_bytes:
                return
        self._check_exactly(headers, partial(read_property, properties))

    def _check_exactly(self, headers: Mapping[str, Any], property_of: Callable[[str], Any]) -> None:
        size = _measure(headers)
        if size > self._bytes_max:
            _refuse("too_large", f"headers take {size} bytes; {self._bytes_max} are allowed")
        if not self._frame_bytes_max:
            return
        frame = _FRAME_BYTES + _ADDED_BYTES + size + _property_bytes(property_of)
        if frame > self._frame_bytes_max:
            _refuse(
                "too_large",
                f"the header frame would take {frame} bytes; the connection negotiated {self._frame_bytes_max}",
            )


def _characters_in(array: Sequence[Any]) -> int:
    """Characters of an array of texts and numbers; more than are allowed where it holds anything else."""
    characters = 0
    for value in array:
        kind = type(value)
        if kind is str:
            characters += len(value)
        elif kind not in _SMALL:
            return HEADERS_BYTES_MAX
    return characters


def _measure(headers: Mapping[str, Any]) -> int:
    """Encoded bytes of the headers, at most a few too many.

    A stack instead of recursion, and limits checked on the way: it ends on a table that contains itself.
    """
    size = 4
    count = 0
    stack: list[tuple[Any, int]] = [(headers, 0)]
    while stack:
        container, depth = stack.pop()
        if depth > HEADERS_DEPTH_MAX:
            _refuse("too_deep", f"headers are nested deeper than {HEADERS_DEPTH_MAX} levels")
        is_table = isinstance(container, Mapping)
        count += len(container)
        if count > HEADERS_MAX:
            _refuse("too_many", f"there are more than {HEADERS_MAX} header values, nested ones counted")
        for entry in container.items() if is_table else container:
            name, value = entry if is_table else (None, entry)
            size += 1 + _text_bytes(name)
            if isinstance(value, (str, bytes, bytearray)):
                size += 5 + _text_bytes(value)
            elif isinstance(value, (Mapping, list, tuple)):
                size += 5
                stack.append((value, depth + 1))
            else:
                size += _VALUE_BYTES
    return size


def _property_bytes(property_of: Callable[[str], Any]) -> int:
    return 10 + sum(1 + _text_bytes(property_of(name)) for name in _SHORT_STRINGS)


def _text_bytes(value: Any) -> int:
    if isinstance(value, str):
        # What is not Unicode is refused by the client's own encoder, with its own error.
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    return len(value) if isinstance(value, (bytes, bytearray)) else 0


def _refuse(reason: str, what: str) -> NoReturn:
    raise HeadersRefused(f"{what}; nothing was sent", reason=reason)
