"""Bytes to and from a broker: a socket that waits in slices, so that a call whose deadline is brought forward ends."""

import errno
import os
import select
import socket
import ssl
import time
from contextlib import suppress
from typing import Final, Self

from relatum.waiting import LOOK_S, has_passed

RECEIVE_BYTES: Final = 256 << 10
"""Bytes taken from the socket at a time: more than a socket buffer usually holds, so one call empties it."""

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
        until = time.monotonic() + timeout_s
        stream = _connected(host, port, until)
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if tls is not None:
                stream = tls.wrap_socket(stream, server_hostname=name, do_handshake_on_connect=False)
                _shake_hands(stream, max(until, time.monotonic() + SEND_S_MIN))
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
        self._socket.settimeout(min(timeout_s, LOOK_S))
        while True:
            try:
                return self._view[: self._socket.recv_into(self._buffer)]
            except (BlockingIOError, ssl.SSLWantReadError, TimeoutError) as error:
                self._socket.settimeout(_slice_s(until, error))

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


def _slice_s(until: float, error: OSError | None = None) -> float:
    """Seconds to wait before the next look at the deadline of the call, which another thread may bring forward.

    Raises:
        TimeoutError: The time is over.
    """
    left_s = until - time.monotonic()
    if left_s <= 0 or has_passed():
        raise TimeoutError("timed out") from error
    return min(left_s, LOOK_S)


def _connected(host: str, port: int, until: float) -> socket.socket:
    """As `socket.create_connection`: to the first of a host's addresses that answers."""
    error: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        stream = socket.socket(family, kind, protocol)
        try:
            stream.setblocking(False)
            code = stream.connect_ex(where)
            if code == errno.EINPROGRESS:
                _wait_until_writable(stream, until)
                code = stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))  # noqa: TRY301 - the next address is tried
        except OSError as failed:
            stream.close()
            error = failed
        except BaseException:
            stream.close()
            raise
        else:
            return stream
    raise error


def _wait_until_writable(stream: socket.socket, until: float) -> None:
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    while not poll.poll(_slice_s(until) * 1000):
        pass


def _shake_hands(stream: ssl.SSLSocket, until: float) -> None:
    while True:
        stream.settimeout(_slice_s(until))
        with suppress(TimeoutError):
            stream.do_handshake()
            return
