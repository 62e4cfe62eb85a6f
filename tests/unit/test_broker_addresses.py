"""Addresses of a broker: how URLs name several, how to log in, and passwords that change."""

import copy
import gc
import pickle
import ssl
import threading
import traceback
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import kombu
import pika
import pytest

from relatum import Broker
from relatum.errors import BrokerUnavailable, ConfigurationError
from relatum.reading import BrokerAddress, BrokerLogin, HeldPassword
from relatum.superstreams.connections import address_of
from tests.support.tls import FILES

CERTIFICATE, KEY = FILES / "certificate.pem", FILES / "key.pem"
OTHER_KEY = "-----BEGIN PRIVATE KEY-----\nnone\n-----END PRIVATE KEY-----\n"


def where(address: BrokerAddress) -> list[str]:
    return [each.where for each in address.each]


@pytest.mark.parametrize("between", [";", ",", " ; ", ",\n"])
def test_urls_are_parted_by_either_character(between: str) -> None:
    """URLs are separated by semicolons or commas, and passwords may contain both."""
    address = BrokerAddress.parse(between.join(["amqp://u:p,a;b@a/v", "amqp://u:p@b:5673/v", "amqps://u:p@c/v;"]))
    assert where(address) == ["a:5672", "b:5673", "c:5671"]
    assert [each.password for each in address.each] == ["p,a;b", "p", "p"]
    assert [each.stream_port for each in address.each] == [5552, 5553, 5551]
    assert str(address) == "amqp://u@a:5672/v (or b:5673, c:5671)"
    assert pickle.loads(pickle.dumps(address)) == address
    alone = BrokerAddress.parse("amqp://u:p@a/v;")
    assert (alone, alone.each) == (BrokerAddress.parse("amqp://u:p@a/v"), (alone,))


def test_stream_urls_and_options_of_the_login_belong_to_each() -> None:
    """Stream URLs match the others one by one, and options of the login need TLS in each URL."""
    address = BrokerAddress.of(Broker("amqp://a;amqp://b", stream_url="rabbitmq-stream://a:1;rabbitmq-stream://b:2"))
    assert [each.stream_port for each in address.each] == [1, 2]
    with pytest.raises(ConfigurationError, match="as many stream URLs as AMQP URLs"):
        Broker("amqp://a;amqp://b", stream_url="rabbitmq-stream://a:1")
    context = ssl.create_default_context()
    address = BrokerAddress.of(Broker("amqps://a;amqps://b", ssl_context=context))
    assert [each.login.ssl_context for each in address.each] == [context, context]
    with pytest.raises(ConfigurationError, match="need a URL with TLS"):
        Broker("amqps://a;amqp://b", ssl_context=context)


@pytest.mark.parametrize(
    ("url", "host", "password", "vhost"),
    [
        ("amqp://u:p%40ss%2Fword@host", "host", "p@ss/word", "/"),
        ("amqp://u:p@ss@host/a%40b", "host", "p@ss", "a@b"),
        ("amqp://u:p@[::1]:5672/v", "::1", "p", "v"),
        ("amqps://u:p@host/?certfile=/a/me@here.pem", "host", "p", "/"),
    ],
)
def test_what_is_quoted_is_read(url: str, host: str, password: str, vhost: str) -> None:
    """What a URL may hold is not taken for a mistake."""
    address = BrokerAddress.parse(url)
    assert (address.host, address.password, address.vhost) == (host, password, vhost)


