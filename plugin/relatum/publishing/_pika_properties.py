"""pika's properties of messages that are stamped here: a copy, or made here, and encoded in a third of pika's time."""

import copy
from functools import lru_cache
from struct import Struct
from typing import Any, Final

from pika import BasicProperties
from pika.data import encode_short_string, encode_value

_ID_LENGTH: Final = 36
"""Characters of an id of ours; most of others' have as many."""

_FLAGS: Final = Struct(">H").pack
_LENGTH: Final = Struct(">I").pack
_SHORT: Final = Struct("B").pack
_INTEGER: Final = Struct(">ci").pack
_INTEGER_MAX: Final = 2**31 - 1
_ID_LENGTH_SENT: Final = _SHORT(_ID_LENGTH)
_REMEMBERED_MAX: Final = 4096
"""Short strings that are remembered as they are sent; a publisher that makes them up anew only loses speed."""


@lru_cache(_REMEMBERED_MAX)
def _short(text: Any) -> bytes:
    """The name of a header, or a content type, as pika sends it, errors included."""
    pieces: list[bytes] = []
    encode_short_string(pieces, text)
    return b"".join(pieces)


class OwnProperties(BasicProperties):  # type: ignore[misc]
    """Properties that were made here, for one message: what is missing is added to them, not to a copy."""

    headers: dict[str, Any] | None
    message_id: str | None

    def encode(self) -> list[bytes]:
        """What pika's own gives, byte for byte, in other pieces; most messages have no more than is encoded here."""
        message_id, content_type = self.message_id, self.content_type
        if not (
            type(message_id) is str
            and len(message_id) == _ID_LENGTH
            and message_id.isascii()
            and (content_type is None or type(content_type) is str)
            and self.content_encoding is None
            and self.priority is None
            and self.correlation_id is None
            and self.reply_to is None
            and self.expiration is None
            and self.timestamp is None
            and self.type is None
            and self.user_id is None
            and self.app_id is None
            and self.cluster_id is None
        ):
            return BasicProperties.encode(self)  # type: ignore[no-any-return]
        flags = self.FLAG_MESSAGE_ID
        pieces: list[bytes] = []
        if content_type is not None:
            flags |= self.FLAG_CONTENT_TYPE
            pieces.append(_short(content_type))
        if self.headers is not None:
            flags |= self.FLAG_HEADERS
            table = _encoded_table(self.headers)
            pieces += (_LENGTH(len(table)), table)
        if self.delivery_mode is not None:
            flags |= self.FLAG_DELIVERY_MODE
            pieces.append(_SHORT(self.delivery_mode))
        return [_FLAGS(flags), *pieces, _ID_LENGTH_SENT, message_id.encode()]


def _encoded_table(headers: dict[Any, Any]) -> bytes:
    pieces: list[bytes] = []
    for name, value in headers.items():
        if type(value) is str:
            text = value.encode()
            pieces += (_short(name), b"S", _LENGTH(len(text)), text)
        elif type(value) is bool:
            pieces += (_short(name), b"t\1" if value else b"t\0")
        elif type(value) is int and -_INTEGER_MAX <= value <= _INTEGER_MAX:
            pieces += (_short(name), _INTEGER(b"I", value))
        else:
            pieces.append(_short(name))
            encode_value(pieces, value)
    return b"".join(pieces)


def copy_with(given: BasicProperties, headers: dict[str, Any] | None, message_id: str | None) -> BasicProperties:
    """A copy of the properties with other headers and another `message_id`. A subclass of the caller's stays one."""
    if type(given) is not BasicProperties:
        copied = copy.copy(given)
        copied.headers, copied.message_id = headers, message_id
        return copied
    # Through the initialiser: an object whose dictionary was filled otherwise is slower to encode.
    return OwnProperties(
        given.content_type,
        given.content_encoding,
        headers,
        given.delivery_mode,
        given.priority,
        given.correlation_id,
        given.reply_to,
        given.expiration,
        message_id,
        given.timestamp,
        given.type,
        given.user_id,
        given.app_id,
        given.cluster_id,
    )
