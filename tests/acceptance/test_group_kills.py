"""Members of a consumer killed under load: each complete group is given, and acknowledged once; incomplete ones never.

What is compared is what the members wrote down themselves, line by line, with what a bare pika publisher sent.
"""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pika
import pytest
import sqlalchemy as sa

import relatum_migrations
from relatum.local import LocalServers
from relatum.membership import GROUP_KEY
from relatum.recording import status
from relatum.store import make_engine
from relatum_consumer import Relations
from tests.support import (
    broker_connection,
    declare_stream,
    publish_plain,
    record,
    recorded_to,
    recording,
    stream_available,
    wait_recorded,
    wait_until,
)
from tests.support.groups import Plain, group_id, of_group, whole_group
from tests.support.publishing import Load

MEMBERS = 3
GROUPS_A_SECOND = 60
SIZE = 4
EACH_INCOMPLETE = 10
"""One group in so many never gets all its messages."""

MEMBER = Path(__file__).with_name("_group_member.py")


class GroupLoad(Load):
    """Publishes groups, mixed with one another."""

    def __init__(self, broker_url: str, stream: str) -> None:
        self._url, self._stream = broker_url, stream
        self.complete: set[str] = set()
        self.incomplete: set[str] = set()
        super().__init__()

    def _run(self) -> None:
        chance, number = random.Random(3), 0
        late: list[Plain] = []
        with broker_connection(self._url) as connection:
            channel = connection.channel()
            while not self._stop.is_set() or late:
                messages, late = late, []
                for _ in range(0 if self._stop.is_set() else GROUPS_A_SECOND // 10):
                    number += 1
                    group = self._group(number)
                    # Half of its messages come with those of the groups after it.
                    chance.shuffle(group)
                    messages += group[: SIZE // 2]
                    late += group[SIZE // 2 :]
                chance.shuffle(messages)
                for body, headers in messages:
                    channel.basic_publish("", self._stream, body, pika.BasicProperties(headers=headers))
                connection.process_data_events(0)
                self._stop.wait(0.1)

    def _group(self, number: int) -> list[Plain]:
        if number % EACH_INCOMPLETE:
            self.complete.add(group_id(number))
            return whole_group(number, SIZE)
        self.incomplete.add(group_id(number))
        return [of_group(number, 1), of_group(number, 3), of_group(number, SIZE, last=True)]


class Members:
    """Processes that share the groups of one consumer."""

    def __init__(self, broker_url: str, database_url: str, stream: str, directory: Path) -> None:
        self._arguments = [broker_url, database_url, stream, "billing"]
        self._directory = directory
        self._started = 0
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start another."""
        self._started += 1
        file = self._directory / f"member-{self._started}"
        with (self._directory / "errors").open("ab") as errors:
            arguments = [sys.executable, str(MEMBER), *self._arguments, str(file)]
            self.running.append(subprocess.Popen(arguments, stderr=errors))

    def kill(self, index: int) -> None:
        """Kill one of them."""
        process = self.running.pop(index)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def lines(self, word: str) -> list[list[str]]:
        """What they wrote down."""
        lines = [line.split() for file in self._directory.glob("member-*") for line in file.read_text().splitlines()]
        return [line for line in lines if line[0] == word]

    def stop(self) -> None:
        """End those that still run."""
        while self.running:
            self.kill(0)


def test_members_killed_at_random_moments_lose_and_double_nothing(
    amqp_url: str,
    database_url: str,
    engine: sa.Engine,
    stream_name: str,
    kills: int,
    chance: random.Random,
    tmp_path: Path,
) -> None:
    """SIGKILL at random moments while groups come; the members that are left do all that is to be done."""
    members = Members(amqp_url, database_url, stream_name, tmp_path)
    try:
        with recording(amqp_url, engine, stream_name, keys=[GROUP_KEY]):
            with GroupLoad(amqp_url, stream_name) as load:
                kill_at_random(members, kills, chance)
                wait_until(lambda: len(load.complete) > 100, what="groups enough")
            wait_recorded(amqp_url, engine, stream_name)
            states = dict.fromkeys(load.complete, "done") | dict.fromkeys(load.incomplete, "open")
            wait_until(lambda: states_of(engine) == states, what="all is done", every_s=0.2)
            # A member killed between its acknowledgement and the line that says so leaves one line less.
            wait_until(lambda: len(members.lines("done")) >= len(load.complete) - kills, what="the last lines")
            assert not [process.poll() for process in members.running if process.poll() is not None], (
                tmp_path / "errors"
            ).read_text()
    finally:
        members.stop()
    given = Counter(line[1] for line in members.lines("given"))
    done = Counter(line[1] for line in members.lines("done"))
    assert set(given) == load.complete, "each complete group at least once, and no incomplete one"
    assert {line[2] for line in members.lines("given")} == {str(SIZE)}, "whole, each time"
    assert max(done.values()) == 1
    assert len(load.complete) - kills <= len(done) <= len(load.complete)


def kill_at_random(members: Members, times: int, chance: random.Random) -> None:
    """Kill one after the other while they work, and start another for each."""
    for _ in range(MEMBERS):
        members.start()
    for _ in range(times):
        before = len(members.lines("done"))
        wait_until(lambda before=before: len(members.lines("done")) > before, what="they work")
        time.sleep(chance.random() * 0.2)  # Not a wait for a condition: the moment of death is the test.
        members.kill(chance.randrange(MEMBERS))
        members.start()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning")
def test_groups_of_a_tail_that_was_lost_are_looked_for_again(private_servers: LocalServers, tmp_path: Path) -> None:
    """What was scanned is gone, and its offsets hold other groups: those are given, and what is not whole is not."""
    servers, stream = private_servers, "orders"
    url = servers.broker_url
    relatum_migrations.upgrade(servers.database_url)
    declare_stream(url, stream)
    engine = make_engine(servers.database_url)
    publish_plain(url, stream, [*whole_group(1, 2), of_group(2, 1)])
    record(url, engine, stream, keys=[GROUP_KEY])
    servers.rabbitmq.stop()
    older = tmp_path / "older"
    shutil.copytree(servers.rabbitmq.data, older, symlinks=True)
    restart_broker(servers, stream)
    publish_plain(url, stream, [of_group(2, 2, last=True), *whole_group(3, 3), *whole_group(4, 2)])
    record(url, engine, stream)
    with Relations(url, servers.database_url) as relations:
        assert bodies_given(relations, stream, acknowledge=(1, 4)) == ["1-1 1-2", "2-1 2-2", "3-1 3-2 3-3", "4-1 4-2"]

    servers.rabbitmq.stop()
    shutil.rmtree(servers.rabbitmq.data)
    shutil.copytree(older, servers.rabbitmq.data, symlinks=True)
    restart_broker(servers, stream)
    publish_plain(url, stream, [*whole_group(5, 2), *whole_group(3, 2)])
    with recording(url, engine, stream):
        wait_until(lambda: recorded_to(engine, stream) == 7, what="the stream as it is now is recorded")
    (seen,) = status(url, engine.url, [stream])
    assert [event.kind for event in seen.events] == ["tail_lost"]
    with Relations(url, servers.database_url) as relations:
        assert bodies_given(relations, stream, acknowledge=(3, 5)) == ["5-1 5-2", "3-1 3-2"]
        publish_plain(url, stream, [of_group(2, 2, last=True)])
        record(url, engine, stream)
        assert bodies_given(relations, stream, acknowledge=(2,)) == ["2-1 2-2"]
        assert bodies_given(relations, stream) == []
        (source,) = relations.group_consumer_status("billing").sources
        assert (source.scanned_to, source.lag_offsets) == (8, 0)
    assert states_of(engine) == {group_id(number): "done" for number in (1, 2, 3, 4, 5)}
    engine.dispose()


def bodies_given(relations: Relations, stream: str, *, acknowledge: tuple[int, ...] = ()) -> list[str]:
    """What a member is given, each group's bodies as one text; it acknowledges some."""
    found = []
    with relations.groups(stream, consumer="billing") as groups:
        for group in groups:
            found.append(" ".join(message.body.decode() for message in group))
            if group.group_id in {group_id(number) for number in acknowledge}:
                group.acknowledge()
    return found


def restart_broker(servers: LocalServers, stream: str) -> None:
    """Start the broker again, and wait until it serves its stream."""
    servers.rabbitmq.restart()
    wait_until(lambda: stream_available(servers.broker_url, stream), what="the stream is served again")


def states_of(engine: sa.Engine) -> dict[str, str]:
    """The state of each group."""
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT group_id, state FROM relatum.group_states")
        return dict(tuple(row) for row in rows)
