"""A TCP proxy in a thread, to break the line between a client and a server in the ways networks do."""

import select
import selectors
import socket
import threading
from contextlib import AbstractContextManager
from typing import Self
from urllib.parse import urlsplit, urlunsplit

SLOW_PART = 4096
"""Bytes that come through at a time on a slow line."""


class Proxy(AbstractContextManager["Proxy"]):
    """Forwards connections to one server, on `listens_on` or a free port; `bytes_per_s` slows its answers.

    `mode` is "pass", "frozen" (all arrives later), "blackhole" (nothing arrives), or "blackhole_replies" (only
    what the client sends arrives: a half-open link). `opened`, `most` (at once) and `refused` count connections,
    `dropped` the bytes of clients that did not arrive.
    A client that sends `ends_at` gets `last_words`, and its connection ends.
    """

    def __init__(self, host: str, port: int, *, listens_on: int = 0) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", listens_on))
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._peers: dict[socket.socket, socket.socket] = {}
        self._from_server: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False
        self.mode = "pass"
        self.accepts = True
        self.opened = self.most = self.refused = self.dropped = 0
        self.bytes_per_s: float | None = None
        self.ends_at = self.last_words = b""
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    @classmethod
    def to(cls, url: str) -> Self:
        parts = urlsplit(url)
        return cls(parts.hostname or "127.0.0.1", parts.port or 5672)

    def url(self, url: str) -> str:
        parts = urlsplit(url)
        user = parts.netloc.rpartition("@")[0]
        return urlunsplit(parts._replace(netloc=f"{user}@127.0.0.1:{self.port}"))

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def reset(self) -> None:
        with self._lock:
            for one in list(self._peers):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                self._forget(one)

    def cut(self, last: bytes = b"") -> None:
        """End all connections as a server does that stops, which says something last; new ones are accepted."""
        with self._lock:
            for one in list(self._peers):
                if last and one not in self._from_server and one in self._peers:
                    one.sendall(last)
                self._forget(one)

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._wake_writer.send(b"x")
        self._thread.join(90)
        self.reset()
        for one in (self._listener, self._wake_reader, self._wake_writer):
            one.close()
        self._selector.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closing:
            if self.mode == "frozen":
                select.select([self._wake_reader], [], [], 0.01)
                continue
            for key, _ in self._selector.select(0.2):
                one = key.fileobj
                assert isinstance(one, socket.socket)
                if one is self._listener:
                    self._accept()
                elif one is not self._wake_reader:
                    self._forward(one)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._target) if self.accepts else None
        except OSError:
            server = None  # The server is down, too.
        if server is None:
            client.close()
            self.refused += 1
            return
        with self._lock:
            self._peers[client], self._peers[server] = server, client
            self._from_server.add(server)
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._selector.register(one, selectors.EVENT_READ)
            self.opened += 1
            self.most = max(self.most, len(self._peers) // 2)

    def _forward(self, one: socket.socket) -> None:
        if self.bytes_per_s is not None and one in self._from_server:
            select.select([self._wake_reader], [], [], SLOW_PART / self.bytes_per_s)
        with self._lock:
            peer = self._peers.get(one)
            if peer is None or self.mode == "frozen":
                return
            try:
                data = one.recv(65536 if self.bytes_per_s is None else SLOW_PART)
                if self.ends_at and self.ends_at in data and one not in self._from_server:
                    one.sendall(self.last_words)
                    data = b""
                dropped = self.mode == "blackhole" or (self.mode == "blackhole_replies" and one in self._from_server)
                if dropped:
                    self.dropped += len(data) if one not in self._from_server else 0
                elif data:
                    peer.sendall(data)
            except OSError:
                data = b""
            if not data:
                self._forget(one)
                self._forget(peer)

    def _forget(self, one: socket.socket) -> None:
        if self._peers.pop(one, None) is not None:
            self._from_server.discard(one)
            self._selector.unregister(one)
            one.close()
