"""A connection of the stream protocol in a loop: never waits; what arrives is given on, what ends it is said once."""

import contextlib
import ssl
import time
from collections.abc import Callable

from relatum.errors import ConnectionLost
from relatum.following._loop import Loop
from relatum.reading import RECEIVE_BYTES, SILENCE_HEARTBEATS, SocketConnection
from relatum.wire import Event, frames

READS_AT_ONCE = 8
"""How often one connection is read before the others have their turn: 2 MiB."""


class Link:
    """One connection, logged in. It sends by `flush`, and heartbeats by `beat`.

    Args:
        loop: The loop it is part of.
        connection: The connection, which is this object's from now on.
        came: Called with what came.
        lost: Called once, when it ends by itself, with why; not after `close`.
    """

    def __init__(
        self,
        loop: Loop,
        connection: SocketConnection,
        came: Callable[[list[Event]], None],
        lost: Callable[[Exception], None],
    ) -> None:
        self._loop = loop
        self._connection = connection
        self._came = came
        self._lost = lost
        self.session = connection.session
        self.session.reports_damage = True
        self._socket = connection.hand_over()
        self._descriptor = self._socket.fileno()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._unsent = bytearray()
        self._is_paused = False
        self.is_open = True
        self._sent_at = self._received_at = time.monotonic()
        loop.add_handler(self._descriptor, self._on_ready, Loop.READ)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _on_ready(self, _descriptor: int, events: int) -> None:
        try:
            if events & Loop.WRITE:
                self._send()
            if events & Loop.READ:
                self._receive()
        except Exception as error:  # noqa: BLE001 - whatever it was, the others go on
            self._end(error)

    def _receive(self) -> None:
        for _ in range(READS_AT_ONCE):
            try:
                count = self._socket.recv_into(self._buffer)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError as error:
                raise ConnectionLost(f"A stream connection was lost: {error.strerror or error}.") from error
            if not count:
                raise ConnectionLost("The broker hung up on a stream connection.")
            self._received_at = time.monotonic()
            self._came(self.session.receive(self._buffer[:count]))
            if not self.is_open or self._is_paused:
                return
            # What TLS has unpacked already makes no descriptor ready.
            if count < RECEIVE_BYTES and not self._has_pending():
                return
        if self._has_pending():
            self._loop.add_callback(self._read_on)

    def _read_on(self) -> None:
        if self.is_open and not self._is_paused:
            self._on_ready(self._descriptor, Loop.READ)

    def _has_pending(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def _send(self) -> None:
        self._unsent += self.session.take_outgoing()
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
                self._sent_at = time.monotonic()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            raise ConnectionLost(f"A stream connection was lost: {error.strerror or error}.") from error
        self._watch()

    def _watch(self) -> None:
        reads = 0 if self._is_paused else Loop.READ
        self._loop.update_handler(self._descriptor, reads | (Loop.WRITE if self._unsent else 0))

    # --- its owner ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what the session has to send, as far as that goes now."""
        if self.is_open:
            try:
                self._send()
            except ConnectionLost as error:
                self._end(error)

    def pause(self, is_paused: bool) -> None:
        """Read no more for now, or again: who does not read gets no more."""
        if self.is_open and is_paused != self._is_paused:
            self._is_paused = is_paused
            self._received_at = time.monotonic()
            self._watch()
            if self._has_pending():
                self._read_on()

    def beat(self, now: float) -> None:
        """Send a heartbeat where one is due; end where nothing came for too long."""
        heartbeat_s = self.session.heartbeat_s
        if not heartbeat_s or not self.is_open:
            return
        if now - self._received_at > heartbeat_s * SILENCE_HEARTBEATS and not self._is_paused:
            self._end(ConnectionLost("A stream connection was lost: the broker fell silent."))
            return
        if now - self._sent_at > heartbeat_s / 2:
            self.session.send(frames.heartbeat())
            self.flush()

    def _end(self, error: Exception) -> None:
        if not self.is_open:
            return
        self._drop()
        self._lost(error)

    def _drop(self) -> None:
        self.is_open = False
        self._loop.remove_handler(self._descriptor)
        # A last word: the answer to the broker's Close, or a Close.
        with contextlib.suppress(OSError, ValueError):
            self._socket.send(bytes(self._unsent + self.session.take_outgoing()))
        self._connection.abandon()

    def close(self) -> None:
        """Say goodbye, best effort, and close."""
        if self.is_open:
            self.session.leave()
            self._drop()
