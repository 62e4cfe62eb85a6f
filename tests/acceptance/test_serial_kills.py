"""Killing publishers, consumers, movers, PostgreSQL and the broker while contexts move, under load.

At the end each message that a publisher was told of was consumed once, none twice, and each context's messages were
consumed in the order in which they were published; checked by `_serial_proof`, which reads the streams by bare pika and
the tables by bare psycopg, and shares no code with what it checks.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest

import relatum_migrations
from relatum import Broker
from relatum.contexts import SerializationContexts, verify
from relatum.errors import Conflict
from relatum.local import LocalServers
from tests.acceptance._party import Party
from tests.acceptance._serial_proof import Consumed, Sent, faults, read_partition, sent_by, valid_messages
from tests.support import broker_connection, stream_available, unique_name, wait_until
from tests.support.proxy import Proxy
from tests.support.super_streams import declare_by_hand

# A bare pika connection that cannot connect, or dies, leaves its loop's pair of sockets to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"),
]

FACES = ("threads", "asyncio")
PARTITIONS = 4
COUNTS = {"publisher": 2, "member": 3, "mover": 2}
"""How many processes there are of each role."""

CONTEXTS = 40
PUBLISHED_A_SECOND = 80
"""By each publisher."""

LEASE_S, FROZEN_S = 1.0, 2.0
"""A member that is frozen stands still for longer than its lease."""

MOVES = (20, 200)
"""How many moves end at least, and in a long run."""

SLEEPS = 2
"""How often all publishers sleep over a move of all contexts, at least."""

LIMIT_S = 720
"""Seconds the kills may take on a busy machine; usual are 20, and 100 in a long run."""

DRAIN_S = 240

PROGRAM = Path(__file__).with_name("_serial_party.py")


@dataclass
class Servers:
    """Where everything is, and what the test made there; `line` is the broker by which publishers publish."""

    broker_url: str
    stream_url: str
    database_url: str
    directory: Path
    line: str
    super_stream: str = field(default_factory=lambda: unique_name("accounts"))
    incarnations: int = 0

    @property
    def broker(self) -> Broker:
        """The broker, as functions take it."""
        return Broker(self.broker_url, stream_url=self.stream_url)

    @property
    def partitions(self) -> list[str]:
        """The streams of the super stream."""
        return [f"{self.super_stream}-{place}" for place in range(PARTITIONS)]

    def make(self) -> Self:
        """Declare the super stream, and make the table that consumers write to."""
        with broker_connection(self.broker_url) as connection:
            declare_by_hand(connection, self.super_stream, [str(place) for place in range(PARTITIONS)], self.partitions)
        with psycopg.connect(self.database_url) as connection:
            # Without a unique index: what is consumed twice must be seen.
            connection.execute(
                "CREATE TABLE consumed (id bigserial PRIMARY KEY, context text NOT NULL, name text NOT NULL, "
                "stream text NOT NULL, stream_offset bigint NOT NULL)"
            )
        return self

    def start(self, role: str, number: int) -> "subprocess.Popen[bytes]":
        """Start one of a role; it has a name of its own each time."""
        self.incarnations += 1
        name = f"{role}-{number}-{self.incarnations}"
        party = {
            "name": name,
            "line": self.line,
            "broker": self.broker_url,
            "stream_url": self.stream_url,
            "database": self.database_url,
            "super_stream": self.super_stream,
            "lease_s": LEASE_S,
            "contexts": CONTEXTS,
            "rate": PUBLISHED_A_SECOND,
            "ledger": str(self.directory / f"{name}.ledger"),
        }
        face = "threads" if role == "mover" else FACES[number % 2]
        command = [sys.executable, PROGRAM, role, face, json.dumps(party)]
        with (self.directory / f"{role}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        with psycopg.connect(self.database_url) as connection:
            return connection.execute(query.encode()).fetchall()

    @property
    def moves_ended(self) -> int:
        """How many moves have ended."""
        return int(self.rows("SELECT count(*) FROM relatum.context_moves WHERE ended_at IS NOT NULL")[0][0])

    @property
    def consumed(self) -> list[Consumed]:
        """What consumers wrote, in order."""
        return [
            Consumed(*row) for row in self.rows("SELECT context, name, stream, stream_offset FROM consumed ORDER BY id")
        ]


@contextmanager
def running(servers: Servers) -> Iterator[list[Party]]:
    """Publishers, members and movers; all ended afterwards."""
    with ExitStack() as stack:
        yield [stack.enter_context(Party(partial(servers.start, role), count)) for role, count in COUNTS.items()]


class Sleep:
    """Has publishers sleep at the worst moment, while all contexts move."""

    def __init__(self, servers: Servers, publishers: Party, line: Proxy) -> None:
        self._servers = servers
        self._publishers = publishers
        self._line = line

    def process(self, chance: random.Random) -> None:
        """Stop a publisher wherever it is just now."""
        with self._publishers.frozen(chance.randrange(COUNTS["publisher"])):
            self._move_all(chance)

    def line(self, chance: random.Random) -> None:
        """Let what all publishers have sent arrive when its contexts are elsewhere."""
        self._line.mode = "frozen"
        # Not a wait for a condition: what is published in this time is what comes too late.
        time.sleep(0.2)
        self._move_all(chance)
        self._line.mode = "pass"

    def _move_all(self, chance: random.Random) -> None:
        """Move all contexts that stand to one partition."""
        with suppress(Conflict), contexts_of(self._servers) as contexts:
            *sources, target = chance.sample(self._servers.partitions, PARTITIONS)
            contexts.consolidate(sources, target)


def kill_at_random(
    servers: Servers,
    actions: Sequence[Callable[[random.Random], None]],
    chance: random.Random,
    kills: int,
    moves: int,
    longest_s: float,
) -> int:
    """Do each thing once, and then any, until enough moves have ended; gives how many were done."""
    limit, done, first = time.monotonic() + LIMIT_S, 0, chance.sample(actions, len(actions))
    while first or done < kills or servers.moves_ended < moves:
        assert time.monotonic() < limit, f"{done} kills, {servers.moves_ended} moves"
        time.sleep(chance.uniform(0.1, longest_s))  # Not a wait for a condition: the moment of death is the test.
        (first.pop() if first else chance.choice(actions))(chance)
        done += 1
    return done


def contexts_of(servers: Servers) -> SerializationContexts:
    """The contexts, to be moved by the test itself."""
    return SerializationContexts(servers.super_stream, servers.database_url, broker=servers.broker)


def wait_for_moves(servers: Servers) -> None:
    """Wait until moves end that had not."""
    ended = servers.moves_ended
    wait_until(lambda: servers.moves_ended > ended + COUNTS["mover"], what="moves go on")


def finish_moves(servers: Servers) -> None:
    """Go on with every move that was left."""
    with contexts_of(servers) as contexts:
        for move in contexts.moves():
            contexts.resume(move.move_id)
        assert contexts.moves() == []


def assert_nothing_lost(servers: Servers) -> tuple[int, int]:
    """Wait for the consumers, and compare the three witnesses; gives how many messages and strays there were."""
    partitions = {stream: read_partition(servers.broker_url, stream) for stream in servers.partitions}
    count = sum(map(len, valid_messages(partitions, "serialization_context").values()))
    with suppress(AssertionError):
        wait_until(lambda: len(servers.consumed) >= count, limit_s=DRAIN_S, every_s=0.2)
    sent: dict[str, Sent] = {}
    for ledger in servers.directory.glob("*.ledger"):
        sent |= sent_by(ledger)
    found = faults(partitions, sent, servers.consumed)
    assert not found, f"{len(found)} faults of {count} messages: {found[:20]}"
    report = verify(
        servers.super_stream,
        broker=servers.broker,
        database=servers.database_url,
    )
    assert report.ok, report.findings
    assert report.messages - report.unplaced == count
    assert "Traceback" not in (log := "".join(file.read_text() for file in servers.directory.glob("*.log"))), log[
        -5000:
    ]
    return count, report.strays


@pytest.fixture
def line(private_servers: LocalServers) -> Iterator[Proxy]:
    """The line to the broker that publishers use."""
    with Proxy.to(private_servers.broker_url) as proxy:
        yield proxy


@pytest.fixture
def own(private_servers: LocalServers, line: Proxy, tmp_path: Path) -> Servers:
    """Servers of this test's own, to be killed."""
    relatum_migrations.upgrade(private_servers.database_url)
    urls = (private_servers.broker_url, private_servers.stream_url, private_servers.database_url)
    return Servers(*urls, tmp_path, line.url(private_servers.broker_url)).make()


