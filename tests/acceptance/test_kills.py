"""Killing the recorder, the broker and the database under load; then the table must equal the streams, row by row.

The comparison uses neither our reader nor our verification: a bare pika consumer reads the whole stream, and a bare
psycopg connection the table.
"""

import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pika
import psycopg
import pytest
import sqlalchemy as sa

import relatum_migrations
from relatum.local import LocalServers
from relatum.membership import GROUP_KEY
from relatum.recording import status, verify
from relatum.store.database import make_engine
from relatum_consumer import Relations
from tests.acceptance._command import Relatum
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
from tests.support.groups import ids, of_group, whole_group
from tests.support.publishing import StubbornLoad
from tests.support.tables import streams

# A bare pika connection that cannot connect, or dies, leaves its loop's pair of sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)

STREAM = "orders"
GROUPS = "groups"


def load_of(servers: LocalServers) -> StubbornLoad:
    """Publishes numbered orders, through whatever happens to the broker."""

    def order(number: int) -> tuple[str, pika.BasicProperties]:
        return STREAM, pika.BasicProperties(headers={"order_id": f"o{number}", "host": f"h{number % 17}"})

    return StubbornLoad(servers.broker_url, order, each_s=2_000)


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


def wait_until_it_records(engine: sa.Engine) -> None:
    """Wait until more is recorded than is now."""
    before = recorded_to(engine, STREAM)
    wait_until(lambda: recorded_to(engine, STREAM) > before, limit_s=120, what="it records")


def test_a_recorder_killed_at_random_moments_loses_and_doubles_nothing(
    servers: LocalServers, engine: sa.Engine, kills: int, chance: random.Random, tmp_path: Path
) -> None:
    """SIGKILL at random moments under load; the last run catches up, and every message has its rows once."""
    relatum = Relatum(servers.broker_url, servers.stream_url, servers.database_url)
    # One holder name, so that a restart needs not wait for the lease.
    words = ("record", STREAM, "--keys", "order_id", "--keys", "host", "--holder", "the-recorder")
    with load_of(servers) as load:
        for _ in range(kills):
            with relatum.running(*words, stderr=tmp_path / "recorder.log"):
                wait_until_it_records(engine)
                time.sleep(chance.random() * 0.3)  # Not a wait for a condition: the moment of death is the test.
    with relatum.running(*words, stderr=tmp_path / "recorder.log"):
        wait_recorded(servers.broker_url, engine, STREAM)
    assert assert_equal(servers) >= min(load.published, 500 * kills)


