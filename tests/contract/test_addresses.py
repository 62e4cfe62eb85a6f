"""Which servers a reader trusts and reaches: guessed stream ports, other nodes, and what nodes advertise."""

import contextlib
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from relatum import Broker
from relatum.errors import AccessRefused, BrokerUnavailable, StreamUnavailable
from relatum.local import LocalRabbitMQ
from relatum.reading import BrokerAddress, StreamReader
from relatum.wire import frames
from tests.contract._faces import FACES, open_and_close, open_face, ways
from tests.contract._node import EmptyNode, LaggingNode, SilentLeader, Stranger, deaf
from tests.support import START_S, declare_stream, in_a_try, publish_plain
from tests.support.ports import STREAM_OFFSET, free_port
from tests.support.proxy import Proxy
from tests.support.rabbitmq_tools import add_users, as_user
from tests.support.tls import FILES, Ending

NOBODY = "nobody.invalid"
"""A name that never resolves. Source: RFC 2606."""

CALLS = 10

ANSWERS = {
    "another": frames.table({"cluster_name": "another@host", "version": "4.3"}),
    "nameless": frames.table({"version": "4.3"}),
    "silent": None,
}

ANSWER_S = 12.0
"""A busy machine answers within this time; a silent server is waited for a third of it."""


def at(url: str, port: int, host: str = "127.0.0.1") -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@{host}:{port}").geturl()


@pytest.fixture
def guessing(amqp_url: str) -> Iterator[tuple[str, int]]:
    """A URL of the broker, and the free port that is guessed by it to be the streams'."""
    parts = urlsplit(amqp_url)
    port = free_port((0, STREAM_OFFSET))
    with Proxy(parts.hostname or "", parts.port or 0, listens_on=port):
        yield at(amqp_url, port), port + STREAM_OFFSET


def login_in(url: str) -> bytes:
    parts = urlsplit(url)
    return f"\0{parts.username}\0{parts.password}".encode()


@pytest.mark.parametrize("answer", ANSWERS)
def test_strangers_on_the_guessed_port_get_no_password(face_name: str, answer: str, guessing: tuple[str, int]) -> None:
    """A server that is another broker, gives no name, or is silent gets no credentials, and is an error."""
    url, port = guessing
    words = "in time" if answer == "silent" else "does not belong to the cluster"
    with Stranger(ANSWERS[answer], port) as stranger:
        with pytest.raises(BrokerUnavailable, match=words):
            open_and_close(face_name, url, timeout_s=ANSWER_S)
        assert (stranger.visits, login_in(url) in stranger.told) == (1, False)


def test_who_takes_the_guessed_port_over_is_told_no_password(
    face_name: str, guessing: tuple[str, int], stream_url: str, stream_name: str
) -> None:
    """A reader that connects again asks again: the one that listens now may be another than before."""
    url, port = guessing
    publish_plain(url, stream_name, [b"a"])
    stream = urlsplit(stream_url)
    before = Proxy(stream.hostname or "", stream.port or 0, listens_on=port)
    with before, open_face(face_name, url, timeout_s=ANSWER_S) as reader:
        assert reader.read(stream_name, 0).body == b"a"
        before.close()
        with Stranger(ANSWERS["another"], port) as stranger:
            with pytest.raises(BrokerUnavailable):
                reader.read(stream_name, 0)
            assert (stranger.visits, login_in(url) in stranger.told) == (1, False)


def test_a_stranger_with_a_trusted_certificate_is_told_no_password(amqp_url: str) -> None:
    """A trusted certificate alone gets no credentials: the broker must be the one that the AMQP port belongs to."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(FILES / "certificate.pem", FILES / "key.pem")
    trusting = ssl.create_default_context(cafile=FILES / "certificate.pem")
    port = free_port((0, STREAM_OFFSET))
    url = at(amqp_url, port, "localhost").replace("amqp:", "amqps:")
    with (
        Stranger(ANSWERS["another"], port + STREAM_OFFSET, context) as stranger,
        contextlib.closing(Ending(context, {port: urlsplit(amqp_url).port or 0})),
    ):
        with pytest.raises(BrokerUnavailable, match="does not belong to the cluster"):
            open_and_close("blocking", Broker(url, ssl_context=trusting), timeout_s=ANSWER_S)
        assert (stranger.visits, login_in(amqp_url) in stranger.told) == (1, False)


def test_brokers_are_compared_once(amqp_url: str, stream_url: str) -> None:
    """The AMQP port is asked once whether the stream port is the same broker's, however many readers open."""
    host = urlsplit(stream_url).hostname or ""
    with Proxy.to(amqp_url) as proxy:
        address = BrokerAddress.parse(proxy.url(amqp_url), stream_url)
        for face in FACES * 3:
            open_and_close(face, replace(address, stream_host=host, stream_port_guessed=True))
        assert proxy.opened == 1


def test_a_broker_without_the_stream_plugin(face_name: str, guessing: tuple[str, int], stream_url: str) -> None:
    """Where only AMQP answers, the error names the command that enables the stream plugin."""
    url, port = guessing
    for address in (url, at(stream_url, port)):
        with pytest.raises(BrokerUnavailable, match="rabbitmq-plugins enable rabbitmq_stream"):
            open_and_close(face_name, address)


