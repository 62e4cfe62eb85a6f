"""Addresses of a broker: how URLs name several, and how to log in."""

import pickle
import ssl
from dataclasses import FrozenInstanceError
from pathlib import Path

import kombu
import pika
import pytest

from relatum import Broker
from relatum.errors import ConfigurationError
from relatum.reading import BrokerAddress, BrokerLogin
from relatum.superstreams.connections import address_of
from tests.support.tls import FILES

CERTIFICATE, KEY = FILES / "certificate.pem", FILES / "key.pem"
OTHER_KEY = "-----BEGIN PRIVATE KEY-----\nnone\n-----END PRIVATE KEY-----\n"


def where(address: BrokerAddress) -> list[str]:
    """The hosts and ports of an address, in their order."""
    return [each.where for each in address.each]


@pytest.mark.parametrize("between", [";", ",", " ; ", ",\n"])
def test_urls_are_parted_by_either_character(between: str) -> None:
    """As kombu, Celery and dramatiq part them, or by commas; each is whole, and passwords may hold both characters."""
    address = BrokerAddress.parse(between.join(["amqp://u:p,a;b@a/v", "amqp://u:p@b:5673/v", "amqps://u:p@c/v;"]))
    assert where(address) == ["a:5672", "b:5673", "c:5671"]
    assert [each.password for each in address.each] == ["p,a;b", "p", "p"]
    assert [each.stream_port for each in address.each] == [5552, 5553, 5551]
    assert str(address) == "amqp://u@a:5672/v (or b:5673, c:5671)"
    assert pickle.loads(pickle.dumps(address)) == address
    alone = BrokerAddress.parse("amqp://u:p@a/v;")
    assert (alone, alone.each) == (BrokerAddress.parse("amqp://u:p@a/v"), (alone,))


def test_stream_urls_and_options_of_the_login_belong_to_each() -> None:
    """As many stream URLs, in the order of the others, or it is an error; options need TLS in each of them."""
    address = BrokerAddress.of(Broker("amqp://a;amqp://b", stream_url="rabbitmq-stream://a:1;rabbitmq-stream://b:2"))
    assert [each.stream_port for each in address.each] == [1, 2]
    with pytest.raises(ConfigurationError, match="as many stream URLs"):
        Broker("amqp://a;amqp://b", stream_url="rabbitmq-stream://a:1")
    address = BrokerAddress.parse("amqps://a;amqps://b").logging_in(verifies=False)
    assert [each.login.verifies for each in address.each] == [False, False]
    with pytest.raises(ConfigurationError, match="need a URL with TLS"):
        BrokerAddress.parse("amqps://a;amqp://b").logging_in(verifies=False)


def test_of_a_clients_connection() -> None:
    """The one that kombu is at comes first; names of hosts are understood, and what leads elsewhere is left out.

    So are of pika's the nodes that dramatiq gives it: parameters of each.
    """
    given = ["amqp://u:p@a//", "b", "pyamqp://u:p@c:5673//", "amqp://u:p@d/other", "redis://e", "amqp://u:p@f"]
    connection = kombu.Connection(given)
    assert where(address_of(connection)) == ["a:5672", "b:5672", "c:5673", "f:5672"]
    assert {each.user for each in address_of(connection).each} == {"u"}
    connection.maybe_switch_next()
    assert where(address_of(connection)) == ["b:5672", "a:5672", "c:5673", "f:5672"]
    nodes = [pika.ConnectionParameters("a"), pika.ConnectionParameters("b"), pika.ConnectionParameters("c", 1, "other")]
    of_pika = pika.BaseConnection.__new__(pika.SelectConnection)
    of_pika.params = nodes[1]
    assert where(address_of(of_pika, nodes=nodes)) == ["b:5672", "a:5672"]


def test_a_broker_is_a_value_that_shows_no_password() -> None:
    """Equal by what it was made of, sent as that, frozen; a password beside the URL takes the place of the URL's."""
    made = Broker("amqp://u:hidden@a/v;amqp://w:own@b/v", stream_url="rabbitmq-stream://a:1,rabbitmq-stream://b:2")
    assert made == Broker(made.url, stream_url=made.stream_url) != Broker(made.url)
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(pickle.loads(pickle.dumps(made))) == hash(made)
    assert (repr(made), made.vhost) == ("Broker('amqp://u@a:5672/v (or b:5672)')", "v")
    with pytest.raises(FrozenInstanceError):
        made.url = "amqp://c"  # type: ignore[misc]
    for password in ("later", len):
        told = Broker(made.url, password=password)  # type: ignore[arg-type]
        assert "later" not in repr(told)
        assert told != made
    assert [each.password for each in BrokerAddress.of(Broker(made.url, password="later")).each] == ["later", "own"]


