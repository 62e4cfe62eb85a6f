"""Dead letters: messages that were given up, published to a stream of their own, with the reason beside them."""

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self

from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import AMQPError, NackError, UnroutableError

from relatum.errors import BrokerUnavailable, PublishNacked, PublishUnroutable
from relatum.reading import BrokerAddress, Message
from relatum.reading._amqp_blocking import connection_error, pika_parameters

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

    def __init__(self, address: BrokerAddress, stream: str, *, timeout_s: float = 10.0) -> None:
        self.stream = stream
        self._address = address
        # No heartbeats: nobody answers them while nothing is published, and the next publish notices a lost connection.
        self._parameters = pika_parameters(address, None, timeout_s, "PLAIN", 0)
        self._lock = threading.Lock()
        self._channel: BlockingChannel | None = None

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
                self._publish(message, added)

    def _publish(self, message: Message, added: Mapping[str, Any]) -> None:
        try:
            self._open().basic_publish("", self.stream, message.body, _properties(message, added), mandatory=True)
        except UnroutableError as error:
            raise PublishUnroutable(
                f"there is no stream {self.stream!r} for dead letters: declare it", in_stream=False
            ) from error
        except NackError as error:
            raise PublishNacked(f"the broker refused a dead letter for {self.stream!r}", in_stream=False) from error
        except (AMQPError, OSError) as error:
            self._drop()
            what = str(error) or type(error).__name__
            raise BrokerUnavailable(f"no dead letter could be published to {self.stream!r}: {what}") from error

    def _open(self) -> BlockingChannel:
        """The channel. One whose connection ended while nothing was published is opened anew."""
        if self._channel is not None:
            with suppress(AMQPError, OSError):
                self._channel.connection.process_data_events(0)
            if not self._channel.is_open:
                self._drop()
        if self._channel is None:
            self._channel = self._connect().channel()
            self._channel.confirm_delivery()
        return self._channel

    def _connect(self) -> BlockingConnection:
        try:
            return BlockingConnection(self._parameters)
        except (AMQPError, OSError) as error:
            raise connection_error(error, self._address) from error

    def _drop(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None and channel.connection.is_open:
            with suppress(AMQPError, OSError):
                channel.connection.close()

    def close(self) -> None:
        """Close the connection. Publishing again opens another."""
        with self._lock:
            self._drop()

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
