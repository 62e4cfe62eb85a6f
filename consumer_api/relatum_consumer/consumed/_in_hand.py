"""What a look-up needs of a message in hand: what it says, where it lies, and which messages are the same one."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

from relatum.errors import InvalidInput, RelatumError
from relatum.ids import MessageId
from relatum.reading import Message
from relatum_consumer.consumed import _clients as clients

Consumed: TypeAlias = Any
"""A message that a client gave: see docs/consumed.md for each of them."""


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
    try:
        taken = clients.taken(given)
        if isinstance(taken, clients.Taken):
            own = _mark(taken.message)
    except RelatumError:
        raise
    except Exception as error:
        why = str(error) if isinstance(error, clients.Strange) else type(error).__name__
        wrong = f"{needed} is needed, and this {_kind(given)} cannot be read ({why}): {clients.TAKEN}"
        raise InvalidInput(wrong) from error
    if taken is None:
        found_none = " (did `find` find nothing? Its answer's status and explanation say why)" if given is None else ""
        raise InvalidInput(f"{needed} is needed, not {_kind(given)}{found_none}: {clients.TAKEN}")
    if isinstance(taken, Message):
        return InHand(taken, taken.id)

    def is_copy(other: Message) -> bool:
        return taken.offset in (None, other.offset) and _mark(other) == own

    return InHand(taken.message, None, is_copy)


def _kind(given: Any) -> str:
    """What it is, without what it says: that may be a message."""
    if type(given) is not tuple:
        return "None" if given is None else type(given).__name__
    kinds = [type(each).__name__ for each in given[:5]]
    return f"tuple ({', '.join(kinds)}{', …' if len(given) > len(kinds) else ''})"


def _mark(message: Message) -> Hashable:
    """What all copies of a message have in common, and no other message: without an id that is all it says."""
    message_id = message.properties.message_id
    return (message_id if message_id is not None else clients.but_body(message)), message.body
