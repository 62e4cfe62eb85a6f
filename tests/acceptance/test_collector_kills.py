"""Killing a collector's members, the process its executor talks to, PostgreSQL and the broker, under load.

At the end each message in the streams has exactly one final status, and it agrees with what the executors did: what one
wrote in the transaction it joined is there once, what another sent elsewhere at least once. Two members share the
collector, one of each face. The streams are read by bare pika, the tables by bare psycopg; the statuses are what a
producer is told.
"""

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

import pika
import psycopg
import pytest

import relatum_migrations
from relatum import Outcome, Outcomes, OutcomeStatus
from relatum.local import LocalServers
from tests.acceptance._party import Party
from tests.support import all_plain, declare_stream, delete_stream, stream_available, unique_name, wait_until
from tests.support.ports import free_port
from tests.support.publishing import StubbornLoad

# A bare pika connection that cannot connect, or dies, leaves its loop's pair of sockets to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning")
]

FACES = ("threads", "asyncio")

MEMBER = Path(__file__).with_name("_collector_member.py")
LEDGER = Path(__file__).with_name("_collector_ledger.py")

CONSUMING = """
SELECT split_part(m.holder, ':', 2)::int
FROM relatum.collector_members m JOIN relatum.collected_messages c USING (member_id)
WHERE c.state = 'forwarded' LIMIT 1
"""
"""The process id of a member with a bulk at its executor."""

BUSY_WITH = """
SELECT c.message_id
FROM relatum.collector_members m JOIN relatum.collected_messages c USING (member_id)
WHERE c.state = 'forwarded' AND split_part(m.holder, ':', 2) = '{}'
"""
"""The messages a process has handed to an executor."""

UNANSWERED = """
SELECT message_id FROM relatum.collected_messages
WHERE attempts > 1 AND split_part(message_id, '-', 2)::int % 50 <> 0
"""
"""Messages with an attempt that failed, and was not to."""


@dataclass
class Servers:
    """Where everything is, and what the test made there."""

    broker_url: str
    stream_url: str
    database_url: str
    directory: Path
    streams: list[str] = field(default_factory=lambda: [unique_name("orders"), unique_name("parcels")])
    port: int = field(default_factory=lambda: free_port((0,)))

    def make(self) -> Self:
        """Declare the streams, and make the table joined executors write to."""
        for stream in self.streams:
            declare_stream(self.broker_url, stream)
        with psycopg.connect(self.database_url) as connection:
            # Without a unique index: what is written twice must be seen.
            connection.execute("CREATE TABLE booked (message_id text NOT NULL)")
        return self

    @property
    def ledger(self) -> Path:
        """The file that plain executors have written to."""
        return self.directory / "ledger"

    def start_member(self, number: int) -> "subprocess.Popen[bytes]":
        """Start a member of the collector."""
        arguments = [FACES[number], self.broker_url, self.stream_url, self.database_url, str(self.port), *self.streams]
        with (self.directory / "members.log").open("ab") as log:
            return subprocess.Popen([sys.executable, MEMBER, *arguments], stdout=log, stderr=log)

    def start_ledger(self, _: int) -> "subprocess.Popen[bytes]":
        """Start the process that plain executors talk to."""
        return subprocess.Popen([sys.executable, "-I", "-S", LEDGER, str(self.port), self.ledger])


def load_of(servers: Servers, published: int = 0) -> StubbornLoad:
    """Publishes numbered messages, through whatever happens to the broker."""

    def message(number: int) -> tuple[str, pika.BasicProperties]:
        type_ = "joined" if number // 2 % 2 else "plain"
        return servers.streams[number % 2], pika.BasicProperties(type=type_, message_id=f"{type_}-{number}")

    return StubbornLoad(servers.broker_url, message, each_s=400, published=published)


@contextmanager
def running(servers: Servers) -> Iterator[tuple[Party, Party]]:
    """Two members and a ledger."""
    with Party(servers.start_member, len(FACES)) as members, Party(servers.start_ledger, 1) as ledgers:
        yield members, ledgers


def kill_at_random(chance: random.Random, times: int, longest_s: float, kill: Callable[[random.Random], None]) -> None:
    """Kill again and again, at moments that nobody has chosen."""
    for _ in range(times):
        time.sleep(chance.uniform(0.05, longest_s))  # Not a wait for a condition: the moment of death is the test.
        kill(chance)


# --- what must hold at the end ----------------------------------------------------------------------------------


def ids_in_streams(servers: Servers) -> list[str]:
    """The ids of all messages, read by a bare pika consumer."""
    return [
        str(properties.message_id)
        for stream in servers.streams
        for _, properties, _ in all_plain(servers.broker_url, stream)
    ]


def final_outcomes(servers: Servers, ids: list[str]) -> dict[str, Outcome]:
    """What producers are told, once nothing is open any more."""
    with Outcomes(servers.database_url) as outcomes:
        wait_until(
            lambda: all(outcome.is_final for outcome in outcomes.of_many(ids).values()),
            every_s=0.2,
            what="a final status of every message",
        )
        return outcomes.of_many(ids)


def column(servers: Servers, query: str) -> list[str]:
    """The values of a query's only column."""
    with psycopg.connect(servers.database_url) as connection:
        return [row[0] for row in connection.execute(query)]


