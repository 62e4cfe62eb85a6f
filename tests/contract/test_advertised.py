"""Names that nodes advertise and nobody reaches from here; and a broker that does not speak the stream protocol."""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from relatum.errors import BrokerUnavailable, StreamUnavailable
from relatum.local import LocalRabbitMQ
from relatum.reading import BrokerAddress
from tests.contract._faces import FACES, open_face
from tests.contract._node import EmptyNode
from tests.support import START_S, declare_stream, in_a_try, publish_plain

NOBODY = "nobody.invalid"
"""A name that never resolves. Source: RFC 2606."""

CALLS = 10


@pytest.fixture(params=["unknown", "dropped"])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """Where a node advertises to be: under a name that is not known here, or behind what drops connections."""
    if request.param == "unknown":
        yield NOBODY, 5552
        return
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        # Connections that are not accepted: the system drops who comes after them.
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()


@pytest.mark.parametrize("face", FACES)
def test_a_leader_that_is_not_reached_is_named(face: str, elsewhere: tuple[str, int], stream_url: str) -> None:
    """One error within the call's time says the name and the setting; it is not tried anew by each call."""
    host, port = elsewhere
    words = rf"advertises {host}:{port} .*stream\.advertised_host"

    def is_in_time() -> bool:
        with EmptyNode(port, host) as node:
            parts = urlsplit(stream_url)
            url = parts._replace(netloc=f"{parts.netloc.rpartition('@')[0]}@127.0.0.1:{node.port}").geturl()
            with open_face(face, url, timeout_s=10) as reader:
                began = time.monotonic()
                for _ in range(CALLS):
                    with pytest.raises(StreamUnavailable, match=words):
                        reader.read("orders", 0)
                return time.monotonic() - began < 4.0

    # The name is looked up, or the connection waited for, once in five seconds, for two at most.
    in_a_try(is_in_time, what="ten errors in the time of one connection")


@pytest.mark.parametrize("face", FACES)
def test_a_replica_at_the_given_address_is_read_there(face: str, tmp_path: Path) -> None:
    """Whatever name its node advertises."""
    configuration = {"stream.advertised_host": NOBODY}
    with LocalRabbitMQ(tmp_path / "broker", configuration=configuration, start_timeout_s=START_S) as server:
        declare_stream(server.broker_url, "s")
        publish_plain(server.broker_url, "s", [b"0", b"1"])
        with open_face(face, BrokerAddress.parse(server.broker_url, server.stream_url)) as reader:
            assert reader.bounds("s") == (0, 1)
            assert reader.bounds("s").is_proven
            assert reader.read("s", 1).body == b"1"
            assert [message.body for message in reader.iterate("s")] == [b"0", b"1"]


def test_a_broker_without_the_stream_plugin(tmp_path: Path) -> None:
    """One error says what to run, by a guessed stream port and by a given one."""
    with LocalRabbitMQ(tmp_path / "broker", plugins=(), start_timeout_s=START_S) as server:
        stream_url = server.broker_url.replace("amqp://", "rabbitmq-stream://").replace(
            f":{server.port}", f":{server.stream_port}"
        )
        for face in FACES:
            for address in (BrokerAddress.parse(server.broker_url), BrokerAddress.parse(stream_url)):
                with (
                    pytest.raises(BrokerUnavailable, match="rabbitmq-plugins enable rabbitmq_stream"),
                    open_face(face, address),
                ):
                    pass
