"""A line to the broker on which what publishers send can be made to arrive late: as if they slept just before."""

import socket
import threading
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit, urlunsplit


class Gate:
    """Forwards connections to a broker; what clients send waits while the gate is shut. A context manager.

    Args:
        url: The broker's AMQP URL.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 5672)
        self._listener = socket.create_server(("127.0.0.1", 0))
        user, port = parts.netloc.rpartition("@")[0], self._listener.getsockname()[1]
        self.url = urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{port}"))
        self._is_open = threading.Event()
        self._is_open.set()
        threading.Thread(target=self._accept, name="gate", daemon=True).start()

    def shut(self) -> None:
        """Let nothing that clients send arrive from now on."""
        self._is_open.clear()

    def open(self) -> None:
        """Let arrive what waits, and all that follows."""
        self._is_open.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        # Closing alone would leave the thread that waits there where it is.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                for one in (client, server):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for one, other, waits in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._forward, args=(one, other, waits), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket, waits: bool) -> None:
        with suppress(OSError), one, other:
            while data := one.recv(65536):
                if waits:
                    self._is_open.wait()
                other.sendall(data)
            other.shutdown(socket.SHUT_RDWR)
