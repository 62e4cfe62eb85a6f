"""An address that is somebody else's, or nobody's: the error names who answers there, or that the name is unknown."""

import socket
import threading
from urllib.parse import urlsplit

import pytest

from relatum.errors import BrokerUnavailable, ConfigurationError
from relatum.recording import Recorder
from relatum_consumer import Relations
from relatum_migrations import upgrade
from tests.contract._faces import FACES, open_face

TIMEOUT_S = 10.0
NOBODY = "nobody.invalid"
"""A name that never resolves. Source: RFC 2606."""


def at(url: str, other: str, scheme: str) -> str:
    """A URL of a scheme with the credentials of one URL, that leads to another one's port."""
    mine, theirs = urlsplit(url), urlsplit(other)
    return f"{scheme}://{mine.username}:{mine.password}@{theirs.hostname}:{theirs.port}/"


@pytest.mark.parametrize("face", FACES)
def test_a_port_that_is_no_stream_port_is_named(face: str, amqp_url: str, database_server_url: str) -> None:
    """AMQP's and PostgreSQL's ports given as `rabbitmq-stream://` are wrong URLs: waiting does not help."""
    for other in (amqp_url, database_server_url):
        url = at(amqp_url, other, "rabbitmq-stream")
        wrong = pytest.raises(ConfigurationError, match="does not speak RabbitMQ's stream protocol")
        with wrong, open_face(face, url, timeout_s=TIMEOUT_S):
            pass


@pytest.mark.parametrize("scheme", ["rabbitmq-stream", "amqp"])
@pytest.mark.parametrize("face", FACES)
def test_a_server_that_accepts_and_says_nothing_did_not_answer_in_time(face: str, scheme: str, amqp_url: str) -> None:
    """A broker that stands still is not said to be missing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = at(amqp_url, f"none://127.0.0.1:{silent.getsockname()[1]}/", scheme)
        words = r"Nothing at .* answered as .* in time"
        with pytest.raises(BrokerUnavailable, match=words), open_face(face, url, timeout_s=1):
            pass


@pytest.mark.parametrize("face", FACES)
def test_tls_on_a_plain_port_is_said_to_fail(face: str, amqp_url: str, stream_url: str) -> None:
    """The stream protocol hangs up in silence; AMQP 0.9.1 answers something else, which no waiting cures."""
    url = at(amqp_url, stream_url, "rabbitmq-stream+tls")
    with (
        pytest.raises(BrokerUnavailable, match=r"TLS with .* failed|No stream protocol"),
        open_face(face, url, timeout_s=TIMEOUT_S),
    ):
        pass
    url = at(amqp_url, amqp_url, "amqps")
    with pytest.raises(ConfigurationError, match="does not speak TLS"), open_face(face, url, timeout_s=TIMEOUT_S):
        pass


def test_a_port_of_rabbitmq_given_as_database_is_named(amqp_url: str) -> None:
    """AMQP's port given as `postgresql://` is a wrong URL, for look-ups and for migrations; waiting does not help."""
    url = at(amqp_url, amqp_url, "postgresql")
    wrong = pytest.raises(ConfigurationError, match="is not PostgreSQL")
    with wrong:
        upgrade(url)
    with Relations(broker=amqp_url, database=url) as relations, wrong:
        relations.find("order_id", 1)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("scheme", ["rabbitmq-stream", "amqp"])
def test_an_unknown_host_is_said_to_be_unknown(face: str, scheme: str) -> None:
    """A host name that does not resolve is named as such, by each way to the broker."""
    unknown = pytest.raises(BrokerUnavailable, match=f"'{NOBODY}' does not resolve")
    with unknown, open_face(face, f"{scheme}://{NOBODY}/", timeout_s=TIMEOUT_S):
        pass


def test_a_recorder_of_a_wrong_port_ends_and_names_it(amqp_url: str, database_url: str) -> None:
    """A recorder that was given AMQP's port as the stream's ends at once: waiting would not cure it."""
    recorder = Recorder(at(amqp_url, amqp_url, "rabbitmq-stream"), database_url, ["orders"])
    with pytest.raises(ConfigurationError, match="does not speak"):
        recorder.run(threading.Event())
