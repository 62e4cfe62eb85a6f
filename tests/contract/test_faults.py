"""What readers do when the network or the broker does not, and where they are given wrong addresses, or several."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from relatum import Broker
from relatum.errors import AccessRefused, BrokerUnavailable, ConfigurationError, ConnectionLost, ReadTimeout
from relatum.reading import BrokerAddress, Message
from relatum.recording import Recorder
from relatum.wire import frames
from relatum_consumer import Relations
from relatum_migrations import upgrade
from tests.contract._faces import Face, open_and_close, open_face
from tests.support import LIMIT_S, in_a_try, publish_plain, until_answered, wait_until
from tests.support.proxy import Proxy
from tests.support.standstill import in_time

TIMEOUT_S = 1.0
HEARTBEAT_S = 1
OPENING_S = 10.0

LAST = 2


@pytest.fixture
def face(face_name: str, stream_url: str, proxy: Proxy) -> Iterator[Face]:
    address = BrokerAddress.of(proxy.url(stream_url))
    with open_face(face_name, address, timeout_s=TIMEOUT_S, heartbeat_s=HEARTBEAT_S) as opened:
        yield opened


@pytest.fixture
def stream(amqp_url: str, stream_name: str) -> str:
    publish_plain(amqp_url, stream_name, [b"0", b"1", b"2"])
    return stream_name


def test_a_frozen_broker_is_a_time_out(face: Face, proxy: Proxy, stream: str) -> None:
    """A read without an answer ends in time, and the reader works again when the broker does."""
    assert until_answered(lambda: face.read(stream, 1)).body == b"1"
    proxy.mode = "frozen"
    with in_time(TIMEOUT_S), pytest.raises((ReadTimeout, ConnectionLost, BrokerUnavailable)):
        face.read(stream, 1)
    proxy.mode = "pass"
    assert until_answered(lambda: face.read(stream, 2)).body == b"2"


@pytest.mark.parametrize("last", [b"", frames.heartbeat()], ids=["at once", "after a heartbeat"])
def test_a_connection_that_ended_idle(face_name: str, stream_url: str, proxy: Proxy, stream: str, last: bytes) -> None:
    """The next question opens another one, unseen by the caller; also if the program was suspended."""
    with open_face(face_name, proxy.url(stream_url)) as face:
        for offset in range(LAST + 1):
            assert face.read(stream, offset).body == str(offset).encode()
            proxy.cut(last)
            assert face.bounds(stream).last == LAST
            proxy.cut(last)
            assert [message.offset for message in face.read_many([(stream, offset)])] == [offset]
            proxy.cut(last)
            assert len(face.iterate(stream)) == LAST + 1
            proxy.cut(last)


@pytest.mark.parametrize("fault", ["frozen", "cut"])
def test_a_reader_that_waits_learns_that_nobody_is_there(face: Face, proxy: Proxy, stream: str, fault: str) -> None:
    """At the end of its connection, or by missing heartbeats; it can continue from where it was."""

    def break_behind(message: Message) -> None:
        if message.offset == LAST and fault == "cut":
            proxy.cut()
        elif message.offset == LAST:
            proxy.mode = "frozen"

    with pytest.raises(ConnectionLost):
        face.follow(stream, break_behind, idle_timeout_s=LIMIT_S)
    proxy.mode = "pass"
    assert [message.offset for message in until_answered(lambda: face.iterate(stream, 1))] == [1, 2]


# With asyncio, the loop does not run between the calls of this suite.
@pytest.mark.parametrize("face_name", ["blocking"])
def test_an_idle_connection_is_kept(face: Face, proxy: Proxy, stream: str) -> None:
    """Heartbeats keep an idle stream connection open past the time the broker would close it."""

    def is_kept() -> bool:
        until_answered(lambda: face.read(stream, 0))
        before, until = proxy.opened, time.monotonic() + 4 * HEARTBEAT_S
        wait_until(lambda: time.monotonic() > until)
        until_answered(lambda: face.read(stream, 1))
        return proxy.opened == before

    in_a_try(is_kept, what="the connection is kept")


NO_STREAMS = (ConfigurationError, "does not speak RabbitMQ's stream protocol")
SILENT = (BrokerUnavailable, r"Nothing at .* answered as .* in time")
UNKNOWN = (BrokerUnavailable, "'nobody.invalid' does not resolve")
NOBODY = (BrokerUnavailable, r"127\.0\.0\.1")
WRONG: dict[str, tuple[type[Exception], str]] = {
    "rabbitmq-stream://{login}@{amqp}/": NO_STREAMS,
    "rabbitmq-stream://{login}@{database}/": NO_STREAMS,
    "rabbitmq-stream://{login}@{silent}/": SILENT,
    "amqp://{login}@{silent}/": SILENT,
    "rabbitmq-stream://nobody.invalid/": UNKNOWN,
    "amqp://nobody.invalid/": UNKNOWN,
    "rabbitmq-stream://127.0.0.1:129/": NOBODY,
    "amqp://127.0.0.1:129/": NOBODY,
    "amqp://127.0.0.1:100/": (ConfigurationError, "rabbitmq-stream"),
    # The stream protocol hangs up silently; AMQP 0.9.1 returns an error that no waiting cures.
    "rabbitmq-stream+tls://{login}@{streams}/": (
        BrokerUnavailable,
        r"TLS with .* failed|Cannot connect to .* by the stream protocol",
    ),
    "amqps://{login}@{amqp}/": (ConfigurationError, "does not speak TLS"),
}
"""Addresses of others, or of nobody (129, nor 120 below; by 100 no stream port is guessed; `invalid`: RFC 2606)."""


@pytest.mark.parametrize("address", WRONG)
def test_a_wrong_address_is_named(face_name: str, address: str, broker: Broker, database_server_url: str) -> None:
    """A wrong address is an error that says what answers there, or that nothing does."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = {"amqp": broker.url, "streams": broker.stream_url, "database": database_server_url}
        places = {name: urlsplit(url).netloc.rpartition("@")[2] for name, url in urls.items()}
        login = urlsplit(broker.url).netloc.rpartition("@")[0]
        places |= {"silent": f"127.0.0.1:{silent.getsockname()[1]}", "login": login}
        error, words = WRONG[address]
        patience_s = TIMEOUT_S if "{silent}" in address else OPENING_S
        with pytest.raises(error, match=words):
            open_and_close(face_name, address.format(**places), timeout_s=patience_s)


