"""What recording costs the servers: connections, threads, transactions, questions."""

import gc
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import sqlalchemy as sa

from relatum.errors import ConfigurationError
from relatum.limits import RECORDER_CONNECTIONS_MAX
from relatum.local import LocalServers
from relatum.recording import Recorder
from relatum.store import Database, make_engine
from relatum_migrations import upgrade
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    publish_plain,
    recorded_to,
    recording,
    stream_available,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.threads import Threads

STREAMS = 60
MANY_STREAMS = 300
THREADS_MAX = 12
BROKER_CONNECTIONS_MAX = 8
REST_S = 8.0


@pytest.fixture
def many_streams(request: pytest.FixtureRequest, amqp_url: str) -> Iterator[list[str]]:
    """The names of many streams, each with one message."""
    prefix = unique_name()
    names = [f"{prefix}-{n}" for n in range(getattr(request, "param", STREAMS))]
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        for name in names:
            channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
            channel.basic_publish("", name, b"m")
    yield names
    for name in names:
        delete_stream(amqp_url, name)


@contextmanager
def running(recorder: Recorder) -> Iterator[None]:
    """Run a recorder in a thread."""
    stop = threading.Event()
    thread = threading.Thread(target=recorder.run, args=[stop])
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(90)
    assert not thread.is_alive()


def rest(seconds: float) -> float:
    """Let time pass in which nothing happens: that is what is measured. Gives how long it was."""
    began = time.monotonic()
    return wait_until(lambda: (took := time.monotonic() - began) >= seconds and took, what="rest")


@pytest.mark.parametrize("connections_max", [1, RECORDER_CONNECTIONS_MAX])
def test_many_streams_need_few_connections(
    amqp_url: str, database_url: str, engine: sa.Engine, many_streams: list[str], connections_max: int, earlier: Threads
) -> None:
    """Whatever the number of streams, a recorder opens as many connections as it may and waits for a free one."""
    role = unique_name("few").replace("-", "_")
    with psycopg.connect(database_url, autocommit=True) as administrator:
        administrator.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'p' CONNECTION LIMIT {connections_max}")
        administrator.execute(f"GRANT relatum_recorder TO {role}")
    parts = urlsplit(database_url)
    url = parts._replace(netloc=f"{role}:p@{parts.netloc.rpartition('@')[2]}").geturl()
    options = {} if connections_max == RECORDER_CONNECTIONS_MAX else {"database_connections_max": connections_max}
    recorder = Recorder(amqp_url, url, many_streams, **options)  # type: ignore[arg-type]
    try:
        with running(recorder):
            wait_until(
                lambda: all(recorded_to(engine, name) == 1 for name in many_streams), limit_s=120, what="all recorded"
            )
            assert len(earlier.begun()) <= THREADS_MAX
        reconnects = [recorder.statistics().streams[name].reconnects for name in many_streams]
        assert not any(reconnects), "nobody failed for want of a connection"
    finally:
        with psycopg.connect(database_url, autocommit=True) as administrator:
            administrator.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize("many_streams", [MANY_STREAMS], indirect=True)
def test_hundreds_of_streams_take_a_dozen_threads_and_a_handful_of_connections(
    amqp_url: str, database_url: str, engine: sa.Engine, many_streams: list[str], earlier: Threads
) -> None:
    """Threads, and connections to both servers, at work and at rest; all is recorded, and nothing failed."""
    recorder = Recorder(amqp_url, database_url, many_streams, keys=["k"])
    with running(recorder):
        wait_until(lambda: recorded(engine, many_streams) == MANY_STREAMS, what="all recorded")
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            for name in many_streams:
                channel.basic_publish("", name, b"m")
        wait_until(lambda: recorded(engine, many_streams) == 2 * MANY_STREAMS, what="all recorded again")
        assert len(earlier.begun()) <= THREADS_MAX
        pool: Any = recorder._engine.pool
        assert pool.checkedin() + pool.checkedout() <= RECORDER_CONNECTIONS_MAX
        follower, reader = recorder._group.follower.statistics(), recorder._group.reader().statistics()
        assert (follower.followed, follower.attached) == (MANY_STREAMS, MANY_STREAMS)
        assert follower.connections + reader.idle + reader.in_use <= BROKER_CONNECTIONS_MAX
        told = recorder.statistics()
    assert all(each.messages == 2 and not each.reconnects for each in told.streams.values())


