"""Reading streams over AMQP 0.9.1 with pika, blocking.

pika's BlockingConnection rejects messages when a channel is closed, which RabbitMQ up to 3.12 answers by closing
the connection. So this runs a SelectConnection's own loop, step by step.
"""

import contextlib
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, TypeVar

import pika
from pika.adapters.select_connection import IOLoop, SelectConnection
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.channel import Channel
from pika.exceptions import (
    AMQPError,
    AuthenticationError,
    ChannelClosedByBroker,
    IncompatibleProtocolError,
    StreamLostError,
)

from relatum.client_logs import own_connection
from relatum.errors import (
    BrokerUnavailable,
    ConfigurationError,
    ConnectionLost,
    ReadTimeout,
    RelatumError,
    UsedAfterClose,
)
from relatum.ids import MessageId
from relatum.processes import after_fork, leave_to_parent
from relatum.reading._address import BrokerAddress
from relatum.reading._amqp_operations import (
    AmqpOperations,
    Answer,
    Command,
    Count,
    Delivery,
    Next,
    offset_of,
    refused,
)
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._connections import Connections
from relatum.reading._handshake import inside, refusal_inside, why_hung_up
from relatum.reading._message import Message
from relatum.reading._opening import HEARTBEAT_S
from relatum.reading._refusal import is_refusal, login_refused
from relatum.reading._scan import Scan
from relatum.reading._stream_errors import moved
from relatum.reading._time import check_time, connect_left_s
from relatum.reading._turns import CONNECTIONS_MAX, ReaderStatistics, Use
from relatum.reading._window import Result, Window
from relatum.steps import each, run
from relatum.waiting import Patience, left_s
from relatum.wire import AMQP, ask_who, hint, is_another, unreached

PIKA_GRACE_S: Final = 1.0
"""Seconds added to a time-out that pika watches itself."""

HEARTBEAT_BYTES: Final = 8
"""Bytes of a heartbeat frame of AMQP 0.9.1."""

GOODBYE_S: Final = 0.5
"""Seconds the broker has to answer a close."""

_Result = TypeVar("_Result")


def pika_parameters(address: BrokerAddress, timeout_s: float, heartbeat_s: int) -> pika.ConnectionParameters:
    """What pika needs to connect to an address, and to log in as that says."""
    if address.amqp_port is None:
        raise ConfigurationError("AMQP 0.9.1 needs an amqp:// URL.")
    credentials: Any = pika.PlainCredentials(address.user, address.password)
    login = address.login
    if login.mechanism == "EXTERNAL":
        credentials = pika.credentials.ExternalCredentials()
    options = None
    if address.amqp_tls:
        options = pika.SSLOptions(login.tls_context(), login.server_name_for(address.host))
    return pika.ConnectionParameters(
        host=address.host,
        port=address.amqp_port,
        virtual_host=address.vhost,
        credentials=credentials,
        ssl_options=options,
        heartbeat=heartbeat_s,
        socket_timeout=timeout_s,
        stack_timeout=timeout_s,
        blocked_connection_timeout=timeout_s,
    )


def blocking_connection(address: BrokerAddress, *, timeout_s: float, heartbeat_s: int) -> pika.BlockingConnection:
    """A blocking connection of pika's to an address.

    Raises:
        BrokerUnavailable, AccessRefused: none can be opened.
        TlsRefused: TLS cannot be, for a reason that it names.
        ConfigurationError: the address has no AMQP port, or a file of TLS cannot be used.
    """
    parameters = pika_parameters(address, timeout_s, heartbeat_s)
    try:
        with own_connection():
            return pika.BlockingConnection(parameters)
    # A broker that accepts and never answers ends as an AMQPConnectorException, which is no AMQPError.
    except (AMQPError, AMQPConnectorException, OSError) as error:
        raise connection_error(error, address) from error


def connection_error(error: BaseException | None, address: BrokerAddress) -> RelatumError:
    """The error for a connection that could not be opened.

    pika calls a connection that ended during the opening a "probable" refusal. It is one where the broker said so.
    """
    where = f"{address.host}:{address.amqp_port}"
    closed = _CLOSED_BY_BROKER.search(f"{error} {error!r}")
    if closed is not None and is_refusal(int(closed[1]), closed[2]):
        return login_refused(where, address.who, address.vhost, int(closed[1]))
    if inside(error, AuthenticationError) is not None:
        return ConfigurationError(f"The broker at {where} does not offer {address.login.mechanism} to log in by.")
    return no_amqp(error, address)


def no_amqp(error: BaseException | None, address: BrokerAddress) -> RelatumError:
    """The error where no AMQP 0.9.1 answers, as far as the reason can be found among a client's own errors.

    It may block for a second, to ask who hung up instead of answering.
    """
    port = address.amqp_port or 0
    where = f"{address.host}:{port}"
    # pika's words, and asyncio's, for a server that hung up instead of answering.
    hung_up = any(inside(error, kind) for kind in _HUNG_UP)
    refused = refusal_inside(error, where)
    if refused is None and hung_up and address.amqp_tls:
        refused = why_hung_up(address.host, port, address.login)
    if refused is not None:
        return refused
    service = ask_who(address.host, port) if hung_up and not address.amqp_tls else None
    if service is not None and service != AMQP:
        return ConfigurationError(f"{is_another(service, where, AMQP)}.")
    reason = inside(error, socket.gaierror) or inside(error, OSError)
    return BrokerUnavailable(f"No AMQP 0.9.1 at {where}{unreached(reason, address.host)}{hint(port, AMQP)}.")


