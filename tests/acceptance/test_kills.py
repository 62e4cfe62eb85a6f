"""Recorders, lines and servers are harmed: the table must equal the streams, by bare pika and psycopg."""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pika
import pytest
import sqlalchemy as sa

import relatum_migrations
from relatum.local import LocalServers
from relatum.membership import GROUP_KEY
from relatum.recording import status, verify
from relatum.store.database import as_engine
from relatum.store.members import LEASE_S
from relatum_consumer import Relations
from tests.acceptance._command import Relatum
from tests.acceptance._harm import WORKS_S, Harm, Party, assert_no_traceback, leaves_sockets, start_logged
from tests.support import (
    declare_stream,
    delete_stream,
    publish_plain,
    read_stream,
    record,
    recorded_to,
    recording,
    rows_of,
    stream_available,
    unique_name,
    wait_until,
)
from tests.support.groups import ids, of_group, whole_group
from tests.support.publishing import StubbornLoad

pytestmark = leaves_sockets

STREAM = "orders"
GROUPS = "groups"

KEYS = ("host", "order_id")

PUBLISHER = Path(__file__).with_name("_publisher.py")

ROWS = """
SELECT k.name, r.value, r.stream_offset
FROM relatum.relationships r JOIN relatum.keys k USING (key_id) JOIN relatum.streams s USING (stream_id)
WHERE s.name = %s ORDER BY r.stream_offset, k.name
"""

COVERED = (
    "SELECT from_offset, to_offset FROM relatum.coverage JOIN relatum.streams s USING (stream_id) WHERE s.name = %s"
)


@pytest.fixture
def servers(private_servers: LocalServers) -> LocalServers:
    relatum_migrations.upgrade(private_servers.database_url)
    delete_stream(private_servers.broker_url, STREAM)
    declare_stream(private_servers.broker_url, STREAM)
    return private_servers


@pytest.fixture
def engine(servers: LocalServers) -> Iterator[sa.Engine]:
    with as_engine(servers.database_url) as engine:
        yield engine


def assert_recorded(harm: Harm, stream: str) -> int:
    """Wait until a stream is recorded, and compare all of it with its rows; gives the messages."""
    in_stream = [
        (key, record.headers[key], record.offset)
        for record in read_stream(harm.servers.broker_url, stream)
        for key in KEYS
        if key in record.headers
    ]

    def is_recorded() -> bool:
        return any(end > in_stream[-1][2] for _, end in harm.rows(COVERED, stream))

    wait_until(is_recorded, WORKS_S, what=f"all of {stream} is recorded", every_s=0.2)
    in_table = harm.rows(ROWS, stream)
    assert len(in_table) == len(in_stream)
    assert in_table == in_stream
    covered = sorted(harm.rows(COVERED, stream))
    assert covered[0][0] == 0
    assert [start for start, _ in covered[1:]] == [end for _, end in covered[:-1]], "no hole, and nothing twice"
    return len(in_stream) // len(KEYS)


def least_recorded(harm: Harm, streams: list[str]) -> int:
    return min(max((end for _, end in harm.rows(COVERED, stream)), default=0) for stream in streams)


def test_whatever_fails_the_table_equals_the_streams(harm: Harm, tmp_path: Path) -> None:
    """The table equals the streams after recorders were killed, frozen during commits, cut off and without servers."""
    streams = [unique_name("orders"), unique_name("parcels")]
    relatum = Relatum(harm.broker_url, harm.stream_url, harm.database_url)
    words = ["record", *streams, *(word for key in KEYS for word in ("--keys", key)), "--holder"]

    def order(number: int) -> tuple[str, pika.BasicProperties]:
        headers = {"order_id": f"o{number}", "host": f"h{number % 17}"}
        return streams[number % 2], pika.BasicProperties(headers=headers)

    def start(number: int) -> "subprocess.Popen[str]":
        # One holder name each, so that a restart need not wait for the lease.
        return relatum.start(*words, f"recorder-{number}", stderr=tmp_path / "recorders.log")

    for stream in streams:
        declare_stream(harm.servers.broker_url, stream)
    works = partial(least_recorded, harm, streams)
    with Party(start, 2) as recorders:
        with StubbornLoad(harm.servers.broker_url, order, each_s=400):
            wait_until(works, what="both streams are recorded")
            harm.work(works, streams, {"recorder": recorders}, frozen_s=2.5 * LEASE_S)
        messages = [assert_recorded(harm, stream) for stream in streams]
    for seen in status(harm.servers.broker_url, harm.servers.database_url, streams):
        assert (seen.events, seen.generation, seen.gaps) == ([], 1, [])
    assert_no_traceback(tmp_path / "recorders.log")
    print(f"{messages} messages")


