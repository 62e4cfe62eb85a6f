"""Each component during each fault of its servers ends in its time; the waits are those that docs/answers.md lists."""

import asyncio
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import aio_pika
import pytest
import sqlalchemy as sa

import relatum
from pyspark_relatum import DefaultSource
from relatum import errors
from relatum.collecting import AsyncMessageCollector, AsyncOutcomes, ExecutorOptions, MessageCollector, Outcomes
from relatum.contexts import AffinityOptions, AsyncSerialConsumer, ContextOptions, SerialConsumer, SerialOptions
from relatum.membership import GROUP_KEY
from relatum.recording import Recorder, prune, status
from relatum.recording.embedded import EmbeddedRecorder
from relatum.store.database import Database
from relatum.superstreams import Layout
from relatum_consumer import AsyncRelations, Relations
from tests.support import broker_connection, in_a_try, unique_name, until_answered, wait_until
from tests.support.affinity import Face
from tests.support.leases import LEASE_S
from tests.support.place import FailingPlace, Place
from tests.support.ports import STREAM_OFFSET, free_port
from tests.support.relations import FACES
from tests.support.routing import confirming, of_context
from tests.support.serial_consuming import serial_bed
from tests.support.standstill import SLACK_S, in_time, locked, nobody_waits, somebody_waits
from tests.support.super_streams import super_stream

WAIT_S = 0.5
"""What is asked for."""

BUSY_S = 1.0
"""What a busy machine may take more of a documented wait, in the best of some tries."""

STOP_S = 4.0
"""Seconds a recorder has to stop: three for the database, and one for the rest."""

ROW = re.compile(r"^\| `(?P<wait>[^`]+)`.*?\| (?P<late_s>[\d.]+) s later \|", re.MULTILINE)

DOCUMENTED = {
    found["wait"]: float(found["late_s"])
    for found in ROW.finditer((Path(__file__).parents[2] / "docs" / "answers.md").read_text())
}
"""The waits of the table, and by how much later they end at most."""


def _relations(at: FailingPlace) -> Any:
    at.place.record(keys=["order_id", GROUP_KEY])
    made = (AsyncRelations if at.is_async else Relations)(at.broker, at.place.database, timeout_s=WAIT_S)
    at.at_end(made.close)
    return made


def _receipt(at: FailingPlace, database: str) -> Any:
    """Of a message that was published by way of no line, and that nobody records."""
    options: dict[str, Any] = {"database": database, "recorder": "external", "broker": at.broker}
    if at.is_async:
        connection = at.go(aio_pika.connect(at.place.amqp))
        at.at_end(connection.close)
    else:
        connection = at.enter(broker_connection(at.place.amqp))
    relatum.intercept(connection, **options)
    at.at_end(relatum.release, connection)

    async def published() -> Any:
        return await relatum.publish_async(await connection.channel(), aio_pika.Message(b"a"), at.place.stream)

    return at.go(published()) if at.is_async else relatum.publish(connection.channel(), "", at.place.stream, b"a")


def _collector(at: FailingPlace, executor: Callable[[Any], Any] = lambda _: None) -> Any:
    made = (AsyncMessageCollector if at.is_async else MessageCollector)(
        "waits", database=at.database, broker=at.broker, streams=[at.place.stream], type_of=lambda _: "any"
    )
    made.register_executor("any", executor, ExecutorOptions(bulk_messages=1))
    at.at_end(made.close)
    return made


def _consumer(at: FailingPlace) -> Any:
    """A serial consumer that has started, behind one batch, of a super stream of one partition with a message more."""
    bed = at.enter(serial_bed(at.place.amqp, at.place.engine, 1))
    kind = AsyncSerialConsumer if at.is_async else SerialConsumer
    made = kind(bed.name, "waits", SerialOptions(lease_s=LEASE_S), database=at.database, broker=at.broker)
    at.at_end(made.close)
    at.go(made.start())
    bed.publish(0, "a", "1")
    at.go(at.go(made.next_batch(90.0)).acknowledge())
    return made, bed


def _running(at: FailingPlace, component: Any, *handler: Any) -> tuple[threading.Thread, threading.Event]:
    """A thread in which a component runs, and the event that stops it."""
    stop = threading.Event()

    async def in_a_loop() -> None:
        told = asyncio.Event()
        running = asyncio.create_task(component.run(*handler, told))
        await asyncio.to_thread(stop.wait)
        told.set()
        await running

    target = (lambda: at.go(in_a_loop())) if at.is_async else (lambda: component.run(*handler, stop))
    thread = threading.Thread(target=target, name="runs", daemon=True)
    thread.start()
    return thread, stop


