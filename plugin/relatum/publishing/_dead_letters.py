"""Dead letters: messages given up, which are published to another stream with the reason as a header."""

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
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

_NAME_CHARACTERS_MAX: Final = 60
"""Characters of a header's name in the list of omissions."""

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

    def publish(self, message: Message, reason: str, **headers: str | int | bool) -> None:
        """Publish a message and wait for the confirm.

        A dead letter has the message's body, properties and headers, and the headers `relatum_dead_reason`,
        `relatum_dead_stream` and `relatum_dead_offset`. Properties and headers that AMQP 0.9.1 cannot send (a
        correlation id over 255 bytes, headers larger than a frame) are left out and named in `relatum_dead_left_out`.

        Args:
            message: The message, as read.
            reason: Why it is given up; at most 1,000 characters are kept.
            headers: Further headers.

        Raises:
            PublishUnroutable: the stream does not exist.
            PublishNacked: the broker refused the message.
            PublishRejected: the broker never accepts this message.
            InvalidInput, DataError: as `PublishRejected`, but the message was not sent.
            BrokerUnavailable: the broker does not answer. A retry may publish the message again.
            AccessRefused: the broker refuses the user.
        """
        added: dict[str, Any] = {REASON_HEADER: reason[:REASON_CHARACTERS_MAX], **headers}
        added |= {STREAM_HEADER: message.stream, OFFSET_HEADER: message.offset}
        fields = {name: getattr(message.properties, name) for name in _PROPERTIES}
        if fields["timestamp"] is not None:
            fields["timestamp"] = int(fields["timestamp"].timestamp())
        own = {name: value for name, value in message.headers.items() if name not in added}
        try:
            _check_depth(own)
            self._publisher.publish(self.stream, message.body, BasicProperties(headers={**own, **added}, **fields))
        except InvalidInput as refused:
            reduced = _reduced(fields, own, added, getattr(refused, "bytes_max", HEADERS_BYTES_MAX))
            self._publisher.publish(self.stream, message.body, reduced)
            extra = {"stream": message.stream, "offset": message.offset, "left_out": added[LEFT_OUT_HEADER]}
            logger.warning("a dead letter was published without some of its properties: %s", refused, extra=extra)

    def close(self) -> None:
        """Close the connection. The next publish opens another."""
        self._publisher.close()


class DeadLetterPublisher:
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
                self._dead_letters.publish(message, reason, **self._headers)
            except Exception as error:
                if may_repeat(error) or may_be_mended(error):
                    raise
                # It would fail again and block the next ones.
                extra = {"stream": message.stream, "offset": message.offset}
                log_failure(logger, error, f"message {message.id} cannot become a dead letter", extra=extra)
                self._refused[message.id] = ended(error)
            self._left.popleft()
        return self._refused


def _reduced(
    fields: Mapping[str, Any], headers: Mapping[str, Any], added: dict[str, Any], bytes_max: int
) -> BasicProperties:
    """Return the properties and headers that can be sent and fit into `bytes_max`; name the others in `added`."""
    # Less the added headers and the list of omissions, at four bytes a character.
    room: float = bytes_max - encoded_bytes(BasicProperties(headers=added)) - 5 * REASON_CHARACTERS_MAX
    kept: dict[str, dict[str, Any]] = {"": {}, "header ": {}}
    left_out: list[str] = []
    for kind, given in (("", fields), ("header ", headers)):
        for name, value in given.items():
            size = _bytes({name: value}) if kind else _bytes({}, **{name: value})
            if size > room:
                left_out.append(kind + name[:_NAME_CHARACTERS_MAX])
            else:
                room -= size
                kept[kind][name] = value
    added[LEFT_OUT_HEADER] = ", ".join(left_out)[:REASON_CHARACTERS_MAX]
    return BasicProperties(headers={**kept["header "], **added}, **kept[""])


def _bytes(headers: dict[str, Any], **fields: Any) -> float:
    """Return the encoded bytes of headers and properties; endless if they cannot be sent."""
    try:
        _check_depth(headers)
        return encoded_bytes(BasicProperties(headers=headers, **fields))
    except InvalidInput:
        return math.inf


def _check_depth(headers: Mapping[str, Any]) -> None:
    """Refuse headers nested so deep that the broker accepts them, but every pika consumer crashes."""
    if _is_deep(headers, HEADERS_DEPTH_MAX):
        raise InvalidInput(f"headers are nested deeper than {HEADERS_DEPTH_MAX} levels")


def _is_deep(value: Any, levels: int) -> bool:
    """Return whether tables and arrays are nested deeper than `levels`."""
    if not isinstance(value, Mapping | list | tuple):
        return False
    if levels < 0:
        return True
    return any(_is_deep(each, levels - 1) for each in (value.values() if isinstance(value, Mapping) else value))