# --- how to log in ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("amqp://h/?cacertfile=/ca.pem", "need a URL with TLS"),
        ("rabbitmq-stream://h/?auth_mechanism=external&certfile=/c", "need a URL with TLS"),
        ("amqps://h/?verify=maybe", "'verify' has an invalid value"),
        ("amqps://h/?auth_mechanism=amqplain", "'auth_mechanism' has an invalid value"),
        ("amqps://h/?cacertfile=/a&cafile=/b", "gives 'ca' two values"),
        ("amqps://h/?auth_mechanism=external", "client certificate"),
        ("amqps://h/?keyfile=/k", "needs its certificate"),
        ("amqps://h/?cacertfile=/nowhere/ca.pem", "'/nowhere/ca.pem' cannot be read: No such file"),
        (f"amqps://h/?cacertfile={KEY}", "no certificate in PEM"),
        (f"amqps://h/?certfile={CERTIFICATE}", "no certificate with its key"),
        ("amqp://user:secret@host:99999", "port in the broker's URL is no number"),
        ("amqp://user:secret@host:abc/", "port in the broker's URL is no number"),
        ("amqp://user:secret", "port in the broker's URL is no number"),
        ("amqp://user:secret@[::1:5672", r"written as \[::1\]:5672"),
        ("amqp://user:sec[ret@host", "%5B"),
        ("amqp://relatum:p@sec/ret@host", "%40"),
        ("amqp://relatum:sec/ret@host", "%2F"),
        ("amqp://relatum:sec?ret@host", "%3F"),
        ("amqp://relatum:p@sec#ret@host", "%23"),
        ("rabbitmq-stream://relatum:12/sec@host", "%2F"),
        ("http://user:secret@host", "begins with one of"),
        (f"amqp://user:secret@{'h' * 64}/", "over 63 characters"),
        ("amqp://user:secret@a..b/", "over 63 characters"),
        # They would lead to other streams, or one is not whole.
        ("amqp://u:secret@a/v;amqp://u:secret@b/w", "the same virtual host"),
        ("amqp://u:secret@a;b", "must be whole"),
        ("amqp://u:secret@a,b:5672/v", "must be whole"),
    ],
)
def test_what_cannot_be_is_one_error(url: str, words: str) -> None:
    """The error names what is wrong, comes before anything connects, and shows no password."""
    for make in (BrokerAddress.of, lambda url: BrokerAddress.of(Broker(url))):
        with pytest.raises(ConfigurationError, match=words) as refused:
            make(url)
        assert "sec" not in str(refused.value)


def test_a_key_of_another_certificate_is_named_and_not_shown(tmp_path: Path) -> None:
    """Neither key nor password is in the error or in what shows the value, nor a key in place of its file."""
    with pytest.raises(ConfigurationError, match="name of a file") as refused:
        BrokerLogin(certificate=str(CERTIFICATE), key=OTHER_KEY)
    assert "none" not in str(refused.value)
    other = tmp_path / "other.pem"
    other.write_text(OTHER_KEY)
    login = BrokerLogin(certificate=str(CERTIFICATE), key=str(other), key_password="hidden")
    with pytest.raises(ConfigurationError, match="client key") as caught:
        login.tls_context()
    for shown in (str(caught.value), repr(login), repr(BrokerAddress("h", amqp_tls=True, login=login))):
        assert "hidden" not in shown
        assert "PRIVATE KEY" not in shown


def test_all_spellings_say_the_same_and_others_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """RabbitMQ's and aiormq's; one that is not known is another client's, or mistyped: it is named, not its value."""
    for ca in ("cacertfile", "cafile"):
        expected = BrokerLogin(ca="/ca", certificate="/c", key="/k")
        assert BrokerAddress.parse(f"amqps://h/?{ca}=/ca&certfile=/c&keyfile=/k").login == expected
    for _ in range(2):
        assert BrokerAddress.parse("amqps://h/?cacertfil=/secret").login == BrokerLogin()
    (line,) = caplog.messages
    assert "'cacertfil'" in line
    assert "cacertfile" in line
    assert "secret" not in line


def test_names_of_files_can_be_sent_and_a_context_cannot() -> None:
    """A value of files or text is pickled as it is; a context is one clear error."""
    login = BrokerLogin(ca_text=CERTIFICATE.read_text(), certificate=str(CERTIFICATE), key=str(KEY))
    address = BrokerAddress("h", amqp_port=5671, amqp_tls=True, login=login)
    assert pickle.loads(pickle.dumps(address)) == address
    assert isinstance(pickle.loads(pickle.dumps(login)).tls_context(), ssl.SSLContext)
    with pytest.raises(ConfigurationError, match="cannot be sent"):
        pickle.dumps(BrokerLogin(ssl_context=ssl.create_default_context()))
    with pytest.raises(ConfigurationError, match="cannot be sent"):
        pickle.dumps(Broker("amqps://h", ssl_context=ssl.create_default_context()))


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    """A renewed certificate is taken from the next connection on; until then one context serves all."""
    ca = tmp_path / "ca.pem"
    ca.write_text(CERTIFICATE.read_text())
    login = BrokerLogin(ca=str(ca))
    first = login.tls_context()
    assert login.tls_context() is first
    ca.write_text(CERTIFICATE.read_text() + "\n")
    assert login.tls_context() is not first
