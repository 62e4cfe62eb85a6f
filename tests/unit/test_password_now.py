"""A password that changes: who is asked, how long, and what of it is told."""

import copy
import gc
import pickle
import threading
import traceback
from collections.abc import Callable
from typing import Any

import kombu
import pika
import pytest

from relatum import Broker
from relatum.errors import BrokerUnavailable, ConfigurationError, InvalidInput
from relatum.reading import BrokerAddress, HeldPassword
from relatum.superstreams.connections import address_of

SECRET = "s3cret"


def address(now: Any, **more: Any) -> BrokerAddress:
    return BrokerAddress("h", amqp_port=1, **more).with_password(now)


def of_the_module() -> str:
    return SECRET


def raising(error: BaseException) -> Callable[[], str]:
    def fail() -> str:
        raise error

    return fail


class Connection:
    """What is looked at: a connection with a password."""

    is_closed = False

    def __init__(self, password: str) -> None:
        self.password = password

    def address(self, first: str = "first") -> BrokerAddress:
        """Its address, at first."""
        held = HeldPassword(self, first, lambda connection: connection.password)
        return BrokerAddress("h", "u", first, amqp_port=1).with_password(held)


def test_a_function_is_asked_at_each_login() -> None:
    """It is not asked before, and not remembered."""
    passwords = iter(["a", "b"])
    asked = address(lambda: next(passwords))
    assert [asked.secret(), asked.secret()] == ["a", "b"]
    assert address(lambda: "", others=(BrokerAddress("g", password="own"),)).each[0].secret() == ""


@pytest.mark.parametrize("given", [None, 7, b"bytes", "a\0b", "\udc80"])
def test_what_is_no_password_is_one_error(given: Any) -> None:
    """It says what has to change, and shows nothing."""
    with pytest.raises(ConfigurationError, match=f"returned {type(given).__name__}"):
        address(lambda: given).secret()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_it_raises_is_not_shown(kind: type[BaseException]) -> None:
    """A message may hold the secret; it may pass, so it is tried again. What is no function is refused at once."""
    with pytest.raises(BrokerUnavailable, match=kind.__name__) as caught:
        address(raising(kind(f"of {SECRET}"))).secret()
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(InvalidInput, match="password= takes text or a function"):
        Broker("amqp://h", password=7)  # type: ignore[arg-type]


def test_who_asks_waits_a_while_and_one_thread_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often one tries to log in: the one that was asked answers all."""
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
    """Neither the function nor what it gives is shown; it is sent as such, and of a connection its password of then."""
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
        assert [each.password for each in there.each] == ["second", "first"]
        assert there.password_now is None


def test_the_last_change_counts_and_outlives_its_connection() -> None:
    """Several connections log in alike; one of them goes on.

    A new one takes over where the old one is gone, as after its token has expired; before, they may be two users.
    """
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
    assert not here.is_joined_by(new.address("second"))
    assert here.secret() == "first"
    old.is_closed = True
    assert here.is_joined_by(new.address("second"))
    assert here.secret() == "second"
    assert not here.is_joined_by(BrokerAddress("other", "u", "second", amqp_port=1))


def test_kombu_is_asked_by_who_logs_in_alone() -> None:
    """Not by the thread that publishes, which it may keep waiting."""
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
    """Nobody can log in by them: it is said what to do."""
    credentials = pika.PlainCredentials("u", "p", erase_on_connect=True)
    connection = pika.connection.Connection.__new__(pika.SelectConnection)
    connection.params = pika.ConnectionParameters(credentials=credentials)
    assert address_of(connection).secret() == "p"
    connection.params.credentials.erase_credentials()
    with pytest.raises(ConfigurationError, match="broker="):
        address_of(connection)
