"""Killing publishers, consumers, movers, PostgreSQL and the broker while contexts move, under load.

At the end each message that a publisher was told of was consumed once, none twice, and each context's messages were
consumed in the order in which they were published; checked by `_serial_proof`, which reads the streams by bare pika and
the tables by bare psycopg, and shares no code with what it checks.
"""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest

import relatum_migrations
from relatum.contexts import SerializationContexts, verify
from relatum.errors import Conflict
from relatum.local import LocalServers
from tests.acceptance._serial_gate import Gate
from tests.acceptance._serial_proof import Consumed, Sent, faults, read_partition, sent_by, valid_messages
from tests.support import broker_connection, stream_available, unique_name, wait_until

# A bare pika connection that cannot connect, or dies, leaves its loop's pair of sockets to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"),
]

FACES = ("threads", "asyncio")
PARTITIONS = 4
PUBLISHERS = 4
MEMBERS = 3
MOVERS = 3
CONTEXTS = 40
PUBLISHED_A_SECOND = 80
"""By each publisher."""

MOVES = (40, 200)
"""How many moves end at least, and in a long run."""

SLEEPS = 3
"""How often all publishers sleep over a move of all contexts, at least."""

LIMIT_S = 720
"""Seconds the kills may take on a busy machine; usual are 20, and 100 in a long run."""

DRAIN_S = 240

HERE = Path(__file__).parent