def test_of_a_clients_connection() -> None:
    """The current node of kombu or pika comes first, then the other nodes of the same virtual host."""
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
    """A broker is a frozen value that pickles, shows no password, and prefers its own password to the URL's."""
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


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("amqp://h/?cacertfile=/ca.pem", "need a URL with TLS"),
        ("rabbitmq-stream://h/?auth_mechanism=external&certfile=/c", "need a URL with TLS"),
        ("amqps://h/?verify=maybe", "'verify' has an invalid value"),
        ("amqps://h/?auth_mechanism=amqplain", "'auth_mechanism' has an invalid value"),
        ("amqps://h/?cacertfile=/a&cafile=/b", "different values for one option"),
        ("amqps://h/?auth_mechanism=external", "client certificate"),
        ("amqps://h/?keyfile=/k", "needs its certificate"),
        ("amqps://h/?cacertfile=/nowhere/ca.pem", "'/nowhere/ca.pem' cannot be read: No such file"),
        (f"amqps://h/?cacertfile={KEY}", "no certificate in PEM"),
        (f"amqps://h/?certfile={CERTIFICATE}", "no certificate with its key"),
        ("amqp://user:secret@host:99999", "port in the broker's URL is not a number"),
        ("amqp://user:secret@host:abc/", "port in the broker's URL is not a number"),
        ("amqp://user:secret", "port in the broker's URL is not a number"),
        ("amqp://user:secret@[::1:5672", r"written as \[::1\]:5672"),
        ("amqp://user:sec[ret@host", "%5B"),
        ("amqp://relatum:p@sec/ret@host", "%40"),
        ("amqp://relatum:sec/ret@host", "%2F"),
        ("amqp://relatum:sec?ret@host", "%3F"),
        ("amqp://relatum:p@sec#ret@host", "%23"),
        ("rabbitmq-stream://relatum:12/sec@host", "%2F"),
        ("http://user:secret@host", "must begin with one of"),
        (f"amqp://user:secret@{'h' * 64}/", "over 63 characters"),
        ("amqp://user:secret@a..b/", "over 63 characters"),
        # They would name other streams, or one is incomplete.
        ("amqp://u:secret@a/v;amqp://u:secret@b/w", "the same virtual host"),
        ("amqp://u:secret@a;b", "must be complete"),
        ("amqp://u:secret@a,b:5672/v", "must be complete"),
    ],
)
def test_what_cannot_be_is_one_error(url: str, words: str) -> None:
    """The error names what is wrong, comes before anything connects, and shows no password."""
    for make in (BrokerAddress.of, lambda url: BrokerAddress.of(Broker(url))):
        with pytest.raises(ConfigurationError, match=words) as refused:
            make(url)
        assert "sec" not in str(refused.value)


def test_a_key_of_another_certificate_is_named_and_not_shown(tmp_path: Path) -> None:
    """Neither a key nor a password is shown by an error or a representation."""
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
    """Options of RabbitMQ and aiormq mean the same; an unknown one is named once, without its value."""
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
    """A login of files or text can be pickled; one with a TLS context cannot."""
    login = BrokerLogin(ca_text=CERTIFICATE.read_text(), certificate=str(CERTIFICATE), key=str(KEY))
    address = BrokerAddress("h", amqp_port=5671, amqp_tls=True, login=login)
    assert pickle.loads(pickle.dumps(address)) == address
    assert isinstance(pickle.loads(pickle.dumps(login)).tls_context(), ssl.SSLContext)
    context = ssl.create_default_context()
    for unsendable in (BrokerLogin(ssl_context=context), Broker("amqps://h", ssl_context=context)):
        with pytest.raises(ConfigurationError, match="cannot be sent"):
            pickle.dumps(unsendable)


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    """A renewed certificate is taken from the next connection on; until then one context serves all."""
    ca = tmp_path / "ca.pem"
    ca.write_text(CERTIFICATE.read_text())
    login = BrokerLogin(ca=str(ca))
    first = login.tls_context()
    assert login.tls_context() is first
    ca.write_text(CERTIFICATE.read_text() + "\n")
    assert login.tls_context() is not first


SECRET = "s3cret"


def address(now: Any, **more: Any) -> BrokerAddress:
    return BrokerAddress("h", amqp_port=1, **more).with_password(now)


def of_the_module() -> str:
    return SECRET


def raising(error: BaseException) -> Callable[[], str]:
    def fail() -> str:
        raise error

    return fail


@dataclass(eq=False)
class Connection:
    """A connection whose password may change."""

    password: str
    is_closed: bool = False

    def address(self, first: str = "first") -> BrokerAddress:
        held = HeldPassword(self, first, lambda connection: connection.password)
        return BrokerAddress("h", "u", first, amqp_port=1).with_password(held)


def test_a_function_is_asked_at_each_login() -> None:
    """A password function is called at each login, and not before."""
    passwords = iter(["a", "b"])
    asked = address(lambda: next(passwords))
    assert [asked.secret(), asked.secret()] == ["a", "b"]
    assert address(lambda: "", others=(BrokerAddress("g", password="own"),)).each[0].secret() == ""


