"""Two brokers that have a stream of the same name, and one database: neither is taken for the other."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa

from relatum.errors import AnotherBroker
from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader, claimed_identity
from relatum.recording import Recorder, backfill, forget, status, verify
from relatum.wire import IDENTITY_STREAM
from relatum_consumer import Relations, Status
from tests.support import (
    declare_stream,
    delete_stream,
    publish_plain,
    record,
    recording,
    rows_of,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.rabbitmq_tools import run_tool

pytestmark = pytest.mark.differs


@pytest.fixture
def stream(amqp_url: str, own_broker: LocalRabbitMQ) -> Iterator[str]:
    """A stream that both brokers have, with other messages in each."""
    name = unique_name("both")
    for url, count in ((amqp_url, 5), (own_broker.broker_url, 9)):
        declare_stream(url, name)
        publish_plain(url, name, [(b"%s %d" % (url.encode()[-8:], n), {"order_id": f"o{n}"}) for n in range(count)])
    yield name
    for url in (amqp_url, own_broker.broker_url):
        delete_stream(url, name)


def rows(engine: sa.Engine, stream: str) -> list[tuple[int, UUID | None]]:
    """The generations of a stream, each with its broker."""
    query = sa.text("SELECT generation, broker_id FROM relatum.streams WHERE name = :name ORDER BY generation")
    with engine.begin() as connection:
        return [(row[0], row[1]) for row in connection.execute(query, {"name": stream})]


def id_of(url: str) -> UUID | None:
    """The id of the broker."""
    with StreamReader.open(url) as reader:
        return claimed_identity(reader).broker_id


@pytest.mark.parametrize("first_is_own", [True, False])
def test_another_brokers_stream_is_one_clear_error(
    amqp_url: str, own_broker: LocalRabbitMQ, engine: sa.Engine, stream: str, first_is_own: bool
) -> None:
    """The second broker's recorder, back-fill and comparison say so, name both, and write nothing."""
    one, other = (own_broker.broker_url, amqp_url) if first_is_own else (amqp_url, own_broker.broker_url)
    record(one, engine, stream, keys=["order_id"])
    before = rows_of(engine, stream)
    for ask in (
        lambda: Recorder(other, engine, [stream]).run(threading.Event()),
        lambda: backfill(other, engine, stream),
        lambda: verify(other, engine, [stream]),
    ):
        with pytest.raises(AnotherBroker) as caught:
            ask()
        for url in (one, other):
            assert str(id_of(url))[:8] in str(caught.value)
        assert caught.value.stream == stream
    assert rows_of(engine, stream) == before
    assert rows(engine, stream) == [(1, id_of(one))]
    assert verify(one, engine, [stream]).ok


@pytest.fixture
def shared(amqp_url: str, own_broker: LocalRabbitMQ, engine: sa.Engine, stream: str) -> Iterator[tuple[str, str]]:
    """The name of that stream, which is recorded from the other broker, and of one that is this broker's alone."""
    alone = unique_name("alone")
    declare_stream(amqp_url, alone)
    publish_plain(amqp_url, alone, [(b"mine", {"order_id": "o3"})])
    record(own_broker.broker_url, engine, stream, keys=["order_id"])
    record(amqp_url, engine, alone)
    yield stream, alone
    delete_stream(amqp_url, alone)


def test_lookups_name_another_brokers_stream_or_leave_it_out(
    relations: Relations, shared: tuple[str, str], own_broker: LocalRabbitMQ, engine: sa.Engine
) -> None:
    """Who names it gets the error; who names none gets an answer without it, which says so and is not proven."""
    stream, alone = shared
    for ask in (
        lambda: relations.find("order_id", "o3", streams=stream),
        lambda: relations.find("order_id", "o3", streams=[alone, stream]),
        lambda: relations.trace(("order_id", "o3"), streams=stream),
        lambda: relations.after(relations.find("order_id", "o3", streams=alone)[0], stream),
    ):
        with pytest.raises(AnotherBroker, match=stream):
            ask()
    found = relations.find("order_id", "o3")
    assert [message.body for message in found] == [b"mine"]
    assert (found.status, [each.stream for each in found.left_out]) == (Status.UNPROVEN, [stream])
    assert found.streams == (alone,)
    none = relations.find("order_id", "o8")
    assert (none.status, [each.stream for each in none.left_out]) == (Status.UNPROVEN, [stream])
    assert "another" in none.left_out[0].reason or "recorded from the broker" in none.left_out[0].reason
    traced = relations.trace(("order_id", "o3"))
    assert [each.stream for each in traced.left_out] == [stream]
    assert relations.find("order_id", "o3", streams=alone).status is Status.FOUND
    assert not relations.find("order_id", "o8", streams=alone)
    # Whose it is has no trouble.
    with Relations(own_broker.broker_url, engine) as others:
        assert others.find("order_id", "o8").status is Status.UNPROVEN
        assert others.find("order_id", "o8", streams=stream).status is Status.FOUND
