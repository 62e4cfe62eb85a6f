"""URLs that cannot be: one error of configuration, which says what to change and shows no part of a password."""

import psycopg
import pytest

from relatum.checks import checked_name
from relatum.errors import AccessRefused, ConfigurationError, InvalidInput
from relatum.reading import BrokerAddress
from relatum.store import parse_database, translated_errors

LONG = "h" * 64

BROKERS = [
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
    (f"amqp://user:secret@{LONG}/", "over 63 characters"),
    ("amqp://user:secret@a..b/", "over 63 characters"),
]

DATABASES = [
    ("postgresql://user:secret@db/name?connect_timeout=abc", "connect_timeout in the database's URL is a whole number"),
    ("postgresql://user:secret@db/name?keepalives_idle=1.5", "keepalives_idle in the database's URL"),
    ("postgresql://user:secret@db/name?tcp_user_timeout=", "tcp_user_timeout in the database's URL"),
    ("postgresql://us\0er:secret@db/name", "NUL"),
    ("postgresql://user:sec\0ret@db/name", "NUL"),
    ("postgresql://user:secret@db/na\0me", "NUL"),
    ("postgresql://user:sec%00ret@db/name", "NUL"),
    ("postgresql://user:secret@db/name?application_name=%00", "NUL"),
    ("postgresql://user:sec\ud800ret@db/name", "surrogate"),
    (f"postgresql://user:secret@{LONG}/name", "over 63 characters"),
    ("postgresql://user:secret@a..b/name", "over 63 characters"),
]


@pytest.mark.parametrize(("url", "said"), BROKERS)
def test_a_brokers_url_that_cannot_be_says_what_to_change(url: str, said: str) -> None:
    """The port, the brackets or the characters that are to be quoted are named; a password is not shown."""
    with pytest.raises(ConfigurationError, match=said) as refused:
        BrokerAddress.parse(url)
    assert "sec" not in str(refused.value)


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


@pytest.mark.parametrize(("url", "said"), DATABASES)
def test_a_databases_url_that_cannot_be_says_what_to_change(url: str, said: str) -> None:
    """An option or a character that libpq or psycopg refuses is named before anything connects."""
    with pytest.raises(ConfigurationError, match=said) as refused:
        parse_database(url)
    assert "sec" not in str(refused.value)


@pytest.mark.parametrize("number", ["7", "-1", "0", "+3"])
def test_whole_numbers_are_taken(number: str) -> None:
    """Each way in which libpq takes a whole number is taken."""
    assert parse_database(f"postgresql://db/name?connect_timeout={number.replace('+', '%2B')}")


def test_an_option_that_psycopg_refuses_is_configuration() -> None:
    """Also where it is of the environment, or of a caller's own engine, and not of a URL."""
    with pytest.raises(ConfigurationError, match="bad value for connect_timeout"), translated_errors():
        psycopg.connect("host=127.0.0.1 port=1", connect_timeout="abc")


@pytest.mark.parametrize("what", ["schema relatum", "table relationships", "sequence streams_stream_id_seq"])
def test_a_missing_privilege_names_the_roles(what: str) -> None:
    """PostgreSQL's words are followed by the roles that the migration made."""
    with pytest.raises(AccessRefused, match=r"relatum_consumer.*relatum_recorder"), translated_errors():
        raise psycopg.errors.InsufficientPrivilege(f"permission denied for {what}")


def test_a_name_longer_than_any_stream_is_refused() -> None:
    """255 bytes are a name; more is an error at once, before a broker is asked, and is not shown whole."""
    assert checked_name("stream", "é" * 127) == "é" * 127
    with pytest.raises(InvalidInput, match="255 bytes at most") as refused:
        checked_name("stream", "é" * 128)
    assert len(str(refused.value)) < 400