def _complete(at: FailingPlace) -> None:
    relations = _relations(at)
    until_answered(lambda: at.go(relations.find("order_id", 1, complete=True)))
    at.place.put(b"more")
    with at.fault("broker frozen", errors.Transient):
        at.go(relations.find("order_id", 1, complete=True))


def _receipt_waits(at: FailingPlace, fault: str) -> None:
    """The message is confirmed: whatever is suspended, only its rows are not known."""
    receipt = _receipt(at, at.database if fault.startswith("database") else at.place.database)
    if fault.startswith("broker"):
        with pytest.raises(errors.NotRecordedInTime):
            at.go(receipt.wait(0.0))
    with at.fault(fault, errors.NotRecordedInTime):
        at.go(receipt.wait(WAIT_S))


def _settle(at: FailingPlace) -> None:
    receipt = _receipt(at, at.place.database)
    assert len(at.go(receipt.settle())) == 1
    with at.fault("broker frozen", errors.BrokerUnavailable):
        at.go(receipt.settle(WAIT_S))


def _receipt_outcome(at: FailingPlace) -> None:
    receipt = _receipt(at, at.place.database)
    with at.fault("broker frozen", errors.NotFinishedInTime):
        at.go(receipt.outcome(WAIT_S))


def _outcomes_wait(at: FailingPlace, fault: str, error: type[Exception], *, is_shared: bool = False) -> None:
    """No statement is left that waits for a lock."""
    database = at.enter(closing(Database(at.place.database))) if is_shared else at.place.database
    outcomes = (AsyncOutcomes if at.is_async else Outcomes)(database)
    at.at_end(outcomes.close)
    with at.fault(fault):
        with pytest.raises(error):
            at.go(outcomes.wait("nobody's", WAIT_S))
        nobody_waits(at.place.database)


def _collector_closes(at: FailingPlace, fault: str) -> None:
    taken = threading.Event()
    collector = _collector(at, lambda _: taken.set())
    at.go(collector.start())
    if fault.startswith("database"):
        at.place.put(b"a")
        assert at.go(asyncio.to_thread(taken.wait, 90) if at.is_async else taken.wait(90))
    with at.fault(fault):
        if fault.startswith("database"):
            at.place.put(b"b")
        assert at.go(collector.close(WAIT_S)) in (True, False)


def _consumer_closes(at: FailingPlace, fault: str) -> None:
    consumer, _ = _consumer(at)
    with at.fault(fault):
        assert at.go(consumer.close(WAIT_S)) in (True, False)


def _next_batch(at: FailingPlace) -> None:
    consumer, _ = _consumer(at)
    with at.fault("broker frozen"):
        assert at.go(consumer.next_batch(WAIT_S)) is None


def _messages(at: FailingPlace) -> None:
    consumer, _ = _consumer(at)
    with at.fault("broker frozen"):
        assert list(at.go(consumer.messages(WAIT_S))) == []


def _consumer_stops(at: FailingPlace, fault: str) -> None:
    """The batch under way is not acknowledged, and is handed out again."""
    consumer, bed = _consumer(at)
    batches: list[Any] = []
    begun, away = threading.Event(), threading.Event()

    def handle(batch: Any) -> None:
        batches.append(batch)
        begun.set()
        assert away.wait(90)
        stop.set()

    async def handle_async(batch: Any) -> None:
        await asyncio.to_thread(handle, batch)

    bed.publish(0, "a", "2", "3")
    thread, stop = _running(at, consumer, handle_async if at.is_async else handle)
    assert begun.wait(90)
    with at.fault(fault):
        away.set()
        thread.join(90)
    assert not thread.is_alive()
    assert not batches[0].is_acknowledged
    assert at.go(consumer.next_batch(90)).messages == batches[0].messages


def _groups(at: FailingPlace) -> None:
    relations = _relations(at)
    following = {"follow": True, "idle_timeout_s": WAIT_S}
    until_answered(lambda: list(at.go(relations.groups(at.place.stream, **following))))
    with at.fault("broker frozen", errors.Transient):
        list(at.go(relations.groups(at.place.stream, **following)))


