"""A stream-protocol connection on an event loop.

It reads the socket itself, since asyncio's transports cannot take over a connection that has logged in over TLS, and
`add_reader` needs no copy.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from typing import Final

from relatum.errors import ConnectionLost
from relatum.following._subscriptions import Subscriptions
from relatum.reading import RECEIVE_BYTES, SILENCE_HEARTBEATS, SocketConnection, StreamPlaces
from relatum.wire import frames

READS_AT_ONCE: Final = 8
"""Reads of one connection before other work gets its turn: 2 MiB."""

UNSENT_BYTES_MAX: Final = 1 << 20
"""Maximum bytes waiting to be sent; a broker that does not read them is considered dead."""

BEAT_S: Final = 1.0
"""Seconds between checks of heartbeats."""

_WOULD_BLOCK: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Connection:
    """A logged-in connection, with the streams that are read over it.

    `placed`: Called with the requested places of streams. `lost`: Called once with the reason if the connection ends by
    itself, not after `close`.
    """

    def __init__(
        self,
        connection: SocketConnection,
        placed: "Callable[[Connection, list[StreamPlaces]], None]",
        lost: "Callable[[Connection, Exception], None]",
    ) -> None:
        self._connection = connection
        self._placed = placed
        self._lost = lost
        self.session = connection.session
        self.session.reports_damage = True
        self.subscriptions = Subscriptions(self.session)
        self._socket = connection.socket
        self._loop = asyncio.get_running_loop()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._unsent = bytearray()
        self._is_open = True
        self._is_paused = self._is_writing = False
        self.opened_at = self._sent_at = self._received_at = self._paused_at = time.monotonic()
        self._loop.add_reader(self._socket, self._read)
        self._beating = self._loop.call_later(BEAT_S, self._beat)

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if not self._is_open or self._is_paused:
            return
        try:
            self._receive()
        except Exception as error:  # noqa: BLE001 - other connections continue
            self._end(error)

    def _receive(self) -> None:
        for _ in range(READS_AT_ONCE):
            try:
                count = self._socket.recv_into(self._buffer)
            except _WOULD_BLOCK:
                return
            except OSError as error:
                raise _broken(error) from error
            if not count:
                raise ConnectionLost("The broker closed a stream connection.")
            self._received_at = time.monotonic()
            places = self.subscriptions.receive(self.session.receive(self._buffer[:count]))
            if places:
                self._placed(self, places)
            if not self._is_open or self._is_paused:
                return
            # Bytes that TLS has already decrypted do not make the socket readable.
            if count < RECEIVE_BYTES and not self._has_pending():
                return
        if self._has_pending():
            self._loop.call_soon(self._read)

    def _has_pending(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def flush(self) -> None:
        """Send as many of the outgoing bytes as the socket accepts."""
        if self._is_open:
            try:
                self._send()
            except ConnectionLost as error:
                self._end(error)

    def _send(self) -> None:
        self._unsent += self.session.take_outgoing()
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
                self._sent_at = time.monotonic()
        except _WOULD_BLOCK:
            if len(self._unsent) > UNSENT_BYTES_MAX:
                raise ConnectionLost("A stream connection was lost: the broker does not read.") from None
        except OSError as error:
            raise _broken(error) from error
        if bool(self._unsent) != self._is_writing:
            self._is_writing = not self._is_writing
            if self._is_writing:
                self._loop.add_writer(self._socket, self.flush)
            else:
                self._loop.remove_writer(self._socket)

    # --- control ------------------------------------------------------------------------------------------------------

    def pause(self, is_paused: bool) -> None:
        """Stop or resume reading; TCP then slows the broker down."""
        if not self._is_open or is_paused == self._is_paused:
            return
        self._is_paused, now = is_paused, time.monotonic()
        if is_paused:
            self._paused_at = now
            self._loop.remove_reader(self._socket)
            return
        # The broker was not silent during a pause.
        self._received_at += now - self._paused_at
        self._loop.add_reader(self._socket, self._read)
        if self._has_pending():
            self._loop.call_soon(self._read)

    def _beat(self) -> None:
        """Send a heartbeat if one is due; end the connection if the broker has been silent for too long."""
        self._beating = self._loop.call_later(BEAT_S, self._beat)
        now, heartbeat_s = time.monotonic(), self.session.heartbeat_s
        if not heartbeat_s:
            return
        if now - self._received_at > heartbeat_s * SILENCE_HEARTBEATS and not self._is_paused:
            self._end(ConnectionLost("A stream connection was lost: the broker sent nothing for too long."))
        elif now - self._sent_at > heartbeat_s / 2:
            self.session.send(frames.heartbeat())
            self.flush()

    def _end(self, error: Exception) -> None:
        if self._is_open:
            self._drop()
            self._lost(self, error)

    def _drop(self) -> None:
        self._is_open = False
        self._beating.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        # The answer to the broker's Close, or our own Close.
        with contextlib.suppress(OSError, ValueError):
            self._socket.send(bytes(self._unsent + self.session.take_outgoing()))
        self._connection.abandon()

    def close(self) -> None:
        """Send Close as best effort, and close the connection."""
        if self._is_open:
            self.session.leave()
            self._drop()


def _broken(error: OSError) -> ConnectionLost:
    return ConnectionLost(f"A stream connection was lost: {error.strerror or error}.")