_HUNG_UP: Final = (StreamLostError, IncompatibleProtocolError, ConnectionResetError, EOFError, ssl.SSLError)

_CLOSED_BY_BROKER: Final = re.compile(r"\((\d+)\) (.*)", re.DOTALL)
"""What pika's errors keep of a Close frame: the reply code and the text."""


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
    def do(self, command: Command) -> Answer:
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


class Amqp:
    """The blocking face over AMQP 0.9.1. Threads may share it: each call has a connection to itself."""

    _timeout_s = Patience("_limit_s")

    def __init__(
        self,
        address: BrokerAddress,
        *,
        timeout_s: float,
        heartbeat_s: int = HEARTBEAT_S,
        connections: int = CONNECTIONS_MAX,
    ) -> None:
        self._address = address
        self._limit_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._operations = AmqpOperations(timeout_s)
        self._connections: Connections[PikaConnection] = Connections(connections)
        self._is_closed = False
        self.server_properties: dict[str, Any] = {}

    def open(self, connect_s: float | None = None) -> None:
        """Connect once, so that what is wrong shows at once.

        Args:
            connect_s: Seconds for that; None: `timeout_s`.
        """
        connection = self._connected(connect_s or self._limit_s)
        self._connections.take(None, Use.ANSWER)
        self._connections.note_opened()
        self.server_properties = connection.server_properties
        self._release(connection, Use.ANSWER)

    def _connected(self, within_s: float) -> PikaConnection:
        within_s = connect_left_s(within_s)
        parameters = pika_parameters(self._address, within_s, self._heartbeat_s)
        return PikaConnection(self._address, parameters, self._limit_s, within_s)

    def _acquire(self, use: Use) -> PikaConnection:
        if self._is_closed:
            raise UsedAfterClose("the reader was closed: open another one")
        connection = self._connections.take(None, use)
        if connection is None:
            try:
                connection = self._connected(self._limit_s)
            except BaseException:
                self._connections.drop(use)
                raise
            self._connections.note_opened()
        connection.has_received = False
        return connection

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
        self._is_closed = True
        for connection in self._connections.end():
            connection.close()

    def _ask(self, make: Callable[[], Generator[Command, Any, _Result]]) -> _Result:
        """Run one operation; once more on another connection where an idle one turns out to be closed."""
        deadline = time.monotonic() + self._timeout_s
        with self._connections.turn(Use.ANSWER, deadline):
            while True:
                connection = self._acquire(Use.ANSWER)
                try:
                    return run(make(), connection.do)
                except ConnectionLost:
                    if connection.has_received or time.monotonic() >= deadline:
                        raise
                finally:
                    self._release(connection, Use.ANSWER)

    def _each(
        self, make: Callable[[], Generator[Command | _Result, Any, None]], use: Use
    ) -> Generator[_Result, None, None]:
        """What an operation gives; begun once more, as for `_ask`, if nothing had come."""
        deadline = time.monotonic() + self._timeout_s
        with self._connections.turn(use, deadline):
            while True:
                connection = self._acquire(use)
                has_given = False
                try:
                    with contextlib.closing(each(make(), connection.do)) as items:
                        for item in items:
                            has_given = True
                            yield item
                except ConnectionLost:
                    if has_given or connection.has_received or time.monotonic() >= deadline:
                        raise
                else:
                    return
                finally:
                    self._release(connection, use)

    def probe(self, name: str) -> None:
        """Return where there is a stream of that name; raises `NotAStream`, `StreamNotFound`, `StreamUnavailable`."""
        self._ask(lambda: self._operations.probe(name))

    def read(self, stream: str, offset: int) -> Message:
        return self._ask(lambda: self._operations.read(stream, offset))

    def bounds(self, stream: str) -> StreamBounds:
        return self._ask(lambda: self._operations.bounds(stream))

    def missing(self, streams: Sequence[str]) -> list[str]:
        """AMQP 0.9.1 closes a channel over each that is: none is said."""
        return []

    def partitions(self, super_stream: str) -> list[str]:
        """AMQP 0.9.1 cannot say: none."""
        return []

    def routes(self, exchange: str, routing_key: str) -> None:
        """AMQP 0.9.1 cannot say."""
        return

    def read_many(self, ids: Iterable[MessageId], window: int, use: Use) -> Generator[Result, None, None]:
        results: Generator[Result, None, None]
        results = self._each(lambda: self._operations.read_many(Window(ids, window)), use)
        yield from results

    def batches(self, stream: str, scan: Scan, idle_s: float, use: Use) -> Generator[RecordBatch | None, None, None]:
        yield from self._each(lambda: self._operations.scan(stream, scan, idle_s), use)
