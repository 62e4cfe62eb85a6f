"""What recording costs the servers: connections, threads, transactions, questions."""

import gc
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import sqlalchemy as sa

from relatum.common.limits import RECORDER_CONNECTIONS_MAX
from relatum.common.waiting import has_passed
from relatum.recording import Recorder
from tests.support import broker_connection, delete_stream, new_streams, recording, unique_name, wait_until
from tests.support._raw_publisher import RawPublisher, uncompressed
from tests.support._recording import running
from tests.support.amqp import encode, section
from tests.support.databases import user_in
from tests.support.loop_guard import TURN_MAX_S
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.standstill import locked, somebody_waits
from tests.support.threads import Threads

MANY = 120
SOME = 30
THREADS_MAX = 12
BROKER_CONNECTIONS_MAX = 8
REST_S = 8.0


@dataclass
class Streams:
    """Many streams, and how many messages each of them has."""

    amqp: str
    names: list[str]
    messages: int = 0

    def publish(self) -> None:
        with broker_connection(self.amqp) as connection:
            channel = connection.channel()
            for name in self.names:
                channel.basic_publish("", name, b"m")
        self.messages += 1


@pytest.fixture(scope="module")
def streams(amqp_url: str) -> Iterator[Streams]:
    prefix = unique_name()
    made = Streams(amqp_url, [f"{prefix}-{n}" for n in range(MANY)])
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        for name in made.names:
            channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
    made.publish()
    yield made
    for name in made.names:
        delete_stream(amqp_url, name)


def rest(seconds: float) -> float:
    """Let time pass in which nothing happens: that is what is measured. Gives how long it was."""
    began = time.monotonic()
    return wait_until(lambda: (took := time.monotonic() - began) >= seconds and took, what="rest")


def wait_all_recorded(engine: sa.Engine, streams: Streams, count: int) -> None:
    query = sa.text(
        "SELECT coalesce(sum(to_offset), 0) FROM relatum.coverage JOIN relatum.streams USING (stream_id) "
        "WHERE is_tail AND name = ANY(:names)"
    )

    def are_recorded() -> bool:
        with engine.begin() as connection:
            sum_ = connection.execute(query, {"names": streams.names[:count]}).scalar_one()
        return bool(sum_ == count * streams.messages)

    wait_until(are_recorded, limit_s=120, what="all recorded")


@pytest.fixture
def limited_url(request: pytest.FixtureRequest, database_url: str) -> Iterator[str]:
    """The database's URL of a recorder that PostgreSQL gives so many connections and no more."""
    with user_in(database_url, "relatum_recorder", connections_max=str(request.param)) as url:
        yield url


@pytest.mark.parametrize(
    ("count", "options", "limited_url"),
    [(SOME, {"database_connections_max": 1}, 1), (MANY, {}, RECORDER_CONNECTIONS_MAX)],
    indirect=["limited_url"],
    ids=["one connection", "as many as by default"],
)
def test_a_hundred_streams_take_a_dozen_threads_and_a_handful_of_connections(
    engine: sa.Engine, limited_url: str, streams: Streams, count: int, options: dict[str, int], earlier: Threads
) -> None:
    """Threads, and connections to both servers, at work and at rest; all is recorded, and nothing failed."""
    recorder = Recorder(streams.amqp, limited_url, streams.names[:count], **options)  # type: ignore[arg-type]
    with running(recorder):
        wait_all_recorded(engine, streams, count)
        streams.publish()
        wait_all_recorded(engine, streams, count)
        assert len(earlier.begun()) <= THREADS_MAX
        pool = recorder._group.database.pool
        assert pool.idle + pool.in_use <= options.get("database_connections_max", RECORDER_CONNECTIONS_MAX)
        follower, reader = recorder._group.follower.statistics(), recorder._group.follower.reader.statistics()
        assert (follower.followed, follower.attached) == (count, count)
        assert follower.connections + reader.idle + reader.in_use <= BROKER_CONNECTIONS_MAX

        def counted() -> bool:
            return all(each.messages == streams.messages for each in recorder.statistics().streams.values())

        # The recorder notices a commit a moment after others can read its rows.
        wait_until(counted, what="counts of all streams")
    assert not [name for name, each in recorder.statistics().streams.items() if each.reconnects]


