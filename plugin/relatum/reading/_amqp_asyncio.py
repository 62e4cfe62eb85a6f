"""Reading streams over AMQP 0.9.1 with aio-pika, for asyncio. The only module that imports it."""

import asyncio
import contextlib
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from relatum.client_logs import own_connection
from relatum.errors import (
    ConfigurationError,
    ConnectionLost,
    ReadTimeout,
    RelatumError,
    UsedAfterClose,
)
from relatum.ids import MessageId
from relatum.reading._address import BrokerAddress
from relatum.reading._amqp_blocking import no_amqp
from relatum.reading._amqp_operations import (
    AmqpOperations,
    Answer,
    Command,
    Consume,
    Count,
    Delivery,
    Next,
    offset_of,
    refused,
)
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._connections import AsyncConnections
from relatum.reading._message import Message
from relatum.reading._opening import HEARTBEAT_S
from relatum.reading._refusal import is_refusal, login_refused
from relatum.reading._scan import Scan
from relatum.reading._stream_errors import moved
from relatum.reading._time import check_time, connect_left_s
from relatum.reading._turns import CONNECTIONS_MAX, ReaderStatistics, Use
from relatum.reading._window import Result, Window
from relatum.steps import async_each, async_run
from relatum.waiting import Patience, left_s

try:
    import aio_pika
    import aiormq
except ImportError as error:  # pragma: no cover - the extra is installed in tests
    raise ConfigurationError("Reading over AMQP 0.9.1 with asyncio needs the extra `aio` (aio-pika).") from error

CANCELLED_LOOK_S: Final = 1.0
"""Seconds between looks whether the broker has cancelled a consumer."""

GOODBYE_S: Final = 0.5
"""Seconds the broker has to answer the close of a channel."""

_Result = TypeVar("_Result")


class _Properties:
    """A delivery's properties under pika's names; pamqp calls the type `message_type`."""

    def __init__(self, properties: Any) -> None:
        self._properties = properties

    @property
    def type(self) -> Any:
        return self._properties.message_type

    def __getattr__(self, name: str) -> Any:
        return getattr(self._properties, name)