def _recorder_stops(at: FailingPlace, fault: str, *, is_shared: bool = False) -> None:
    """In the middle of its work, which the next one does once."""
    database = at.enter(closing(Database(at.database, refusing=None))) if is_shared else at.database
    thread, stop = _running(at, Recorder(at.broker, database, [at.place.stream], keys=["order_id"]))
    at.place.put((b"", {"order_id": 2}))
    at.place.wait_recorded()
    with at.fault(fault):
        at.place.put((b"", {"order_id": 3}))
        if fault.startswith("locked"):
            somebody_waits(at.place.database)
        stopped = time.monotonic()
        stop.set()
        thread.join(90)
        took_s = time.monotonic() - stopped
    assert not thread.is_alive()
    at.place.record()
    assert at.place.values() == ["1", "2", "3"]
    at.took_s = took_s + WAIT_S  # the documented time counts from the stop


def _embedded_recorder_closes(at: FailingPlace) -> None:
    """In less time than a recorder has by itself. What is left is recorded by the next one."""
    at.enter(pytest.MonkeyPatch.context()).setattr("relatum.recording.recorder_group.DATABASE_S", 60.0)
    recorder = EmbeddedRecorder(at.broker, at.database)
    recorder.watch("", at.place.stream)
    at.place.put(b"a")
    at.place.wait_recorded()
    with at.fault("database frozen"):
        at.place.put(b"b")
        recorder.close()


def _stops_as_it_starts(at: FailingPlace, kind: str) -> None:
    """A statement that PostgreSQL does not answer has half a minute, and a second where its owner is to stop."""
    recorder = Recorder(at.place.amqp, at.place.database, [at.place.stream], keys=["order_id"])
    with at.fault("locked keys collectors"):
        thread, stop = _running(at, _collector(at) if kind == "collector" else recorder)
        somebody_waits(at.place.database)
        stop.set()
        thread.join(90)
    assert not thread.is_alive()


def _router_ends(at: FailingPlace) -> None:
    """Opened, and asked for a new name, it fails in time, with nothing sent; and it closes."""
    name = at.enter(super_stream(at.place.broker, 2)).super_stream
    router = relatum.ContextRouter(name, at.database, ContextOptions(timeout_s=WAIT_S))
    at.at_end(router.close)
    channel = at.enter(confirming(at.place.amqp))
    for context, most_s in (("first", WAIT_S), ("new", 3 * WAIT_S)):
        with in_time(most_s), at.fault("database frozen", errors.DatabaseUnavailable):
            router.publish(channel, b"1", of_context(context))
        until_answered(lambda: router.publish(channel, b"1", of_context("known")))
    with at.fault("database frozen"):
        router.close()


def _affinity_goes_on(at: FailingPlace) -> None:
    """With the options users have, a message of a known set waits for a look of a second, and is published."""
    name = at.enter(super_stream(at.place.broker, 2)).super_stream
    router = at.enter(relatum.AffinityRouter(name, at.database))
    publisher = Face(router, at.enter(confirming(at.place.amqp)))
    publisher.publish(b"1", "known")
    with at.fault("database frozen"):
        for _ in range(3):
            publisher.publish(b"2", "known")


def _plain_goes_on(at: FailingPlace) -> None:
    """Messages without a set are published while the first one of a set waits for PostgreSQL."""
    name = at.enter(super_stream(at.place.broker, 2)).super_stream
    router = at.enter(relatum.AffinityRouter(name, at.database))
    plain, other = [Face(router, at.enter(confirming(at.place.amqp))) for _ in range(2)]
    plain.publish(b"1")
    with ThreadPoolExecutor(1) as pool, at.fault("database frozen"):
        pool.submit(other.publish, b"2", "first")
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            plain.publish(b"3")


def _predecessor(at: FailingPlace) -> None:
    name = at.enter(super_stream(at.place.broker, 2)).super_stream
    router = at.enter(relatum.AffinityRouter(name, at.database, AffinityOptions(timeout_s=WAIT_S)))
    publisher = Face(router, at.enter(confirming(at.place.amqp)))
    until_answered(lambda: publisher.publish(b"1", "known"))
    with at.fault("database frozen", errors.DatabaseUnavailable):
        publisher.publish(b"2", affinity_predecessor="unknown")


def _spark(at: FailingPlace) -> None:
    at.place.put(*[b"x" * 10_000] * 300)
    options = {"broker": at.amqp, "streamUrl": at.stream_url, "stream": at.place.stream, "batchRows": "1"}
    source = DefaultSource(options | {"pollTimeoutMs": str(round(WAIT_S * 1000))})
    reader = source.reader(source.schema())
    (partition,) = until_answered(reader.partitions)
    batches: Any = reader.read(partition)
    until_answered(lambda: next(batches))
    with at.fault("broker frozen", errors.ReadTimeout):
        list(batches)