def test_one_that_ends_as_it_begins_leaves_nothing_open(
    streams: Streams, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A recorder that is stopped as it begins closes what it opens, and logs no warning."""
    for number in range(6):
        recorder = Recorder(streams.amqp, database_url, streams.names[:5])
        with running(recorder):
            if number % 2:
                wait_until(
                    lambda: any(each.name == "relatum-recorder" for each in threading.enumerate()), what="a thread"
                )
            else:
                wait_until(lambda recorder=recorder: recorder._group._has_begun, what="its begin")  # type: ignore[misc]
        gc.collect()
    assert not [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_one_that_is_stopped_at_its_first_question_logs_no_outage(
    streams: Streams, database_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question to PostgreSQL that the stop ends says nothing about PostgreSQL."""
    recorder, stop = Recorder(streams.amqp, database_url, streams.names[:1]), threading.Event()
    check = recorder._group.broker.check

    def check_late(names: list[str]) -> None:
        stop.set()
        wait_until(has_passed, what="the end of the stop's time")
        check(names)

    monkeypatch.setattr(recorder._group.broker, "check", check_late)
    recorder.run(stop)
    assert not [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("is_standby", [False, True], ids=["holder", "standby"])
def test_at_rest_a_process_asks_little_whatever_the_number_of_streams(
    engine: sa.Engine, database_url: str, streams: Streams, is_standby: bool
) -> None:
    """A recorder at rest makes at most two transactions a second, and rolls none back."""
    with running(Recorder(streams.amqp, database_url, streams.names[:SOME], keys=["k"])):
        wait_all_recorded(engine, streams, SOME)
        ends: Counter[str] = Counter()
        # The other one has its streams to itself, so this one needs its own, unless it is a standby.
        names = streams.names[:SOME] if is_standby else streams.names[SOME : 2 * SOME]
        recorder = Recorder(streams.amqp, database_url, names)
        for kind in ("commit", "rollback"):
            sa.event.listen(recorder._group.engine, kind, partial(count, ends, kind))
        with running(recorder):
            wait_until(lambda: all_known(engine, names), what="all opened")
            rest(2.0)
            before = Counter(ends)
            rested_s = rest(REST_S)
            assert 1 <= ends["commit"] - before["commit"] <= 2 * rested_s
            assert ends["rollback"] == 0


def count(ends: Counter[str], kind: str, _connection: sa.Connection) -> None:
    ends[kind] += 1


def all_known(engine: sa.Engine, names: list[str]) -> bool:
    query = sa.text("SELECT count(*) FROM relatum.streams WHERE name = ANY(:names) AND lease_holder IS NOT NULL")
    with engine.begin() as connection:
        return bool(connection.execute(query, {"names": names}).scalar_one() == len(names))


def test_what_is_away_is_said_once_and_said_to_be_back(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """One line when the broker goes away and one when it is back, of many streams and through many tries."""

    def said() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.name == "relatum.recorder"]
        return [line for line in lines if line.startswith("RabbitMQ")]

    def publish(*names: str) -> None:
        for name in names:
            place.put(b"", to=name)

    caplog.set_level(logging.INFO, "relatum.recorder")
    with new_streams(place.amqp, 5) as names, Proxy.to(place.stream_url) as line:
        publish(*names)
        with recording(line.url(place.stream_url), place.engine, *names):
            for name in names:
                place.wait_recorded(name)
            line.accepts = False
            line.cut()
            wait_until(said, what="the outage in the log")
            rest(3.0)
            publish(*names)
            line.accepts = True
            for name in names:
                place.wait_recorded(name)
            wait_until(lambda: "back," in said()[-1], what="its end in the log")
    assert len(said()) == 2, said()


LEASE_S = 5.0
"""As by default: what a machine that is busy with other tests keeps, too."""

RECORD = section(0x74, encode({"order_id": "o1"})) + section(0x75, encode(b""))
"""A message as AMQP 1.0 has it."""


def holder_of(place: Place) -> str | None:
    """The holder of the stream; a member whose lease has expired gets another name."""
    query = "SELECT s.lease_holder FROM relatum.streams s JOIN relatum.recorder_members m ON m.holder = s.lease_holder "
    found = place.sql(query + "WHERE m.lease_expires_at > clock_timestamp()")
    return str(found[0][0]) if found else None


def test_a_recorder_that_catches_up_gives_way_and_keeps_its_lease(place: Place, longest: dict[str, float]) -> None:
    """A recorder that catches up has no long step in its loop, keeps its lease, and records other streams, too."""
    with RawPublisher(place.stream_url, place.stream) as publisher:
        for _ in range(10):
            publisher.publish(*[uncompressed([RECORD] * 2000)] * 5)
    with new_streams(place.amqp, 1) as (other,):
        recorder = Recorder(place.amqp, place.database, [place.stream, other], keys=["order_id"], lease_s=LEASE_S)
        with running(recorder):
            holder = wait_until(lambda: holder_of(place), what="the stream held")
            place.put((b"", {"order_id": 2}), to=other)
            place.wait_recorded(other)
            assert place.recorded_to() < 100_000
            place.wait_recorded()
            assert holder_of(place) == holder, longest
    assert len(place.rows()) == 100_000
    assert max(longest.values()) < TURN_MAX_S, longest


def test_a_locked_table_takes_no_lease(place: Place) -> None:
    """A recorder that waits for a locked table keeps its lease."""
    place.put((b"", {"order_id": 1}))
    recorder = Recorder(place.amqp, place.database, [place.stream], keys=["order_id"], lease_s=LEASE_S)
    with running(recorder):
        place.wait_recorded()
        holder = holder_of(place)
        with locked(place.database, "relationships"):
            place.put((b"", {"order_id": 2}))
            somebody_waits(place.database)
            until = time.monotonic() + 2 * LEASE_S
            wait_until(lambda: time.monotonic() >= until or holder_of(place) != holder, what="leases to run out")
            assert holder_of(place) == holder
        place.wait_recorded()
    assert place.values() == ["1", "2"]
