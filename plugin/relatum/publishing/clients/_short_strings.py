"""Names of headers, and other short strings that come again and again, as AMQP 0.9.1 sends them. Pure."""

from collections.abc import Callable
from typing import Any, Final

_REMEMBERED_MAX: Final = 4096
"""Strings that are remembered as they are sent; a publisher that makes them up anew only loses speed."""


class ShortStrings(dict[Any, bytes]):
    """Short strings as a client's own `encode` sends them, errors included; each is encoded once."""

    def __init__(self, encode: Callable[[Any], bytes]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, text: Any) -> bytes:
        encoded = self._encode(text)
        if len(self) < _REMEMBERED_MAX:
            self[text] = encoded
        return encoded
