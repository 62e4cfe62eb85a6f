"""Dead letters: messages given up, which are published to another stream with the reason as a header."""

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pika import BasicProperties

from relatum.closing import Closing
from relatum.errors import InvalidInput
from relatum.ids import MessageId
from relatum.limits import HEADERS_BYTES_MAX, HEADERS_DEPTH_MAX
from relatum.publishing._direct_publisher import DIRECT_TIMEOUT_S, DirectPublisher, encoded_bytes
from relatum.reading import BrokerAddress, Message
from relatum.waiting import ended, log_failure, may_be_mended, may_repeat

logger = logging.getLogger("relatum.dead_letters")

REASON_HEADER: Final = "relatum_dead_reason"
"""Header: why the message was given up."""

STREAM_HEADER: Final = "relatum_dead_stream"
"""Header: the name of the message's stream."""

OFFSET_HEADER: Final = "relatum_dead_offset"
"""Header: the message's offset in its stream. The two identify a dead letter that was published twice."""

LEFT_OUT_HEADER: Final = "relatum_dead_left_out"
"""Header: the properties and headers that do not fit or cannot be sent: "correlation_id, header trace"."""

REASON_CHARACTERS_MAX: Final = 1000
"""Characters of a reason; the rest is cut off."""

_PROPERTIES: Final = (
    "content_type",
    "content_encoding",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "message_id",
    "timestamp",
    "type",
    "app_id",
)
"""Properties a dead letter keeps: not `expiration`, ignored by streams, nor `user_id`, allowed only to that user."""


class DeadLetters(Closing):
    """Publishes given-up messages to a stream, each confirmed. A context manager; threads may share one.

    The first message opens the connection; after a loss, the next one opens another. A message may be published twice
    if the connection ends before the confirm: compare `relatum_dead_stream` and `relatum_dead_offset`.

    Args:
        address: The broker's address, with an AMQP port.
        stream: The name of an existing stream or other queue.
        timeout_s: Seconds until a silent broker, or one that blocks publishers, is `BrokerUnavailable`.

    Raises:
        ConfigurationError: the address has no AMQP port; give the broker as an amqp:// URL.
    """

    def __init__(self, address: BrokerAddress, stream: str, *, timeout_s: float = DIRECT_TIMEOUT_S) -> None:
        self.stream = stream
        self._publisher = DirectPublisher(address, "a dead letter", timeout_s=timeout_s)

    def publish(self, messages: Sequence[Message], reason: str, **headers: str | int | bool) -> None:
        """Publish messages in order and wait for the confirm of each.

        A dead letter has the message's body, properties and headers, and the headers `relatum_dead_reason`,
        `relatum_dead_stream` and `relatum_dead_offset`. Properties and headers that AMQP 0.9.1 cannot send (a
        correlation id over 255 bytes, headers larger than a frame) are left out and named in `relatum_dead_left_out`.

        Args:
            messages: The messages, as read.
            reason: Why they are given up; at most 1,000 characters are kept.
            headers: Further headers.

        Raises:
            PublishUnroutable: the stream does not exist; the messages before this one are published.
            PublishNacked: the broker refused a message; the messages before it are published.
            PublishRejected: the broker never accepts this message; the messages before it are published.
            InvalidInput, DataError: as `PublishRejected`, but the message was not sent.
            BrokerUnavailable: the broker does not answer. A retry publishes confirmed messages again.
            AccessRefused: the broker refuses the user.
        """
        added = {REASON_HEADER: reason[:REASON_CHARACTERS_MAX], **headers}
        for message in messages:
            letter = _Letter(message, added)
            try:
                letter.check_depth()
                self._publisher.publish(self.stream, message.body, letter.properties())
            except InvalidInput as refused:
                letter.reduce(getattr(refused, "bytes_max", HEADERS_BYTES_MAX))
                self._publisher.publish(self.stream, message.body, letter.properties())
                extra = {"stream": message.stream, "offset": message.offset, "left_out": letter.left_out}
                logger.warning("a dead letter was published without some of its properties: %s", refused, extra=extra)

    def close(self) -> None:
        """Close the connection. The next publish opens another."""
        self._publisher.close()


