"""A server that answers clients as a test wants, as PostgreSQL would in a state that is hard to produce."""

import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_SSL_REQUEST = 80877103
_GSS_REQUEST = 80877104


def refusal(sqlstate: str, text: str) -> bytes:
    fields = b"".join(kind + value.encode() + b"\0" for kind, value in ((b"S", "FATAL"), (b"V", "FATAL")))
    return _message(b"E", fields + b"C" + sqlstate.encode() + b"\0M" + text.encode() + b"\0\0")


def welcome(version: str) -> bytes:
    settings = {"server_version": version, "client_encoding": "UTF8", "standard_conforming_strings": "on"}
    said = b"".join(_message(b"S", f"{name}\0{value}\0".encode()) for name, value in settings.items())
    return _message(b"R", struct.pack("!I", 0)) + said + _message(b"K", struct.pack("!II", 1, 2)) + _message(b"Z", b"I")


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


@contextmanager
def answering(answer: bytes, *, negotiates: bool = True) -> Iterator[str]:
    def serve(connection: socket.socket, *_: object) -> None:
        with suppress(OSError, struct.error):
            connection.settimeout(90)
            length, code = struct.unpack("!II", connection.recv(8, socket.MSG_WAITALL))
            while code in (_SSL_REQUEST, _GSS_REQUEST):
                connection.sendall(b"N" if negotiates and answer[:1] in b"ER" else answer)
                length, code = struct.unpack("!II", connection.recv(8, socket.MSG_WAITALL))
            connection.recv(length - 8, socket.MSG_WAITALL)
            connection.sendall(answer)
            while connection.recv(4096):
                pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), serve) as server:  # type: ignore[arg-type]
        threading.Thread(target=server.serve_forever, args=[0.05]).start()
        try:
            yield f"postgresql://user:secret@127.0.0.1:{server.server_address[1]}/name"
        finally:
            server.shutdown()
