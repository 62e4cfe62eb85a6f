"""What a look-up needs of a message in hand: what it says, where it lies, and which messages are the same one."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeAlias

from relatum.checks import shown
from relatum.errors import InvalidInput
from relatum.ids import MessageId
from relatum.reading import Message
from relatum_consumer.consumed import _clients as clients

Consumed: TypeAlias = Any
"""A message that a client gave: see docs/consumed.md for each of them."""

_PLAIN: Final = (str, int, float, bytes, datetime)
"""Types of headers that reach a stream by every version of the broker, unchanged."""


@dataclass(frozen=True, slots=True)
class InHand:
    """A message in hand.

    Attributes:
        message: What it says. Where `id` is None, its own id means nothing.
        id: Where it lies; None where a client does not say so, or it lies in a queue.
        is_copy: Where `id` is None, whether a message of a stream is the same one: the message that was consumed, or
            the copy of it that lies there.
    """

    message: Message
    id: MessageId | None
    is_copy: Callable[[Message], bool] | None = None


def in_hand(given: Message | Consumed, needed: str = "a message") -> InHand:
    """A message that was read, or consumed with one of the clients; `needed` is what the caller takes, for the error.

    Raises:
        InvalidInput: it is none.
    """
    if isinstance(given, Message):
        return InHand(given, given.id)
    taken = clients.taken(given)
    if taken is None:
        raise InvalidInput(f"{needed} is needed, not {shown(given)}: {clients.TAKEN}")
    if isinstance(taken, Message):
        return InHand(taken, taken.id)
    mark = taken.mark or _mark
    own = mark(taken.message)

    def is_copy(other: Message) -> bool:
        return taken.offset in (None, other.offset) and mark(other) == own

    return InHand(taken.message, None, is_copy)


def _mark(message: Message) -> Hashable:
    """What all copies of a message have in common, and no other message.

    Without an id that is all it says. The broker adds headers named `x-…`, and leaves tables out of streams.
    """
    properties = message.properties
    if properties.message_id is not None:
        return properties.message_id, message.body
    headers = {
        (name, value)
        for name, value in message.headers.items()
        if isinstance(value, _PLAIN) and not name.startswith("x-")
    }
    return properties.correlation_id, properties.type, message.body, frozenset(headers)
