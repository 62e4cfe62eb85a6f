"""The messages of one answer while they are read: each once, and bounded over all streams together."""

from collections.abc import Callable, Iterable
from typing import Final

from relatum.errors import InvalidInput
from relatum.ids import MessageId
from relatum.limits import MESSAGE_BYTES
from relatum.reading import Message
from relatum_consumer.lookups import _limits as limits

_SPARE: Final = 64
"""Messages held beyond twice the limit before the last ones are dropped: small limits need not sort each time."""


class Gathered:
    """Takes messages as they are read, whichever streams they come from."""

    def __init__(
        self,
        is_meant: Callable[[Message], bool],
        advice: str,
        *,
        first: Callable[[Iterable[Message]], list[Message]] | None = None,
        limit: int | None = None,
    ) -> None:
        self._is_meant = is_meant
        self._advice = advice
        self._first = first
        self._held_max = None if limit is None else 2 * limit + _SPARE
        self._messages: dict[MessageId, Message] = {}
        self._bytes = 0

    @property
    def messages(self) -> list[Message]:
        """What was taken, each once, in no order."""
        return list(self._messages.values())

    def consider(self, message: Message) -> None:
        """Take a message if it is meant; `InvalidInput` where there are too many, though all were asked for."""
        if self._is_meant(message):
            self.take(message)

    def take(self, message: Message) -> None:
        """Take a message that is meant; the same one again changes nothing."""
        if message.id in self._messages:
            return
        self._messages[message.id] = message
        if self._first is not None and self._held_max is not None:
            if len(self._messages) > self._held_max:
                self._messages = {each.id: each for each in self._first(self._messages.values())}
            return
        self._bytes += MESSAGE_BYTES + len(message.body if message.raw is None else message.raw)
        self.check(0)

    def check(self, more: int) -> None:
        """See that so many messages more are not too many."""
        check_count(len(self._messages) + more, self._advice)
        if self._bytes > limits.ANSWER_BYTES_MAX:
            raise InvalidInput(f"messages of more than {limits.ANSWER_BYTES_MAX >> 20} MiB: {self._advice}")


def check_count(messages: int, advice: str) -> None:
    """Refuse an answer that is too large as soon as that shows, before more of it is read."""
    if messages > limits.ANSWER_MESSAGES_MAX:
        raise InvalidInput(f"more than {limits.ANSWER_MESSAGES_MAX} messages: {advice}")
