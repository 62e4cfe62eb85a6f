"""Contexts move under load while publishers, consumers, movers, lines and servers are harmed.

All that was told is consumed once, in order, by `_serial_proof`, which shares no code with what it checks.
"""

import json
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psycopg

from relatum import Broker
from relatum.contexts import SerializationContexts, SerialReport, verify
from relatum.errors import Conflict
from tests.acceptance._harm import WORKS_S, Harm, Party, assert_no_traceback, leaves_sockets, start_logged
from tests.acceptance._serial_proof import Consumed, Sent, faults, sent_by, valid_messages
from tests.support import broker_connection, read_stream, unique_name, until_answered, wait_until
from tests.support.super_streams import declare_by_hand

pytestmark = leaves_sockets

FACES = ("threads", "asyncio")
PARTITIONS = 4
COUNTS = {"publisher": 2, "member": 3, "mover": 2}

CONTEXTS = 40
PUBLISHED_A_SECOND = 40

LEASE_S = 1.0
MOVES = 20
"""How many moves end at least."""

SLEEPS = 2
"""How often all publishers sleep over a move of all contexts, at least."""

ENDED = "relatum.context_moves WHERE ended_at IS NOT NULL"

PROGRAM = Path(__file__).with_name("_serial_party.py")


@dataclass
class Bed:
    """What the test made on the harmed servers."""

    harm: Harm
    directory: Path
    super_stream: str = field(default_factory=lambda: unique_name("accounts"))
    incarnations: int = 0

    @property
    def partitions(self) -> list[str]:
        return [f"{self.super_stream}-{place}" for place in range(PARTITIONS)]

    def __post_init__(self) -> None:
        with broker_connection(self.harm.servers.broker_url) as connection:
            declare_by_hand(connection, self.super_stream, [str(place) for place in range(PARTITIONS)], self.partitions)
        with psycopg.connect(self.harm.servers.database_url) as connection:
            # Without a unique index, so that messages consumed twice show.
            connection.execute(
                "CREATE TABLE consumed (id bigserial PRIMARY KEY, context text NOT NULL, name text NOT NULL, "
                "stream text NOT NULL, stream_offset bigint NOT NULL)"
            )

    def start(self, role: str, number: int) -> "subprocess.Popen[bytes]":
        self.incarnations += 1
        name = f"{role}-{number}-{self.incarnations}"
        party = {
            "name": name,
            "broker": self.harm.broker_url,
            "stream_url": self.harm.stream_url,
            "database": self.harm.database_url,
            "super_stream": self.super_stream,
            "lease_s": LEASE_S,
            "contexts": CONTEXTS,
            "rate": PUBLISHED_A_SECOND,
            "ledger": str(self.directory / f"{name}.ledger"),
        }
        face = "threads" if role == "mover" else FACES[number % 2]
        command = (sys.executable, PROGRAM, role, face, json.dumps(party))
        return start_logged(self.directory / f"{role}.log", *command)

    def count(self, table: str) -> int:
        return int(self.harm.rows(f"SELECT count(*) FROM {table}")[0][0])

    @property
    def consumed(self) -> list[Consumed]:
        query = "SELECT context, name, stream, stream_offset FROM consumed ORDER BY id"
        return [Consumed(*row) for row in self.harm.rows(query)]

    @property
    def broker(self) -> Broker:
        return Broker(self.harm.servers.broker_url, stream_url=self.harm.servers.stream_url)

    @property
    def contexts(self) -> SerializationContexts:
        return SerializationContexts(self.super_stream, self.harm.servers.database_url, broker=self.broker)

    def verify(self) -> SerialReport:
        return verify(self.super_stream, broker=self.broker, database=self.harm.servers.database_url)

    def sleep(self, publishers: Party) -> None:
        with publishers.frozen(self.harm.chance.randrange(COUNTS["publisher"])):
            self._move_all()

    def sleep_all(self) -> None:
        """Let what all publishers have sent arrive when its contexts are elsewhere."""
        self.harm.lines["AMQP"].mode = "frozen"
        # Not a wait for a condition: messages published in this time are the ones that come too late.
        time.sleep(0.2)
        self._move_all()
        self.harm.lines["AMQP"].mode = "pass"

    def _move_all(self) -> None:
        with suppress(Conflict), self.contexts as contexts:
            *sources, target = self.harm.chance.sample(self.partitions, PARTITIONS)
            contexts.consolidate(sources, target)


def finish_moves(bed: Bed) -> None:
    with bed.contexts as contexts:
        for move in contexts.moves():
            contexts.resume(move.move_id)
        assert contexts.moves() == []


def assert_nothing_lost(bed: Bed) -> tuple[int, int]:
    """Wait for the consumers, and compare the three witnesses; gives how many messages and strays there were."""
    servers = bed.harm.servers
    partitions = {stream: list(read_stream(servers.broker_url, stream)) for stream in bed.partitions}
    count = sum(map(len, valid_messages(partitions).values()))
    with suppress(AssertionError):
        wait_until(lambda: bed.count("consumed") >= count, WORKS_S, every_s=0.2)
    sent: dict[str, Sent] = {}
    for ledger in bed.directory.glob("*.ledger"):
        sent |= sent_by(ledger)
    found = faults(partitions, sent, bed.consumed)
    assert not found, f"{len(found)} faults of {count} messages: {found[:20]}"
    report = bed.verify()
    assert report.ok, report.findings
    assert report.messages - report.unplaced == count
    assert_no_traceback(*bed.directory.glob("*.log"))
    return count, report.strays


def test_whatever_fails_contexts_that_move_keep_their_order(harm: Harm, tmp_path: Path) -> None:
    """Whatever process dies or sleeps: no confirmed message is lost or consumed twice, and each context is in order."""
    bed = Bed(harm, tmp_path)
    with ExitStack() as stack:
        roles = {role: stack.enter_context(Party(partial(bed.start, role), COUNTS[role])) for role in COUNTS}
        wait_until(lambda: bed.count("consumed"), WORKS_S, what="the first message consumed")
        more = {"sleep over a move": partial(bed.sleep, roles["publisher"]), "sleep all": bed.sleep_all}
        harm.work(lambda: bed.count("consumed"), bed.partitions, roles, frozen_s=2.5 * LEASE_S, more=more)
        wait_until(lambda: bed.count(ENDED) > MOVES, WORKS_S, what="moves go on")
        # No move of another mover blocks those that make strays.
        roles["mover"].stop()
        finish_moves(bed)
        for _ in range(SLEEPS):
            bed.sleep_all()
        # A publisher that was just killed, or that waits, has sent nothing that could come too late.
        wait_until(
            lambda: until_answered(bed.verify).strays or bed.sleep_all(), WORKS_S, what="a message behind a fence"
        )
        roles["publisher"].stop()
        finish_moves(bed)
        count, strays = assert_nothing_lost(bed)
    assert strays > 0, "some messages came to lie behind the fences of their contexts"
    print(f"{count} messages, {bed.count(ENDED)} moves, {strays} strays")