def test_members_frozen_for_longer_than_their_lease_lose_and_double_nothing(
    servers: LocalServers, engine: sa.Engine, kills: int, chance: random.Random, tmp_path: Path
) -> None:
    """SIGSTOP at random moments: the other one takes over, and who comes back to what it was about writes no row.

    Also of one that is frozen amid a commit: PostgreSQL ends its transaction, and lets go of what that has locked.
    """
    relatum = Relatum(servers.broker_url, servers.stream_url, servers.database_url)
    words = ("record", STREAM, "--keys", "order_id", "--keys", "host", "--holder")
    holder = sa.select(streams.c.lease_holder).where(streams.c.name == STREAM)
    with load_of(servers), ExitStack() as stack:
        members = {
            name: stack.enter_context(relatum.running(*words, name, stderr=tmp_path / f"{name}.log"))
            for name in ("one", "two")
        }
        for _ in range(max(2, kills // 4)):
            wait_until_it_records(engine)
            time.sleep(chance.random() * 0.3)  # Not a wait for a condition: the moment is the test.
            with engine.connect() as connection:
                frozen = members[wait_until(lambda: connection.execute(holder).scalar_one() or "", what="a holder")]
            frozen.send_signal(signal.SIGSTOP)
            try:
                wait_until_it_records(engine)
            finally:
                frozen.send_signal(signal.SIGCONT)
        wait_until_it_records(engine)
    record(servers.broker_url, engine, STREAM)
    assert assert_equal(servers) > 0


@pytest.mark.parametrize("which", ["broker", "database"])
def test_a_server_killed_again_and_again_loses_and_doubles_no_row(
    servers: LocalServers, engine: sa.Engine, kills: int, which: str
) -> None:
    """The recorder connects again and catches up each time; publishing goes on while the database is away."""
    server = servers.rabbitmq if which == "broker" else servers.postgresql
    with load_of(servers) as load, recording(servers.broker_url, engine, STREAM, keys=["order_id", "host"]):
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
    """RabbitMQ does not fsync streams: after a power loss the table is ahead, and offsets are used again.

    Groups that were scanned there are looked for again: those are given that are whole now, and no others.
    """
    url, both = servers.broker_url, (STREAM, GROUPS)
    declare_stream(url, GROUPS)
    publish_plain(url, STREAM, orders("kept", 3_000), confirm=False)
    publish_plain(url, GROUPS, [*whole_group(1, 2), of_group(2, 1)])
    record(url, engine, *both, keys=["order_id", GROUP_KEY])
    servers.rabbitmq.stop()
    older = tmp_path / "older"
    shutil.copytree(servers.rabbitmq.data, older, symlinks=True)
    restart_broker(servers)
    publish_plain(url, STREAM, orders("lost", 1_000), confirm=False)
    publish_plain(url, GROUPS, [of_group(2, 2, last=True), *whole_group(3, 3), *whole_group(4, 2)])
    record(url, engine, *both)
    assert len(rows_of(engine, STREAM)) == 4_000
    assert bodies_given(servers, acknowledge=(1, 4)) == ["1-1 1-2", "2-1 2-2", "3-1 3-2 3-3", "4-1 4-2"]

    servers.rabbitmq.stop()
    shutil.rmtree(servers.rabbitmq.data)
    shutil.copytree(older, servers.rabbitmq.data, symlinks=True)
    restart_broker(servers)
    publish_plain(url, STREAM, orders("new", 500), confirm=False)
    publish_plain(url, GROUPS, [*whole_group(5, 2), *whole_group(3, 2)])
    found = verify(url, engine.url, [STREAM])
    assert [difference.kind for difference in found.streams[0].differences] == ["replaced"], "verify notices it too"
    with recording(url, engine, *both):
        wait_until(lambda: [recorded_to(engine, each) for each in both] == [3_500, 7], what="the streams as they are")
    for seen in status(url, engine.url, both):
        assert ([event.kind for event in seen.events], seen.generation) == (["tail_lost"], 1)
    values = [value for _, value, _ in rows_of(engine, STREAM)]
    assert values == [f"kept{n}" for n in range(3_000)] + [f"new{n}" for n in range(500)]
    assert verify(url, engine.url, both).ok
    assert bodies_given(servers, acknowledge=(3, 5)) == ["5-1 5-2", "3-1 3-2"]
    publish_plain(url, GROUPS, [of_group(2, 2, last=True)])
    record(url, engine, GROUPS)
    assert bodies_given(servers, acknowledge=(2,)) == ["2-1 2-2"]
    assert bodies_given(servers) == []
    with Relations(url, servers.database_url) as relations:
        consumer = relations.group_consumer_status("billing")
    assert [(source.scanned_to, source.lag_offsets) for source in consumer.sources] == [(8, 0)]
    assert consumer.counts == dict.fromkeys(consumer.counts, 0) | {"done": 5}


def bodies_given(servers: LocalServers, *, acknowledge: tuple[int, ...] = ()) -> list[str]:
    """What a member is given, each group's bodies as one text; it acknowledges some."""
    found = []
    with (
        Relations(servers.broker_url, servers.database_url) as relations,
        relations.groups(GROUPS, consumer="billing") as groups,
    ):
        for group in groups:
            found.append(" ".join(message.body.decode() for message in group))
            if group.group_id in ids(*acknowledge):
                group.acknowledge()
    return found


def restart_broker(servers: LocalServers) -> None:
    """Start the broker again, and wait until it serves its streams, which is a moment later."""
    servers.rabbitmq.restart()
    for stream in (STREAM, GROUPS):
        wait_until(partial(stream_available, servers.broker_url, stream), what="the stream is served again")


def orders(name: str, count: int) -> list[tuple[bytes, dict[str, str]]]:
    """Orders whose ids begin with a name."""
    return [(b"x", {"order_id": f"{name}{n}"}) for n in range(count)]
