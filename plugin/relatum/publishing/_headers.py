"""Limits on headers, checked before a byte is sent. Pure.

They protect readers and other channels: the broker accepts tables nested 900 to 2,000 levels deep, which crash every
pika and aio-pika reader of the stream, and a header frame over the negotiated size closes the whole connection.
"""

from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any, Final, NoReturn

from relatum.errors import HeadersRefused
from relatum.limits import HEADERS_BYTES_MAX, HEADERS_DEPTH_MAX, HEADERS_MAX

_FRAME_BYTES: Final = 8 + 14
"""Bytes of a header frame besides the properties: frame header and end, then class, weight, body size and flags."""

_ADDED_BYTES: Final = 128
"""Bytes reserved for what the interceptor adds: the time, the receipt and the property `message_id`."""

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
"""The most bytes of properties other than headers: the short strings, then mode, priority and timestamp."""

_VALUE_BYTES: Final = 9
"""Bytes of the largest value other than text, bytes, tables and arrays: the type and 8 bytes."""


class HeaderLimits:
    """The limits of one connection. `frame_bytes_max`: The negotiated frame size; 0: no limit."""

    def __init__(self, frame_bytes_max: int) -> None:
        self._frame_bytes_max = frame_bytes_max
        sure = HEADERS_BYTES_MAX
        if frame_bytes_max:
            sure = min(sure, frame_bytes_max - _FRAME_BYTES - _PROPERTIES_BYTES_MAX - _ADDED_BYTES)
        self._sure_bytes = sure
        self.sure_characters = (sure - _VALUE_BYTES - 1) // (_VALUE_BYTES + 5)
        """Characters of names and values together that are within every limit, in any number of headers."""

    def check(self, headers: Mapping[str, Any], read_property: Callable[[Any, str], Any], properties: Any) -> None:
        """Check that the headers can be sent safely.

        Raises:
            HeadersRefused: the headers are too many, too deep or too large (field `reason`); nothing was sent.
        """
        size = _measure(headers)
        if size <= self._sure_bytes:
            return
        if size > HEADERS_BYTES_MAX:
            _refuse("too_large", f"headers take {size} bytes; {HEADERS_BYTES_MAX} are allowed")
        of_properties = 10 + sum(1 + _text_bytes(read_property(properties, name)) for name in _SHORT_STRINGS)
        frame = _FRAME_BYTES + _ADDED_BYTES + size + of_properties
        if frame > self._frame_bytes_max:
            _refuse(
                "too_large",
                f"the header frame would take {frame} bytes; the connection negotiated {self._frame_bytes_max}",
            )


def _measure(headers: Mapping[str, Any]) -> int:
    """Return the headers' encoded bytes, or slightly more. Limits are checked meanwhile: a table may contain itself."""
    size = 4
    count = 0
    stack: list[tuple[Any, int]] = [(headers, 0)]
    while stack:
        container, depth = stack.pop()
        if depth > HEADERS_DEPTH_MAX:
            _refuse("too_deep", f"headers are nested deeper than {HEADERS_DEPTH_MAX} levels")
        count += len(container)
        if count > HEADERS_MAX:
            _refuse("too_many", f"there are more than {HEADERS_MAX} header values, nested ones counted")
        is_table = type(container) is dict or isinstance(container, Mapping)
        for name, value in container.items() if is_table else zip(repeat(""), container):
            size += 1 + _text_bytes(name)
            kind = type(value)
            if kind is str or isinstance(value, (str, bytes, bytearray)):
                size += 5 + _text_bytes(value)
            elif kind is int or kind is bool or not isinstance(value, (Mapping, list, tuple)):
                size += _VALUE_BYTES
            else:
                size += 5
                stack.append((value, depth + 1))
    return size


def _text_bytes(value: Any) -> int:
    if type(value) is str and value.isascii():
        return len(value)
    if isinstance(value, str):
        # The client's encoder refuses half a surrogate pair.
        return len(value.encode("utf-8", "surrogatepass"))
    return len(value) if isinstance(value, (bytes, bytearray)) else 0


def _refuse(reason: str, what: str) -> NoReturn:
    raise HeadersRefused(f"{what}; nothing was sent", reason=reason)
