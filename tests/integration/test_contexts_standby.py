"""Routers and a standby, which may know of a move too late: nothing it says counts."""

from collections.abc import Iterator

import psycopg
import pytest
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum.contexts import ContextOptions, SerializationContexts
from relatum.errors import DatabaseUnavailable
from relatum.local import LocalPostgreSQL
from relatum.superstreams import Layout
from relatum_migrations import upgrade
from tests.support import START_S, wait_until
from tests.support.routing import consumed, of_context, other_than
from tests.support.standby import Standby


@pytest.fixture(scope="module")
def primary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPostgreSQL]:
    with LocalPostgreSQL(tmp_path_factory.mktemp("primary"), durable=False, start_timeout_s=START_S) as server:
        upgrade(server.database_url)
        yield server


@pytest.fixture(scope="module")
def standby(tmp_path_factory: pytest.TempPathFactory, primary: LocalPostgreSQL) -> Iterator[Standby]:
    with Standby(tmp_path_factory.mktemp("standby"), primary) as server:
        yield server


def behind(standby: Standby, *, paused: bool) -> None:
    with psycopg.connect(standby.database_url, autocommit=True) as connection:
        connection.execute("SELECT pg_wal_replay_pause()" if paused else "SELECT pg_wal_replay_resume()")


def placed(standby: Standby, super_stream: str) -> bool:
    """Whether the standby knows of a placement in a super stream."""
    query = "SELECT FROM relatum.placements JOIN relatum.super_streams s USING (super_stream_id) WHERE s.name = %s"
    with psycopg.connect(standby.database_url) as connection:
        return connection.execute(query, [super_stream]).fetchone() is not None


def test_a_standby_tells_no_message_as_published(
    primary: LocalPostgreSQL, standby: Standby, channel: BlockingChannel, layout: Layout, amqp_url: str
) -> None:
    """A router that reaches a standby, which may show an old placement, sends nothing."""
    name, home = layout.super_stream, layout.route("x").stream
    with SerializationContexts(name, primary.database_url, broker=amqp_url) as contexts:
        contexts.assign(["x"], home)
        wait_until(lambda: placed(standby, name), what="the standby has it")
        behind(standby, paused=True)
        try:
            contexts.move(["x"], other_than(layout, home))
            with (
                relatum.ContextRouter(name, standby.database_url, ContextOptions(timeout_s=0.5)) as router,
                pytest.raises(DatabaseUnavailable) as refused,
            ):
                router.publish(channel, b"x", of_context("x"))
            assert refused.value.reason == "read_only"
            with SerializationContexts(name, standby.database_url) as shown:
                assert shown.assignment_of("x").partition == home  # what is only shown may be of a moment ago
                assert shown.status().moves == ()
        finally:
            behind(standby, paused=False)
    assert consumed(name, primary.database_url, amqp_url, 0) == {}


def test_of_several_hosts_the_one_that_takes_writes_is_asked(
    primary: LocalPostgreSQL, standby: Standby, channel: BlockingChannel, layout: Layout, amqp_url: str
) -> None:
    """Of several hosts the primary is used, also if the standby comes first and the URL asks for no kind of server."""
    at = f"127.0.0.1:{primary.port}/"
    hosts = primary.database_url.replace(at, f"127.0.0.1:{standby.port},{at}")
    with relatum.ContextRouter(layout.super_stream, hosts) as router:
        for number in range(3):
            router.publish(channel, b"%d" % number, of_context("x"))
    with SerializationContexts(layout.super_stream, hosts, broker=amqp_url) as contexts:
        contexts.move(["x"], other_than(layout, layout.route("x").stream))
    assert consumed(layout.super_stream, primary.database_url, amqp_url, 3) == {"x": [b"0", b"1", b"2"]}
