"""Dead letters: messages that were given up, published to a stream of their own, with the reason beside them."""

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from pika import BasicProperties

from relatum._direct import TIMEOUT_S, DirectPublisher
from relatum.reading import BrokerAddress, Message

REASON_HEADER: Final = "relatum_dead_reason"
"""The header that says why a message was given up."""

STREAM_HEADER: Final = "relatum_dead_stream"
"""The header with the stream the message lies in."""

OFFSET_HEADER: Final = "relatum_dead_offset"
"""The header with the message's offset there: stream and offset are the same however often it is published."""

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


class DeadLetters:
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

    def __init__(self, address: BrokerAddress, stream: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.stream = stream
        self._publisher = DirectPublisher(address, "a dead letter", timeout_s=timeout_s)
        self._lock = threading.Lock()

    def publish(self, messages: Sequence[Message], reason: str, **headers: str | int | bool) -> None:
        """Publish messages, in order, and wait for the confirm of each.

        Body, properties and headers are the message's own; added are the headers `relatum_dead_reason`,
        `relatum_dead_stream` and `relatum_dead_offset`.

        Args:
            messages: The messages, as they were read.
            reason: Why they were given up; at most 1,000 characters of it are kept.
            headers: More headers to add.

        Raises:
            PublishUnroutable: there is no such stream; nothing of what follows was published.
            PublishNacked: the broker refused a message; those before it are published.
            BrokerUnavailable: the broker does not answer. Repeating publishes those again that were confirmed.
            AccessRefused: the broker refuses the user.
        """
        added = {REASON_HEADER: reason[:REASON_CHARACTERS_MAX], **headers}
        with self._lock:
            for message in messages:
                self._publisher.publish(self.stream, message.body, _properties(message, added))

    def close(self) -> None:
        """Close the connection. Publishing again opens another."""
        self._publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _properties(message: Message, added: Mapping[str, Any]) -> BasicProperties:
    place = {STREAM_HEADER: message.stream, OFFSET_HEADER: message.offset}
    given = {name: getattr(message.properties, name) for name in _PROPERTIES}
    if given["timestamp"] is not None:
        given["timestamp"] = int(given["timestamp"].timestamp())
    return BasicProperties(headers={**message.headers, **added, **place}, **given)
