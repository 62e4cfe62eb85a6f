"""Bytes to and from a broker: a socket there, an asyncio stream here. What stream connections stand on."""

import asyncio
import contextlib
import socket
import ssl
import time
from typing import Final, Self, cast

from relatum.waiting import LOOK_S, Bell, has_passed

RECEIVE_BYTES: Final = 256 << 10
"""Bytes taken from the socket at a time: more than a socket buffer usually holds, so one call empties it."""

BITE_BYTES: Final = 32 << 10
"""Bytes taken at a time in a task: a hundred small chunks, after which other tasks go on."""

SEND_S_MIN: Final = 0.5
"""Seconds a send may take at least, however short the wait for an answer is."""

GOODBYE_S: Final = 1.0
"""Seconds for the last bytes to leave."""


class Channel:
    """A socket. One thread at a time may send, and one receive."""

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)

    @classmethod
    def open(cls, host: str, port: int, tls: ssl.SSLContext | None, name: str | None, timeout_s: float) -> Self:
        """Connect.

        `name`: The name that the server's certificate is compared with; None where the context compares none.

        Raises:
            OSError: nobody answers, or not in time, or TLS failed.
        """
        deadline = time.monotonic() + timeout_s
        stream = socket.create_connection((host, port), timeout_s)
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if tls is not None:
                stream.settimeout(max(SEND_S_MIN, deadline - time.monotonic()))
                stream = tls.wrap_socket(stream, server_hostname=name)
        except BaseException:
            stream.close()
            raise
        return cls(stream)

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send all of it.

        Raises:
            TimeoutError: it took longer than allowed, half a second at least; how much has left is not known.
            OSError: the connection ended.
        """
        self._socket.settimeout(max(timeout_s, SEND_S_MIN))
        self._socket.sendall(data)

    def receive(self, timeout_s: float) -> bytes | memoryview:
        """What has come, valid until the next call; nothing where the other side hung up.

        Args:
            timeout_s: Seconds to wait; 0 takes what is there.

        Raises:
            TimeoutError: nothing came, or the call has no time left.
            OSError: the connection ended.
        """
        until = time.monotonic() + timeout_s
        # In slices: the deadline of the call may be brought forward by another thread.
        self._socket.settimeout(min(timeout_s, LOOK_S))
        while True:
            try:
                return self._view[: self._socket.recv_into(self._buffer)]
            except (BlockingIOError, ssl.SSLWantReadError, TimeoutError) as error:
                left_s = until - time.monotonic()
                if left_s <= 0 or has_passed():
                    raise TimeoutError("nothing has come") from error
                self._socket.settimeout(min(left_s, LOOK_S))

    def hand_over(self) -> socket.socket:
        """The socket, not blocking from now on, for a loop of somebody else's."""
        self._socket.setblocking(False)
        return self._socket

    def abort(self) -> None:
        """Close it without a word."""
        self._socket.close()

    def close(self) -> None:
        """Close it once what was sent has left, as the system does."""
        self._socket.close()


class AsyncChannel(asyncio.Protocol):
    """As `Channel`, for tasks: one at a time may receive. asyncio's own streams take a timer and more for each wait."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._came = bytearray()
        self._bell = Bell()
        self._error: Exception | None = None
        self._is_over = self._is_paused = False
        self._has_room, self._is_closed = asyncio.Event(), asyncio.Event()
        self._has_room.set()

    @classmethod
    async def open(cls, host: str, port: int, tls: ssl.SSLContext | None, name: str | None, timeout_s: float) -> Self:
        """Connect; see `Channel.open`."""
        # asyncio asks for a name where there is TLS; with an empty one none is sent, and none compared.
        server_name = (name or "") if tls is not None else None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            transport, channel = await loop.create_connection(cls, host, port, ssl=tls, server_hostname=server_name)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return channel

    # --- what the loop calls ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is connected."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Hold what came, as much as a socket would."""
        self._came += data
        if len(self._came) > RECEIVE_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._bell.ring(1)

    def eof_received(self) -> bool:
        """The other side says no more; what it is told may still leave, but for TLS."""
        self._is_over = True
        self._bell.ring(1)
        return self._transport.get_extra_info("sslcontext") is None

    def pause_writing(self) -> None:
        """Much waits to leave."""
        self._has_room.clear()

    def resume_writing(self) -> None:
        """There is room again."""
        self._has_room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._error, self._is_over = exc, True
        self._is_closed.set()
        self._has_room.set()
        self._bell.ring(1)

    # --- what its user calls ------------------------------------------------------------------------------

    async def send(self, data: bytes, timeout_s: float) -> None:
        """Send it; see `Channel.send`. Tasks may send at the same time: each is sent as a whole."""
        self._transport.write(data)
        if not self._has_room.is_set():
            async with asyncio.timeout(max(timeout_s, SEND_S_MIN)):
                await self._has_room.wait()
            if self._is_closed.is_set():
                raise self._error or ConnectionResetError("the connection ended")

    async def receive(self, timeout_s: float) -> bytes | memoryview:
        """What has come; see `Channel.receive`."""
        while not self._came:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return b""
            if not await self._bell.wait(max(0.0, timeout_s)):
                raise TimeoutError("nothing has come")
        data = bytes(self._came[:BITE_BYTES])
        del self._came[:BITE_BYTES]
        if self._is_paused and len(self._came) <= RECEIVE_BYTES:
            self._is_paused = False
            self._transport.resume_reading()
        if len(data) == BITE_BYTES:
            # What has come already is taken without a wait.
            await asyncio.sleep(0)
        return data

    def abort(self) -> None:
        """Close it without a word."""
        # The event loop may have ended before us.
        with contextlib.suppress(OSError, RuntimeError):
            self._transport.abort()

    async def close(self) -> None:
        """Close it once what was sent has left."""
        with contextlib.suppress(OSError, RuntimeError):
            self._transport.close()
            async with asyncio.timeout(GOODBYE_S):
                await self._is_closed.wait()
