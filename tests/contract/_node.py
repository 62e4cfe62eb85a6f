"""Servers of the stream protocol that answer some of it, and have nothing to show."""

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from typing import Self

from relatum.wire import frames
from relatum.wire.frames import Code, Command, Start
from tests.unit.wire_samples import answered, deliver, record, sized


@contextlib.contextmanager
def deaf() -> Iterator[socket.socket]:
    """A socket that accepts no more connections: the system silently drops attempts to connect."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener


class Node:
    """Answers frames as its kind does; `told` has all bytes that it received. A context manager."""

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self.told, self.visits = b"", 0
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with contextlib.suppress(ssl.SSLError):
                    if self._tls is not None:
                        connection = self._tls.wrap_socket(connection, server_side=True)
                    self.visits += 1
                    self._connections.append(connection)
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, struct.error), connection, connection.makefile("rb") as source:
            while head := source.read(8):
                size, key, _ = struct.unpack(">IHH", head)
                body = source.read(size - 4)
                self.told += head + body
                connection.sendall(self._answer(key, body))

    def _answer(self, key: int, body: bytes) -> bytes:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Stranger(Node):
    """Answers a greeting and all later requests, or nothing at all without properties."""

    def __init__(self, properties: bytes | None, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._properties = properties
        super().__init__(port, tls)

    def _answer(self, key: int, body: bytes) -> bytes:
        if self._properties is None:
            return b""
        mechanisms = struct.pack(">I", 1) + frames.string("PLAIN")
        rest = {Command.PEER_PROPERTIES: self._properties, Command.SASL_HANDSHAKE: mechanisms}.get(Command(key), b"")
        return answered(key, struct.unpack_from(">I", body)[0], body=rest)


class EmptyNode(Node):
    """Answers logins, refuses every subscription, and names another broker's port in Metadata."""

    _leader = 1
    """The leader in Metadata: 0 for itself, 1 for the other."""
    _between: tuple[int, ...] = ()
    """The ports of more nodes, which Metadata names before the other one."""

    def __init__(self, other_port: int, other_host: str = "127.0.0.1") -> None:
        self._other_port, self._other_host = other_port, other_host
        super().__init__()

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
        tune = frames.tune(1 << 20, 60) if key == Command.SASL_AUTHENTICATE else b""
        return answered(key, correlation, code, rest) + tune

    def _metadata(self, correlation: int, stream: str) -> bytes:
        own = [("127.0.0.1", port) for port in (self.port, *self._between)]
        nodes = struct.pack(">I", len(own) + 1)
        for reference, (host, port) in enumerate([*own, (self._other_host, self._other_port)]):
            nodes += struct.pack(">H", reference) + frames.string(host) + struct.pack(">I", port)
        leader, count = len(own) * self._leader, len(own) + 1
        replicas = struct.pack(f">I{count}H", count, *range(count))
        places = struct.pack(">I", 1) + frames.string(stream) + struct.pack(">HH", Code.OK, leader) + replicas
        answer = struct.pack(">HHI", Command.METADATA | frames.RESPONSE_BIT, 1, correlation) + nodes + places
        return struct.pack(">I", len(answer)) + answer


class SilentLeader(EmptyNode):
    """A RabbitMQ 4 that shows nothing of the streams it leads since it was elected: `first_chunk` is -1."""

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
        return answered(key, struct.unpack_from(">I", body)[0], body=rest)


class OneChunk(SilentLeader):
    """Has one chunk of `count` messages from an offset on, which subscriptions of some kinds get.

    It leads its streams, or names the port of their leader, and before it the one of a replica.
    """

    def __init__(self, first: int, count: int, *kinds: Start, leader_port: int = 0, between: int = 0) -> None:
        self._between = (between,) if between else ()
        self._chunk = deliver(record(b"x") * count, count, count, first=first)
        self._kinds = kinds or tuple(Start)
        self._leader = 1 if leader_port else 0
        super().__init__(-1)
        self._other_port = leader_port or 1

    def damage(self) -> None:
        """Make the chunk's checksum wrong."""
        self._chunk = self._chunk[:-1] + b"?"

    def _answer(self, key: int, body: bytes) -> bytes:
        if key == Command.METADATA and not body[8:]:
            return sized(struct.pack(">HHIII", key | frames.RESPONSE_BIT, 1, struct.unpack(">II", body)[0], 0, 0))
        answer = super()._answer(key, body)
        if key == Command.SUBSCRIBE:
            cursor = frames.Cursor(body, 4)
            number, _, kind = cursor.take(1), cursor.string(), cursor.uint16()
            answer += sized(self._chunk[:4] + number + self._chunk[5:]) if kind in self._kinds else b""
        return answer


class LaggingNode(EmptyNode):
    """A replica that has the offsets 0 and 1 of each stream, whose leader is the other node."""

    def _answer(self, key: int, body: bytes) -> bytes:
        if key != Command.SUBSCRIBE:
            return super()._answer(key, body)
        chunk = bytearray(deliver(record(b"0") + record(b"1"), 2, 2, first=0))
        chunk[4] = body[4]  # the subscription
        return answered(key, struct.unpack_from(">I", body)[0]) + sized(bytes(chunk))