class Burial:
    """Publishes dead letters. A retry does not publish confirmed ones again."""

    def __init__(
        self, dead_letters: DeadLetters, letters: Iterable[tuple[Message, str]], **headers: str | int | bool
    ) -> None:
        self._dead_letters = dead_letters
        self._left = deque(letters)
        self._headers = headers
        self._refused: dict[MessageId, str] = {}

    def run(self) -> dict[MessageId, str]:
        """Publish the remaining messages; return those that can never be dead letters, with the reasons.

        Raises:
            Transient, AccessRefused, PublishNacked, PublishUnroutable: the broker may accept them later; call again.
        """
        while self._left:
            message, reason = self._left[0]
            try:
                self._dead_letters.publish([message], reason, **self._headers)
            except Exception as error:
                if may_repeat(error) or may_be_mended(error):
                    raise
                # It would fail again and block the next ones.
                extra = {"stream": message.stream, "offset": message.offset}
                log_failure(logger, error, f"message {message.id} cannot become a dead letter", extra=extra)
                self._refused[message.id] = ended(error)
            self._left.popleft()
        return self._refused


class _Letter:
    """A dead letter's headers and properties: the message's own, which may be left out, and added ones."""

    def __init__(self, message: Message, added: Mapping[str, Any]) -> None:
        self._added = {**added, STREAM_HEADER: message.stream, OFFSET_HEADER: message.offset}
        self._headers = {name: value for name, value in message.headers.items() if name not in self._added}
        self._fields = {name: getattr(message.properties, name) for name in _PROPERTIES}
        if self._fields["timestamp"] is not None:
            self._fields["timestamp"] = int(self._fields["timestamp"].timestamp())
        self.left_out = ""

    def properties(self) -> BasicProperties:
        """Return the properties for pika."""
        return BasicProperties(headers={**self._headers, **self._added}, **self._fields)

    def check_depth(self) -> None:
        """Refuse headers nested so deep that the broker accepts them, but every pika consumer crashes."""
        if _is_deep(self._headers, HEADERS_DEPTH_MAX):
            raise InvalidInput(f"headers are nested deeper than {HEADERS_DEPTH_MAX} levels")

    def reduce(self, bytes_max: int) -> None:
        """Leave out what cannot be encoded, then the largest properties and headers until a frame holds the rest."""
        sizes = {(name, ""): _bytes({}, **{name: value}) for name, value in self._fields.items() if value is not None}
        sizes |= {(name, "header "): _bytes({name: value}) for name, value in self._headers.items()}
        # Less the added headers and the list of omissions, at four bytes a character.
        room = bytes_max - _bytes(self._added) - 5 * REASON_CHARACTERS_MAX
        total = sum(size for size in sizes.values() if size <= bytes_max)
        left_out: list[str] = []
        for (name, kind), size in sorted(sizes.items(), key=lambda part: -part[1]):
            if size <= bytes_max:
                if total <= room:
                    break
                total -= size
            del (self._headers if kind else self._fields)[name]
            left_out.append(kind + name[:_NAME_CHARACTERS_MAX])
        self.left_out = self._added[LEFT_OUT_HEADER] = ", ".join(left_out)[:REASON_CHARACTERS_MAX]


_NAME_CHARACTERS_MAX: Final = 60
"""Characters of a header's name in the list of omissions."""

_UNSENDABLE: Final = 2**32
"""The size assigned to what cannot be sent: larger than any frame."""


def _bytes(headers: dict[str, Any], **fields: Any) -> int:
    """Return the encoded bytes of headers and properties."""
    if _is_deep(headers, HEADERS_DEPTH_MAX):
        return _UNSENDABLE
    try:
        return encoded_bytes(BasicProperties(headers=headers, **fields))
    except InvalidInput:
        return _UNSENDABLE


def _is_deep(value: Any, levels: int) -> bool:
    """Return whether tables and arrays are nested deeper than `levels`."""
    if not isinstance(value, Mapping | list | tuple):
        return False
    if levels < 0:
        return True
    return any(_is_deep(each, levels - 1) for each in (value.values() if isinstance(value, Mapping) else value))
