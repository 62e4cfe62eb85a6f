"""Opens sockets, and waits in slices: another thread may bring the deadline of the call forward meanwhile."""

import errno
import os
import select
import socket
import ssl
import time
from contextlib import suppress
from typing import Final

from relatum.waiting import LOOK_S, has_passed

HANDSHAKE_S_MIN: Final = 0.5
"""Seconds for TLS's handshake at least, however long connecting took."""


def open_socket(host: str, port: int, tls: ssl.SSLContext | None, name: str | None, deadline: float) -> socket.socket:
    """Connect.

    `name`: The name that the server's certificate is compared with; None where the context compares none.

    Raises:
        OSError: Nobody answers, or not in time, or TLS failed.
    """
    stream = _connected(host, port, deadline)
    try:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if tls is not None:
            stream = tls.wrap_socket(stream, server_hostname=name, do_handshake_on_connect=False)
            _shake_hands(stream, max(deadline, time.monotonic() + HANDSHAKE_S_MIN))
    except BaseException:
        stream.close()
        raise
    return stream


def slice_s(until: float, error: OSError | None = None) -> float:
    """Seconds to wait before the next look at the deadline of the call.

    Raises:
        TimeoutError: The time is over.
    """
    left_s = until - time.monotonic()
    if left_s <= 0 or has_passed():
        raise TimeoutError("timed out") from error
    return min(left_s, LOOK_S)


def _connected(host: str, port: int, until: float) -> socket.socket:
    """As `socket.create_connection`: to the first of a host's addresses that answers, each within its share of time."""
    error: OSError = OSError(f"{host} has no address")
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, where) in enumerate(addresses):
        now = time.monotonic()
        share_s = (until - now) / (len(addresses) - number)
        stream = socket.socket(family, kind, protocol)
        try:
            stream.setblocking(False)
            code = stream.connect_ex(where)
            if code == errno.EINPROGRESS:
                _wait_until_writable(stream, now + share_s)
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
    while not poll.poll(slice_s(until) * 1000):
        pass


def _shake_hands(stream: ssl.SSLSocket, until: float) -> None:
    while True:
        stream.settimeout(slice_s(until))
        with suppress(TimeoutError):
            stream.do_handshake()
            return
