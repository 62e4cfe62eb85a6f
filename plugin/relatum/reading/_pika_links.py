"""Reading streams over AMQP 0.9.1 with pika, blocking: a connection for each call.

pika's BlockingConnection rejects messages when a channel is closed, which RabbitMQ up to 3.12 answers by closing
the connection. So this runs a SelectConnection's own loop, step by step.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pika
from pika.adapters.select_connection import IOLoop, SelectConnection
from pika.channel import Channel
from pika.exceptions import AMQPError, ChannelClosedByBroker

from relatum.client_logs import own_connection
from relatum.errors import ConnectionLost, ReadTimeout, RelatumError
from relatum.processes import after_fork, leave_to_parent
from relatum.reading._address import BrokerAddress
from relatum.reading._amqp_operations import Answer, Command, Count, Delivery, Next, offset_of, refused
from relatum.reading._connections import Connections
from relatum.reading._failing_over import Attempts
from relatum.reading._opening import HEARTBEAT_S
from relatum.reading._pika_opening import connection_error, pika_parameters
from relatum.reading._stream_errors import moved
from relatum.reading._time import check_time, connect_left_s
from relatum.reading._turns import ReaderStatistics, Use
from relatum.waiting import Patience, left_s

PIKA_GRACE_S: Final = 1.0
"""Seconds added to a time-out that pika watches itself."""

HEARTBEAT_BYTES: Final = 8
"""Bytes of a heartbeat frame of AMQP 0.9.1."""

GOODBYE_S: Final = 0.5
"""Seconds the broker has to answer a close."""


class _Loop(IOLoop):  # type: ignore[misc]
    """pika's loop, which knows the descriptors it watches: pika has no way to drop a connection at once."""

    def __init__(self) -> None:
        self._descriptors: set[int] = set()
        super().__init__()

    def add_handler(self, fd: int, handler: Any, events: int) -> None:
        self._descriptors.add(fd)
        super().add_handler(fd, handler, events)

    def remove_handler(self, fd: int) -> None:
        self._descriptors.discard(fd)
        super().remove_handler(fd)

    def shut_sockets(self) -> None:
        """Shut what is connected to a broker: pika then reads its end."""
        for descriptor in self._descriptors:
            with socket.socket(fileno=os.dup(descriptor)) as twin, contextlib.suppress(OSError):
                if twin.family != socket.AF_UNIX:
                    twin.shutdown(socket.SHUT_RDWR)


