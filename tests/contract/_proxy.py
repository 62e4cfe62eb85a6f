"""A TCP proxy that can freeze or cut what passes through it."""

import contextlib
import socket
import threading
from typing import Self


class Proxy:
    """Passes connections on to a port of this machine, until told otherwise. A context manager."""

    def __init__(self, host: str, target_port: int, *, port: int = 0) -> None:
        self._target = (host, target_port)
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        self._passing = threading.Event()
        self._passing.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self.accepted += 1
                self._sockets += [client, server]
                self._start(self._pass_on, client, server)
                self._start(self._pass_on, server, client)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._passing.wait()
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def freeze(self) -> None:
        """Pass nothing on, in either direction; connections stay open."""
        self._passing.clear()

    def thaw(self) -> None:
        """Pass on again."""
        self._passing.set()

    def cut(self) -> None:
        """End all connections; new ones are accepted."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.thaw()
        self.cut()
        for thread in self._threads:
            thread.join(timeout=90)
