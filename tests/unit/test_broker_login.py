"""How to log in to a broker: read from URLs, and refused before anything connects where it cannot be."""

import pickle
import ssl
from pathlib import Path

import pytest

from relatum.errors import ConfigurationError
from relatum.reading import BrokerAddress, BrokerLogin
from tests.support.tls import FILES

CERTIFICATE, KEY = FILES / "certificate.pem", FILES / "key.pem"
OTHER_KEY = "-----BEGIN PRIVATE KEY-----\nnone\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("amqp://h/?cacertfile=/ca.pem", "need a URL with TLS"),
        ("rabbitmq-stream://h/?auth_mechanism=external&certfile=/c", "need a URL with TLS"),
        ("amqps://h/?verify=maybe", "'verify' cannot have that value"),
        ("amqps://h/?auth_mechanism=amqplain", "'auth_mechanism' cannot have that value"),
        ("amqps://h/?cacertfile=/a&cafile=/b", "two things of 'ca'"),
        ("amqps://h/?auth_mechanism=external", "client certificate"),
        ("amqps://h/?keyfile=/k", "needs its certificate"),
        ("amqps://h/?cacertfile=/nowhere/ca.pem", "'/nowhere/ca.pem' cannot be read: No such file"),
        (f"amqps://h/?cacertfile={KEY}", "no certificate in PEM"),
        (f"amqps://h/?certfile={CERTIFICATE}", "no certificate with its key"),
    ],
)
def test_what_cannot_be_is_one_error(url: str, words: str) -> None:
    """The error names what is wrong, and comes before anything connects."""
    with pytest.raises(ConfigurationError, match=words):
        BrokerAddress.of(url)


def test_a_key_of_another_certificate_is_named_and_not_shown() -> None:
    """Neither key nor password is in the error or in what shows the value."""
    login = BrokerLogin(certificate=CERTIFICATE.read_text(), key=OTHER_KEY, key_password="hidden")
    with pytest.raises(ConfigurationError, match=r"client key \(PEM text\)") as caught:
        login.tls_context()
    for shown in (str(caught.value), repr(login), repr(BrokerAddress("h", amqp_tls=True, login=login))):
        assert "hidden" not in shown
        assert "PRIVATE KEY" not in shown


def test_all_spellings_say_the_same() -> None:
    """RabbitMQ's and aiormq's parameters give one value."""
    expected = BrokerLogin(ca="/ca", certificate="/c", key="/k")
    for query in ("cacertfile=/ca&certfile=/c&keyfile=/k", "cafile=/ca&certfile=/c&keyfile=/k"):
        assert BrokerAddress.parse(f"amqps://h/?{query}").login == expected


def test_a_parameter_that_is_not_known_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """It may be another client's, or mistyped: the log names it and those that are known, and shows no value."""
    for _ in range(2):
        assert BrokerAddress.parse("amqps://h/?cacertfil=/secret").login == BrokerLogin()
    (line,) = caplog.messages
    assert "'cacertfil'" in line
    assert "cacertfile" in line
    assert "secret" not in line


def test_text_in_place_of_files_can_be_sent_and_a_context_cannot() -> None:
    """A value of files or text is pickled as it is; a context is one clear error."""
    login = BrokerLogin(ca=CERTIFICATE.read_text(), certificate=CERTIFICATE.read_text(), key=KEY.read_text())
    address = BrokerAddress("h", amqp_port=5671, amqp_tls=True, login=login)
    assert pickle.loads(pickle.dumps(address)) == address
    assert isinstance(pickle.loads(pickle.dumps(login)).tls_context(), ssl.SSLContext)
    with pytest.raises(ConfigurationError, match="cannot be sent"):
        pickle.dumps(BrokerLogin(ssl_context=ssl.create_default_context()))


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    """A renewed certificate is taken from the next connection on; until then one context serves all."""
    ca = tmp_path / "ca.pem"
    ca.write_text(CERTIFICATE.read_text())
    login = BrokerLogin(ca=str(ca))
    first = login.tls_context()
    assert login.tls_context() is first
    ca.write_text(CERTIFICATE.read_text() + "\n")
    assert login.tls_context() is not first
