"""An asyncio connection of the stream protocol: an asyncio stream around a session."""

import asyncio
import contextlib
import socket
import ssl
import time
from typing import TypeVar

from relatum.errors import (
    AccessRefused,
    ConfigurationError,
    ConnectionLost,
    DataError,
    ReadTimeout,
    TlsRefused,
)
from relatum.reading._address import BrokerAddress
from relatum.reading._handshake import has_hung_up, why_hung_up
from relatum.reading._operations import StreamOperations
from relatum.reading._socket import RECEIVE_BYTES, SILENCE_HEARTBEATS, not_opened, tls_context_for
from relatum.wire import Event, Login, Steps, StreamSession, frames

_Result = TypeVar("_Result")


class AsyncConnection:
    """One connection, for one task at a time; see `SocketConnection`, whose twin it is."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, login: Login) -> None:
        self._reader = reader
        self._writer = writer
        self.session = StreamSession(login)
        self.operations = StreamOperations(self.session)
        self.is_usable = True
        self.has_received = False
        self._sent_at = self._received_at = time.monotonic()

    @property
    def has_ended(self) -> bool:
        """True once the broker hung up, as far as the loop has seen."""
        return self._reader.at_eof() or self._writer.transport.is_closing()

    @classmethod
    async def open(cls, address: BrokerAddress, login: Login, timeout_s: float) -> "AsyncConnection":
        """Connect and log in; raises what `SocketConnection.open` raises."""
        host, port = address.stream_host, address.stream_port
        if port is None:
            raise ConfigurationError("The address has no stream port.")
        # In a thread: it reads files.
        tls = await asyncio.to_thread(tls_context_for, address) if address.stream_tls else None
        # An empty name: none is sent, and none compared.
        name = (address.login.server_name_for(host) or "") if tls is not None else None
        connection: AsyncConnection | None = None
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(
                    host, port, ssl=tls, server_hostname=name, limit=RECEIVE_BYTES
                )
                connection = cls(reader, writer, login)
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                await connection.run(connection.session.connecting(), deadline)
        except BaseException as error:
            if connection is not None:
                connection.abandon()
            told = not_opened(error, host, port)
            # Without a connection it may also be that nobody listens.
            was_there = connection is not None or isinstance(error, ssl.SSLError | ConnectionResetError)
            if tls is not None and was_there and has_hung_up(error) and not isinstance(told, TlsRefused):
                refused = await asyncio.to_thread(why_hung_up, host, port, address.login)
                told = refused if refused is not None else told
            if told is error:
                raise
            raise told from error
        return connection

    async def run(self, steps: Steps[_Result], deadline: float) -> _Result:
        """Drive an operation to its end."""
        try:
            next(steps)
            while True:
                steps.send(await self.exchange(deadline))
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            # The answer is still to come; on another task's call it would only be in the way.
            self.abandon()
            raise

    async def exchange(self, deadline: float) -> list[Event]:
        """Send what is to be sent, then wait for bytes and return what they amount to (maybe nothing yet)."""
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self.flush()
                data = await self._reader.read(RECEIVE_BYTES)
        except TimeoutError as error:
            self.abandon()
            raise ReadTimeout("The broker did not answer in time.") from error
        except OSError as error:
            raise self._lost(error) from error
        return self._received(data)

    async def wait(self, idle_s: float) -> list[Event] | None:
        """As `exchange`, but None when nothing came for so long; heartbeats go both ways meanwhile."""
        idle_at = time.monotonic() + idle_s
        while True:
            heartbeat_s = self.session.heartbeat_s
            left = idle_at - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, min(left, heartbeat_s / 2) if heartbeat_s else left)):
                    await self.keep_alive()
                    await self.flush()
                    data = await self._reader.read(RECEIVE_BYTES)
                return self._received(data)
            except TimeoutError:
                now = time.monotonic()
                if heartbeat_s and now - self._received_at > heartbeat_s * SILENCE_HEARTBEATS:
                    raise self._lost(None) from None
                if now >= idle_at:
                    return None
            except OSError as error:
                raise self._lost(error) from error

    def _received(self, data: bytes) -> list[Event]:
        if not data:
            raise self._lost(None)
        self.has_received = True
        self._received_at = time.monotonic()
        try:
            return self.session.receive(data)
        except ConnectionLost:
            self._send_last_words()
            raise
        except (DataError, AccessRefused):
            self.abandon()
            raise

    async def flush(self) -> None:
        """Send what the session has to send."""
        outgoing = self.session.take_outgoing()
        if outgoing:
            self._sent_at = time.monotonic()
            self._writer.write(outgoing)
            await self._writer.drain()

    async def put_by(self) -> None:
        """Send what is left over from an operation that was ended early; a connection that has ended is abandoned."""
        if self.is_usable:
            try:
                await self.flush()
            except OSError:
                self.abandon()

    async def keep_alive(self) -> None:
        """Send a heartbeat when nothing was sent for half of one."""
        heartbeat_s = self.session.heartbeat_s
        if heartbeat_s and time.monotonic() - self._sent_at > heartbeat_s / 2:
            self.session.send(frames.heartbeat())
            await self.flush()

    def _lost(self, error: OSError | None) -> ConnectionLost:
        self.abandon()
        reason = (error.strerror or str(error)) if error is not None else "it fell silent or hung up"
        return ConnectionLost(f"The stream connection to the broker was lost: {reason}.")

    def _send_last_words(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write(self.session.take_outgoing())
            self._writer.close()
        self.is_usable = self.session.is_open = False

    def abandon(self) -> None:
        """Drop the connection without a word."""
        self.is_usable = self.session.is_open = False
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.transport.abort()

    async def close(self) -> None:
        """Say goodbye, best effort, and close."""
        if self.is_usable:
            self.session.leave()
            self._send_last_words()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._writer.wait_closed()
