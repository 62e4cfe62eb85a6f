"""Publishes Relatum's own messages directly to a stream, each confirmed, over a separate connection."""

import threading
from contextlib import suppress
from typing import Final

from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import (
    AMQPError,
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    NackError,
    UnroutableError,
)

from relatum.client_logs import own_connection
from relatum.closing import Closing
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    HeadersRefused,
    InvalidInput,
    PublishNacked,
    PublishRejected,
    PublishUnroutable,
    RelatumError,
)
from relatum.processes import after_fork, leave_to_parent
from relatum.publishing._publish_errors import MALFORMED
from relatum.reading import GOODBYE_S, BrokerAddress, blocking_connection, in_time

DIRECT_TIMEOUT_S: Final = 10.0
"""Seconds until a silent broker counts as unavailable."""

_ACCESS_REFUSED: Final = 403
"""AMQP's reply code for a user without permission."""

_PRECONDITION_FAILED: Final = 406
"""AMQP's reply code for a message larger than the broker accepts."""

_FRAME_BYTES: Final = 8 + 12
"""Bytes of a header frame besides its properties: the frame's header and end, then class, weight and body size.

Source: AMQP 0-9-1, 2.3.5 and 2.3.5.2. RabbitMQ compares the whole frame with the negotiated size.
"""


class DirectPublisher(Closing):
    """Publishes to streams by name, through the default exchange. A context manager; threads may share one.

    The first message opens the connection; after a loss, the next one opens another. If the connection ends before a
    confirm and the caller retries, the message may be published twice.

    Args:
        address: The broker's address, with an AMQP port.
        what: The name of a message in errors: "a dead letter".
        timeout_s: Seconds to connect, and then for each message, until a broker that is silent or blocks publishers is
            `BrokerUnavailable`.

    Raises:
        ConfigurationError: the address has no AMQP port; give the broker as an amqp:// URL.
    """

    def __init__(self, address: BrokerAddress, what: str, *, timeout_s: float = DIRECT_TIMEOUT_S) -> None:
        self._address = address
        self._what = what
        if address.amqp_port is None:
            raise ConfigurationError(f"publishing {what} needs AMQP 0.9.1: give the broker as an amqp:// URL")
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: BlockingConnection | None = None
        self._channel: BlockingChannel | None = None
        after_fork(self, DirectPublisher._renew)

    def _renew(self) -> None:
        """Forget the parent's connection in a child."""
        self._lock = threading.Lock()
        leave_to_parent(self._connection, self._channel)
        self._connection = self._channel = None

    @own_connection()
    def publish(self, stream: str, body: bytes, properties: BasicProperties) -> None:
        """Publish a message and wait for its confirm.

        Raises:
            PublishUnroutable: the stream does not exist.
            PublishNacked: the broker refused the message.
            PublishRejected: the broker never accepts this message: it is too large, or malformed.
            InvalidInput: the properties cannot be encoded; nothing was sent.
            HeadersRefused: the properties exceed a frame (field `bytes_max`: the room for them); nothing was sent.
            BrokerUnavailable: the broker does not answer, or the connection ended before the confirm.
            AccessRefused: the broker refuses the user, or does not let it write to the default exchange.
        """
        size = encoded_bytes(properties)
        with self._lock:
            try:
                connection = self._connected()
                self._check_frame(connection, size)
                with in_time(connection, self._timeout_s):
                    if self._channel is None:
                        self._channel = connection.channel()
                        self._channel.confirm_delivery()
                    self._channel.basic_publish("", stream, body, properties, mandatory=True)
            except UnroutableError as error:
                raise PublishUnroutable(
                    f"there is no stream {stream!r} for {self._what}: declare it", in_stream=False
                ) from error
            except NackError as error:
                raise PublishNacked(f"the broker refused {self._what} for {stream!r}", in_stream=False) from error
            except (AMQPError, OSError) as error:
                self._drop()
                raise self._translated(stream, error) from error

    def _translated(self, stream: str, error: BaseException) -> RelatumError:
        """Return the error for a message that could not be published."""
        code = error.reply_code if isinstance(error, ChannelClosedByBroker | ConnectionClosedByBroker) else None
        if isinstance(error, ChannelClosedByBroker) and code == _ACCESS_REFUSED:
            return AccessRefused(
                f"the broker refuses the user {self._address.user!r} to publish {self._what} to {stream!r} by "
                "the default exchange: grant the permission to write to 'amq.default'"
            )
        why = str(error) or type(error).__name__
        if code == _PRECONDITION_FAILED or code in MALFORMED:
            return PublishRejected(f"the broker does not accept {self._what} for {stream!r}: {why}")
        return BrokerUnavailable(f"{self._what} could not be published to {stream!r}: {why}")

    def _check_frame(self, connection: BlockingConnection, size: int) -> None:
        """Refuse properties that exceed a frame: the broker would close the connection."""
        frame_bytes_max = connection._impl.params.frame_max
        if frame_bytes_max and size + _FRAME_BYTES > frame_bytes_max:
            raise HeadersRefused(
                f"the properties of {self._what} take {size} bytes; the connection negotiated frames of "
                f"{frame_bytes_max}; nothing was sent",
                reason="too_large",
                bytes_max=frame_bytes_max - _FRAME_BYTES,
            )

    def _connected(self) -> BlockingConnection:
        """Return the connection, reopened if it has ended."""
        if self._connection is not None:
            with suppress(AMQPError, OSError):
                self._connection.process_data_events(0)
            if self._channel is None or not self._channel.is_open:
                self._drop()
        if self._connection is None:
            # No heartbeats: none are answered between messages, and the next publish notices a lost connection.
            self._connection = blocking_connection(self._address, timeout_s=self._timeout_s, heartbeat_s=0)
        return self._connection

    def _drop(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None and connection.is_open:
            with suppress(AMQPError, OSError), in_time(connection, GOODBYE_S):
                connection.close()

    @own_connection()
    def close(self) -> None:
        """Close the connection. The next publish opens another."""
        with self._lock:
            self._drop()


def encoded_bytes(properties: BasicProperties) -> int:
    """Return the number of encoded bytes of a message's properties and headers."""
    try:
        return sum(map(len, properties.encode()))
    except Exception as error:
        # pika's encoder raises AssertionError, struct.error, RecursionError and its own errors.
        raise InvalidInput(f"AMQP 0.9.1 cannot encode the properties: {error or type(error).__name__}") from error