def test_an_amqp_port_given_as_another_servers_is_named(amqp_url: str, database_url: str) -> None:
    """Recorder, migrations and lookups end at once where AMQP's port is given as the streams' or as PostgreSQL's."""
    recorder = Recorder(amqp_url.replace("amqp:", "rabbitmq-stream:"), database_url, ["orders"])
    with pytest.raises(ConfigurationError, match="does not speak"):
        recorder.run(threading.Event())
    url = amqp_url.replace("amqp:", "postgresql:")
    wrong = pytest.raises(ConfigurationError, match="is not PostgreSQL")
    with wrong:
        upgrade(url)
    with Relations(broker=amqp_url, database=url) as relations, wrong:
        relations.find("order_id", 1)


def test_wrong_password_and_virtual_host(face_name: str, stream_url: str) -> None:
    """A wrong password and a virtual host that does not exist are refused, and no error shows a password."""
    parts = urlsplit(stream_url)
    host = parts.netloc.rpartition("@")[2]
    for wrong in ({"netloc": f"{parts.username}:canary-7f3a@{host}"}, {"path": "/no-such-vhost"}):
        with pytest.raises(AccessRefused) as caught:
            open_and_close(face_name, parts._replace(**wrong).geturl())
        assert "canary" not in str(caught.value)


# How a client's frames begin: AMQP's Start-Ok and Open, the stream protocol's SaslAuthenticate and Open.
MOMENTS = {"amqp": (b"\0\x0a\0\x0b", b"\0\x0a\0\x28"), "stream": (b"\0\x13\0\1", b"\0\x15\0\1")}


@contextlib.contextmanager
def stopping(url: str, moment: bytes, close: bytes = b"") -> Iterator[str]:
    """A broker's URL that goes away when a client sends a certain frame: without a word, or with an AMQP Close."""
    with Proxy.to(url) as proxy:
        proxy.ends_at, proxy.last_words = moment, close
        yield proxy.url(url)


def close_frame(code: int, text: str) -> bytes:
    payload = struct.pack(">HHHB", 10, 50, code, len(text)) + text.encode() + struct.pack(">HH", 10, 40)
    return struct.pack(">BHI", 1, 0, len(payload)) + payload + b"\xce"


@pytest.mark.parametrize("protocol", MOMENTS)
@pytest.mark.parametrize("moment", [0, 1], ids=["logging-in", "opening"])
def test_a_broker_that_hangs_up_refuses_nobody(face_name: str, protocol: str, moment: int, broker: Broker) -> None:
    """A connection that is cut while it opens is unavailable, which can be tried again, and never a refusal."""
    url = {"stream": broker.stream_url, "amqp": broker.url}[protocol]
    with stopping(url, MOMENTS[protocol][moment]) as broken, pytest.raises(BrokerUnavailable):
        open_and_close(face_name, broken, timeout_s=OPENING_S)


