"""A minimal client of RabbitMQ's stream protocol, as a baseline for our own reader.

One connection, no time-outs, no checksums, no errors but assertions.

Source: https://github.com/rabbitmq/rabbitmq-server/blob/main/deps/rabbitmq_stream/docs/PROTOCOL.adoc
"""

import asyncio
import socket
import struct
from collections.abc import Iterable
from itertools import islice
from typing import Final, Self
from urllib.parse import unquote, urlsplit

DECLARE_PUBLISHER: Final = 1
PUBLISH: Final = 2
PUBLISH_CONFIRM: Final = 3
SUBSCRIBE: Final = 7
DELIVER: Final = 8
UNSUBSCRIBE: Final = 12
PEER_PROPERTIES: Final = 17
SASL_HANDSHAKE: Final = 18
SASL_AUTHENTICATE: Final = 19
TUNE: Final = 20
OPEN: Final = 21
RESPONSE: Final = 0x8000

CHUNK_HEADER: Final = struct.Struct(">BBHIqQQIIII")
"""Magic and version, type, entries, records, time, epoch, first offset, checksum, lengths, the rest."""

FRAME_RECORDS: Final = 2_000
"""Records in a frame of `publish_all`. They must be small, to stay under the broker's 1 MiB."""

UNCONFIRMED_MAX: Final = 100_000
"""Maximum unconfirmed records."""


def text(value: str) -> bytes:
    """Encode a string in the protocol's form."""
    data = value.encode()
    return struct.pack(">h", len(data)) + data


class BareStreamClient:
    """A connection that reads one message at an offset, or writes many.

    Args:
        url: `rabbitmq-stream://user:password@host:port/vhost`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port or 5552))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray()
        self._correlation = 0
        user, password = unquote(parts.username or "guest"), unquote(parts.password or "guest")
        login = f"\0{user}\0{password}".encode()
        self._call(PEER_PROPERTIES, struct.pack(">i", 0))
        self._call(SASL_HANDSHAKE, b"")
        self._call(SASL_AUTHENTICATE, text("PLAIN") + struct.pack(">i", len(login)) + login)
        tune = self._receive()
        assert struct.unpack_from(">H", tune)[0] == TUNE
        # Accept the offered frame size, and disable heartbeats.
        self._send(TUNE, tune[4:8] + struct.pack(">I", 0))
        self._call(OPEN, text(unquote(parts.path[1:]) or "/"))

    def read(self, stream: str, offset: int) -> bytes:
        """Return the record at an offset: subscribe, receive a chunk, unsubscribe, in one round trip."""
        subscribe = self._request(SUBSCRIBE, b"\1" + text(stream) + struct.pack(">HQH", 4, offset, 1))
        unsubscribe = self._request(UNSUBSCRIBE, b"\1")
        self._socket.sendall(subscribe + unsubscribe)
        record = None
        while True:
            frame = self._receive()
            key = struct.unpack_from(">H", frame)[0]
            if key == DELIVER:
                record = _record_at(frame, 5, offset)
            elif key == UNSUBSCRIBE | RESPONSE:
                assert record is not None, f"there is no message at offset {offset} of {stream}"
                return record

    def publish_all(self, stream: str, records: Iterable[bytes], frame_records: int = FRAME_RECORDS) -> int:
        """Publish records, many in a frame, wait for all confirms, and return their number."""
        self._call(DECLARE_PUBLISHER, b"\1" + text("") + text(stream))
        rest = iter(records)
        sent = confirmed = 0
        while part := list(islice(rest, frame_records)):
            entries = [struct.pack(">QI", number, len(record)) + record for number, record in enumerate(part, sent)]
            self._send(PUBLISH, b"\1" + struct.pack(">i", len(part)) + b"".join(entries))
            sent += len(part)
            while sent - confirmed > UNCONFIRMED_MAX:
                confirmed += self._confirms()
        while confirmed < sent:
            confirmed += self._confirms()
        return sent

    def _confirms(self) -> int:
        frame = self._receive()
        key, _, _, count = struct.unpack_from(">HHBi", frame)
        assert key == PUBLISH_CONFIRM, f"the broker sent frame {key} for a confirm"
        return int(count)

    def _call(self, key: int, payload: bytes) -> bytes:
        self._socket.sendall(self._request(key, payload))
        while True:
            frame = self._receive()
            if struct.unpack_from(">H", frame)[0] == key | RESPONSE:
                assert struct.unpack_from(">H", frame, 8)[0] == 1, f"request {key} was refused"
                return frame

    def _request(self, key: int, payload: bytes) -> bytes:
        self._correlation += 1
        return _frame(key, struct.pack(">I", self._correlation) + payload)

    def _send(self, key: int, payload: bytes) -> None:
        self._socket.sendall(_frame(key, payload))

    def _receive(self) -> bytes:
        buffer = self._buffer
        while len(buffer) < 4 or len(buffer) < 4 + struct.unpack_from(">I", buffer)[0]:
            data = self._socket.recv(1 << 20)
            assert data, "the broker closed the connection"
            buffer += data
        end = 4 + struct.unpack_from(">I", buffer)[0]
        frame = bytes(buffer[4:end])
        del buffer[:end]
        return frame

    def detach(self) -> socket.socket:
        """Return the socket, for another client."""
        return self._socket

    def close(self) -> None:
        """Close the socket without the protocol's Close command."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncBareStreamClient:
    """The same client on asyncio's streams. The blocking client logs in for it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._correlation = 1_000

    @classmethod
    async def open(cls, url: str) -> Self:
        """Open a connection and log in."""
        blocking = BareStreamClient(url)
        return cls(*await asyncio.open_connection(sock=blocking.detach()))

    async def read(self, stream: str, offset: int) -> bytes:
        """Return the record at an offset: subscribe, receive a chunk, unsubscribe, in one round trip."""
        subscribe = struct.pack(">I", self._correlation) + b"\1" + text(stream) + struct.pack(">HQH", 4, offset, 1)
        unsubscribe = struct.pack(">I", self._correlation + 1) + b"\1"
        self._correlation += 2
        self._writer.write(_frame(SUBSCRIBE, subscribe) + _frame(UNSUBSCRIBE, unsubscribe))
        record = None
        while True:
            size = struct.unpack(">I", await self._reader.readexactly(4))[0]
            frame = await self._reader.readexactly(size)
            key = struct.unpack_from(">H", frame)[0]
            if key == DELIVER:
                record = _record_at(frame, 5, offset)
            elif key == UNSUBSCRIBE | RESPONSE:
                assert record is not None, f"there is no message at offset {offset} of {stream}"
                return record

    def close(self) -> None:
        """Close the socket without the protocol's Close command."""
        self._writer.close()


def _frame(key: int, payload: bytes) -> bytes:
    return struct.pack(">IHH", 4 + len(payload), key, 1) + payload


def _record_at(frame: bytes, start: int, offset: int) -> bytes:
    """Return the record at an offset in a chunk of plain entries."""
    header = CHUNK_HEADER.unpack_from(frame, start)
    records, first = header[3], header[6]
    assert first <= offset < first + records, f"offset {offset} is not in the chunk that begins with {first}"
    place = start + CHUNK_HEADER.size
    for _ in range(offset - first):
        place += 4 + struct.unpack_from(">I", frame, place)[0]
    size = struct.unpack_from(">I", frame, place)[0]
    return frame[place + 4 : place + 4 + size]