def _closed_with(error: BaseException) -> tuple[int | None, str]:
    """The reply code and text of the Close that ended an opening; None where there was none.

    aiormq takes a Close for a frame out of turn, and keeps it nowhere but in the frame of the call that met it.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        met = frame.f_locals.get("frame")
        if isinstance(met, aiormq.spec.Connection.Close):
            return met.reply_code, met.reply_text
    return None, ""


class _Consumer:
    """One channel with at most one consumer: what one operation uses at a time."""

    _timeout_s = Patience("_limit_s")

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._connection = connection
        self._limit_s = timeout_s
        self._channel: Any = None
        self._stream = ""
        self._deliveries: list[Delivery] = []
        self._unsettled = 0
        self._arrived = asyncio.Event()
        self._failure: RelatumError | None = None

    async def perform(self, command: Command) -> Answer:
        """Perform one command of `AmqpOperations`."""
        with own_connection():
            return await self._perform(command)

    async def _perform(self, command: Command) -> Answer:
        if isinstance(command, Next):
            return await self._next(command.timeout_s)
        self._stream = command.stream
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._close()
                self._failure = None
                self._channel = await self._connection.channel(publisher_confirms=False)
                if isinstance(command, Count):
                    declared = await self._channel.queue_declare(command.stream, passive=True)
                    return int(declared.message_count)
                await self._consume(command)
        except TimeoutError as error:
            raise ReadTimeout("The broker did not answer in time.") from error
        except aiormq.exceptions.ChannelClosed as error:
            raise self._refused(error) from error
        except (aiormq.exceptions.AMQPError, ConnectionError, RuntimeError) as error:
            raise ConnectionLost("The AMQP connection to the broker was lost.") from error
        return None

    async def _consume(self, command: Consume) -> None:
        channel = self._channel

        async def on_delivery(message: Any) -> None:
            offset = offset_of(message.header.properties.headers)
            if channel is self._channel and offset is not None:
                self._unsettled = message.delivery.delivery_tag
                properties = _Properties(message.header.properties)
                self._deliveries.append(Delivery(offset, properties, message.body))
                self._arrived.set()

        channel.closing.add_done_callback(lambda closing: self._on_end(channel, closing))
        await channel.basic_qos(prefetch_count=command.prefetch)
        await channel.basic_consume(command.stream, on_delivery, arguments={"x-stream-offset": command.argument})

    def _on_end(self, channel: Any, closing: "asyncio.Future[Any]") -> None:
        if channel is not self._channel:
            return
        error = None if closing.cancelled() else closing.exception()
        if isinstance(error, aiormq.exceptions.ChannelClosed):
            self._failure = self._refused(error)
        else:
            self._failure = ConnectionLost("The AMQP connection to the broker was lost.")
        self._arrived.set()

    def _refused(self, error: Any) -> RelatumError:
        code = getattr(error, "reply_code", None) or _code_of(error)
        return refused(self._stream, code, str(error))

    async def _next(self, timeout_s: float) -> list[Delivery]:
        if self._unsettled:
            await self._channel.basic_ack(self._unsettled, multiple=True)
            self._unsettled = 0
        check_time()
        if not self._deliveries:
            await self._wait(time.monotonic() + left_s(timeout_s))
            if not self._deliveries and self._failure is None:
                # Cut short by the call's time, it would not be quiet: nothing is concluded from that.
                check_time()
        if self._failure is not None and not self._deliveries:
            raise self._failure
        deliveries, self._deliveries = self._deliveries, []
        return deliveries

    async def _wait(self, deadline: float) -> None:
        """Wait for a delivery, an end, or the deadline."""
        while not self._deliveries and self._failure is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left, CANCELLED_LOOK_S)):
                    await self._arrived.wait()
            # Not every version of aiormq tells that the broker cancelled a consumer; all forget its tag.
            if not self._deliveries and self._channel is not None and not self._channel.consumers:
                self._failure = self._failure or moved(self._stream)

    async def close(self) -> None:
        """End the consumer by closing its channel."""
        with own_connection():
            await self._close()

    async def _close(self) -> None:
        channel, self._channel = self._channel, None
        self._deliveries, self._unsettled = [], 0
        if channel is not None and not channel.is_closed:
            with contextlib.suppress(aiormq.exceptions.AMQPError, ConnectionError, RuntimeError, TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await channel.close()


def _code_of(error: Any) -> int:
    """The reply code of a channel error; aiormq has a class for each and not always the code."""
    classes = {
        aiormq.exceptions.ChannelNotFoundEntity: 404,
        aiormq.exceptions.ChannelAccessRefused: 403,
        aiormq.exceptions.ChannelPreconditionFailed: 406,
        aiormq.exceptions.ChannelLockedResource: 405,
    }
    return next((code for kind, code in classes.items() if isinstance(error, kind)), 0)


class AsyncAmqp:
    """The asyncio face over AMQP 0.9.1. One connection; each call has a channel to itself, and a turn for that."""

    _timeout_s = Patience("_limit_s")

    def __init__(
        self,
        address: BrokerAddress,
        *,
        timeout_s: float,
        heartbeat_s: int = HEARTBEAT_S,
        connections: int = CONNECTIONS_MAX,
    ) -> None:
        self._heartbeat_s = heartbeat_s
        if address.amqp_port is None:
            raise ConfigurationError("AMQP 0.9.1 needs an amqp:// URL.")
        self._address = address
        self._limit_s = timeout_s
        self._operations = AmqpOperations(timeout_s)
        self._connections: AsyncConnections[Any] = AsyncConnections(connections)
        self._connection: Any = None
        self._connecting = asyncio.Lock()
        self._is_closed = False
        self.server_properties: dict[str, Any] = {}

    async def open(self, timeout_s: float | None = None) -> None:
        """Connect, so that what is wrong shows at once; within `timeout_s` seconds, or those of each call."""
        connection = await self._connected(timeout_s)
        self.server_properties = dict(connection.server_properties or {})

    async def _connected(self, timeout_s: float | None = None) -> Any:
        if self._is_closed:
            raise UsedAfterClose("the reader was closed: open another one")
        async with self._connecting:
            if self._connection is None or self._connection.is_closed:
                self._connection = await self._connect(connect_left_s(timeout_s or self._limit_s))
                self._connections.note_opened()
            return self._connection

    async def _connect(self, timeout_s: float) -> Any:
        address = self._address
        where = f"{address.host}:{address.amqp_port}"
        options: dict[str, Any] = {}
        if address.amqp_tls:
            # In a thread: it reads files. An empty name: none is sent, and none compared.
            options["context"] = await asyncio.to_thread(address.login.tls_context)
            options["server_hostname"] = address.login.server_name_for(address.host) or ""
        try:
            url = aio_pika.connection.make_url(
                host=address.host,
                port=address.amqp_port or 5672,
                login=address.user,
                password=address.password,
                virtualhost=address.vhost,
                ssl=address.amqp_tls,
                heartbeat=self._heartbeat_s,
                auth=address.login.mechanism.lower(),
            )
            connection = aiormq.Connection(url, **options)
            # The tasks that read and write for the connection are started here, and are its own as well.
            with own_connection():
                async with asyncio.timeout(timeout_s):
                    await connection.connect()
        except aiormq.exceptions.ProbableAuthenticationError as error:
            raise login_refused(where, address.who, address.vhost) from error
        except aiormq.exceptions.AuthenticationError as error:
            message = f"The broker at {where} does not offer {address.login.mechanism} to log in by."
            raise ConfigurationError(message) from error
        except (aiormq.exceptions.AMQPError, OSError, TimeoutError) as error:
            if is_refusal(*_closed_with(error)):
                raise login_refused(where, address.who, address.vhost, _closed_with(error)[0]) from error
            raise await asyncio.to_thread(no_amqp, error, address) from error
        return connection

    async def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        connection, self._connection = self._connection, None
        if connection is not None and not connection.is_closed:
            with contextlib.suppress(aiormq.exceptions.AMQPError, OSError), own_connection():
                await connection.close()

    def statistics(self) -> ReaderStatistics:
        """The channels in use, and the one connection."""
        found = self._connections.statistics()
        is_idle = self._connection is not None and not self._connection.is_closed and not found.in_use
        return replace(found, idle=int(is_idle and not found.following))

    async def _ask(self, make: Callable[[], Generator[Command, Any, _Result]]) -> _Result:
        """Run one operation; once more on a new connection: reading changes nothing."""
        deadline = time.monotonic() + self._timeout_s
        async with self._connections.turn(Use.ANSWER, deadline):
            while True:
                consumer = _Consumer(await self._connected(), self._limit_s)
                try:
                    return await async_run(make(), consumer.perform)
                except ConnectionLost:
                    if time.monotonic() >= deadline:
                        raise
                    await self._drop()
                finally:
                    await consumer.close()

    async def _each(
        self, make: Callable[[], Generator[Command | _Result, Any, None]], use: Use
    ) -> AsyncGenerator[_Result, None]:
        """What an operation gives; begun once more, as for `_ask`, if nothing had come."""
        deadline = time.monotonic() + self._timeout_s
        async with self._connections.turn(use, deadline):
            while True:
                consumer = _Consumer(await self._connected(), self._limit_s)
                has_given = False
                try:
                    async with contextlib.aclosing(async_each(make(), consumer.perform)) as items:
                        async for item in items:
                            has_given = True
                            yield item
                except ConnectionLost:
                    if has_given or time.monotonic() >= deadline:
                        raise
                    await self._drop()
                else:
                    return
                finally:
                    await consumer.close()

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(aiormq.exceptions.AMQPError, OSError, RuntimeError), own_connection():
                await connection.close()

    async def read(self, stream: str, offset: int) -> Message:
        return await self._ask(lambda: self._operations.read(stream, offset))

    async def bounds(self, stream: str) -> StreamBounds:
        return await self._ask(lambda: self._operations.bounds(stream))

    async def missing(self, streams: Sequence[str]) -> list[str]:
        """AMQP 0.9.1 closes a channel over each that is: none is said."""
        return []

    async def partitions(self, super_stream: str) -> list[str]:
        """AMQP 0.9.1 cannot say: none."""
        return []

    async def routes(self, exchange: str, routing_key: str) -> None:
        """AMQP 0.9.1 cannot say."""
        return

    async def read_many(self, ids: Iterable[MessageId], window: int, use: Use) -> AsyncGenerator[Result, None]:
        results: AsyncGenerator[Result, None] = self._each(lambda: self._operations.read_many(Window(ids, window)), use)
        async with contextlib.aclosing(results):
            async for result in results:
                yield result

    async def batches(
        self, stream: str, scan: Scan, idle_s: float, use: Use
    ) -> AsyncGenerator[RecordBatch | None, None]:
        batches = self._each(lambda: self._operations.scan(stream, scan, idle_s), use)
        async with contextlib.aclosing(batches):
            async for batch in batches:
                yield batch