def test_whatever_fails_publishers_are_right_about_their_messages(harm: Harm, tmp_path: Path) -> None:
    """Every outcome that publishers and their forks got is true, and their messages are recorded, despite all harm."""
    streams = [unique_name("orders"), unique_name("parcels")]
    urls, incarnations = (harm.broker_url, harm.stream_url, harm.database_url), count(1)

    def start(number: int) -> "subprocess.Popen[bytes]":
        name = f"p{number}-{next(incarnations)}"
        return start_logged(tmp_path / "publishers.log", sys.executable, PUBLISHER, name, 2, *urls, tmp_path, *streams)

    def kill_worker() -> None:
        master = harm.chance.choice(publishers.processes).pid
        for pid in Path(f"/proc/{master}/task/{master}/children").read_text().split()[:1]:
            os.kill(int(pid), signal.SIGKILL)

    for stream in streams:
        declare_stream(harm.servers.broker_url, stream)
    works = partial(least_recorded, harm, streams)
    with Party(start, 2) as publishers:
        wait_until(works, WORKS_S, what="both streams are recorded")
        more = {"kill worker": kill_worker}
        harm.work(works, streams, {"publisher": publishers}, frozen_s=1.6 * LEASE_S, more=more)
    assert_no_traceback(tmp_path / "publishers.log")
    relatum = Relatum(harm.servers.broker_url, harm.servers.stream_url, harm.servers.database_url)
    with relatum.running("record", *streams, stderr=tmp_path / "recorder.log"):
        messages = [assert_recorded(harm, stream) for stream in streams]
    print(f"{messages} messages, {assert_told_the_truth(harm, streams, tmp_path)}")


def assert_told_the_truth(harm: Harm, streams: list[str], ledgers: Path) -> dict[str, int]:
    """Compare publishers' notes with where their messages are; return how often they got each outcome."""
    told: dict[str, dict[str, list[str]]] = {}
    for ledger in ledgers.glob("*.ledger"):
        for line in ledger.read_text().split("\n")[:-1]:
            kind, name, *more = line.split(" ")
            told.setdefault(name, {})[kind] = more
    places: defaultdict[str, list[list[str]]] = defaultdict(list)
    for stream in streams:
        for each in read_stream(harm.servers.broker_url, stream):
            if each.body:
                places[each.body.decode()].append([stream, str(each.offset)])
    assert [name for name, found in places.items() if len(found) > 1] == [], "in the streams more than once"
    assert set(places) <= set(told), "nobody sent it"
    for name, kinds in told.items():
        found = places.get(name)
        assert found or not kinds.keys() & {"confirmed", "at"}, f"{name} is lost: {kinds}"
        assert not found or "absent" not in kinds, f"{name} is there: {kinds}"
        assert "at" not in kinds or [kinds["at"]] == found, f"{name} is at {found}: {kinds}"
    return dict(Counter(kind for kinds in told.values() for kind in kinds))


def test_a_broker_that_lost_its_tail_is_recorded_anew(servers: LocalServers, engine: sa.Engine, tmp_path: Path) -> None:
    """A stream that lost its tail in a power loss is recorded again, and its groups are those that are whole now."""
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
    return [(b"x", {"order_id": f"{name}{n}"}) for n in range(count)]