BROKER_FROZEN: dict[str, Callable[[FailingPlace], None]] = {
    "Relations(timeout_s=)": _complete,
    "receipt.wait(timeout_s)": partial(_receipt_waits, fault="broker frozen"),
    "settle(timeout_s)": _settle,
    "receipt.outcome(timeout_s)": _receipt_outcome,
    "Outcomes.wait(…, timeout_s)": partial(_outcomes_wait, fault="broker frozen", error=errors.NotFinishedInTime),
    "MessageCollector.close(timeout_s)": partial(_collector_closes, fault="broker frozen"),
    "SerialConsumer.close(timeout_s)": partial(_consumer_closes, fault="broker frozen"),
    "next_batch(timeout_s)": _next_batch,
    "messages(timeout_s)": _messages,
    "groups(follow=True, idle_timeout_s=)": _groups,
    "Recorder.run(stop)": partial(_recorder_stops, fault="broker frozen"),
    "pollTimeoutMs": _spark,
}
"""The table of docs/answers.md."""

_outcomes_locked = partial(_outcomes_wait, fault="locked collected_messages", error=errors.DatabaseUnavailable)
_recorder_locked = partial(_recorder_stops, fault="locked relationships")

DATABASE_AWAY: dict[str, tuple[Callable[[FailingPlace], None], float]] = {
    "a receipt waits": (partial(_receipt_waits, fault="database frozen"), 2 * WAIT_S),
    "outcomes wait": (_outcomes_locked, 2 * WAIT_S),
    "outcomes of a shared database wait": (partial(_outcomes_locked, is_shared=True), 2 * WAIT_S),
    "a collector closes": (partial(_collector_closes, fault="database frozen"), WAIT_S + 10.0),
    "a serial consumer closes": (partial(_consumer_closes, fault="database frozen"), 4.0),
    "a serial consumer stops, silence": (partial(_consumer_stops, fault="locked serial_positions"), 2.0),
    "a serial consumer stops, refused": (partial(_consumer_stops, fault="database refused"), 2.0),
    "a collector stops as it starts": (partial(_stops_as_it_starts, kind="collector"), 2.0),
    "a recorder stops as it starts": (partial(_stops_as_it_starts, kind="recorder"), 2.0),
    "a recorder stops": (partial(_recorder_stops, fault="database frozen"), STOP_S + WAIT_S),
    "a recorder stops, a lock": (_recorder_locked, STOP_S + WAIT_S),
    "a recorder of a shared database stops, a lock": (partial(_recorder_locked, is_shared=True), STOP_S + WAIT_S),
    "an embedded recorder closes": (_embedded_recorder_closes, 2.0),
    "a router opens, publishes and closes": (_router_ends, 1.0),
    "an affinity router goes on": (_affinity_goes_on, 2.0),
    "an affinity router looks up a predecessor": (_predecessor, 2 * WAIT_S),
    "an affinity router goes on without sets": (_plain_goes_on, 2 * WAIT_S),
}
"""And the seconds that each has."""

ONE_FACE = {
    "blocking": ("Recorder.run(stop)", "pollTimeoutMs", "recorder", "router"),
    "asyncio": ("messages(", "a serial consumer"),
}
"""What there is for threads alone, and for asyncio alone."""


def faces_of(cases: dict[str, Any]) -> list[tuple[str, str]]:
    others = {"blocking": ONE_FACE["asyncio"], "asyncio": ONE_FACE["blocking"]}
    return [(case, face) for case in cases for face in FACES if not any(each in case for each in others[face])]


@pytest.mark.parametrize(("wait", "face"), faces_of(BROKER_FROZEN))
def test_each_wait_ends_when_the_table_says(wait: str, failing: FailingPlace) -> None:
    """A wait during which the broker freezes ends within the time that docs/answers.md states."""

    def is_in_time() -> bool:
        try:
            BROKER_FROZEN[wait](failing)
        except errors.DatabaseUnavailable:
            # PostgreSQL is not frozen in any case here: a busy machine opened no connection in half a second.
            return False
        return failing.took_s < WAIT_S + DOCUMENTED[wait] + BUSY_S

    in_a_try(is_in_time, what=f"{wait} ended in time")


def test_the_table_names_the_waits_that_are_measured() -> None:
    """Each row of the table is tested here, except `wait_related`, which has its own file."""
    assert set(DOCUMENTED) == {*BROKER_FROZEN, "wait_related(timeout_s=)"}