def test_contexts_that_move_while_everything_is_killed_keep_their_order(
    own: Servers, private_servers: LocalServers, line: Proxy, chance: random.Random, kills: int, is_long: bool
) -> None:
    """Whoever dies or sleeps, and whenever: nothing told is lost, nothing consumed twice, each context in order."""

    def freeze_member(chance: random.Random) -> None:
        with members.frozen(chance.randrange(COUNTS["member"])):
            time.sleep(FROZEN_S)  # Not a wait for a condition: how long it stands still is the test.

    def kill_database() -> None:
        private_servers.postgresql.kill()
        private_servers.postgresql.restart()

    def kill_broker() -> None:
        private_servers.rabbitmq.kill()
        private_servers.rabbitmq.restart()
        for stream in own.partitions:
            wait_until(partial(stream_available, own.broker_url, stream), what="the stream")

    with running(own) as (publishers, members, movers):
        wait_until(lambda: own.consumed, what="the first message consumed")
        sleep = Sleep(own, publishers, line)
        kills_any = [each.kill_any for each in (publishers, members, movers)]
        actions = [*kills_any, freeze_member, sleep.process, sleep.line]
        done = kill_at_random(own, actions, chance, kills, MOVES[is_long], 1.0)
        kill_database()
        wait_for_moves(own)
        kill_broker()
        wait_for_moves(own)
        # No move of another's is in the way of those that make strays.
        movers.stop()
        finish_moves(own)
        for _ in range(SLEEPS):
            sleep.line(chance)
        publishers.stop()
        finish_moves(own)
        count, strays = assert_nothing_lost(own)
    assert strays > 0, "some messages came to lie behind the fences of their contexts"
    print(f"{count} messages, {own.moves_ended} moves, {strays} strays, {done} kills, and both servers")