@pytest.mark.parametrize(
    ("code", "text", "expected", "said"),
    [
        (320, "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'", BrokerUnavailable, None),
        (541, "INTERNAL_ERROR - access to vhost '/' refused for user 'u': vhost is down", BrokerUnavailable, None),
        (530, "NOT_ALLOWED - access to vhost '/' refused: connection limit (10) is reached", BrokerUnavailable, None),
        (530, "NOT_ALLOWED - vhost /limit not found", AccessRefused, "'relatum' in .*: there is no such virtual host"),
        (403, "ACCESS_REFUSED - Login was refused", AccessRefused, "'relatum' in .*RabbitMQ does not say which"),
    ],
)
def test_only_the_brokers_own_word_is_a_refusal(
    face_name: str, code: int, text: str, expected: type[Exception], said: str | None, amqp_url: str
) -> None:
    """A Close is a refusal where its code says so; that of a node that stops, or of a full virtual host, passes."""
    with stopping(amqp_url, MOMENTS["amqp"][1], close_frame(code, text)) as broken, pytest.raises(expected, match=said):
        open_and_close(face_name, broken, timeout_s=OPENING_S)


@pytest.fixture
def nodes(stream_url: str) -> Iterator[list[Proxy]]:
    """Three ways to the broker, as if to three nodes."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Proxy.to(stream_url)) for _ in range(3)]


@pytest.fixture
def address(amqp_url: str, stream_url: str, nodes: list[Proxy]) -> Broker:
    return Broker(";".join([amqp_url] * 3), stream_url=";".join(node.url(stream_url) for node in nodes))


@contextlib.contextmanager
def reading(face_name: str, address: Broker, stream: str, **options: Any) -> Iterator[Face]:
    with open_face(face_name, address, **options) as face:
        assert face.read(stream, 0).body == b"0"
        yield face


@pytest.mark.parametrize("fault", ["down", "silent"])
def test_the_next_is_used_where_one_does_not_answer(
    face_name: str, address: Broker, nodes: list[Proxy], stream: str, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Where an address does not answer the next is used, logged once, and later readers begin with that one."""
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
    face_name: str, address: Broker, nodes: list[Proxy], stream: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is asked then is answered; nobody goes back to one that answers again; and where none does, it says so."""
    with reading(face_name, address, stream) as face:
        assert [node.opened for node in nodes[1:]] == [0, 0]
        cut(nodes[0])
        assert (face.read(stream, 1).body, face.bounds(stream).last) == (b"1", LAST)
        assert told(caplog) == 1
        nodes[0].accepts, asked = True, nodes[0].opened
        assert [message.body for message in face.iterate(stream)] == [b"0", b"1", b"2"]
        assert (nodes[0].opened, told(caplog)) == (asked, 1)
        for node in nodes:
            cut(node)
        # A read in progress may still report that its connection was lost.
        wait_until(lambda: "No address answers" in failure_of(face, stream), what="that none answers")
        nodes[1].accepts = True
        assert until_answered(lambda: face.read(stream, 1)).body == b"1"


def test_a_reader_goes_on_past_a_silent_node(face_name: str, address: Broker, nodes: list[Proxy], stream: str) -> None:
    """A call that a silent node does not answer ends in time, and another node answers the next one."""
    with reading(face_name, address, stream, timeout_s=3.0) as face:
        nodes[0].mode = "blackhole"
        with pytest.raises((ReadTimeout, BrokerUnavailable)):
            face.read(stream, 1)
        assert until_answered(lambda: face.read(stream, 1)).body == b"1"


def test_a_refused_login_is_passed_over(face_name: str, address: Broker, nodes: list[Proxy], stream: str) -> None:
    """A refused login is passed over while another node answers, and is the error where none does."""
    first, *others = BrokerAddress.of(address).each
    here = replace(first, password="wrong").beside(others)
    with reading(face_name, here, stream):
        assert nodes[1].opened
    for node in nodes[1:]:
        cut(node)
    with pytest.raises(AccessRefused):
        open_and_close(face_name, here)


def failure_of(face: Face, stream: str) -> str:
    with pytest.raises(BrokerUnavailable) as caught:
        face.read(stream, 1)
    return str(caught.value)


def cut(node: Proxy) -> None:
    node.accepts = False
    node.cut()


def told(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.name == "relatum.broker" for record in caplog.records)