@pytest.mark.differs
@pytest.mark.parametrize(("case", "face"), faces_of(DATABASE_AWAY))
def test_each_ends_in_its_time_while_postgresql_is_away(case: str, failing: FailingPlace) -> None:
    """A call ends within its time while PostgreSQL does not answer."""
    ask, most_s = DATABASE_AWAY[case]
    ask(failing)
    assert failing.took_s < most_s + SLACK_S
    failing.close()
    wait_until(lambda: not any("waits" in each.name for each in threading.enumerate()), what="its threads end")


async def test_a_cancelled_publication_lets_go_of_the_database(place: Place, layout: Layout) -> None:
    """A task that is cancelled while its context is placed leaves no statement that waits for a lock."""
    known, new = (aio_pika.Message(b"1", headers={"serialization_context": each}) for each in ("known", "new"))
    connection = await aio_pika.connect(place.amqp)
    async with connection, relatum.AsyncContextRouter(layout.super_stream, place.database) as router:
        channel = await connection.channel()
        await router.publish(channel, known)
        with locked(place.database, "placements"):
            with in_time(WAIT_S), pytest.raises(TimeoutError):
                await asyncio.wait_for(router.publish(channel, new), WAIT_S)
            await asyncio.to_thread(nobody_waits, place.database)


@pytest.mark.parametrize(("is_away", "told"), [(True, "is unavailable"), (False, "is waiting and will retry")])
def test_what_is_asked_for_rarely_does_not_hold_the_stop(
    is_away: bool, told: str, place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorder that waits for its broker or its stream stops in time, and has stored no stream."""
    monkeypatch.setattr("relatum.common.waiting._failures.BACKOFF_S", (90.0, 90.0))
    broker = f"amqp://guest:guest@127.0.0.1:{free_port((0, STREAM_OFFSET))}" if is_away else place.amqp
    stop = threading.Event()
    thread = threading.Thread(target=Recorder(broker, place.database, [unique_name()]).run, args=[stop], daemon=True)
    thread.start()
    wait_until(lambda: told in caplog.text, what="what it waits for is told")
    assert place.sql("SELECT name FROM relatum.streams") == []
    with in_time(STOP_S):
        stop.set()
        thread.join(90)
    assert not thread.is_alive()


@pytest.mark.parametrize("face", ["blocking"])
def test_a_recorder_goes_on_when_the_database_does(failing: FailingPlace, caplog: pytest.LogCaptureFixture) -> None:
    """A recorder logs that PostgreSQL does not answer, and records each message once when it answers again."""
    place, short = failing.place, Database(failing.database, refusing=None, statement_s=WAIT_S)
    thread, stop = _running(failing, Recorder(place.amqp, short, [place.stream], keys=["order_id"]))
    place.put((b"a", {"order_id": 1}))
    place.wait_recorded()
    with failing.fault("database frozen"):
        place.put(*((b"b", {"order_id": number}) for number in range(2, 50)))
        wait_until(lambda: "no answer in time" in caplog.text, what="the recorder says that PostgreSQL is silent")
    place.wait_recorded()
    stop.set()
    thread.join(90)
    short.close()
    assert place.values() == ["1", *(str(number) for number in range(1, 50))]


def test_what_commands_do_once_ends_by_the_urls_limit(amqp_url: str, database_url: str) -> None:
    """`?statement_timeout_s=` in the URL limits calls without a time-out of their own."""
    url = f"{database_url}?statement_timeout_s={WAIT_S}"
    with locked(database_url, "streams"):
        for ask in (lambda: status(amqp_url, url), lambda: prune(amqp_url, url, ["x"])):
            with in_time(WAIT_S), pytest.raises(errors.DatabaseUnavailable, match=r"in time \(0\.5 s\)"):
                ask()


def test_a_pool_keeps_some_and_opens_as_many_again(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool keeps `pool_size` connections and opens as many more; a call that gets none fails in time."""
    monkeypatch.setattr("relatum.store.database._POOL_S", 0.2)
    database = Database(f"{database_url}?statement_timeout_s=0", pool_size=1)
    assert len(database.rows(sa.text("SELECT 1"), {})) == 1
    assert (database.pool.idle, database.pool.in_use) == (1, 0)
    with database.transaction() as connection:
        connection.execute(sa.text("SELECT 1"))
        assert len(database.rows(sa.text("SELECT 1"), {})) == 1
    with database.transaction(), database.transaction() as connection:
        assert connection.scalar(sa.text("SELECT 1")) == 1
        with in_time(0.2), pytest.raises(errors.DatabaseUnavailable, match="no connection to PostgreSQL became free"):
            database.rows(sa.text("SELECT 1"), {})
    assert (database.pool.idle, database.pool.in_use) == (1, 0)
    database.close()
