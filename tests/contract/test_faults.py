"""What readers do when the network or the broker does not."""

import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from relatum.errors import AccessRefused, BrokerUnavailable, ConfigurationError, ConnectionLost, ReadTimeout
from relatum.local import LocalRabbitMQ
from relatum.reading import BrokerAddress, Message
from tests.contract._faces import Face, open_face
from tests.support import LIMIT_S, START_S, declare_stream, in_a_try, publish_plain, until_answered, wait_until
from tests.support.proxy import Proxy
from tests.support.standstill import in_time

TIMEOUT_S = 1.0
HEARTBEAT_S = 1
AWAY = 129
"""A port where nobody listens, nor 120 below it."""

LAST = 2
"""The offset of the last message."""


@pytest.fixture
def proxy(stream_url: str) -> Iterator[Proxy]:
    """A proxy before the broker."""
    with Proxy.to(stream_url) as proxy:
        yield proxy


@pytest.fixture
def face(face_name: str, stream_url: str, proxy: Proxy) -> Iterator[Face]:
    """A reader that goes through the proxy."""
    address = BrokerAddress.parse(through(stream_url, proxy))
    with open_face(face_name, address, timeout_s=TIMEOUT_S, heartbeat_s=HEARTBEAT_S) as opened:
        yield opened


def through(url: str, proxy: Proxy) -> str:
    """The URL with the proxy's port."""
    parts = urlsplit(url)
    credentials = parts.netloc.rpartition("@")[0]
    return parts._replace(netloc=f"{credentials}@127.0.0.1:{proxy.port}").geturl()


@pytest.fixture
def stream(amqp_url: str, stream_name: str) -> str:
    """A stream with three messages."""
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


def test_a_frozen_broker_is_noticed_while_waiting(face: Face, proxy: Proxy, stream: str) -> None:
    """A reader that waits for new messages learns by missing heartbeats that nobody is there."""

    def freeze_behind(message: Message) -> None:
        if message.offset == LAST:
            proxy.mode = "frozen"

    with pytest.raises(ConnectionLost):
        face.follow(stream, freeze_behind, idle_timeout_s=LIMIT_S)


def test_a_connection_that_ended_while_idle(face: Face, proxy: Proxy, stream: str) -> None:
    """The next read opens another one, unseen by the caller."""
    for offset in range(LAST + 1):
        assert until_answered(lambda offset=offset: face.read(stream, offset)).body == str(offset).encode()
        proxy.cut()


def test_a_connection_that_ends_while_waiting(face: Face, proxy: Proxy, stream: str) -> None:
    """A reader that waits for new messages is told, and can go on from where it was."""

    def cut_behind(message: Message) -> None:
        if message.offset == LAST:
            proxy.cut()

    with pytest.raises(ConnectionLost):
        face.follow(stream, cut_behind, idle_timeout_s=LIMIT_S)
    assert [message.offset for message in face.iterate(stream, 1)] == [1, 2]


def test_an_idle_connection_is_kept(face: Face, proxy: Proxy, stream: str, face_name: str) -> None:
    """Heartbeats keep an idle stream connection open past the time the broker would close it."""
    if face_name == "asyncio":
        # Its loop does not run between the calls of this suite; it connects anew instead.
        assert until_answered(lambda: face.read(stream, 0)).body == b"0"
        return

    def is_kept() -> bool:
        until_answered(lambda: face.read(stream, 0))
        before, until = proxy.opened, time.monotonic() + 4 * HEARTBEAT_S
        wait_until(lambda: time.monotonic() > until)
        until_answered(lambda: face.read(stream, 1))
        return proxy.opened == before

    in_a_try(is_kept, what="the connection is kept")


@pytest.mark.parametrize("scheme", ["rabbitmq-stream", "amqp"])
def test_nobody_there(face_name: str, scheme: str, amqp_url: str) -> None:
    """A port where nobody listens, and one where nobody answers, are errors in time."""
    with pytest.raises(BrokerUnavailable), open_face(face_name, f"{scheme}://127.0.0.1:{AWAY}/", timeout_s=TIMEOUT_S):
        pass
    parts = urlsplit(amqp_url)
    with Proxy(parts.hostname or "", parts.port or 0) as silent:
        silent.mode = "frozen"
        with (
            in_time(TIMEOUT_S),
            pytest.raises(BrokerUnavailable),
            open_face(face_name, f"{scheme}://127.0.0.1:{silent.port}/", timeout_s=TIMEOUT_S),
        ):
            pass


def test_wrong_password_and_virtual_host(face_name: str, stream_url: str) -> None:
    """Both are refusals, and no message shows the password."""
    parts = urlsplit(stream_url)
    host = parts.netloc.rpartition("@")[2]
    wrong = parts._replace(netloc=f"{parts.username}:canary-7f3a@{host}").geturl()
    with pytest.raises(AccessRefused) as caught, open_face(face_name, wrong):
        pass
    assert "canary" not in str(caught.value)
    with pytest.raises(AccessRefused), open_face(face_name, parts._replace(path="/no-such-vhost").geturl()):
        pass


def test_urls_that_do_not_fit(face_name: str) -> None:
    """A URL that is none, or of the other protocol, is a configuration error that does not show it."""
    for url in ("http://u:canary@h/", "amqp://u:can[ary@h:x/", "", "h:5672"):
        with pytest.raises(ConfigurationError) as caught, open_face(face_name, url):
            pass
        assert "can" not in str(caught.value).split()
    with pytest.raises(ConfigurationError, match="rabbitmq-stream"), open_face(face_name, "amqp://127.0.0.1:100/"):
        pass


@pytest.fixture(scope="module")
def unreadable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRabbitMQ]:
    """A private broker whose user may declare and publish, but not read; with a stream `s`."""
    # Publishing needs `write` on the default exchange, reading `read` on the stream; 3.10 mixes the two up.
    settings = {f"default_permissions.{kind}": "^amq[.]default$" for kind in ("read", "write")}
    settings["default_permissions.configure"] = ".*"
    with LocalRabbitMQ(
        tmp_path_factory.mktemp("unreadable"), configuration=settings, start_timeout_s=START_S
    ) as server:
        declare_stream(server.broker_url, "s")
        publish_plain(server.broker_url, "s", [b"0"])
        yield server


def test_a_user_who_may_not_read(face_name: str, unreadable: LocalRabbitMQ) -> None:
    """Every way of reading says that access is refused."""
    with open_face(face_name, unreadable.broker_url) as face:
        for attempt in (
            lambda: face.read("s", 0),
            lambda: face.bounds("s"),
            lambda: face.iterate("s"),
            lambda: face.batches("s", take=1),
        ):
            with pytest.raises(AccessRefused):
                attempt()
        (result,) = face.read_many([("s", 0)])  # type: ignore[list-item]
        assert isinstance(result, AccessRefused)
