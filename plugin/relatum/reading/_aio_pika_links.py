"""Reading streams over AMQP 0.9.1 with aio-pika, for asyncio: one connection, a channel for each call.

The only module that imports it here.
"""

import asyncio
import contextlib
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from relatum.client_logs import own_connection
from relatum.errors import ConfigurationError, ConnectionLost, ReadTimeout, RelatumError
from relatum.reading._address import BrokerAddress
from relatum.reading._amqp_operations import Answer, Command, Consume, Count, Delivery, Next, offset_of, refused
from relatum.reading._connections import AsyncConnections
from relatum.reading._failing_over import Attempts
from relatum.reading._pika_opening import no_amqp
from relatum.reading._refusal import is_refusal, login_refused
from relatum.reading._stream_errors import moved
from relatum.reading._time import check_time, connect_left_s
from relatum.reading._turns import ReaderStatistics, Use
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


class AioPikaChannel:
    """One channel with at most one consumer: what one operation uses at a time."""

    has_received = False
    """Whether it is not asked again where the connection is lost: it always is, as long as nothing was given."""

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


class AioPikaLinks:
    """The connection of one reader, and its channels. Tasks of one loop may share it."""

    def __init__(self, address: BrokerAddress, timeout_s: float, heartbeat_s: int, connections: int) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._connections: AsyncConnections[Any] = AsyncConnections(connections)
        self._connection: Any = None
        self._connecting = asyncio.Lock()
        self.turn = self._connections.turn

    async def open(self, within_s: float) -> dict[str, Any]:
        """Connect; what the broker says of itself."""
        connection = await self._connected(within_s)
        return dict(connection.server_properties or {})

    async def _connected(self, within_s: float) -> Any:
        async with self._connecting:
            if self._connection is None or self._connection.is_closed:
                self._connection = await self._connect(connect_left_s(within_s))
                self._connections.note_opened()
            return self._connection

    async def _connect(self, within_s: float) -> Any:
        attempts = Attempts(self._address, within_s)
        while True:
            with attempts as (address, share_s):
                return await self._connect_to(address, share_s)

    async def _connect_to(self, address: BrokerAddress, timeout_s: float) -> Any:
        where = address.where
        options: dict[str, Any] = {}
        if address.amqp_tls:
            # In a thread: it reads files. An empty name: none is sent, and none compared.
            options["context"] = await asyncio.to_thread(address.login.tls_context)
            options["server_hostname"] = address.login.server_name_for(address.host) or ""
        # In a thread: somebody's function may be asked.
        password = await asyncio.to_thread(address.secret)
        try:
            url = aio_pika.connection.make_url(
                host=address.host,
                port=address.amqp_port or 5672,
                login=address.user,
                password=password,
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

    @asynccontextmanager
    async def link(self, _use: Use) -> AsyncIterator[AioPikaChannel]:
        """A channel for one operation, whose turn it is; what it lost is dropped."""
        connection = await self._connected(self._timeout_s)
        channel = AioPikaChannel(connection, self._timeout_s)
        try:
            yield channel
        except ConnectionLost:
            await self._drop(connection)
            raise
        finally:
            await channel.close()

    async def _drop(self, connection: Any) -> None:
        if self._connection is connection:
            self._connection = None
        if not connection.is_closed:
            with contextlib.suppress(aiormq.exceptions.AMQPError, OSError, RuntimeError), own_connection():
                await connection.close()

    def statistics(self) -> ReaderStatistics:
        """The channels in use, and the one connection."""
        found = self._connections.statistics()
        is_idle = self._connection is not None and not self._connection.is_closed and not found.in_use
        return replace(found, idle=int(is_idle and not found.following))

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await self._drop(self._connection)