@dataclass
class Servers:
    """Where everything is, and what the test made there."""

    broker_url: str
    stream_url: str
    database_url: str
    directory: Path
    line: str
    """The broker's URL by which publishers publish."""
    super_stream: str = field(default_factory=lambda: unique_name("accounts"))
    incarnations: int = 0

    @property
    def partitions(self) -> list[str]:
        """The streams of the super stream."""
        return [f"{self.super_stream}-{place}" for place in range(PARTITIONS)]

    def make(self) -> Self:
        """Declare the super stream, and make the table that consumers write to."""
        with broker_connection(self.broker_url) as connection:
            channel = connection.channel()
            channel.exchange_declare(self.super_stream, "direct", durable=True, arguments={"x-super-stream": True})
            for place, stream in enumerate(self.partitions):
                channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
                channel.queue_bind(stream, self.super_stream, str(place), {"x-stream-partition-order": place})
        with psycopg.connect(self.database_url) as connection:
            # Without a unique index: what is consumed twice must be seen.
            connection.execute(
                "CREATE TABLE consumed (id bigserial PRIMARY KEY, context text NOT NULL, name text NOT NULL, "
                "stream text NOT NULL, stream_offset bigint NOT NULL)"
            )
        return self

    def delete(self) -> None:
        """Delete the super stream."""
        with broker_connection(self.broker_url) as connection:
            channel = connection.channel()
            for stream in self.partitions:
                channel.queue_delete(stream)
            channel.exchange_delete(self.super_stream)

    def start(self, script: str, *arguments: object) -> "subprocess.Popen[bytes]":
        """Start one of the scripts beside this file."""
        with (self.directory / f"{script}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, HERE / script, *map(str, arguments)], stdout=log, stderr=log)

    def start_publisher(self, number: int) -> "subprocess.Popen[bytes]":
        """Start a publisher; it has a name of its own each time."""
        self.incarnations += 1
        name = f"publisher-{number}-{self.incarnations}"
        face, ledger = FACES[number % 2], self.directory / f"{name}.ledger"
        ledger.touch()
        servers = (self.line, self.broker_url, self.database_url, self.super_stream)
        return self.start("_serial_publisher.py", face, name, *servers, ledger, CONTEXTS, PUBLISHED_A_SECOND)

    def start_member(self, number: int) -> "subprocess.Popen[bytes]":
        """Start a member of the consumer."""
        servers = (self.broker_url, self.stream_url, self.database_url, self.super_stream)
        return self.start("_serial_member.py", FACES[number % 2], *servers, "audit")

    def start_mover(self, _number: int) -> "subprocess.Popen[bytes]":
        """Start a mover."""
        self.incarnations += 1
        servers = (self.broker_url, self.stream_url, self.database_url, self.super_stream)
        return self.start("_serial_mover.py", *servers, self.incarnations)

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


@dataclass
class Party:
    """Processes of one kind, each replaced by another when it is killed."""

    start: "Callable[[int], subprocess.Popen[bytes]]"
    processes: "list[subprocess.Popen[bytes]]"

    def kill(self, chance: random.Random) -> None:
        """Kill one of them, and start another."""
        number = chance.randrange(len(self.processes))
        self.processes[number].kill()
        self.processes[number].wait()
        self.processes[number] = self.start(number)

    def stop(self) -> None:
        """End them in order."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(90)
            process.kill()
            process.wait()


@contextmanager
def running(servers: Servers) -> Iterator[tuple[Party, Party, Party]]:
    """Publishers, members and movers; all ended afterwards."""
    parties = [
        Party(start, [start(number) for number in range(count)])
        for start, count in (
            (servers.start_publisher, PUBLISHERS),
            (servers.start_member, MEMBERS),
            (servers.start_mover, MOVERS),
        )
    ]
    try:
        yield parties[0], parties[1], parties[2]
    finally:
        for party in parties:
            party.stop()


class Sleep:
    """Has publishers sleep at the worst moment, while all contexts move."""

    def __init__(self, servers: Servers, publishers: Party, gate: Gate) -> None:
        self._servers = servers
        self._publishers = publishers
        self._gate = gate

    def process(self, chance: random.Random) -> None:
        """Stop a publisher wherever it is just now."""
        process = chance.choice(self._publishers.processes)
        process.send_signal(signal.SIGSTOP)
        self._move_all(chance)
        process.send_signal(signal.SIGCONT)

    def line(self, chance: random.Random) -> None:
        """Let what all publishers have sent arrive when its contexts are elsewhere."""
        self._gate.shut()
        # Not a wait for a condition: what is published in this time is what comes too late.
        time.sleep(0.2)
        self._move_all(chance)
        self._gate.open()

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
    """Do one thing after the other to the parties, until enough moves have ended; gives how many were done."""
    limit = time.monotonic() + LIMIT_S
    done = 0
    while done < kills or servers.moves_ended < moves:
        assert time.monotonic() < limit, f"{done} kills, {servers.moves_ended} moves"
        time.sleep(chance.uniform(0.1, longest_s))  # Not a wait for a condition: the moment of death is the test.
        chance.choice(actions)(chance)
        done += 1
    return done


def contexts_of(servers: Servers) -> SerializationContexts:
    """The contexts, to be moved by the test itself."""
    return SerializationContexts(
        servers.super_stream, servers.database_url, broker=servers.broker_url, stream_url=servers.stream_url
    )


def wait_for_moves(servers: Servers) -> None:
    """Wait until moves end that had not."""
    ended = servers.moves_ended
    wait_until(lambda: servers.moves_ended > ended + MOVERS, what="moves go on")


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
        broker=servers.broker_url,
        stream_url=servers.stream_url,
        database=servers.database_url,
    )
    assert report.ok, report.findings
    assert report.messages - report.unplaced == count
    assert "Traceback" not in (log := "".join(file.read_text() for file in servers.directory.glob("*.log"))), log[
        -5000:
    ]
    return count, report.strays


@pytest.fixture
def gate(private_servers: LocalServers) -> Iterator[Gate]:
    """The line to the broker that publishers use."""
    with Gate(private_servers.broker_url) as gate:
        yield gate


@pytest.fixture
def own(private_servers: LocalServers, gate: Gate, tmp_path: Path) -> Servers:
    """Servers of this test's own, to be killed."""
    relatum_migrations.upgrade(private_servers.database_url)
    urls = (private_servers.broker_url, private_servers.stream_url, private_servers.database_url)
    return Servers(*urls, tmp_path, gate.url).make()


def test_contexts_that_move_while_everything_is_killed_keep_their_order(
    own: Servers, private_servers: LocalServers, gate: Gate, chance: random.Random, kills: int, is_long: bool
) -> None:
    """Whoever dies or sleeps, and whenever: nothing told is lost, nothing consumed twice, each context in order."""

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
        sleep = Sleep(own, publishers, gate)
        actions = [publishers.kill, members.kill, movers.kill, sleep.process, sleep.line]
        done = kill_at_random(own, actions, chance, kills, MOVES[is_long], 3.0)
        kill_database()
        wait_for_moves(own)
        kill_broker()
        wait_for_moves(own)
        for _ in range(SLEEPS):
            sleep.line(chance)
        publishers.stop()
        movers.stop()
        finish_moves(own)
        count, strays = assert_nothing_lost(own)
    assert strays > 0, "some messages came to lie behind the fences of their contexts"
    print(f"{count} messages, {own.moves_ended} moves, {strays} strays, {done} kills, and both servers")
