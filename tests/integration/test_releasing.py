"""What `release` leaves unrecorded: it is said and counted, and the next recorder of the stream records it."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import aio_pika
import pika
import psycopg
import pytest
import sqlalchemy as sa

import relatum
from relatum.local import LocalServers
from relatum.store import make_engine
from relatum_migrations import upgrade
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    record,
    recorded_to,
    rows_of,
    unique_name,
    wait_until,
)
from tests.support.standstill import in_time

RELEASE_S = 2.0
"""What `release` takes at most, as its documentation says."""


@contextmanager
def stopped(servers: LocalServers) -> Iterator[None]:
    """PostgreSQL is not there."""
    servers.postgresql.stop()
    yield
    servers.postgresql.start()


@contextmanager
def frozen(servers: LocalServers) -> Iterator[None]:
    """PostgreSQL takes connections and answers nothing."""
    servers.postgresql.freeze()
    yield
    servers.postgresql.thaw()


@contextmanager
def slow(servers: LocalServers) -> Iterator[None]:
    """Somebody else holds a table that is written to."""
    with psycopg.connect(servers.database_url) as session:
        session.execute("LOCK TABLE relatum.coverage")
        yield


TROUBLES = (stopped, frozen, slow)


def options_of(servers: LocalServers) -> dict[str, Any]:
    """How connections are intercepted here."""
    return {"database": servers.database_url, "stream_url": servers.rabbitmq.stream_url, "keys": ["order_id"]}


async def of_pika(servers: LocalServers, stream: str, acts: list[Any], **options: Any) -> Any:
    """Publish an order for each text, call the rest, release a connection of pika, and give what that left."""
    with broker_connection(servers.rabbitmq.broker_url) as connection:
        channel = relatum.intercept(connection, **options_of(servers), **options).channel()
        channel.confirm_delivery()
        for act in acts:
            if callable(act):
                act()
            else:
                channel.basic_publish("", stream, b"", pika.BasicProperties(headers={"order_id": act}))
        with in_time(RELEASE_S):
            assert relatum.release(connection) is connection
        return relatum.statistics(connection).left


async def of_aio_pika(servers: LocalServers, stream: str, acts: list[Any], **options: Any) -> Any:
    """The same with aio-pika."""
    async with await aio_pika.connect_robust(servers.rabbitmq.broker_url) as connection:
        channel = await relatum.intercept(connection, **options_of(servers), **options).channel()
        for act in acts:
            if callable(act):
                await asyncio.to_thread(act)
            else:
                await channel.default_exchange.publish(aio_pika.Message(b"", headers={"order_id": act}), stream)
        with in_time(RELEASE_S):
            await asyncio.to_thread(relatum.release, connection)
        return relatum.statistics(connection).left


FACES = (of_pika, of_aio_pika)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of messages that are not recorded."""
    lines = [each.getMessage() for each in caplog.records if each.name == "relatum.recorder"]
    return [line for line in lines if "ends with messages that are not recorded" in line]


@pytest.fixture
def servers(private_servers: LocalServers) -> LocalServers:
    """Servers that may be stopped, with the tables."""
    upgrade(private_servers.database_url)
    return private_servers


@pytest.fixture
def stream(servers: LocalServers) -> str:
    """A new stream."""
    name = unique_name()
    declare_stream(servers.rabbitmq.broker_url, name)
    return name


@pytest.fixture
def own_engine(servers: LocalServers) -> Iterator[sa.Engine]:
    """An engine on their database."""
    engine = make_engine(servers.database_url)
    yield engine
    engine.dispose()


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("publish", FACES)
async def test_what_is_left_is_said_and_recorded_next(
    servers: LocalServers,
    stream: str,
    own_engine: sa.Engine,
    caplog: pytest.LogCaptureFixture,
    publish: Any,
    trouble: Any,
) -> None:
    """One warning and `statistics` say how many of which stream; a recorder that starts later has all, once."""
    with ExitStack() as stack:

        def begin() -> None:
            wait_until(lambda: recorded_to(own_engine, stream) == 1, what="the first message recorded")
            own_engine.dispose()
            stack.enter_context(trouble(servers))

        left = await publish(servers, stream, ["a", begin, "b", "c"])
    assert left == {stream: 2}
    [line] = said(caplog)
    assert f"2 of {stream!r}" in line
    record(servers.rabbitmq.broker_url, own_engine, stream)
    assert rows_of(own_engine, stream) == [("order_id", "a", 0), ("order_id", "b", 1), ("order_id", "c", 2)]


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("publish", FACES)
async def test_what_was_never_looked_at_is_said(
    servers: LocalServers,
    stream: str,
    own_engine: sa.Engine,
    caplog: pytest.LogCaptureFixture,
    publish: Any,
    trouble: Any,
) -> None:
    """Where PostgreSQL never answered, nobody knows how many: the stream is named all the same."""
    with trouble(servers):
        left = await publish(servers, stream, ["a", "b"])
    assert left == {stream: None}
    [line] = said(caplog)
    assert repr(stream) in line
    record(servers.rabbitmq.broker_url, own_engine, stream, keys=["order_id"])
    assert rows_of(own_engine, stream) == [("order_id", "a", 0), ("order_id", "b", 1)]


@pytest.mark.parametrize("publish", FACES)
async def test_nothing_is_said_where_nothing_is_left(
    servers: LocalServers, stream: str, own_engine: sa.Engine, caplog: pytest.LogCaptureFixture, publish: Any
) -> None:
    """Also where PostgreSQL stops once all is recorded, and of a stream that was deleted."""
    gone = unique_name()
    declare_stream(servers.rabbitmq.broker_url, gone)

    def stop_when_recorded() -> None:
        wait_until(lambda: recorded_to(own_engine, stream) == 1, what="the message recorded")
        own_engine.dispose()
        delete_stream(servers.rabbitmq.broker_url, gone)
        wait_until(lambda: f"There is no stream {gone!r}" in caplog.text, what="the stream is missed")
        servers.postgresql.stop()

    assert await publish(servers, stream, ["a", stop_when_recorded], streams=[gone]) == {}
    assert not said(caplog)
