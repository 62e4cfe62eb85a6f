"""Who answers, as the first bytes, or libpq's words, tell it."""

import pytest

from relatum.errors import ProtocolError
from relatum.wire import AnotherProtocol, Login, StreamSession
from relatum.wire import _peers as peers

GREETINGS = {
    b"AMQP\x00\x00\x09\x01": peers.AMQP,
    b"HTTP/1.1 400 Bad Request\r\n": peers.HTTP,
    b"\x15\x03\x03\x00\x02\x02\x46": peers.TLS,
    b"E\x00\x00\x00\x8dSFATAL\x00": peers.POSTGRESQL,
}
"""What servers were seen to answer to PeerProperties."""


@pytest.mark.parametrize("answer", GREETINGS)
def test_each_server_is_known_by_its_first_bytes(answer: bytes) -> None:
    """A stream session that is answered by another server names it, before anything of a login is sent."""
    session = StreamSession(Login("guest", "secret"))
    next(session.connecting())
    assert b"secret" not in session.take_outgoing()
    with pytest.raises(AnotherProtocol) as caught:
        session.receive(answer)
    assert caught.value.service == GREETINGS[answer]
    assert session.take_outgoing() == b""


def test_bytes_of_nobody_known_are_a_broken_protocol() -> None:
    """What is no frame, and no other server's word, is still said to be no frame."""
    session = StreamSession(Login("guest", "guest"))
    with pytest.raises(ProtocolError, match="claims"):
        session.receive(b"\xff\xff\xff\xff\x00\x00")


@pytest.mark.parametrize(
    ("message", "service"),
    [
        ("port 1 failed: received invalid response to SSL negotiation: A", peers.AMQP),
        ("port 1 failed: expected authentication request from server, but received H", peers.HTTP),
        ("port 1 failed: received invalid response to SSL negotiation: ~", "another protocol"),
        ("port 1 failed: Connection refused", None),
    ],
)
def test_libpq_tells_who_answered(message: str, service: str | None) -> None:
    """The first byte in libpq's message names the server that is none of PostgreSQL's."""
    assert peers.service_in(message) == service


def test_a_silent_port_is_named_by_its_number() -> None:
    """Where nobody says anything, the usual owner of the port is named, unless it is the one that is expected."""
    assert peers.hint(15672, peers.AMQP) == " (15672 is usually the port of RabbitMQ's management pages)"
    assert peers.hint(5672, peers.AMQP) == peers.hint(5671, peers.AMQP) == peers.hint(40001, peers.AMQP) == ""
