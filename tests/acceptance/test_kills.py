"""Killing the recorder, the broker and the database under load; then the table must equal the streams, row by row.

The comparison uses neither our reader nor our verification: a bare pika consumer reads the whole stream, and a bare
psycopg connection the table.
"""

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pika
import pika.exceptions
import psycopg
import pytest
import sqlalchemy as sa

import relatum
import relatum_migrations
from relatum.local import LocalServers
from relatum.recording import status, verify
from relatum.store import make_engine
from tests.acceptance._command import COMMAND, Relatum
from tests.support import (
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


def assert_equal(servers: LocalServers) -> int:
    """Compare the whole stream, by a bare pika consumer, with the whole table, by psycopg; gives the messages."""
    in_stream = [
        (key, properties.headers[key], offset)
        for offset, properties, _ in all_plain(servers.broker_url, STREAM)
        for key in ("host", "order_id")
    ]
    with psycopg.connect(servers.database_url) as connection:
        in_table = connection.execute(
            "SELECT k.name, r.value, r.stream_offset FROM relatum.relationships r JOIN relatum.keys k USING (key_id) "
            "ORDER BY r.stream_offset, k.name"
        ).fetchall()
    assert len(in_table) == len(in_stream)
    assert in_table == in_stream
    return len(in_stream) // 2


@pytest.fixture
def servers(private_servers: LocalServers) -> LocalServers:
    """Servers of this test's own, with the schema and one stream."""
    relatum_migrations.upgrade(private_servers.database_url)
    delete_stream(private_servers.broker_url, STREAM)
    declare_stream(private_servers.broker_url, STREAM)
    return private_servers


@pytest.fixture
def engine(servers: LocalServers) -> Iterator[sa.Engine]:
    """An engine on their database."""
    engine = make_engine(servers.database_url)
    yield engine
    engine.dispose()


@contextmanager
def recorder_process(servers: LocalServers, log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """The installed command, recording. One holder name, so that a restart needs not wait for the lease."""
    environment = Relatum(servers.broker_url, servers.stream_url, servers.database_url).environment
    with log.open("ab") as output:
        arguments = [COMMAND, "record", STREAM, "--keys", "order_id", "--keys", "host", "--holder", "the-recorder"]
        process = subprocess.Popen(arguments, env=environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until_it_records(engine: sa.Engine) -> None:
    """Wait until more is recorded than is now."""
    before = recorded_to(engine, STREAM)
    wait_until(lambda: recorded_to(engine, STREAM) > before, limit_s=120, what="it records")


def test_a_recorder_killed_at_random_moments_loses_and_doubles_nothing(
    servers: LocalServers, engine: sa.Engine, kills: int, chance: random.Random, tmp_path: Path
) -> None:
    """SIGKILL at random moments under load; the last run catches up, and every message has its rows once."""
    with Load(servers.broker_url) as load:
        for _ in range(kills):
            with recorder_process(servers, tmp_path / "recorder.log") as process:
                wait_until_it_records(engine)
                time.sleep(chance.random() * 0.3)  # Not a wait for a condition: the moment of death is the test.
                process.send_signal(signal.SIGKILL)
                process.wait()
    with recorder_process(servers, tmp_path / "recorder.log"):
        wait_recorded(servers.broker_url, engine, STREAM)
    assert assert_equal(servers) >= min(load.published, 500 * kills)


@pytest.mark.parametrize("which", ["broker", "database"])
def test_a_server_killed_again_and_again_loses_and_doubles_no_row(
    servers: LocalServers, engine: sa.Engine, kills: int, which: str
) -> None:
    """The recorder connects again and catches up each time; publishing goes on while the database is away."""
    server = servers.rabbitmq if which == "broker" else servers.postgresql
    with Load(servers.broker_url) as load, recording(servers.broker_url, engine, STREAM, keys=["order_id", "host"]):
        for _ in range(max(1, kills // 4)):
            wait_until_it_records(engine)
            published = load.published
            server.kill()
            if which == "database":
                wait_until(lambda start=published: load.published > start, what="publishing goes on without it")
                engine.dispose()
            server.restart()
        wait_until_it_records(engine)
    record(servers.broker_url, engine, STREAM)
    assert assert_equal(servers) > 0


def test_a_broker_that_lost_its_tail_is_noticed_and_recorded_as_it_is_now(
    servers: LocalServers, engine: sa.Engine, tmp_path: Path
) -> None:
    """RabbitMQ does not fsync streams: after a power loss the table is ahead, and offsets are used again."""
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


def test_publishing_does_not_wait_for_the_database(servers: LocalServers, engine: sa.Engine) -> None:
    """An intercepted connection with its recorder inside goes on while PostgreSQL is away, and catches up."""
    connection = pika.BlockingConnection(pika.URLParameters(servers.broker_url))
    relatum.intercept(connection, database=servers.database_url, keys=["order_id"])
    channel = connection.channel()
    channel.confirm_delivery()
    names = ["away", "lost", "back"]
    for number, name in enumerate(names):
        if name != "back":
            servers.postgresql.kill()
        for body, headers in orders(name, 50):
            channel.basic_publish("", STREAM, body, pika.BasicProperties(headers=headers))
        engine.dispose()
        if name != "back":
            servers.postgresql.restart()
        if name != "lost":
            wait_until(lambda count=50 * (number + 1): recorded_to(engine, STREAM) >= count, what="it is recorded")
    relatum.release(connection)
    connection.close()
    published = [headers["order_id"] for name in names for _, headers in orders(name, 50)]
    assert [value for _, value, _ in rows_of(engine, STREAM)] == published


def restart_broker(servers: LocalServers) -> None:
    """Start the broker again, and wait until it serves its streams, which is a moment later."""
    servers.rabbitmq.restart()
    wait_until(lambda: stream_available(servers.broker_url, STREAM), what="the stream is served again")


def orders(name: str, count: int) -> list[tuple[bytes, dict[str, str]]]:
    """Orders whose ids begin with a name."""
    return [(b"x", {"order_id": f"{name}{n}"}) for n in range(count)]