def recorded(engine: sa.Engine, names: list[str]) -> int:
    """How many messages of these streams are recorded."""
    query = sa.text(
        "SELECT coalesce(sum(to_offset), 0) FROM relatum.coverage JOIN relatum.streams USING (stream_id) "
        "WHERE is_tail AND name = ANY(:names)"
    )
    with engine.begin() as connection:
        return int(connection.execute(query, {"names": names}).scalar_one())


def test_one_that_ends_as_it_begins_leaves_nothing_open(
    amqp_url: str, database_url: str, engine: sa.Engine, many_streams: list[str]
) -> None:
    """Whatever was being opened at that moment is closed: a connection left to the garbage collector is a warning."""
    for _ in range(10):
        recorder = Recorder(amqp_url, database_url, many_streams[:5])
        with running(recorder):
            wait_until(lambda recorder=recorder: recorder._group._has_begun, what="its begin")  # type: ignore[misc]
        gc.collect()


def test_no_connection_at_all_is_a_clear_error() -> None:
    """A recorder without a connection could do nothing."""
    with pytest.raises(ConfigurationError, match="connection"):
        Recorder("amqp://localhost", "postgresql://localhost/d", ["s"], database_connections_max=0)


@pytest.mark.parametrize("is_standby", [False, True], ids=["holder", "standby"])
def test_at_rest_a_process_asks_little_whatever_the_number_of_streams(
    amqp_url: str, database_url: str, engine: sa.Engine, many_streams: list[str], is_standby: bool
) -> None:
    """At most two transactions a second, and none that ends in a rollback: not that of a read either."""
    with running(Recorder(amqp_url, database_url, many_streams, keys=["k"])):
        wait_until(
            lambda: all(recorded_to(engine, name) == 1 for name in many_streams), limit_s=120, what="all recorded"
        )
        counted = Database(database_url, refusing=None)
        ends: Counter[str] = Counter()
        for kind in ("commit", "rollback"):
            sa.event.listen(counted.engine, kind, partial(count, ends, kind))
        names = many_streams
        if not is_standby:
            # The other one has its streams to itself, so this one needs its own.
            names = [f"{name}-b" for name in many_streams]
            with broker_connection(amqp_url) as connection:
                for name in names:
                    connection.channel().queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
        try:
            with running(Recorder(amqp_url, counted, names)):
                wait_until(lambda: all_known(engine, names), what="all opened")
                rest(2.0)
                before = Counter(ends)
                rested_s = rest(REST_S)
                assert 1 <= ends["commit"] - before["commit"] <= 2 * rested_s
                assert ends["rollback"] == 0
        finally:
            counted.close()
            for name in set(names) - set(many_streams):
                delete_stream(amqp_url, name)


def count(ends: Counter[str], kind: str, _connection: sa.Connection) -> None:
    """Count how a transaction ended."""
    ends[kind] += 1


def all_known(engine: sa.Engine, names: list[str]) -> bool:
    """Whether somebody records all these streams."""
    query = sa.text("SELECT count(*) FROM relatum.streams WHERE name = ANY(:names) AND lease_holder IS NOT NULL")
    with engine.begin() as connection:
        return bool(connection.execute(query, {"names": names}).scalar_one() == len(names))


def test_what_is_away_is_said_once_and_said_to_be_back(
    private_servers: LocalServers, caplog: pytest.LogCaptureFixture
) -> None:
    """One line when the broker goes away and one when it is back, of many streams and through many tries."""
    upgrade(private_servers.database_url)
    engine = make_engine(private_servers.database_url)
    names = [f"s{n}" for n in range(5)]
    for name in names:
        declare_stream(private_servers.broker_url, name)
        publish_plain(private_servers.broker_url, name, [b"1"])
    with caplog.at_level(logging.INFO, "relatum.recorder"), recording(private_servers.broker_url, engine, *names):
        for name in names:
            wait_recorded(private_servers.broker_url, engine, name)
        private_servers.rabbitmq.kill()
        wait_until(lambda: said(caplog, "RabbitMQ"), what="the outage in the log")
        rest(3.0)
        private_servers.rabbitmq.start()
        for name in names:
            wait_until(partial(stream_available, private_servers.broker_url, name), what="the stream back")
            publish_plain(private_servers.broker_url, name, [b"2"])
            wait_recorded(private_servers.broker_url, engine, name)
        wait_until(lambda: said(caplog, "back,"), what="its end in the log")
        lines = said(caplog, "")
    engine.dispose()
    assert len(lines) <= 4, lines  # A broker that boots may come and go once more.


def said(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    """The recorder's lines about servers that hold so much."""
    lines = [record.getMessage() for record in caplog.records if record.name == "relatum.recorder"]
    return [line for line in lines if line.startswith("RabbitMQ") and part in line]