def assert_all_accounted_for(servers: Servers) -> int:
    """Compare the streams, the statuses and what the executors did; gives how many messages there were."""
    ids = ids_in_streams(servers)
    assert len(set(ids)) == len(ids), "each id was published once"
    outcomes = final_outcomes(servers, ids)
    assert not [outcome for outcome in outcomes.values() if outcome.others], "one status for each message"
    assert sorted(column(servers, "SELECT message_id FROM relatum.collected_messages")) == sorted(ids)
    ended = {status: {id_ for id_, outcome in outcomes.items() if outcome.status is status} for status in OutcomeStatus}
    never = {id_ for id_ in ids if int(id_.rpartition("-")[2]) % 97 == 0}
    assert ended[OutcomeStatus.FAILED] == never
    assert {outcomes[id_].reason for id_ in never} == {"never"}
    succeeded = ended[OutcomeStatus.SUCCEEDED]
    assert succeeded == set(ids) - never
    booked = column(servers, "SELECT message_id FROM booked")
    assert [id_ for id_, times in Counter(booked).items() if times > 1] == [], "written more than once"
    assert set(booked) == {id_ for id_ in succeeded if id_.startswith("joined")}
    assert set(servers.ledger.read_text().split()) == {id_ for id_ in succeeded if id_.startswith("plain")}
    assert "Traceback" not in (log := (servers.directory / "members.log").read_text()), log[-5000:]
    return len(ids)


# --- the kills --------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(amqp_url: str, stream_url: str, database_url: str, tmp_path: Path) -> Iterator[Servers]:
    """The servers of this run: they are not killed."""
    servers = Servers(amqp_url, stream_url, database_url, tmp_path).make()
    yield servers
    for stream in servers.streams:
        delete_stream(amqp_url, stream)


@pytest.fixture
def own(private_servers: LocalServers, tmp_path: Path) -> Servers:
    """Servers of this test's own, to be killed."""
    relatum_migrations.upgrade(private_servers.database_url)
    return Servers(
        private_servers.broker_url, private_servers.stream_url, private_servers.database_url, tmp_path
    ).make()


def test_members_and_what_executors_talk_to_killed_or_frozen_at_random_moments_lose_and_double_nothing(
    shared: Servers, kills: int, chance: random.Random
) -> None:
    """The other member takes over what the dead one had; what the ledger did not answer for is sent again.

    A member that was thought dead, and goes on, finds its messages another's, wherever it was stopped.
    """
    working = taken_over = 0
    with running(shared) as (members, ledgers), load_of(shared) as load:
        wait_until(lambda: column(shared, "SELECT message_id FROM booked"), what="the first results")
        wait_until(lambda: shared.ledger.exists() and shared.ledger.read_text(), what="the ledger's first results")

        def at_work(chance: random.Random, busy: list[str]) -> int:
            """A member that has a bulk at its executor, if any has."""
            return next(
                (n for n, each in enumerate(members.processes) if each.pid in map(int, busy)), chance.randrange(2)
            )

        def kill_member(chance: random.Random) -> None:
            nonlocal working
            # Once at least one that has a bulk at its executor.
            busy = column(shared, CONSUMING) if working else wait_until(lambda: column(shared, CONSUMING))
            index = at_work(chance, busy)
            working += bool(busy)
            members.kill(index)

        def freeze(chance: random.Random) -> None:
            nonlocal taken_over
            with members.frozen(at_work(chance, column(shared, CONSUMING))) as frozen:
                its_own = set(column(shared, BUSY_WITH.format(frozen.pid)))
                time.sleep(chance.uniform(2.0, 3.0))  # Its lease lapses after one, and is looked at every second.
                taken_over += bool(its_own - set(column(shared, BUSY_WITH.format(frozen.pid))))

        kill_at_random(chance, kills, 1.5, kill_member)
        kill_at_random(chance, kills, 0.6, ledgers.kill_any)
        kill_at_random(chance, kills, 0.5, freeze)
        # The ledger starts again so soon that now and then nobody has asked it meanwhile; and where a member stands
        # still in the transaction that it joined nobody has its messages, nor where all is slow.
        for _ in range(20):
            if not column(shared, UNANSWERED):
                kill_at_random(chance, 1, 0.6, ledgers.kill_any)
            if not taken_over:
                kill_at_random(chance, 1, 0.5, freeze)
        load.stop()
        assert assert_all_accounted_for(shared) == load.published
    assert working >= kills // 4, "some died with a bulk at their executor"
    assert column(shared, UNANSWERED), "some attempts failed because the process was away"
    assert taken_over > 0, "some were frozen with a bulk at their executor"


def test_servers_killed_at_random_moments_lose_and_double_nothing(
    own: Servers, private_servers: LocalServers, kills: int, chance: random.Random
) -> None:
    """Collecting goes on when they are back: a commit whose answer was lost is found, not repeated.

    Whatever the broker kept is collected once.
    """

    def kill_database(chance: random.Random) -> None:
        private_servers.postgresql.kill()
        private_servers.postgresql.restart()

    def kill_broker(chance: random.Random) -> None:
        private_servers.rabbitmq.kill()
        private_servers.rabbitmq.restart()
        for stream in own.streams:
            wait_until(partial(stream_available, own.broker_url, stream), what="the stream")

    with running(own):
        with load_of(own) as load:
            wait_until(lambda: column(own, "SELECT message_id FROM booked"), what="the first results")
            kill_at_random(chance, kills, 0.8, kill_database)
        assert assert_all_accounted_for(own) == load.published
        with load_of(own, load.published) as more:
            kill_at_random(chance, max(1, kills // 8), 1.0, kill_broker)
        assert load.published < assert_all_accounted_for(own) <= more.published
