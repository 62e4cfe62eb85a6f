"""Killing and freezing the members of a serial consumer while contexts move.

What the members write, they write in the transaction that stores their positions. At the end each message is there
once, and each context's in the order of publishing: the table is read by bare psycopg.
"""

import random
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import sqlalchemy as sa

from tests.support import wait_until
from tests.support.serial_consuming import SerialBed, serial_bed

MEMBER = Path(__file__).with_name("_serial_consumer_member.py")
FACES = ("threads", "asyncio", "threads")
PARTITIONS = 3
CONTEXTS = [f"context-{number}" for number in range(12)]
ROUNDS = 25
EVERY_S = 0.6
"""Seconds between two kills, or freezes."""
FROZEN_S = 2.0
"""Seconds a frozen member stands still: longer than its lease."""


class Members:
    """The members' processes; some are killed or frozen, by chance, until told otherwise."""

    def __init__(self, arguments: list[str], directory: Path) -> None:
        self._arguments = arguments
        self.log = directory / "members.log"
        self._processes = [self._start(face) for face in FACES]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._harm, name="harm")
        self.kills = self.freezes = 0

    def _start(self, face: str) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen([sys.executable, MEMBER, face, *self._arguments], stdout=log, stderr=log)

    def _harm(self) -> None:
        chance = random.Random(5)
        while not self._stop.wait(EVERY_S):
            victim = chance.randrange(len(FACES))
            process = self._processes[victim]
            if chance.random() < 0.3:
                process.send_signal(signal.SIGSTOP)
                self._stop.wait(FROZEN_S)
                process.send_signal(signal.SIGCONT)
                self.freezes += 1
                continue
            process.kill()
            process.wait()
            self._processes[victim] = self._start(FACES[victim])
            self.kills += 1

    @contextmanager
    def harmed(self) -> Iterator[None]:
        """Kill and freeze members inside the block."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def end(self) -> None:
        """Kill all."""
        for process in self._processes:
            process.kill()
            process.wait()


def publish(bed: SerialBed, members: Members) -> dict[str, int]:
    """Publish to contexts, and move them, leaving strays behind; gives how many messages each has."""
    chance, place, count = random.Random(7), dict.fromkeys(CONTEXTS, 0), dict.fromkeys(CONTEXTS, 0)

    def next_body(context: str) -> str:
        count[context] += 1
        return f"{context}/{count[context]}"

    while members.kills < 5 or members.freezes < 2 or sum(count.values()) < ROUNDS * 60:
        for context in chance.choices(CONTEXTS, k=60):
            bed.publish(place[context], context, next_body(context))
        source = place[chance.choice(CONTEXTS)]
        here = [context for context in CONTEXTS if place[context] == source]
        moved = chance.sample(here, k=min(len(here), chance.randint(1, 4)))
        target = chance.choice([each for each in range(PARTITIONS) if each != source])
        move = bed.begin(moved, source, target)
        move.fence()
        strays = [(context, bed.stray(source, context, next_body(context))) for context in moved[:2]]
        move.mark()
        for context, offset in strays:
            move.adopt(context, offset)
        place |= dict.fromkeys(moved, target)
    return count


def test_nothing_is_lost_or_twice_or_early(amqp_url: str, database_url: str, engine: sa.Engine, tmp_path: Path) -> None:
    """However members die or stand still, each message is consumed once, and each context's in order."""
    with psycopg.connect(database_url) as connection:
        # Without a unique index: what is written twice must be seen.
        connection.execute("CREATE TABLE consumed (id bigint GENERATED ALWAYS AS IDENTITY, message text NOT NULL)")
    with serial_bed(amqp_url, engine, PARTITIONS) as bed:
        members = Members([amqp_url, database_url, bed.name], tmp_path)
        try:
            with members.harmed():
                count = publish(bed, members)
            total = sum(count.values())
            with psycopg.connect(database_url, autocommit=True) as connection:

                def consumed() -> int:
                    row = connection.execute("SELECT count(*) FROM consumed").fetchone()
                    return row[0] if row else 0

                wait_until(lambda: consumed() >= total, what=f"{total} messages were consumed")
                rows = connection.execute("SELECT message FROM consumed ORDER BY id").fetchall()
        finally:
            members.end()
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for (message,) in rows:
        context, _, number = message.partition("/")
        numbers[context].append(int(number))
    expected = {context: list(range(1, last + 1)) for context, last in count.items() if last}
    wrong = {context: found for context, found in numbers.items() if found != expected[context]}
    assert not wrong, members.log.read_text()[-2000:]
    assert dict(numbers) == expected
