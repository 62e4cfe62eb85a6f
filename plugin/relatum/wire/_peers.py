"""Who answers on a port that was taken for another's, so that an error can name it. Pure.

The first bytes tell: each server has its own way to refuse what it does not understand.
"""

import os
import re
import socket
import struct
from typing import Final

from relatum.errors import ConfigurationError

AMQP: Final = "AMQP 0.9.1"
STREAM: Final = "RabbitMQ's stream protocol"
POSTGRESQL: Final = "PostgreSQL"
HTTP: Final = "HTTP"
TLS: Final = "TLS"

USUAL_PORTS: Final = {
    5672: AMQP,
    5671: f"{AMQP} with {TLS}",
    5552: STREAM,
    5551: f"{STREAM} with {TLS}",
    5432: POSTGRESQL,
    15672: "RabbitMQ's management pages",
    15671: f"RabbitMQ's management pages with {TLS}",
    15692: "RabbitMQ's metrics",
    25672: "RabbitMQ's nodes among themselves",
}
"""What usually listens on a port, for servers that say nothing before they understand."""

_SCHEMES: Final = {AMQP: "amqp://", STREAM: "rabbitmq-stream://", POSTGRESQL: "postgresql://"}

GREETING_BYTES_MIN: Final = 5
"""Bytes of an answer that are enough to know who it is from."""

_TLS_ALERT: Final = b"\x15\x03"
"""How a TLS server refuses what is no TLS: record type 21, version 3.x. Source: RFC 8446, 5.1."""

_ANSWERS: Final = ((b"AMQP", AMQP), (b"HTTP", HTTP), (_TLS_ALERT, TLS))

_LIBPQ: Final = re.compile(
    r"(?:received invalid response to SSL negotiation: |expected authentication request from server, but received )(.)"
)
"""What libpq says of a server that answers, and is not PostgreSQL: the first byte of the answer."""

_LIBPQ_BYTES: Final = {"A": AMQP, "H": HTTP, "\x15": TLS}

_STREAM_ANSWER: Final = struct.pack(">H", 0x8011)
"""The key of the answer to PeerProperties, behind the frame's size."""


def service_of(answer: bytes) -> str | None:
    """Who an answer to a client of the stream protocol is from; None where it cannot be told."""
    for beginning, service in _ANSWERS:
        if answer.startswith(beginning):
            return service
    if answer[4:6] == _STREAM_ANSWER:
        return STREAM
    # An error of PostgreSQL's: its letter, a length below 64 KiB, and the first field's letter.
    if answer[:3] == b"E\0\0" and answer[5:6] in (b"S", b"V", b"") and len(answer) >= GREETING_BYTES_MIN:
        return POSTGRESQL
    return None


def service_in(libpq_message: str) -> str | None:
    """Who answered libpq in PostgreSQL's place, as its message tells; None where it says nothing of it."""
    found = _LIBPQ.search(libpq_message)
    return _LIBPQ_BYTES.get(found[1], "another protocol") if found else None


def is_another(service: str, where: str, expected: str) -> str:
    """The sentence that says so, with what to do."""
    scheme = _SCHEMES.get(service)
    if service == TLS:
        advice = "the scheme ends with s or +tls where a port takes TLS"
    elif scheme is not None:
        advice = f"that is a port for {scheme}; {expected} {_usual(expected)}"
    else:
        advice = f"{expected} {_usual(expected)}"
    return f"{service} answers at {where}, not {expected}: {advice}"


def hint(port: int, expected: str) -> str:
    """What usually listens on a port, in brackets to be appended, where it is not what is expected; else nothing."""
    service = USUAL_PORTS.get(port)
    return f" ({port} is usually the port of {service})" if service is not None and expected not in service else ""


def checked_host(host: str, where: str) -> None:
    """See that a host's name can be asked for: Python's look-up of names raises a `UnicodeError` of its own otherwise.

    `host`: The name or address; it is not shown, since it may be a part of a password that was not quoted.

    Raises:
        ConfigurationError: a part between dots is empty, or longer than 63 characters.
    """
    try:
        host.encode("idna")
    except UnicodeError:
        raise ConfigurationError(
            f"{where} names a host that no name can be: a part between dots is empty or has over 63 characters"
        ) from None


def unreached(error: BaseException | None, host: str) -> str:
    """Why a server was not reached, to be appended: that its name does not resolve, or what the system says."""
    if isinstance(error, socket.gaierror):
        return f": the host name {host!r} does not resolve ({error.strerror or error})"
    if not isinstance(error, OSError) or not error.strerror:
        return ""
    # asyncio has a text of its own, which shows a tuple.
    if error.errno is not None and error.strerror.startswith("Connect call failed"):
        return f": {os.strerror(error.errno)}"
    return f": {error.strerror}"


def _usual(expected: str) -> str:
    port = next((port for port, service in USUAL_PORTS.items() if service == expected), None)
    return f"usually has {port}" if port is not None else "is elsewhere"
