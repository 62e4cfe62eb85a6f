"""Readers that are given several addresses: the next is used where one does not answer, at the start and later."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from relatum.errors import AccessRefused, BrokerUnavailable, ReadTimeout
from relatum.reading import BrokerAddress
from tests.contract._faces import Face, open_face
from tests.support import publish_plain, until_answered
from tests.support.proxy import Proxy


@pytest.fixture
def nodes(stream_url: str) -> Iterator[list[Proxy]]:
    """Three ways to the broker, as if to three nodes."""
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy.to(stream_url)) for _ in range(3)]


@pytest.fixture
def address(amqp_url: str, stream_url: str, nodes: list[Proxy]) -> BrokerAddress:
    """All of them."""
    return BrokerAddress.parse(";".join([amqp_url] * 3), ";".join(node.url(stream_url) for node in nodes))


@pytest.fixture
def stream(amqp_url: str, stream_name: str) -> str:
    """A stream of two messages."""
    publish_plain(amqp_url, stream_name, [b"0", b"1"])
    return stream_name


@contextmanager
def reading(face_name: str, address: BrokerAddress, stream: str) -> Iterator[Face]:
    """A reader that has read."""
    with open_face(face_name, address) as face:
        assert face.read(stream, 0).body == b"0"
        yield face


@pytest.mark.parametrize("fault", ["down", "silent"])
def test_the_next_is_used_where_one_does_not_answer(
    face_name: str,
    address: BrokerAddress,
    nodes: list[Proxy],
    stream: str,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    """At the start; who comes later begins with the one that answered. It is said once, and no other is asked."""
    if fault == "down":
        nodes[0].close()
    else:
        nodes[0].mode = "blackhole"
    with reading(face_name, address, stream):
        assert told(caplog) == 1
        asked = nodes[0].opened
        with reading(face_name, address, stream) as face:
            assert face.read(stream, 1).body == b"1"
    assert (nodes[0].opened, nodes[2].opened, told(caplog)) == (asked, 0, 1)


def test_a_reader_goes_on_at_the_next_and_stays(
    face_name: str, address: BrokerAddress, nodes: list[Proxy], stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is asked then is answered; nobody goes back to one that answers again; and where none does, it says so."""
    with reading(face_name, address, stream) as face:
        assert [node.opened for node in nodes[1:]] == [0, 0]
        cut(nodes[0])
        assert face.read(stream, 1).body == b"1"
        assert face.bounds(stream).last == 1
        assert told(caplog) == 1
        nodes[0].accepts, asked = True, nodes[0].opened
        assert [message.body for message in face.iterate(stream)] == [b"0", b"1"]
        assert (nodes[0].opened, told(caplog)) == (asked, 1)
        for node in nodes:
            cut(node)
        with pytest.raises(BrokerUnavailable):
            face.read(stream, 1)  # What it says is the lost line's, where a byte of that was still to be read.
        with pytest.raises(BrokerUnavailable, match="No address answers"):
            face.read(stream, 1)
        nodes[1].accepts = True
        assert until_answered(lambda: face.read(stream, 1)).body == b"1"


def test_a_reader_goes_on_where_a_node_falls_silent(
    face_name: str, address: BrokerAddress, nodes: list[Proxy], stream: str
) -> None:
    """The call that it did not answer ends in time, and the next one is answered by another node."""
    with open_face(face_name, address, timeout_s=3.0) as face:
        assert face.read(stream, 0).body == b"0"
        nodes[0].mode = "blackhole"
        with pytest.raises((ReadTimeout, BrokerUnavailable)):
            face.read(stream, 1)
        assert until_answered(lambda: face.read(stream, 1)).body == b"1"


def test_a_node_that_refuses_the_login_is_passed_over_and_is_the_error_to_act_on(
    face_name: str, address: BrokerAddress, nodes: list[Proxy], stream: str
) -> None:
    """It may be set up otherwise; where no other answers, its error goes before those of servers that are away."""
    first, *others = address.each
    here = replace(first, password="wrong").beside(others)
    with reading(face_name, here, stream):
        assert nodes[1].opened
    for node in nodes[1:]:
        cut(node)
    with pytest.raises(AccessRefused), open_face(face_name, here):
        pass


def cut(node: Proxy) -> None:
    """Have a node answer no more."""
    node.accepts = False
    node.cut()


def told(caplog: pytest.LogCaptureFixture) -> int:
    """How often it was said that another address is used."""
    return sum(record.name == "relatum.broker" for record in caplog.records)
