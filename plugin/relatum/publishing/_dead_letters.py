"""Dead letters: messages that were given up, published to a stream of their own, with the reason beside them."""

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
"""The header that says why a message was given up."""

STREAM_HEADER: Final = "relatum_dead_stream"
"""The header with the name of the message's stream."""

OFFSET_HEADER: Final = "relatum_dead_offset"
"""The header with the message's offset there: stream and offset are the same however often it is published."""

LEFT_OUT_HEADER: Final = "relatum_dead_left_out"
"""The header that names the properties and headers that no dead letter can carry: "correlation_id, header trace"."""

REASON_CHARACTERS_MAX: Final = 1000
"""Characters of a reason that are kept: enough to know a failure by, and far from the limit of a header frame."""

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
"""The properties that go with a dead letter.

Not `expiration`: streams take no notice of it. Not `user_id`: the broker refuses the name of another user.
"""


class DeadLetters(Closing):
    """Publishes given-up messages to a stream, each confirmed. A context manager; threads may share one.

    The connection is opened at the first message, and again after it was lost. A message may be published twice where
    the connection ended before the confirm: `relatum_dead_stream` and `relatum_dead_offset` tell.

    Args:
        address: The broker's address; it must have an AMQP port.
        stream: The name of the stream, or of any queue. It must exist.
        timeout_s: Seconds until connecting, or a broker that blocks publishers, ends as `BrokerUnavailable`.

    Raises:
        ConfigurationError: the address has no AMQP port; give the broker as an amqp:// URL.
    """

    def __init__(self, address: BrokerAddress, stream: str, *, timeout_s: float = DIRECT_TIMEOUT_S) -> None:
        self.stream = stream
        self._publisher = DirectPublisher(address, "a dead letter", timeout_s=timeout_s)

    def publish(self, messages: Sequence[Message], reason: str, **headers: str | int | bool) -> None:
        """Publish messages, in order, and wait for the confirm of each.

        Body, properties and headers are the message's own; added are the headers `relatum_dead_reason`,
        `relatum_dead_stream` and `relatum_dead_offset`. What AMQP 0.9.1 cannot carry, as a stream may hold it (a
        correlation id over 255 bytes, headers over the size of a frame), is left out, and `relatum_dead_left_out` names
        it: the message itself still lies where stream and offset say.

        Args:
            messages: The messages, as they were read.
            reason: Why they were given up; at most 1,000 characters of it are kept.
            headers: More headers to add.

        Raises:
            PublishUnroutable: there is no such stream; nothing of what follows was published.
            PublishNacked: the broker refused a message; those before it are published.
            PublishRejected: the broker takes no such message, however often; those before it are published.
            InvalidInput, DataError: as `PublishRejected`, said before anything of it was sent.
            BrokerUnavailable: the broker does not answer. Repeating publishes those again that were confirmed.
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
                logger.warning("a dead letter without all of its properties: %s", refused, extra=extra)

    def close(self) -> None:
        """Close the connection. Publishing again opens another."""
        self._publisher.close()


class Burial:
    """Publishes dead letters; where that is repeated, none again that was confirmed."""

    def __init__(
        self, dead_letters: DeadLetters, letters: Iterable[tuple[Message, str]], **headers: str | int | bool
    ) -> None:
        self._dead_letters = dead_letters
        self._left = deque(letters)
        self._headers = headers
        self._refused: dict[MessageId, str] = {}

    def run(self) -> dict[MessageId, str]:
        """Publish what is left; gives the messages that can be no dead letters at any time, and why.

        Raises:
            Transient, AccessRefused, PublishNacked, PublishUnroutable: They may be taken later; call it again.
        """
        while self._left:
            message, reason = self._left[0]
            try:
                self._dead_letters.publish([message], reason, **self._headers)
            except Exception as error:
                if may_repeat(error) or may_be_mended(error):
                    raise
                # Whatever else it is, it is the same the next time, and others wait behind it.
                extra = {"stream": message.stream, "offset": message.offset}
                log_failure(logger, error, f"message {message.id} can be no dead letter", extra=extra)
                self._refused[message.id] = ended(error)
            self._left.popleft()
        return self._refused


class _Letter:
    """What a dead letter carries beside the body: the message's own parts, which may be left out, and what is added."""

    def __init__(self, message: Message, added: Mapping[str, Any]) -> None:
        self._added = {**added, STREAM_HEADER: message.stream, OFFSET_HEADER: message.offset}
        self._headers = {name: value for name, value in message.headers.items() if name not in self._added}
        self._fields = {name: getattr(message.properties, name) for name in _PROPERTIES}
        if self._fields["timestamp"] is not None:
            self._fields["timestamp"] = int(self._fields["timestamp"].timestamp())
        self.left_out = ""

    def properties(self) -> BasicProperties:
        """As pika sends them."""
        return BasicProperties(headers={**self._headers, **self._added}, **self._fields)

    def check_depth(self) -> None:
        """Refuse headers that the broker would take, and that crash every consumer that reads them with pika."""
        if _is_deep(self._headers, HEADERS_DEPTH_MAX):
            raise InvalidInput(f"headers are nested deeper than {HEADERS_DEPTH_MAX} levels")

    def reduce(self, bytes_max: int) -> None:
        """Leave out what cannot be encoded, then the largest of the rest until a frame holds it."""
        sizes = {(name, ""): _bytes({}, **{name: value}) for name, value in self._fields.items() if value is not None}
        sizes |= {(name, "header "): _bytes({name: value}) for name, value in self._headers.items()}
        # Without what is added, and the header that names what is left out, at four bytes a character.
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
"""Characters of a header's name where it is named as left out."""

_UNSENDABLE: Final = 2**32
"""The size of what cannot be sent: more than any frame holds."""


def _bytes(headers: dict[str, Any], **fields: Any) -> int:
    """Bytes that headers and properties take."""
    if _is_deep(headers, HEADERS_DEPTH_MAX):
        return _UNSENDABLE
    try:
        return encoded_bytes(BasicProperties(headers=headers, **fields))
    except InvalidInput:
        return _UNSENDABLE


def _is_deep(value: Any, levels: int) -> bool:
    """Whether tables and arrays are nested deeper than so many levels."""
    if not isinstance(value, Mapping | list | tuple):
        return False
    if levels < 0:
        return True
    return any(_is_deep(each, levels - 1) for each in (value.values() if isinstance(value, Mapping) else value))
