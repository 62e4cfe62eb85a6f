"""Nodes of the stream protocol that answer logins, and have nothing to show."""

import contextlib
import socket
import struct
import threading
from typing import Self

from relatum.wire import _frames as frames
from relatum.wire._frames import Code, Command


class EmptyNode:
    """Answers logins, refuses every subscription, and names another broker's port in Metadata. A context manager."""

    _leader = 1
    """Who leads in Metadata: 0 for itself, 1 for the other."""

    def __init__(self, other_port: int, other_host: str = "127.0.0.1") -> None:
        self._other_port, self._other_host = other_port, other_host
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, struct.error), connection, connection.makefile("rb") as source:
            while head := source.read(8):
                size, key, _ = struct.unpack(">IHH", head)
                body = source.read(size - 4)
                connection.sendall(self._answer(key, body))

    def _answer(self, key: int, body: bytes) -> bytes:
        if key in (Command.TUNE, Command.HEARTBEAT, Command.CREDIT):
            return b""
        (correlation,) = struct.unpack_from(">I", body)
        if key == Command.METADATA:
            return self._metadata(correlation, frames.Cursor(body, 8).string())
        code = Code.STREAM_NOT_AVAILABLE if key == Command.SUBSCRIBE else Code.OK
        rest = {
            Command.PEER_PROPERTIES: frames.table({}),
            Command.SASL_HANDSHAKE: struct.pack(">I", 1) + frames.string("PLAIN"),
            Command.OPEN: frames.table({"advertised_host": "127.0.0.1", "advertised_port": str(self.port)}),
        }.get(Command(key), b"")
        answer = struct.pack(">HHIH", key | frames.RESPONSE_BIT, 1, correlation, code) + rest
        tune = frames.tune(1 << 20, 60) if key == Command.SASL_AUTHENTICATE else b""
        return struct.pack(">I", len(answer)) + answer + tune

    def _metadata(self, correlation: int, stream: str) -> bytes:
        nodes = struct.pack(">I", 2)
        for reference, host, port in ((0, "127.0.0.1", self.port), (1, self._other_host, self._other_port)):
            nodes += struct.pack(">H", reference) + frames.string(host) + struct.pack(">I", port)
        places = struct.pack(">I", 1) + frames.string(stream) + struct.pack(">HHIHH", Code.OK, self._leader, 2, 0, 1)
        answer = struct.pack(">HHI", Command.METADATA | frames.RESPONSE_BIT, 1, correlation) + nodes + places
        return struct.pack(">I", len(answer)) + answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class SilentLeader(EmptyNode):
    """A RabbitMQ 4 that leads every stream and shows no message of it: nothing is committed since it was elected.

    Args:
        first_chunk: What StreamStats says: -1 where nothing is written.
    """

    _leader = 0

    def __init__(self, first_chunk: int) -> None:
        self._first_chunk = first_chunk
        super().__init__(1)

    def _answer(self, key: int, body: bytes) -> bytes:
        stats = struct.pack(">I", 1) + frames.string("first_chunk_id") + struct.pack(">q", self._first_chunk)
        rest = {
            Command.PEER_PROPERTIES: frames.table({"version": "4.3.0"}),
            Command.SUBSCRIBE: b"",
            Command.STREAM_STATS: stats,
        }.get(Command(key))
        if rest is None:
            return super()._answer(key, body)
        (correlation,) = struct.unpack_from(">I", body)
        answer = struct.pack(">HHIH", key | frames.RESPONSE_BIT, 1, correlation, Code.OK) + rest
        return struct.pack(">I", len(answer)) + answer
