"""Killing the recorder, the broker and the database under load; then the table must equal the streams, row by row.

The comparison uses neither our reader nor our verification: a bare pika consumer reads the whole stream, and a bare
psycopg connection the table.
"""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pika
import pika.exceptions
import psycopg
import pytest
import sqlalchemy as sa

import relatum
import relatum_migrations
from relatum.local import LocalPostgreSQL, LocalServers
from relatum.recording import status, verify
from relatum.store import make_engine
from tests.acceptance._command import COMMAND, Relatum
from tests.support import (
    START_S,
    all_plain,
    declare_stream,
    delete_stream,
    publish_plain,
    record,
    recorded_to,
    recording,
    rows_of,
    stream_available,
    wait_recorded,
    wait_until,
)
from tests.support.publishing import StubbornLoad

# A bare pika connection that cannot connect, or dies, leaves its loop's pair of sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)

STREAM = "orders"
PUBLISHED_A_SECOND = 2_000


class Load(StubbornLoad):
    """Publishes numbered orders, through whatever happens to the broker."""

    def _publish(self, connection: pika.BlockingConnection) -> None:
        channel = connection.channel()
        while not self._stop.is_set():
            for _ in range(PUBLISHED_A_SECOND // 50):
                number = self.published
                headers = {"order_id": f"o{number}", "host": f"h{number % 17}"}
                channel.basic_publish("", STREAM, b"x" * 100, pika.BasicProperties(headers=headers))
                self.published += 1
            connection.process_data_events(0)
            self._stop.wait(1 / 50)


def stream_by_pika(url: str) -> list[tuple[str, str, int]]:
    """Every message of the stream, read by a bare pika consumer: (key, value, offset) as the table should have it."""
    return [
        (key, properties.headers[key], offset)
        for offset, properties, _ in all_plain(url, STREAM)
        for key in ("host", "order_id")
    ]


def table_by_psycopg(url: str) -> list[tuple[str, str, int]]:
    """Every row of the table, in the same order."""
    with psycopg.connect(url) as connection:
        return connection.execute(
            "SELECT k.name, r.value, r.stream_offset FROM relatum.relationships r JOIN relatum.keys k USING (key_id) "
            "ORDER BY r.stream_offset, k.name"
        ).fetchall()


def assert_equal(servers: "LocalServers | Servers") -> int:
    """Compare the whole stream with the whole table."""
    in_stream = stream_by_pika(servers.broker_url)
    in_table = table_by_psycopg(servers.database_url)
    assert len(in_table) == len(in_stream)
    assert in_table == in_stream
    return len(in_stream) // 2


@dataclass(frozen=True)
class Servers:
    """Where a broker and a database are, neither of which this test kills itself."""

    broker_url: str
    stream_url: str
    database_url: str


@pytest.fixture
def servers(private_servers: LocalServers) -> LocalServers:
    """Servers of this test's own, with the schema and one stream."""
    relatum_migrations.upgrade(private_servers.database_url)
    delete_stream(private_servers.broker_url, STREAM)
    declare_stream(private_servers.broker_url, STREAM)
    return private_servers


@pytest.fixture
def stream(amqp_url: str) -> Iterator[None]:
    """The stream on the broker of all tests."""
    declare_stream(amqp_url, STREAM)
    yield
    delete_stream(amqp_url, STREAM)


@pytest.fixture
def postgresql(tmp_path: Path) -> Iterator[LocalPostgreSQL]:
    """A PostgreSQL of this test's own, with the schema."""
    with LocalPostgreSQL(tmp_path / "postgresql", durable=False, start_timeout_s=START_S) as postgresql:
        relatum_migrations.upgrade(postgresql.database_url)
        yield postgresql
    shutil.rmtree(postgresql.directory, ignore_errors=True)


@pytest.fixture
def shared(stream: None, amqp_url: str, stream_url: str, database_url: str) -> Servers:
    """The servers of all tests, with the schema and the stream."""
    return Servers(amqp_url, stream_url, database_url)


@contextmanager
def recorder_process(relatum: Relatum, log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """The installed command, recording. One holder name, so that a restart needs not wait for the lease."""
    with log.open("ab") as output:
        arguments = [COMMAND, "record", STREAM, "--keys", "order_id", "--keys", "host", "--holder", "the-recorder"]
        process = subprocess.Popen(arguments, env=relatum.environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def command(servers: Servers) -> Relatum:
    """The command with these servers' URLs."""
    return Relatum(servers.broker_url, servers.stream_url, servers.database_url)


def test_a_recorder_killed_at_random_moments_loses_and_doubles_nothing(
    shared: Servers, kills: int, chance: random.Random, tmp_path: Path
) -> None:
    """SIGKILL at random moments under load; the last run catches up, and every message has its rows once."""
    engine = make_engine(shared.database_url)
    working_kills = 0
    with Load(shared.broker_url) as load:
        for _ in range(kills):
            before = recorded_to(engine, STREAM)
            with recorder_process(command(shared), tmp_path / "recorder.log") as process:
                wait_until(lambda start=before: recorded_to(engine, STREAM) > start, what="it records")
                time.sleep(chance.random() * 0.3)  # Not a wait for a condition: the moment of death is the test.
                process.send_signal(signal.SIGKILL)
                process.wait()
            working_kills += 1
    with recorder_process(command(shared), tmp_path / "recorder.log"):
        wait_recorded(shared.broker_url, engine, STREAM)
    engine.dispose()
    assert working_kills == kills
    assert assert_equal(shared) >= min(load.published, 500 * kills)


def test_a_broker_killed_again_and_again_loses_and_doubles_no_row(servers: LocalServers, kills: int) -> None:
    """The recorder reconnects and goes on; whatever the broker kept is recorded, once."""
    engine = make_engine(servers.database_url)
    with Load(servers.broker_url), recording(servers.broker_url, engine, STREAM, keys=["order_id", "host"]):
        for _ in range(max(1, kills // 4)):
            before = recorded_to(engine, STREAM)
            wait_until(lambda start=before: recorded_to(engine, STREAM) > start, limit_s=120, what="it records")
            servers.rabbitmq.kill()
            servers.rabbitmq.restart()
        before = recorded_to(engine, STREAM)
        wait_until(lambda: recorded_to(engine, STREAM) > before, limit_s=120, what="it records again")
    record(servers.broker_url, engine, STREAM)
    engine.dispose()
    assert assert_equal(servers) > 0


def test_a_database_killed_again_and_again_loses_and_doubles_no_row(
    stream: None, amqp_url: str, stream_url: str, postgresql: LocalPostgreSQL, kills: int
) -> None:
    """Publishing goes on meanwhile; the recorder catches up each time."""
    servers = Servers(amqp_url, stream_url, postgresql.database_url)
    engine = make_engine(servers.database_url)
    with Load(servers.broker_url) as load, recording(servers.broker_url, engine, STREAM, keys=["order_id", "host"]):
        for _ in range(max(1, kills // 4)):
            published = load.published
            before = recorded_to(engine, STREAM)
            wait_until(lambda start=before: recorded_to(engine, STREAM) > start, what="it records")
            postgresql.kill()
            wait_until(lambda start=published: load.published > start, what="publishing goes on without the database")
            restart_database(postgresql, engine)
        before = recorded_to(engine, STREAM)
        wait_until(lambda: recorded_to(engine, STREAM) > before, what="it records again")
    record(servers.broker_url, engine, STREAM)
    engine.dispose()
    assert assert_equal(servers) > 0


def test_a_broker_that_lost_its_tail_is_noticed_and_recorded_as_it_is_now(
    servers: LocalServers, tmp_path: Path
) -> None:
    """RabbitMQ does not fsync streams: after a power loss the table is ahead, and offsets are used again."""
    engine = make_engine(servers.database_url)
    url = servers.broker_url
    publish_plain(url, STREAM, orders("kept", 3_000), confirm=False)
    record(url, engine, STREAM, keys=["order_id"])
    servers.rabbitmq.stop()
    older = tmp_path / "older"
    shutil.copytree(servers.rabbitmq.data, older, symlinks=True)
    restart_broker(servers)
    publish_plain(url, STREAM, orders("lost", 1_000), confirm=False)
    record(url, engine, STREAM)
    assert len(rows_of(engine, STREAM)) == 4_000

    servers.rabbitmq.stop()
    shutil.rmtree(servers.rabbitmq.data)
    shutil.copytree(older, servers.rabbitmq.data, symlinks=True)
    restart_broker(servers)
    publish_plain(url, STREAM, orders("new", 500), confirm=False)
    found = verify(url, engine.url, [STREAM])
    assert [difference.kind for difference in found.streams[0].differences] == ["replaced"], "verify notices it too"
    with recording(url, engine, STREAM):
        wait_until(lambda: recorded_to(engine, STREAM) == 3_500, what="the stream as it is now is recorded")
    (seen,) = status(url, engine.url, [STREAM])
    assert [event.kind for event in seen.events] == ["tail_lost"]
    assert seen.generation == 1
    values = [value for _, value, _ in rows_of(engine, STREAM)]
    assert values == [f"kept{n}" for n in range(3_000)] + [f"new{n}" for n in range(500)]
    assert verify(url, engine.url, [STREAM]).ok
    engine.dispose()


def test_publishing_does_not_wait_for_the_database(stream: None, amqp_url: str, postgresql: LocalPostgreSQL) -> None:
    """An intercepted connection with its recorder inside goes on while PostgreSQL is away, and catches up."""
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    relatum.intercept(connection, database=postgresql.database_url, keys=["order_id"])
    channel = connection.channel()
    channel.confirm_delivery()

    def publish(name: str) -> None:
        for body, headers in orders(name, 50):
            channel.basic_publish("", STREAM, body, pika.BasicProperties(headers=headers))

    postgresql.kill()
    publish("away")
    postgresql.restart()
    engine = make_engine(postgresql.database_url)
    wait_until(lambda: recorded_to(engine, STREAM) >= 50, what="what was published meanwhile is recorded")
    postgresql.kill()
    publish("lost")
    restart_database(postgresql, engine)
    publish("back")
    wait_until(lambda: recorded_to(engine, STREAM) >= 150, what="it is recorded again")
    relatum.release(connection)
    connection.close()
    assert [value for _, value, _ in rows_of(engine, STREAM)] == [
        value["order_id"] for name in ("away", "lost", "back") for _, value in orders(name, 50)
    ]
    engine.dispose()


def restart_database(postgresql: LocalPostgreSQL, engine: sa.Engine) -> None:
    """Start the database again, and drop this test's own connections, which ended with it."""
    postgresql.restart()
    engine.dispose()


def restart_broker(servers: LocalServers) -> None:
    """Start the broker again, and wait until it serves its streams, which is a moment later."""
    servers.rabbitmq.restart()
    wait_until(lambda: stream_available(servers.broker_url, STREAM), what="the stream is served again")


def orders(name: str, count: int) -> list[tuple[bytes, dict[str, str]]]:
    """Orders whose ids begin with a name."""
    return [(b"x", {"order_id": f"{name}{n}"}) for n in range(count)]


def test_another_recorder_takes_over_within_seconds(shared: Servers, tmp_path: Path) -> None:
    """When the holder of the lease is killed, one that waits goes on after the lease ran out."""
    engine = make_engine(shared.database_url)
    with recorder_process(command(shared), tmp_path / "recorder.log") as process:
        publish_plain(shared.broker_url, STREAM, orders("a", 10))
        wait_recorded(shared.broker_url, engine, STREAM)
        with recording(shared.broker_url, engine, STREAM):
            process.send_signal(signal.SIGKILL)
            process.wait()
            publish_plain(shared.broker_url, STREAM, orders("b", 10))
            wait_recorded(shared.broker_url, engine, STREAM)
    assert len(rows_of(engine, STREAM)) == 20
    engine.dispose()


def test_the_command_is_installed() -> None:
    """These tests run what a user runs."""
    assert COMMAND.exists(), f"no {COMMAND} beside {sys.executable}"