@pytest.mark.parametrize("given", [None, 7, b"bytes", "a\0b", "\udc80"])
def test_what_is_no_password_is_one_error(given: Any) -> None:
    """A result that is not a password is an error that names its type alone."""
    with pytest.raises(ConfigurationError, match=f"returned {type(given).__name__}"):
        address(lambda: given).secret()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_it_raises_is_not_shown(kind: type[BaseException]) -> None:
    """An error of the password function is transient, and its message, which may hold the secret, is not shown."""
    with pytest.raises(BrokerUnavailable, match=kind.__name__) as caught:
        address(raising(kind(f"of {SECRET}"))).secret()
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_who_asks_waits_a_while_and_one_thread_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A password function that hangs is called once; its callers time out, and its answer serves all."""
    monkeypatch.setattr("relatum.reading._login.PASSWORD_S", 0.05)
    released, calls = threading.Event(), []

    def blocking() -> str:
        calls.append(None)
        released.wait(90)
        return SECRET

    asked = address(blocking)
    for _ in range(3):
        with pytest.raises(BrokerUnavailable, match="did not return within"):
            asked.secret()
    monkeypatch.setattr("relatum.reading._login.PASSWORD_S", 60)
    released.set()
    assert asked.secret() == SECRET
    assert len(calls) in (1, 2)


def test_no_secret_is_shown_or_goes_to_other_processes() -> None:
    """No secret is shown; a function is pickled as such, and a connection as its current password."""
    shown = address(of_the_module)
    assert SECRET not in repr(shown) + str(shown)
    assert "password" not in repr(shown)
    assert shown == BrokerAddress("h", amqp_port=1)
    assert hash(shown) == hash(BrokerAddress("h", amqp_port=1))
    assert SECRET.encode() not in pickle.dumps(shown)
    sent = pickle.loads(pickle.dumps(shown))
    assert (sent.secret(), sent.password) == (SECRET, "guest")
    connection = Connection("first")
    here = connection.address().beside([BrokerAddress("g", "u", "first", amqp_port=1)])
    connection.password = "second"
    for there in (pickle.loads(pickle.dumps(here)), copy.deepcopy(here)):
        assert ([each.password for each in there.each], there.password_now) == (["second", "first"], None)


def test_the_last_change_counts_and_outlives_its_connection() -> None:
    """The latest password of joined connections counts; a new connection joins only once the old one is closed."""
    connection, other = Connection("first"), Connection("first")
    here = connection.address()
    assert here.secret() == "first"
    assert here.is_joined_by(other.address())
    connection.password = "second"
    assert here.secret() == "second"
    other.password = "third"
    assert here.secret() == "third"
    other.password = None  # type: ignore[assignment]
    del connection, other
    gc.collect()
    assert here.secret() == "third"
    old, new = Connection("first"), Connection("second")
    here = old.address()
    assert (here.is_joined_by(new.address("second")), here.secret()) == (False, "first")
    old.is_closed = True
    assert (here.is_joined_by(new.address("second")), here.secret()) == (True, "second")
    assert not here.is_joined_by(BrokerAddress("other", "u", "second", amqp_port=1))


def test_kombu_is_asked_by_who_logs_in_alone() -> None:
    """Kombu's password function is called at the login and not by the thread that publishes."""
    password = raising(OSError())
    connection = kombu.Connection(hostname="h;amqp://v:own@g//", userid="u", password=password)
    of_both = address_of(connection)
    first, *others = of_both.each
    with pytest.raises(BrokerUnavailable, match="raised OSError"):
        first.secret()
    assert [(each.user, each.secret()) for each in others] == [("v", "own")]
    same = address_of(kombu.Connection(hostname="h;amqp://v:own@g//", userid="u", password=password))
    assert same.password_function == of_both.password_function
    assert hash(same.password_function) == hash(of_both.password_function)


def test_erased_credentials_are_one_error() -> None:
    """Credentials that pika has erased are an error that says what to set."""
    credentials = pika.PlainCredentials("u", "p", erase_on_connect=True)
    connection = pika.connection.Connection.__new__(pika.SelectConnection)
    connection.params = pika.ConnectionParameters(credentials=credentials)
    assert address_of(connection).secret() == "p"
    connection.params.credentials.erase_credentials()
    with pytest.raises(ConfigurationError, match="broker="):
        address_of(connection)
