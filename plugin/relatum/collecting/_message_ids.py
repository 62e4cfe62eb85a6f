"""What a collected message is asked for by."""

from typing import Final

from relatum.ids import MessageId
from relatum.reading import Message

MESSAGE_ID_BYTES_MAX: Final = 2000
"""Bytes of a property `message_id` that a message is known by. AMQP 0.9.1 has 255 at most, the stream protocol any
number; an index of PostgreSQL takes 2,704 bytes a row, and with them goes what else the row holds."""


def id_of(message: Message) -> str:
    """What a message is asked for by: its property `message_id`, or "stream:offset" where it has none.

    One with a NUL, which PostgreSQL's text can't hold, and one too long for its index count as none.
    """
    return checked_id(message.id, message.properties.message_id)


def checked_id(place: MessageId, given: str | None) -> str:
    """The property `message_id` where it can be stored and asked for; else "stream:offset"."""
    return given if given and "\0" not in given and not _is_long(given) else id_of_place(place)


def _is_long(given: str) -> bool:
    # Four bytes a character at most: only what is long is encoded to be measured.
    return len(given) > MESSAGE_ID_BYTES_MAX // 4 and len(given.encode()) > MESSAGE_ID_BYTES_MAX


def id_of_place(place: MessageId) -> str:
    """What a message without a property `message_id` is asked for by."""
    return f"{place.stream}:{place.offset}"
