"""Publishing of Relatum's own: straight to a stream, each message confirmed, over a connection opened when needed."""

import threading
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import AMQPError, NackError, UnroutableError

from relatum.errors import BrokerUnavailable, PublishNacked, PublishUnroutable
from relatum.reading import BrokerAddress
from relatum.reading._amqp_blocking import connection_error, pika_parameters

TIMEOUT_S: Final = 10.0
"""Seconds until connecting, or a broker that blocks publishers, counts as one that does not answer."""


class DirectPublisher:
    """Publishes to streams by their names, through the default exchange. A context manager; threads may share one.

    The connection is opened at the first message, and again after it was lost. A message may be published twice where
    the connection ended before the confirm and the caller repeats it.

    Args:
        address: The broker's address; it must have an AMQP port.
        what: What is published, as errors name it: "a dead letter".
        timeout_s: Seconds until connecting, or a broker that blocks publishers, ends as `BrokerUnavailable`.

    Raises:
        ConfigurationError: the address has no AMQP port; give the broker as an amqp:// URL.
    """

    def __init__(self, address: BrokerAddress, what: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._address = address
        self._what = what
        # No heartbeats: nobody answers them while nothing is published, and the next publish notices a lost connection.
        self._parameters = pika_parameters(address, None, timeout_s, "PLAIN", 0)
        self._lock = threading.Lock()
        self._channel: BlockingChannel | None = None

    def publish(self, stream: str, body: bytes, properties: BasicProperties) -> None:
        """Publish a message and wait for its confirm.

        Raises:
            PublishUnroutable: there is no such stream.
            PublishNacked: the broker refused the message.
            BrokerUnavailable: the broker does not answer, or the connection ended before the confirm.
            AccessRefused: the broker refuses the user.
        """
        with self._lock:
            try:
                self._open().basic_publish("", stream, body, properties, mandatory=True)
            except UnroutableError as error:
                raise PublishUnroutable(
                    f"there is no stream {stream!r} for {self._what}: declare it", in_stream=False
                ) from error
            except NackError as error:
                raise PublishNacked(f"the broker refused {self._what} for {stream!r}", in_stream=False) from error
            except (AMQPError, OSError) as error:
                self._drop()
                why = str(error) or type(error).__name__
                raise BrokerUnavailable(f"{self._what} could not be published to {stream!r}: {why}") from error

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
