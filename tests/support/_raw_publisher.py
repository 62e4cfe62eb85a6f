"""A publisher of the stream protocol that sends any given bytes, as an unknown client might."""

import socket
import struct
from collections.abc import Sequence
from typing import Self
from urllib.parse import unquote, urlsplit

from tests.support.amqp import encode, section

Batch = tuple[int, int, int, bytes]
"""A sub-entry batch: its codec, how many records it claims, how many bytes unpacked, and its content as packed."""

_CREATE_SUPER_STREAM = 29
_DECLARE, _PUBLISH, _CONFIRM, _REFUSED, _STORE_OFFSET = 1, 2, 3, 4, 10
_PROPERTIES, _HANDSHAKE, _AUTHENTICATE, _TUNE, _OPEN = 17, 18, 19, 20, 21


class RawConnection:
    """One connection of the stream protocol. Written apart from Relatum's own protocol code."""

    def __init__(self, stream_url: str) -> None:
        parts = urlsplit(stream_url)
        self._socket = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 5552), 10)
        self._number = 0
        self._request(_PROPERTIES, struct.pack(">I", 0))
        self._request(_HANDSHAKE)
        secret = f"\0{unquote(parts.username or 'guest')}\0{unquote(parts.password or 'guest')}".encode()
        self._request(_AUTHENTICATE, _text("PLAIN") + struct.pack(">I", len(secret)) + secret)
        while (frame := self._frame())[:2] != struct.pack(">H", _TUNE):
            pass
        self._send(_TUNE, frame[4:12])
        self._request(_OPEN, _text(unquote(parts.path[1:]) or "/"))

    def create_super_stream(self, name: str, streams: Sequence[str], binding_keys: Sequence[str]) -> None:
        lists = (struct.pack(">I", len(texts)) + b"".join(map(_text, texts)) for texts in (streams, binding_keys))
        self._request(_CREATE_SUPER_STREAM, _text(name) + b"".join(lists) + struct.pack(">I", 0))

    def _send(self, key: int, body: bytes) -> None:
        self._socket.sendall(struct.pack(">IHH", 4 + len(body), key, 1) + body)

    def _request(self, key: int, body: bytes = b"") -> None:
        self._number += 1
        self._send(key, struct.pack(">I", self._number) + body)
        while True:
            frame = self._frame()
            answered, _, number, code = struct.unpack_from(">HHIH", frame + b"\0" * 10)
            if answered & 0x8000 and number == self._number:
                assert code == 1, f"the broker answered {code} to {key}"
                return

    def _frame(self) -> bytes:
        (size,) = struct.unpack(">I", self._exactly(4))
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            assert more, "the broker hung up"
            data += more
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


class RawPublisher(RawConnection):
    """A connection that publishes to one stream."""

    def __init__(self, stream_url: str, stream: str) -> None:
        super().__init__(stream_url)
        self._stream = stream
        self._request(_DECLARE, b"\x01" + _text("") + _text(stream))

    def publish(self, *entries: bytes | Batch, awaits: bool = True) -> None:
        """Publish records and batches in one frame; await confirms: none comes behind a chunk without a record."""
        body = b"\x01" + struct.pack(">I", len(entries))
        for number, entry in enumerate(entries):
            body += struct.pack(">Q", (self._number << 32) + number)
            if isinstance(entry, bytes):
                body += struct.pack(">I", len(entry)) + entry
            else:
                codec, count, size, content = entry
                body += struct.pack(">BHII", 0x80 | codec << 4, count, size, len(content)) + content
        self._number += 1
        self._send(_PUBLISH, body)
        confirmed = 0
        while awaits and confirmed < len(entries):
            frame = self._frame()
            (key,) = struct.unpack_from(">H", frame)
            assert key != _REFUSED, "the broker refused a message"
            if key == _CONFIRM:
                confirmed += struct.unpack_from(">I", frame, 5)[0]

    def store_offset(self, reference: str, offset: int) -> None:
        """Have the broker write an offset of a consumer into the stream: a chunk of its own, without messages."""
        self._send(_STORE_OFFSET, _text(reference) + _text(self._stream) + struct.pack(">Q", offset))


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack(">H", len(encoded)) + encoded


def uncompressed(records: Sequence[bytes]) -> Batch:
    content = b"".join(struct.pack(">I", len(record)) + record for record in records)
    return 0, len(records), len(content), content


def amqp_record(body: bytes, *, message_id: str | None = None, correlation_id: str | None = None) -> bytes:
    """A message as AMQP 1.0 encodes it; its texts may be of any length, as the stream protocol lets them be."""
    return section(0x73, encode([message_id, *[None] * 4, correlation_id])) + section(0x75, encode(body))
