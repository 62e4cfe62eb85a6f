"""Several addresses of one broker: how URLs name them, and whose turn it is."""

import pickle

import pika
import pytest

from relatum.errors import AccessRefused, BrokerUnavailable, ConfigurationError, ReadTimeout, UsedAfterClose
from relatum.reading import BrokerAddress
from relatum.reading._failing_over import Attempts
from relatum.superstreams import address_of
from tests.support import unique_name


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


def test_stream_urls_belong_to_urls_in_their_order() -> None:
    """As many of them, or it is an error."""
    address = BrokerAddress.parse("amqp://a;amqp://b", "rabbitmq-stream://a:1;rabbitmq-stream://b:2")
    assert [each.stream_port for each in address.each] == [1, 2]
    with pytest.raises(ConfigurationError, match="as many stream URLs"):
        BrokerAddress.parse("amqp://a;amqp://b", "rabbitmq-stream://a:1")


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        ("amqp://u:secret@a/v;amqp://u:secret@b/w", "the same virtual host"),
        ("amqp://u:secret@a;b", "each one is whole"),
        ("amqp://u:secret@a,b:5672/v", "each one is whole"),
    ],
)
def test_urls_that_cannot_be_together(urls: str, said: str) -> None:
    """They would lead to other streams, or one is not whole; no password is shown."""
    with pytest.raises(ConfigurationError, match=said) as refused:
        BrokerAddress.parse(urls)
    assert "secret" not in str(refused.value)


def test_options_of_the_login_are_those_of_each() -> None:
    """A URL with TLS is needed for each of them."""
    address = BrokerAddress.parse("amqps://a;amqps://b").logging_in(verifies=False)
    assert [each.login.verifies for each in address.each] == [False, False]
    with pytest.raises(ConfigurationError, match="need a URL with TLS"):
        BrokerAddress.parse("amqps://a;amqp://b").logging_in(verifies=False)


def test_of_a_clients_connection() -> None:
    """The one that kombu is at comes first; names of hosts are understood, and what leads elsewhere is left out."""
    kombu = pytest.importorskip("kombu")
    given = ["amqp://u:p@a//", "b", "pyamqp://u:p@c:5673//", "amqp://u:p@d/other", "redis://e", "amqp://u:p@f"]
    connection = kombu.Connection(given)
    assert where(address_of(connection)) == ["a:5672", "b:5672", "c:5673", "f:5672"]
    assert {each.user for each in address_of(connection).each} == {"u"}
    connection.maybe_switch_next()
    assert where(address_of(connection)) == ["b:5672", "a:5672", "c:5673", "f:5672"]
    assert where(address_of(connection, "rabbitmq-stream://b:1")) == ["b:5672"]


def test_of_a_connection_of_pika_beside_other_nodes() -> None:
    """What dramatiq gives pika: parameters of each node."""
    nodes = [pika.ConnectionParameters("a"), pika.ConnectionParameters("b"), pika.ConnectionParameters("c", 1, "other")]
    connection = pika.BaseConnection.__new__(pika.SelectConnection)
    connection.params = nodes[1]
    assert where(address_of(connection, nodes=nodes)) == ["b:5672", "a:5672"]


@pytest.fixture
def address() -> BrokerAddress:
    """Three addresses that no other test knows."""
    name = unique_name()
    return BrokerAddress.parse(";".join(f"amqp://{name}-{each}" for each in "abc"))


def tried(address: BrokerAddress, **errors: Exception) -> str:
    """The addresses that are tried, by their last letters, until one raises no error."""
    attempts, seen = Attempts(address, 9.0), ""
    while True:
        with attempts as (one, share_s):
            seen += one.host[-1]
            assert 9.0 / (4 - len(seen)) * 0.9 < share_s <= 9.0 / (4 - len(seen))
            if seen[-1] in errors:
                raise errors[seen[-1]]
            return seen


def test_whose_turn_it_is(address: BrokerAddress, caplog: pytest.LogCaptureFixture) -> None:
    """The first one's; then that of who answered last, who keeps it; each change is one line in the log."""
    gone = BrokerUnavailable("gone")
    assert (tried(address), caplog.messages) == ("a", [])
    assert tried(address, a=gone) == "ab"
    assert tried(address, a=gone) == tried(address) == "b"
    (line,) = caplog.messages
    assert f"{address.each[1].where} is used from now on, not at {address.where}: BrokerUnavailable: gone" in line
    assert "(or " not in line
    assert tried(address, b=gone, c=ReadTimeout("silent")) == "bca"
    assert len(caplog.messages) == 2


def test_nobody_answers(address: BrokerAddress, caplog: pytest.LogCaptureFixture) -> None:
    """All are tried once, and what each said is told; an error that somebody must act on goes before."""
    silent = [BrokerUnavailable(f"{each} is gone") for each in "abc"]
    with pytest.raises(BrokerUnavailable, match=r"No address answers\. a is gone b is gone c is gone"):
        tried(address, a=silent[0], b=silent[1], c=silent[2])
    refused = AccessRefused("no such user")
    with pytest.raises(AccessRefused, match="no such user"):
        tried(address, a=silent[0], b=refused, c=silent[2])
    assert tried(address, a=refused) == "ab"
    with pytest.raises(UsedAfterClose):
        tried(address, b=UsedAfterClose("closed"))
    with pytest.raises(ZeroDivisionError):
        tried(address, b=ZeroDivisionError())
