"""What users of the broker may do, and need, where contexts are published, moved and consumed."""

import pytest
from pika import BasicProperties

import relatum
from relatum.contexts import SerializationContexts, verify
from relatum.errors import AccessRefused, PublishOutcomeUnknown
from relatum.local import LocalRabbitMQ
from relatum.superstreams import declare_super_stream
from tests.support import broker_connection
from tests.support.routing import consumed, sleeping
from tests.support.tapped import add_users, as_user

USERS = {
    "publisher": ("^(moved|slept)$", "^$"),
    "publisher-that-adopts": (r"^(slept|amq\.default)$", "^slept-.*$"),
    "mover": (r"^amq\.default$", "^moved-.*$"),
    "consumer": ("^$", "^moved-.*$"),
}
"""What each user may write to and read."""

ACCOUNT = BasicProperties(headers={"serialization_context": "17"})

Urls = dict[str, str]


@pytest.fixture(scope="module")
def urls(own_broker: LocalRabbitMQ) -> Urls:
    """URLs of a broker of this module, by user; "owner" may do all."""
    owner = own_broker.broker_url
    for name in ("moved", "slept"):
        declare_super_stream(owner, name, 2)
    add_users(own_broker, {name: ("^$", *rights) for name, rights in USERS.items()})
    return {"owner": owner, **{name: as_user(owner, name) for name in USERS}}


def other_than(super_stream: str, partition: str) -> str:
    """The other one of two partitions."""
    (other,) = {f"{super_stream}-0", f"{super_stream}-1"} - {partition}
    return other


def test_what_each_party_needs(urls: Urls, database_url: str) -> None:
    """Publishers write to the super stream and movers to the default exchange; consumers read, and so do movers."""
    with broker_connection(urls["publisher"]) as connection, relatum.ContextRouter("moved", database_url) as router:
        channel = connection.channel()
        channel.confirm_delivery()
        router.publish(channel, b"1", ACCOUNT)
        with SerializationContexts("moved", database_url, broker=urls["consumer"]) as contexts:
            target = other_than("moved", contexts.assignment_of("17").partition)
            # Told at once, and not tried again as if the broker was away.
            with pytest.raises(AccessRefused, match=r"stands still.*amq\.default") as caught:
                contexts.move("17", target)
        with SerializationContexts("moved", database_url, broker=urls["mover"]) as contexts:
            contexts.resume(caught.value.move_id)
            assert contexts.assignment_of("17").partition == target
        router.publish(channel, b"2", ACCOUNT)
    assert consumed("moved", database_url, urls["consumer"], 2) == {"17": [b"1", b"2"]}
    assert verify("moved", broker=urls["consumer"], database=database_url).ok


def publish_asleep(user: str, urls: Urls, database_url: str, body: bytes) -> None:
    """Publish a message whose context moves just before it is sent."""
    with (
        broker_connection(urls[user]) as connection,
        relatum.ContextRouter("slept", database_url) as router,
        SerializationContexts("slept", database_url, broker=urls["owner"]) as contexts,
    ):
        channel = connection.channel()
        channel.confirm_delivery()
        router.publish(channel, b"before " + body, ACCOUNT)
        target = other_than("slept", contexts.assignment_of("17").partition)
        sleeping(channel, lambda: contexts.move("17", target))
        router.publish(channel, body, ACCOUNT)


def test_a_stray_needs_the_permissions_to_read_and_to_adopt(urls: Urls, database_url: str) -> None:
    """A publisher without them is never told that a message counts which lies behind its context's fence."""
    publish_asleep("publisher-that-adopts", urls, database_url, b"adopted")
    with pytest.raises(AccessRefused, match="refuses this user") as caught:
        publish_asleep("publisher", urls, database_url, b"not adopted")
    # The router's end tried once more; before that, the publisher had been told that the outcome is not known.
    assert isinstance(caught.value.__context__, PublishOutcomeUnknown)
    report = verify("slept", broker=urls["owner"], database=database_url)
    assert report.ok
    assert (report.strays, report.adopted) == (2, 1)
    assert consumed("slept", database_url, urls["owner"], 3) == {
        "17": [b"before adopted", b"adopted", b"before not adopted"]
    }