def test_a_stream_on_another_node(face_name: str, amqp_url: str, stream_url: str, stream_name: str) -> None:
    """A reader goes to the node that has the stream."""
    publish_plain(amqp_url, stream_name, [b"0", b"1"])
    with EmptyNode(urlsplit(stream_url).port or 0) as node, open_face(face_name, at(stream_url, node.port)) as face:
        assert (face.read(stream_name, 1).body, face.bounds(stream_name)) == (b"1", (0, 1))
        assert [message.body for message in face.iterate(stream_name)] == [b"0", b"1"]
        assert [message.body for message in face.read_many([(stream_name, 1)])] == [b"1"]  # type: ignore[list-item]


def test_a_node_that_cannot_be_reached(face_name: str, stream_url: str, stream_name: str) -> None:
    """Where no other node can be reached, the stream is unavailable, in time."""
    with EmptyNode(1) as node, open_face(face_name, at(stream_url, node.port), timeout_s=6) as face:
        for attempt in (lambda: face.read(stream_name, 0), lambda: face.iterate(stream_name)):
            with pytest.raises(StreamUnavailable):
                attempt()


def test_a_leader_that_shows_nothing_of_what_is_written(face_name: str, stream_url: str, stream_name: str) -> None:
    """It is waited for as long as may be, and its stream never taken for empty; one that has nothing written is."""
    with (
        SilentLeader(0) as node,
        open_face(face_name, at(stream_url, node.port), timeout_s=6) as face,
        pytest.raises(StreamUnavailable),
    ):
        face.bounds(stream_name)
    with SilentLeader(-1) as node, open_face(face_name, at(stream_url, node.port)) as face:
        assert face.bounds(stream_name) == (None, None)


def test_a_lagging_node_does_not_end_a_scan_before_its_stop(stream_url: str) -> None:
    """While the leader is unreachable, a scan up to an offset that the reachable node lacks raises an error."""
    with LaggingNode(1) as node, StreamReader.open(at(stream_url, node.port), timeout_s=6) as reader:
        bounds = reader.bounds("s")
        assert (bounds, bounds.is_proven) == ((0, 1), False)
        assert reader.scan("s", 0, 2, lambda message: message.offset) == [0, 1]
        with pytest.raises(StreamUnavailable):
            reader.scan("s", 0, 3, lambda message: message.offset)


@pytest.fixture(params=["unknown", "dropped"])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """Where a node advertises to be: under a name that is not known here, or behind what drops connections."""
    if request.param == "unknown":
        yield NOBODY, 5552
        return
    with deaf() as listener:
        yield listener.getsockname()


def test_a_leader_that_is_not_reached_is_named(face_name: str, elsewhere: tuple[str, int], stream_url: str) -> None:
    """One error within the call's time says the name and the setting; it is not tried again by each call."""
    host, port = elsewhere
    words = rf"advertises {host}:{port} .*stream\.advertised_host"

    def is_in_time() -> bool:
        with EmptyNode(port, host) as node, open_face(face_name, at(stream_url, node.port), timeout_s=10) as reader:
            began = time.monotonic()
            for _ in range(CALLS):
                with pytest.raises(StreamUnavailable, match=words):
                    reader.read("orders", 0)
            return time.monotonic() - began < 4.0

    # The name is resolved, or the connection waited for, once in five seconds, for two at most.
    in_a_try(is_in_time, what="ten errors in the time of one connection")


@pytest.fixture(scope="module")
def misnamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRabbitMQ]:
    """A broker that advertises a name nobody knows, with a stream `s`, and a user "blind" who may not read it."""
    directory, configuration = tmp_path_factory.mktemp("misnamed"), {"stream.advertised_host": NOBODY}
    with LocalRabbitMQ(directory, configuration=configuration, start_timeout_s=START_S) as server:
        # Publishing needs `write` on the default exchange, reading `read` on the stream; 3.10 confuses the two.
        add_users(server, {"blind": (".*", "^amq[.]default$", "^amq[.]default$")})
        declare_stream(server.broker_url, "s")
        publish_plain(server.broker_url, "s", [b"0", b"1"])
        yield server


def test_a_replica_at_the_given_address_is_read_there(face_name: str, misnamed: LocalRabbitMQ) -> None:
    """Whatever name its node advertises."""
    with open_face(face_name, Broker(misnamed.broker_url, stream_url=misnamed.stream_url)) as reader:
        assert reader.bounds("s") == (0, 1)
        assert reader.bounds("s").is_proven
        assert reader.read("s", 1).body == b"1"
        assert [message.body for message in reader.iterate("s")] == [b"0", b"1"]


def test_a_user_who_may_not_read(face_name: str, misnamed: LocalRabbitMQ) -> None:
    """Each way of reading a stream without the permission is refused."""
    with open_face(face_name, as_user(misnamed.broker_url, "blind")) as face:
        for attempt in ways(face, "s"):
            with pytest.raises(AccessRefused):
                attempt()
        (result,) = face.read_many([("s", 0)])  # type: ignore[list-item]
        assert isinstance(result, AccessRefused)
