"""A collector's members of both faces, its executor's ledger, lines and servers are harmed under load.

Each message then has one final status that agrees with its executor: what joined the transaction is there once, what
was sent elsewhere at least once; read by bare pika and psycopg, and as producers are told.
"""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pika
import psycopg

from relatum import Outcomes
from tests.acceptance._harm import WORKS_S, Harm, Party, assert_no_traceback, leaves_sockets, start_logged
from tests.support import declare_stream, read_stream, unique_name, wait_until
from tests.support.ports import free_port
from tests.support.publishing import StubbornLoad

pytestmark = leaves_sockets

FACES = ("threads", "asyncio")

MEMBER = Path(__file__).with_name("_collector_member.py")
LEDGER = Path(__file__).with_name("_collector_ledger.py")

CONSUMING = """
SELECT DISTINCT split_part(m.holder, ':', 2)::int
FROM relatum.collector_members m JOIN relatum.collected_messages c USING (member_id)
WHERE c.state = 'forwarded'
"""
"""The process ids of members with a bulk at their executor."""

BUSY_WITH = """
SELECT c.message_id
FROM relatum.collector_members m JOIN relatum.collected_messages c USING (member_id)
WHERE c.state = 'forwarded' AND split_part(m.holder, ':', 2) = '{}'
"""

UNANSWERED = """
SELECT message_id FROM relatum.collected_messages
WHERE attempts > 1 AND split_part(message_id, '-', 2)::int % 50 <> 0
"""
"""Messages with an attempt that failed, and was not to."""

FINAL = "SELECT count(*) FROM relatum.collected_messages WHERE state IN ('succeeded', 'failed', 'dead')"

LEASE_S = 1.0
"""Of the members: `_collector_member.py`."""


@dataclass
class Bed:
    """What the test made on the harmed servers."""

    harm: Harm
    directory: Path
    streams: list[str] = field(default_factory=lambda: [unique_name("orders"), unique_name("parcels")])
    port: int = field(default_factory=lambda: free_port((0,)))

    def __post_init__(self) -> None:
        self.ledger = self.directory / "ledger"
        for stream in self.streams:
            declare_stream(self.harm.servers.broker_url, stream)
        with psycopg.connect(self.harm.servers.database_url) as connection:
            # Without a unique index, so that rows written twice show.
            connection.execute("CREATE TABLE booked (message_id text NOT NULL)")

    def start_member(self, number: int) -> "subprocess.Popen[bytes]":
        urls = (self.harm.broker_url, self.harm.stream_url, self.harm.database_url)
        command = (sys.executable, MEMBER, FACES[number], *urls, self.port, *self.streams)
        return start_logged(self.directory / "members.log", *command)

    def start_ledger(self, _: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-I", "-S", LEDGER, str(self.port), self.ledger])

    def load(self) -> StubbornLoad:
        def message(number: int) -> tuple[str, pika.BasicProperties]:
            type_ = "joined" if number // 2 % 2 else "plain"
            return self.streams[number % 2], pika.BasicProperties(type=type_, message_id=f"{type_}-{number}")

        return StubbornLoad(self.harm.servers.broker_url, message, each_s=200)

    def column(self, query: str) -> list[Any]:
        return [value for (value,) in self.harm.rows(query)]

    def works(self) -> float:
        return int(self.column(FINAL)[0])

    def assert_all_accounted_for(self) -> int:
        """Compare the streams, the statuses and what the executors did; gives how many messages there were."""
        url = self.harm.servers.broker_url
        names = [str(each.properties.message_id) for stream in self.streams for each in read_stream(url, stream)]
        ids = set(names)
        assert len(ids) == len(names), "each id was published once"
        wait_until(lambda: self.works() >= len(ids), WORKS_S, every_s=0.5, what="a final status of every message")
        stored = dict(self.harm.rows("SELECT message_id, state FROM relatum.collected_messages"))
        assert self.column("SELECT count(*) FROM relatum.collected_messages") == [len(stored)], "one status for each"
        never = {id_ for id_ in ids if int(id_.rpartition("-")[2]) % 97 == 0}
        assert stored == dict.fromkeys(ids, "succeeded") | dict.fromkeys(never, "failed")
        booked = self.column("SELECT message_id FROM booked")
        assert [id_ for id_, times in Counter(booked).items() if times > 1] == [], "written more than once"
        assert set(booked) == {id_ for id_ in ids - never if id_.startswith("joined")}
        assert set(self.ledger.read_text().split()) == {id_ for id_ in ids - never if id_.startswith("plain")}
        with Outcomes(self.harm.servers.database_url) as outcomes:
            told = outcomes.of_many(ids)
        assert {id_: outcome.status.value for id_, outcome in told.items()} == stored
        assert {told[id_].reason for id_ in never} == {"never"}
        assert_no_traceback(self.directory / "members.log")
        return len(ids)


def test_whatever_fails_each_message_has_one_outcome(harm: Harm, tmp_path: Path) -> None:
    """Each message has one outcome, which matches what its executor did, despite kills, freezes and cut lines."""
    bed, chance = Bed(harm, tmp_path), harm.chance
    working = taken_over = 0

    def at_work() -> int:
        """Which has a bulk at its executor, once one has: a member just started, or its successor, has none."""

        def busy() -> list[int]:
            pids = bed.column(CONSUMING)
            return [number for number, each in enumerate(members.processes) if each.pid in pids]

        return chance.choice(wait_until(busy, WORKS_S, every_s=0.005, what="a bulk at an executor"))

    def kill() -> None:
        nonlocal working
        number = at_work()
        pid = members.processes[number].pid
        members.kill(number)
        working += bool(bed.column(BUSY_WITH.format(pid)))

    def freeze() -> None:
        nonlocal taken_over
        with members.frozen(at_work()) as frozen:
            its_own = set(bed.column(BUSY_WITH.format(frozen.pid)))
            time.sleep(chance.uniform(2.0, 3.0))  # Its lease lapses after one, and is checked every second.
            taken_over += bool(its_own - set(bed.column(BUSY_WITH.format(frozen.pid))))

    def several(harmful: Callable[[], object], has_met: Callable[[], object]) -> None:
        """Do it until it has met what it is done for: all may be too slow, or too quick, for that at once."""
        for _ in range(20):
            harmful()
            if has_met():
                break
            time.sleep(chance.uniform(0.05, 0.6))

    with Party(bed.start_member, len(FACES)) as members, Party(bed.start_ledger, 1) as ledgers:
        more = {
            "kill member": partial(several, kill, lambda: working),
            "freeze member": partial(several, freeze, lambda: taken_over),
            "kill ledger": partial(several, partial(ledgers.kill_any, chance), lambda: bed.column(UNANSWERED)),
        }
        with bed.load():
            wait_until(lambda: bed.column("SELECT message_id FROM booked"), WORKS_S, what="the first results")
            wait_until(lambda: bed.ledger.exists() and bed.ledger.read_text(), what="the ledger's first results")
            harm.work(bed.works, bed.streams, {"member": members, "ledger": ledgers}, frozen_s=3 * LEASE_S, more=more)
        print(f"{bed.assert_all_accounted_for()} messages")
        assert working, "some died with a bulk at their executor"
        assert taken_over, "some were frozen with a bulk at their executor"
        assert bed.column(UNANSWERED), "some attempts failed because the process was away"