class PikaConnection:
    """One connection, for one thread at a time."""

    _timeout_s = Patience("_limit_s")

    @own_connection()
    def __init__(
        self, address: BrokerAddress, parameters: pika.ConnectionParameters, timeout_s: float, connect_s: float
    ) -> None:
        self._limit_s = timeout_s
        self._heartbeat_s = parameters.heartbeat if isinstance(parameters.heartbeat, int) else HEARTBEAT_S
        self._loop = _Loop()
        self._error: BaseException | None = None
        self._is_open = self._is_gone = False
        self._channel: Channel | None = None
        self._stream = ""
        self._is_ready = False
        after_fork(self, PikaConnection._leave)
        self._deliveries: list[Delivery] = []
        self._unsettled: int = 0
        self._failure: RelatumError | None = None
        self.has_received = False
        self._connection = SelectConnection(
            parameters,
            on_open_callback=self._on_open,
            on_open_error_callback=self._on_end,
            on_close_callback=self._on_end,
            custom_ioloop=self._loop,
        )
        # pika ends its own attempt after `connect_s`, and must be left to do so.
        self._until(lambda: self._is_open or self._error is not None, connect_s + PIKA_GRACE_S)
        if not self._is_open:
            self._loop.close()
            raise connection_error(self._error, address) from self._error

    def _leave(self) -> None:
        """In a child: ended, and nothing said to the broker or taken from the loop, which the parent goes on with."""
        self._is_gone, self._is_open = True, False
        self._error = ConnectionLost("The AMQP connection is that of the process that forked.")
        leave_to_parent(self)

    @property
    def is_usable(self) -> bool:
        return self._is_open and self._error is None

    @property
    def server_properties(self) -> dict[str, Any]:
        """What the broker said of itself."""
        return dict(self._connection.server_properties or {})

    # --- the loop -----------------------------------------------------------------------------------------

    def _on_open(self, _connection: Any) -> None:
        self._is_open = True
        self._loop.stop()

    def _on_end(self, _connection: Any, error: Any) -> None:
        self._error = error if isinstance(error, BaseException) else AMQPError(str(error))
        self._is_open = False
        self._loop.stop()

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Run the loop until a condition holds; False when it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            handle = self._loop.call_later(left, self._loop.stop)
            try:
                self._loop.start()
            finally:
                self._loop.remove_timeout(handle)
        return True

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """As `_until`, for an open connection: what ended it, or the channel, is raised."""
        done = self._until(lambda: condition() or self._failure is not None or self._error is not None, timeout_s)
        if self._error is not None:
            raise ConnectionLost("The AMQP connection to the broker was lost.") from self._error
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return done

    # --- commands -----------------------------------------------------------------------------------------

    @own_connection()
    def perform(self, command: Command) -> Answer:
        """Carry out one command of `AmqpOperations`."""
        if isinstance(command, Next):
            return self._next(command.timeout_s)
        self._open_channel(command.stream)
        assert self._channel is not None
        if isinstance(command, Count):
            return self._count(command.stream)
        self._is_ready = False
        self._channel.basic_qos(prefetch_count=command.prefetch)
        self._channel.basic_consume(
            command.stream,
            self._on_delivery,
            arguments={"x-stream-offset": command.argument},
            callback=self._on_ready,
        )
        self._must(lambda: self._is_ready)
        return None

    def _must(self, condition: Callable[[], bool]) -> None:
        if not self._wait(condition, self._timeout_s):
            self.abandon()
            raise ReadTimeout("The broker did not answer in time.")

    def _open_channel(self, stream: str) -> None:
        self.close_channel()
        self._stream, self._failure = stream, None
        channel = self._connection.channel(on_open_callback=self._on_ready)
        channel.add_on_close_callback(self._on_channel_end)
        channel.add_on_cancel_callback(self._on_cancel)
        self._channel, self._is_ready = channel, False
        self._must(lambda: self._is_ready)

    def _count(self, stream: str) -> int:
        counts: list[int] = []

        def on_declared(frame: Any) -> None:
            counts.append(frame.method.message_count)
            self._loop.stop()

        assert self._channel is not None
        self._channel.queue_declare(stream, passive=True, callback=on_declared)
        self._must(lambda: bool(counts))
        return counts[0]

    def _next(self, timeout_s: float) -> list[Delivery]:
        if self._unsettled and self._channel is not None and self._channel.is_open:
            self._channel.basic_ack(self._unsettled, multiple=True)
            self._unsettled = 0
        received = self._connection.bytes_received
        check_time()
        while not self._wait(lambda: bool(self._deliveries), left_s(timeout_s)):
            # Cut short by the call's time, it would not be quiet: nothing is concluded from that.
            check_time()
            # A large message on a slow line is on its way as long as bytes of it come: that is not quiet. Heartbeats
            # are.
            heartbeats = 2 + int(2 * timeout_s / max(1, self._heartbeat_s))
            if self._connection.bytes_received - received <= heartbeats * HEARTBEAT_BYTES:
                break
            received = self._connection.bytes_received
        deliveries, self._deliveries = self._deliveries, []
        return deliveries

    @own_connection()
    def close_channel(self) -> None:
        """End the consumer by closing its channel; does not wait for the answer."""
        channel, self._channel = self._channel, None
        self._deliveries, self._unsettled = [], 0
        if channel is not None and channel.is_open and self.is_usable:
            channel.close()

    # --- callbacks ----------------------------------------------------------------------------------------

    def _on_ready(self, _frame: Any) -> None:
        self._is_ready = True
        self._loop.stop()

    def _on_channel_end(self, channel: Channel, reason: Exception) -> None:
        if channel is self._channel and isinstance(reason, ChannelClosedByBroker):
            self._failure = refused(self._stream, reason.reply_code, reason.reply_text)
            self._loop.stop()

    def _on_cancel(self, _frame: Any) -> None:
        self._failure = moved(self._stream)
        self._loop.stop()

    def _on_delivery(self, channel: Channel, method: Any, properties: Any, body: bytes) -> None:
        offset = offset_of(properties.headers)
        if channel is not self._channel or offset is None:
            return
        self.has_received = True
        self._unsettled = method.delivery_tag
        self._deliveries.append(Delivery(offset, properties, body))
        self._loop.stop()

    # --- end ----------------------------------------------------------------------------------------------

    @own_connection()
    def abandon(self) -> None:
        """Drop the connection; what would come next belongs to nobody."""
        if self._is_gone:
            return
        self._is_gone, self._is_open = True, False
        with contextlib.suppress(AMQPError, OSError):
            if self._error is None:
                self._connection.close()
            if not self._until(lambda: self._error is not None, GOODBYE_S):
                # A broker that does not answer: pika would wait for ever, so the sockets are shut under it.
                self._loop.shut_sockets()
                self._until(lambda: self._error is not None, GOODBYE_S)
        self._loop.close()

    close = abandon


class PikaLinks:
    """The connections of one reader. Threads may share it."""

    def __init__(self, address: BrokerAddress, timeout_s: float, heartbeat_s: int, connections: int) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._connections: Connections[PikaConnection] = Connections(connections)
        self.turn = self._connections.turn

    def open(self, within_s: float) -> dict[str, Any]:
        """Connect once, and keep that connection; what the broker says of itself."""
        connection = self._connected(within_s)
        self._connections.take(None, Use.ANSWER)
        self._connections.note_opened()
        self._release(connection, Use.ANSWER)
        return connection.server_properties

    def _connected(self, within_s: float) -> PikaConnection:
        attempts = Attempts(self._address, connect_left_s(within_s))
        while True:
            with attempts as (address, share_s):
                parameters = pika_parameters(address, share_s, self._heartbeat_s)
                return PikaConnection(address, parameters, self._timeout_s, share_s)

    @contextmanager
    def link(self, use: Use) -> Iterator[PikaConnection]:
        """A connection for one operation, whose turn it is."""
        connection = self._connections.take(None, use)
        if connection is None:
            try:
                connection = self._connected(self._timeout_s)
            except BaseException:
                self._connections.drop(use)
                raise
            self._connections.note_opened()
        connection.has_received = False
        try:
            yield connection
        finally:
            self._release(connection, use)

    def _release(self, connection: PikaConnection, use: Use) -> None:
        if not connection.is_usable:
            self._connections.drop(use)
            connection.close()
            return
        connection.close_channel()
        if not self._connections.put(None, connection, use):
            connection.close()

    def statistics(self) -> ReaderStatistics:
        """The connections."""
        return self._connections.statistics()

    def close(self) -> None:
        """Close all idle connections; those in use close when they are given back."""
        for connection in self._connections.end():
            connection.close()
