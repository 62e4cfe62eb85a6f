"""Both faces of the message collector on a real broker and database: each flush condition, each refusal, each end."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pika
import pytest
import sqlalchemy as sa

from relatum import MessageId
from relatum.collecting import Bulk, ExecutorOptions, Failure, FlushReason, MessageCollector, Outcome, OutcomeStatus
from relatum.collecting._collector_core import ENTRY_BYTES, Advance, Entry
from relatum.errors import ConfigurationError, InvalidInput, NotAStream, StreamNotFound
from relatum.reading import Message, StreamReader
from tests.support import declare_stream, delete_stream, publish_plain, unique_name, wait_until
from tests.support.collectors import AsyncCollectorFace, CollectorStore, a_loop
from tests.support.leases import LEASE_S, let_lapse

SUCCEEDED, FAILED, DEAD = OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED, OutcomeStatus.DEAD
NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"
COLLECTED, FORWARDED, UNKNOWN = OutcomeStatus.COLLECTED, OutcomeStatus.FORWARDED, OutcomeStatus.UNKNOWN


class Consumer:
    """An executor that notes its bulks, and answers as it is told."""

    def __init__(self, answer: Callable[[Bulk], Any] = lambda bulk: None) -> None:
        self.bulks: list[tuple[FlushReason, list[str]]] = []
        self.answer = answer

    def __call__(self, bulk: Bulk) -> Any:
        """Note the bulk's reason and bodies."""
        self.bulks.append((bulk.reason, [each.message.body.decode() for each in bulk.messages]))
        return self.answer(bulk)

    @property
    def bodies(self) -> list[str]:
        """All bodies, in the order they came."""
        return [body for _, bodies in self.bulks for body in bodies]


class Gate(Consumer):
    """An executor that waits until it is let through."""

    def __init__(self) -> None:
        super().__init__(self.wait)
        self.opened = threading.Event()

    def wait(self, bulk: Bulk) -> None:
        """Wait for the gate."""
        assert self.opened.wait(90)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Open the gate at the end, whatever happens: a closed gate would hold up the collector's end."""
        try:
            yield
        finally:
            self.opened.set()


def publish(amqp_url: str, stream: str, *bodies: str, type_: str | None = "order", **properties: Any) -> None:
    """Publish messages whose `message_id` is their body."""
    publish_plain(
        amqp_url,
        stream,
        [
            (body.encode(), pika.BasicProperties(type=type_, message_id=body[:200], delivery_mode=2, **properties))
            for body in bodies
        ],
    )


def read_all(amqp_url: str, stream: str) -> list[Message]:
    """All messages of a stream."""
    with StreamReader.open(amqp_url) as reader:
        return list(reader.iterate(stream))


@pytest.fixture(params=["threads", "asyncio"])
def face(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes collectors: with threads, or with asyncio in a loop in which no task may be left behind."""
    if request.param == "threads":
        yield MessageCollector
        return
    with a_loop() as loop:
        yield partial(AsyncCollectorFace, loop)


@pytest.fixture
def collector_of(
    amqp_url: str, database_url: str, stream_name: str, face: Callable[..., Any]
) -> Callable[..., MessageCollector]:
    """Makes durable collectors that follow the test's stream."""

    def make(**options: Any) -> Any:
        return face(
            **{"name": "billing", "database": database_url, "broker": amqp_url, "streams": [stream_name]} | options
        )

    return make


def wait_status(collector: MessageCollector, status: OutcomeStatus, *ids: str) -> list[Outcome]:
    """Wait until messages have a status; gives their outcomes."""
    wait_until(
        lambda: {collector.outcome(message_id).status for message_id in ids} == {status},
        what=f"{status} of {ids}",
    )
    return [collector.outcome(message_id) for message_id in ids]


# --- each flush condition ---------------------------------------------------------------------------------------

FOREVER: dict[str, Any] = {"max_age_s": 600.0, "bulk_messages": 1000}


@pytest.mark.parametrize(
    ("reason", "options", "limits"),
    [
        (FlushReason.BYTES, FOREVER | {"bulk_bytes": 100}, {}),
        (FlushReason.MESSAGES, FOREVER | {"bulk_messages": 3}, {}),
        (FlushReason.AGE, FOREVER | {"max_age_s": 0.3}, {}),
        (FlushReason.IDLE, FOREVER | {"idle_s": 0.3}, {}),
        # A bulk of each message: which of several reach the limit together depends on how they arrive.
        (FlushReason.TOTAL_BYTES, FOREVER, {"bytes_max": ENTRY_BYTES}),
    ],
)
def test_a_bulk_is_flushed(
    amqp_url: str,
    stream_name: str,
    collector_of: Callable[..., MessageCollector],
    reason: FlushReason,
    options: dict[str, Any],
    limits: dict[str, int],
) -> None:
    """Each limit closes a bulk by itself; the bulk says which, and its messages are in order."""
    publish(amqp_url, stream_name, *("abc"))
    consumer, collector = Consumer(), collector_of(**limits)
    collector.register_executor("order", consumer, ExecutorOptions(**options))
    with collector:
        wait_until(lambda: consumer.bodies == ["a", "b", "c"], what="three messages consumed")
        wait_status(collector, SUCCEEDED, *"abc")
    assert {each for each, _ in consumer.bulks} == {reason}


def test_too_many_active_bulks_flush_the_oldest(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """When a second bulk is begun where two are too many, the first is handed on; the second stays."""
    publish(amqp_url, stream_name, "a", type_="order")
    publish(amqp_url, stream_name, "b", type_="parcel")
    orders, parcels, collector = Consumer(), Consumer(), collector_of(bulks_max=2)
    collector.register_executor("order", orders, ExecutorOptions(**FOREVER))
    collector.register_executor("parcel", parcels, ExecutorOptions(**FOREVER))
    with collector:
        wait_status(collector, SUCCEEDED, "a")
        assert collector.outcome("b").status is COLLECTED
    assert orders.bulks == [(FlushReason.ACTIVE_BULKS, ["a"])]
    assert parcels.bulks == [(FlushReason.STOP, ["b"])]


def test_an_explicit_flush_takes_all_that_was_given(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """`flush` hands on what `collect` took before, of one type or of all."""
    publish(amqp_url, stream_name, "a", "b")
    publish(amqp_url, stream_name, "c", type_="parcel")
    orders, parcels, collector = Consumer(), Consumer(), collector_of(streams=[])
    collector.register_executor("order", orders, ExecutorOptions(**FOREVER))
    collector.register_executor("parcel", parcels, ExecutorOptions(**FOREVER))
    with collector:
        assert collector.collect_many(read_all(amqp_url, stream_name)) == [True] * 3
        collector.flush("order")
        wait_status(collector, SUCCEEDED, "a", "b")
        assert collector.outcome("c").status is COLLECTED
        collector.flush()
        wait_status(collector, SUCCEEDED, "c")
    assert orders.bulks == [(FlushReason.EXPLICIT, ["a", "b"])]
    assert parcels.bulks == [(FlushReason.EXPLICIT, ["c"])]


def test_an_orderly_stop_flushes_and_waits(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """Closing hands on what is being filled, waits for the executor, and stores its results."""
    publish(amqp_url, stream_name, "a", "b")
    consumer, collector = Consumer(), collector_of()
    collector.register_executor("order", consumer, ExecutorOptions(**FOREVER))
    collector.start()
    wait_status(collector, COLLECTED, "a", "b")
    assert collector.close()
    assert consumer.bulks == [(FlushReason.STOP, ["a", "b"])]
    with collector_of(streams=[]) as again:
        assert again.outcome("b").status is SUCCEEDED


def test_what_is_not_done_when_the_stop_ends_is_done_by_the_next(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """An executor that does not come to its end is not waited for longer than was said; its bulk is another's then."""
    publish(amqp_url, stream_name, "a")
    gate, collector = Gate(), collector_of()
    collector.register_executor("order", gate, ExecutorOptions(max_age_s=0.01))
    with gate.closed():
        collector.start()
        wait_until(lambda: gate.bulks, what="a bulk at the executor")
        assert not collector.close(timeout_s=0.2)
        assert not collector.close(), "closed again, it is as little done as before"
        consumer, successor = Consumer(), collector_of()
        successor.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01))
        with successor:
            [outcome] = wait_status(successor, SUCCEEDED, "a")
        assert (consumer.bodies, outcome.attempts) == (["a"], 2)


# --- who is refused, and who waits ------------------------------------------------------------------------------


def test_a_type_without_executor_is_refused(
    amqp_url: str, engine: sa.Engine, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """`collect` says no, and nothing is stored; a followed stream's message is passed over, and counted."""
    publish(amqp_url, stream_name, "a", type_="nobody's")
    publish(amqp_url, stream_name, "b", type_=None)
    publish(amqp_url, stream_name, "c")
    consumer, collector = Consumer(), collector_of()
    collector.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01))
    with collector:
        wait_status(collector, SUCCEEDED, "c")
        assert collector.collect_many(read_all(amqp_url, stream_name)[:2]) == [False, False]
        assert (collector.outcome("a").status, collector.outcome("b").status) == (UNKNOWN, UNKNOWN)
        assert collector.passed_over == 4
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM relatum.collected_messages")).scalar_one() == 1


def test_a_collector_that_does_not_run_takes_nothing(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """Before the start `collect` is an error, after the end a refusal."""
    publish(amqp_url, stream_name, "a")
    [message] = read_all(amqp_url, stream_name)
    collector = collector_of(streams=[])
    collector.register_executor("order", Consumer())
    with pytest.raises(ConfigurationError, match="start"):
        collector.collect(message)
    with collector:
        pass
    assert not collector.collect(message)
    with pytest.raises(ConfigurationError, match="once"):
        collector.start()


def fill(collector: MessageCollector, gate: Gate, messages: Iterable[Message]) -> list[Message]:
    """Give a running and a waiting bulk of one message each; gives the messages that are left."""
    first, second, *rest = messages
    assert collector.collect(first)
    wait_until(lambda: gate.bulks, what="the first bulk at the executor")
    assert collector.collect(second)
    collector.flush()
    return rest


FULL: dict[str, Any] = {"bulk_messages": 1, "queue_bulks": 1, "max_age_s": 600.0}


def test_block_waits_for_room(amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]) -> None:
    """With "block", `collect` waits: it is refused when its time is over, and taken as soon as there is room."""
    publish(amqp_url, stream_name, *"abcd")
    gate, collector = Gate(), collector_of(streams=[])
    collector.register_executor("order", gate, ExecutorOptions(**FULL))
    with collector, gate.closed():
        [third, fourth] = fill(collector, gate, read_all(amqp_url, stream_name))
        assert not collector.collect(third, timeout_s=0.05)
        answers: list[bool] = []
        waiting = threading.Thread(target=lambda: answers.append(collector.collect(fourth)))
        waiting.start()
        assert collector.outcome("d").status is UNKNOWN
        gate.opened.set()
        waiting.join(90)
        assert answers == [True]
        wait_status(collector, SUCCEEDED, *"abd")
        assert collector.outcome("c").status is UNKNOWN


def test_block_ends_when_a_worker_takes_a_bulk(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """There is room as soon as a bulk leaves the queue, not only when one was consumed."""
    publish(amqp_url, stream_name, *"ab")
    gate, collector = Gate(), collector_of(streams=[])
    collector.register_executor("order", gate, ExecutorOptions(**FULL))
    with collector, gate.closed():
        first, second = read_all(amqp_url, stream_name)
        assert collector.collect(first)
        collector.flush()
        assert collector.collect(second, timeout_s=90)


def test_block_stops_a_followed_stream(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """With "block", what has no room stays in the stream, and is collected when there is."""
    publish(amqp_url, stream_name, *"abcdef")
    gate, collector = Gate(), collector_of()
    collector.register_executor("order", gate, ExecutorOptions(**FULL))
    with collector, gate.closed():
        wait_until(lambda: gate.bulks, what="the first bulk at the executor")
        wait_status(collector, COLLECTED, "b")
        assert collector.held_messages == 2
        assert collector.outcome("c").status is UNKNOWN
        gate.opened.set()
        wait_status(collector, SUCCEEDED, *"abcdef")
    assert gate.bodies == list("abcdef")


def test_no_time_to_wait_refuses_at_once(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """With `timeout_s=0`, a message without room is refused, nothing is stored of it, and it may be given again."""
    publish(amqp_url, stream_name, *"abc")
    gate, collector = Gate(), collector_of(streams=[])
    collector.register_executor("order", gate, ExecutorOptions(**FULL))
    with collector, gate.closed():
        [third] = fill(collector, gate, read_all(amqp_url, stream_name))
        assert not collector.collect(third, timeout_s=0)
        assert (collector.refused, collector.outcome("c").status) == (1, UNKNOWN)
        gate.opened.set()
        wait_status(collector, SUCCEEDED, "a", "b")
        assert collector.collect(third, timeout_s=0)
        wait_status(collector, SUCCEEDED, "c")


def test_spill_leaves_bodies_in_their_stream(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """With "spill", all is taken; what waits behind a full queue has no body in memory, and is read again in order."""
    bodies = [f"{n:03}" + "x" * 20_000 for n in range(40)]
    publish(amqp_url, stream_name, *bodies)
    gate, collector = Gate(), collector_of()
    collector.register_executor("order", gate, ExecutorOptions(bulk_messages=4, queue_bulks=1, when_full="spill"))
    with collector, gate.closed():
        wait_until(lambda: collector.held_messages == 40, what="all messages taken")
        wait_until(lambda: collector.held_bytes < 12 * 20_000, what="bodies left in the stream")
        gate.opened.set()
        wait_until(lambda: len(gate.bodies) == 40, what="all messages consumed")
    assert gate.bodies == bodies


def test_memory_ends_at_its_limit(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """However much lies in the stream, no more is held than the limit and the message that reached it."""
    bodies = [f"{n:03}" + "x" * 50_000 for n in range(60)]
    publish(amqp_url, stream_name, *bodies)
    gate, collector = Gate(), collector_of(bytes_max=500_000)
    collector.register_executor("order", gate, ExecutorOptions(bulk_messages=2, queue_bulks=100))
    with collector, gate.closed():
        wait_until(lambda: collector.held_bytes >= 500_000, what="the limit reached")
        assert collector.held_bytes < 500_000 + 52_000
        gate.opened.set()
        wait_until(lambda: len(gate.bodies) == 60, what="all messages consumed")
    assert gate.bodies == bodies


# --- results ----------------------------------------------------------------------------------------------------


def test_each_message_has_its_own_result(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """Of one bulk, one message succeeds, one is tried again and succeeds then, one fails for good."""
    publish(amqp_url, stream_name, *"abc")
    answers = iter([[None, ValueError("later"), Failure("never", retry=False)], [None]])
    consumer, collector = Consumer(lambda bulk: next(answers)), collector_of()
    collector.register_executor("order", consumer, ExecutorOptions(bulk_messages=3, max_age_s=0.5, backoff_s=0.05))
    with collector:
        [a] = wait_status(collector, SUCCEEDED, "a")
        [b] = wait_status(collector, SUCCEEDED, "b")
        [c] = wait_status(collector, FAILED, "c")
    assert [(each.attempts, each.reason) for each in (a, b, c)] == [(1, None), (2, None), (1, "never")]
    assert [bodies for _, bodies in consumer.bulks] == [["a", "b", "c"], ["b"]]
    assert a.finished_at is not None
    assert a.collected_at is not None
    assert a.collected_at <= a.finished_at


def test_raising_fails_what_has_no_result(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """What the executor noted before it raised stays; the rest is tried again, with back-off, then failed."""
    publish(amqp_url, stream_name, "a", "b")
    times: list[float] = []

    def answer(bulk: Bulk) -> None:
        times.append(time.monotonic())
        for each in bulk.messages:
            if each.message_id == "a":
                bulk.succeeded(each)
        raise RuntimeError("no room on disk")

    consumer, collector = Consumer(answer), collector_of()
    collector.register_executor(
        "order", consumer, ExecutorOptions(bulk_messages=2, max_age_s=0.5, attempts=3, backoff_s=0.2)
    )
    with collector:
        [a] = wait_status(collector, SUCCEEDED, "a")
        [b] = wait_status(collector, FAILED, "b")
    assert (a.attempts, b.attempts, b.reason) == (1, 3, "RuntimeError: no room on disk")
    assert [bodies for _, bodies in consumer.bulks] == [["a", "b"], ["b"], ["b"]]
    assert times[1] - times[0] >= 0.2
    assert times[2] - times[1] >= 0.4


def test_a_message_that_waits_for_its_retry_says_so(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """Between two attempts a message is collected, with its attempts and the reason; the next start goes on with it."""
    publish(amqp_url, stream_name, "a")
    collector = collector_of()
    collector.register_executor(
        "order", Consumer(lambda bulk: [ValueError("not yet")]), ExecutorOptions(max_age_s=0.01, backoff_s=1.0)
    )
    with collector:
        wait_until(lambda: collector.outcome("a").reason, what="a failed attempt")
        outcome = collector.outcome("a")
    assert (outcome.status, outcome.attempts, outcome.reason) == (COLLECTED, 1, "ValueError: not yet")
    successor = collector_of()
    successor.register_executor("order", Consumer(), ExecutorOptions(max_age_s=0.01))
    with successor:
        [outcome] = wait_status(successor, SUCCEEDED, "a")
    assert outcome.attempts == 2


def test_given_up_messages_go_to_the_dead_letter_stream(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """After its last attempt a message lies in the dead-letter stream as it was, with the reason, and is dead."""
    publish(amqp_url, stream_name, "a", headers={"order_id": 4711})
    dead_letters = unique_name("dead")
    declare_stream(amqp_url, dead_letters)
    try:
        collector = collector_of(dead_letter_stream=dead_letters)
        consumer = Consumer(lambda bulk: [ValueError("bad")])
        collector.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01, attempts=2, backoff_s=0.01))
        with collector:
            [outcome] = wait_status(collector, DEAD, "a")
        [letter] = read_all(amqp_url, dead_letters)
    finally:
        delete_stream(amqp_url, dead_letters)
    assert (outcome.attempts, outcome.reason) == (2, "ValueError: bad")
    assert (letter.body, letter.properties.message_id, letter.properties.type) == (b"a", "a", "order")
    assert dict(letter.headers) == {
        "order_id": 4711,
        "relatum_dead_reason": "ValueError: bad",
        "relatum_dead_stream": stream_name,
        "relatum_dead_offset": 0,
    }


def test_handlers_are_told_of_each_message(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """Handlers of all, of a type and of a message hear of `collected`, then of the end; a broken one harms nobody."""
    publish(amqp_url, stream_name, "a", "b")
    publish(amqp_url, stream_name, "c", type_="parcel")
    told: dict[str, list[tuple[str, OutcomeStatus]]] = {"all": [], "parcel": [], "b": []}

    def handler(name: str) -> Callable[[Outcome], None]:
        return lambda outcome: told[name].append((outcome.message_id, outcome.status))

    def broken(outcome: Outcome) -> None:
        raise RuntimeError("a handler's own trouble")

    collector = collector_of()
    collector.register_result_handler(broken)
    collector.register_result_handler(handler("all"))
    collector.register_result_handler(handler("parcel"), type="parcel")
    collector.register_result_handler(handler("b"), message_id="b")
    with pytest.raises(InvalidInput, match="two of them"):
        collector.register_result_handler(broken, type="order", message_id="b")
    collector.register_executor("order", Consumer(), ExecutorOptions(max_age_s=0.05))
    collector.register_executor(
        "parcel", Consumer(lambda bulk: [Failure("no", retry=False)]), ExecutorOptions(max_age_s=0.05)
    )
    with collector:
        wait_until(lambda: len(told["all"]) == 6, what="all told")
    assert told["parcel"] == [("c", COLLECTED), ("c", FAILED)]
    assert told["b"] == [("b", COLLECTED), ("b", SUCCEEDED)]
    for message_id, end in [("a", SUCCEEDED), ("b", SUCCEEDED), ("c", FAILED)]:
        assert [status for each, status in told["all"] if each == message_id] == [COLLECTED, end]


class Broken(dict[Any, Any]):
    """An executor's answer that cannot be looked at."""

    def __contains__(self, key: object) -> bool:
        raise RuntimeError("no such question")


@pytest.mark.parametrize("options", [{}, {"joins_transaction": True}])
def test_a_defect_in_a_worker_leaves_nothing_undecided(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector], options: dict[str, Any]
) -> None:
    """An error where none is expected is the result of the bulk's messages, and the worker goes on."""
    publish(amqp_url, stream_name, *"ab")
    collector = collector_of()
    answer = Consumer(lambda bulk: Broken() if bulk.messages[0].message_id == "a" else None)
    collector.register_executor(
        "order", answer, ExecutorOptions(bulk_messages=1, attempts=2, backoff_s=0.01, **options)
    )
    with collector:
        [a] = wait_status(collector, FAILED, "a")
        wait_status(collector, SUCCEEDED, "b")
        wait_until(lambda: collector.held_messages == 0, what="nothing held")
    assert (a.attempts, a.reason) == (2, "RuntimeError: no such question")


# --- exactly once, with the executor's own writes -----------------------------------------------------------------


@pytest.fixture
def ledger(engine: sa.Engine) -> Callable[[], list[str]]:
    """A table for executors to write to; gives what it holds."""
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE ledger (body text)"))

    def rows() -> list[str]:
        with engine.connect() as connection:
            return list(connection.scalars(sa.text("SELECT body FROM ledger ORDER BY body")))

    return rows


def write(bulk: Bulk) -> None:
    """Write each message's body, in the transaction that was joined."""
    assert bulk.connection is not None
    for each in bulk.messages:
        bulk.connection.execute(sa.text("INSERT INTO ledger VALUES (:body)"), {"body": each.message.body.decode()})


def test_a_joined_executor_commits_with_its_results(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector], ledger: Callable[[], list[str]]
) -> None:
    """What it wrote is there once, with partial results, too; a failed message is the executor's own to undo."""
    publish(amqp_url, stream_name, *"abc")

    def answer(bulk: Bulk) -> list[Failure | None]:
        write(bulk)
        return [Failure("no", retry=False) if each.message_id == "b" else None for each in bulk.messages]

    collector = collector_of()
    collector.register_executor("order", answer, ExecutorOptions(bulk_messages=3, joins_transaction=True))
    with collector:
        wait_status(collector, SUCCEEDED, "a", "c")
        wait_status(collector, FAILED, "b")
    assert ledger() == ["a", "b", "c"]


def test_a_joined_executor_that_raises_has_written_nothing(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector], ledger: Callable[[], list[str]]
) -> None:
    """Its writes are rolled back with all it noted; the next attempt writes them once."""
    publish(amqp_url, stream_name, "a", "b")
    attempts: list[int] = []

    def answer(bulk: Bulk) -> None:
        write(bulk)
        bulk.succeeded(bulk.messages[0])
        attempts.append(bulk.messages[0].attempts)
        if len(attempts) == 1:
            raise RuntimeError("on second thought")

    collector = collector_of()
    collector.register_executor(
        "order", answer, ExecutorOptions(bulk_messages=2, joins_transaction=True, backoff_s=0.01)
    )
    with collector:
        wait_status(collector, SUCCEEDED, "a", "b")
    assert (attempts, ledger()) == ([1, 2], ["a", "b"])


def test_a_joined_transaction_that_fails_is_a_failed_attempt(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector], ledger: Callable[[], list[str]]
) -> None:
    """A statement that fails, though the executor swallows its error, fails the attempt: nothing of it is kept."""
    publish(amqp_url, stream_name, "a")
    attempts: list[int] = []

    def answer(bulk: Bulk) -> None:
        write(bulk)
        attempts.append(bulk.messages[0].attempts)
        if len(attempts) == 1:
            assert bulk.connection is not None
            with pytest.raises(sa.exc.DBAPIError):
                bulk.connection.execute(sa.text("SELECT 1 / 0"))

    collector = collector_of()
    collector.register_executor(
        "order", answer, ExecutorOptions(max_age_s=0.01, joins_transaction=True, backoff_s=0.01)
    )
    with collector:
        [outcome] = wait_status(collector, SUCCEEDED, "a")
    assert (attempts, outcome.attempts, ledger()) == ([1, 2], 2, ["a"])


def test_a_joined_transaction_whose_connection_is_lost_is_done_again(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector], ledger: Callable[[], list[str]]
) -> None:
    """A connection that PostgreSQL ends is no fault of the message: the same attempt is done again, and once."""
    publish(amqp_url, stream_name, "a")
    calls: list[int] = []

    def answer(bulk: Bulk) -> None:
        write(bulk)
        calls.append(bulk.messages[0].attempts)
        if len(calls) == 1:
            assert bulk.connection is not None
            bulk.connection.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    collector = collector_of()
    collector.register_executor("order", answer, ExecutorOptions(max_age_s=0.01, joins_transaction=True))
    with collector:
        [outcome] = wait_status(collector, SUCCEEDED, "a")
    assert (calls, outcome.attempts, ledger()) == ([1, 1], 1, ["a"])


def test_a_joined_executor_whose_messages_were_taken_over_writes_nothing(
    amqp_url: str,
    engine: sa.Engine,
    stream_name: str,
    collector_of: Callable[..., MessageCollector],
    ledger: Callable[[], list[str]],
) -> None:
    """A member that was thought dead, and goes on, finds its messages another's: what it wrote is rolled back."""
    publish(amqp_url, stream_name, "a", "b")
    calls: list[list[str]] = []

    def answer(bulk: Bulk) -> None:
        write(bulk)
        calls.append([each.message_id for each in bulk.messages])
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE relatum.collected_messages SET member_id = 0 WHERE message_id = 'a'"))

    collector = collector_of()
    collector.register_executor("order", answer, ExecutorOptions(bulk_messages=2, joins_transaction=True))
    with collector:
        wait_status(collector, SUCCEEDED, "b")
        assert collector.outcome("a").status is FORWARDED
    assert (calls, ledger()) == ([["a", "b"], ["b"]], ["b"])


# --- positions, members, generations ----------------------------------------------------------------------------


def test_the_position_is_durable(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """What was collected is not collected again by the next start, which goes on behind it."""
    consumer = Consumer()
    for body in "abc":
        publish(amqp_url, stream_name, body)
        collector = collector_of()
        collector.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01))
        with collector:
            wait_status(collector, SUCCEEDED, body)
    assert consumer.bodies == ["a", "b", "c"]


@pytest.mark.parametrize(("start", "expected"), [("first", "abcd"), ("next", "d"), (2, "cd")])
def test_a_stream_is_followed_from_where_it_is_told(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector], start: Any, expected: str
) -> None:
    """A stream that was never followed is followed from its first message, from now on, or from an offset."""
    publish(amqp_url, stream_name, *"abc")
    consumer, collector = Consumer(), collector_of(start=start)
    collector.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01))
    with collector:
        wait_until(lambda: collector._shared.intake.is_followed(stream_name), what="the stream followed")
        publish(amqp_url, stream_name, "d")
        wait_status(collector, SUCCEEDED, "d")
    assert consumer.bodies == list(expected)


def test_it_is_said_that_start_does_not_count(
    amqp_url: str,
    stream_name: str,
    engine: sa.Engine,
    collector_of: Callable[..., MessageCollector],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stream that has a position goes on there, which is logged; without its position it is begun anew."""
    publish(amqp_url, stream_name, "a", "b")
    consumer = Consumer()

    def consume() -> list[str]:
        caplog.clear()
        del consumer.bulks[:]
        collector = collector_of(start=1)
        collector.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01))
        with caplog.at_level("INFO", "relatum.collector"), collector:
            wait_until(lambda: collector._shared.intake.is_followed(stream_name), what="the stream followed")
            wait_status(collector, SUCCEEDED, "b")
        return [record.message for record in caplog.records if "start is for" in record.message]

    assert (len(consume()), consumer.bodies) == (0, ["b"])
    assert (len(consume()), consumer.bodies) == (1, [])
    with engine.begin() as connection:
        connection.execute(sa.text(BEGIN_ANEW), {"collector": "billing", "stream": stream_name})
    assert (len(consume()), consumer.bodies) == (0, ["b"])


BEGIN_ANEW = """
UPDATE relatum.collector_sources SET replaced_at = now(), member_id = NULL
WHERE stream = :stream AND replaced_at IS NULL
  AND collector_id IN (SELECT collector_id FROM relatum.collectors WHERE name = :collector)
"""
"""What the page of the collector says."""


@pytest.mark.usefixtures("quick_rhythm")
def test_members_collect_each_message_once(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """One member follows a stream while it runs, then the next; together they consume each message once."""
    consumers = [Consumer(), Consumer()]
    first, second = members = [collector_of(lease_s=LEASE_S) for _ in consumers]
    for member, consumer in zip(members, consumers, strict=True):
        member.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01))
    with second:
        with first:
            publish(amqp_url, stream_name, *"abc")
            wait_status(first, SUCCEEDED, *"abc")
        publish(amqp_url, stream_name, *"def")
        wait_status(second, SUCCEEDED, *"abcdef")
    assert sorted(consumers[0].bodies + consumers[1].bodies) == list("abcdef")


@pytest.mark.usefixtures("quick_rhythm")
def test_a_member_with_more_types_takes_over(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """A new version that knows another type follows from the first such message on; none is passed over."""
    bodies: list[str] = []
    first, second = collector_of(lease_s=LEASE_S), collector_of(lease_s=LEASE_S)
    for member, types in ((first, ["order"]), (second, ["order", "mail"])):
        for each in types:
            member.register_executor(
                each,
                lambda bulk: bodies.extend(each.message.body.decode() for each in bulk.messages),
                ExecutorOptions(max_age_s=0.01),
            )
    with first:
        publish(amqp_url, stream_name, "nobody's", type_="mail")
        publish(amqp_url, stream_name, "a")
        wait_status(first, SUCCEEDED, "a")
        with second:
            publish(amqp_url, stream_name, *"bc", type_="mail")
            publish(amqp_url, stream_name, *"de")
            wait_status(first, SUCCEEDED, *"bcde")
        publish(amqp_url, stream_name, "late", type_="mail")
        publish(amqp_url, stream_name, "f")
        wait_status(first, SUCCEEDED, "f")
        assert {first.outcome(each).status for each in ("nobody's", "late")} == {UNKNOWN}
    assert sorted(bodies) == list("abcdef")


@pytest.mark.usefixtures("quick_rhythm")
def test_messages_of_a_dead_member_are_taken_over(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """What a member that died had collected or handed on is read again and consumed; what retention took failed."""
    publish(amqp_url, stream_name, *"abc")
    dead = CollectorStore("billing", database_url)
    member = dead.open(["order"], LEASE_S)
    places = [MessageId(stream_name, offset) for offset in (0, 1, 2, 99)]
    entries = [Entry(place, body, "order", 1) for place, body in zip(places, "abcd", strict=True)]
    assert dead.follow(member, stream_name, 0) is not None
    dead.add(member, entries, Advance(stream_name, 0, 100))
    dead.forward(member, 7, places[:2])
    let_lapse(engine)
    dead.dispose()
    consumer, collector = Consumer(), collector_of(streams=[])
    collector.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01))
    with collector:
        outcomes = wait_status(collector, SUCCEEDED, *"abc")
        [gone] = wait_status(collector, FAILED, "d")
    assert sorted(consumer.bodies) == ["a", "b", "c"]
    assert [outcome.attempts for outcome in outcomes] == [2, 2, 1]
    assert (gone.reason or "").startswith("expired: ")


def test_a_stream_declared_again_is_collected_from_its_beginning(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """Offsets of a stream that was deleted and declared again mean other messages: none of them is missed."""
    publish(amqp_url, stream_name, "a", "b")
    consumer = Consumer()
    collector = collector_of()
    collector.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01))
    with collector:
        wait_status(collector, SUCCEEDED, "a", "b")
    delete_stream(amqp_url, stream_name)
    declare_stream(amqp_url, stream_name)
    publish(amqp_url, stream_name, "c", "d", "e")
    collector = collector_of()
    collector.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01))
    with collector:
        wait_status(collector, SUCCEEDED, *"cde")
        assert collector.outcome("a").status is SUCCEEDED
    assert consumer.bodies == list("abcde")


def test_a_stream_that_lost_its_end_is_gone_on_with_where_both_agree(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector], engine: sa.Engine
) -> None:
    """What lies there as it was is not consumed again; what took the places of what was lost is."""
    consumer = Consumer()
    publish(amqp_url, stream_name, *"abcdef")
    collector = collector_of()
    collector.register_executor("order", consumer, ExecutorOptions(max_age_s=0.05))
    with collector:
        wait_status(collector, SUCCEEDED, *"abcdef")
    delete_stream(amqp_url, stream_name)
    declare_stream(amqp_url, stream_name)
    publish(amqp_url, stream_name, *"abcd", "new")
    again = collector_of()
    again.register_executor("order", consumer, ExecutorOptions(max_age_s=0.05))
    with again:
        wait_status(again, SUCCEEDED, "new")
        wait_status(again, SUCCEEDED, *"abcdef")
    assert consumer.bodies == [*"abcdef", "new"]


def test_retention_that_was_faster_is_noticed(
    amqp_url: str,
    stream_name: str,
    collector_of: Callable[..., MessageCollector],
    database_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Messages that were dropped before they were collected are missing, and it is said which."""
    delete_stream(amqp_url, stream_name)
    declare_stream(amqp_url, stream_name, x_max_length_bytes=2000, x_stream_max_segment_size_bytes=1000)
    store = CollectorStore("billing", database_url)
    member = store.open(["order"], 0.2)
    store.follow(member, stream_name, 0)
    store.close(member)
    store.dispose()
    count = 0

    def first_offset() -> int:
        nonlocal count
        publish(amqp_url, stream_name, f"{count:03}" + "x" * 500)
        count += 1
        with StreamReader.open(amqp_url) as reader:
            return reader.bounds(stream_name).first or 0

    wait_until(lambda: first_offset() > 0, what="messages dropped by retention")
    consumer, collector = Consumer(), collector_of()
    collector.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01))
    with caplog.at_level("WARNING", "relatum.collector"), collector:
        wait_until(lambda: consumer.bodies and consumer.bodies[-1].startswith(f"{count - 1:03}"))
        first = collector.outcome(consumer.bodies[0][:200]).offset
    [record] = [record for record in caplog.records if "retention" in record.message]
    assert (vars(record)["from"], vars(record)["to"]) == (0, first)


def test_a_message_given_twice_is_consumed_once(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """A message's place is its identity: given again, by `collect` or in its stream, it is taken and left alone."""
    publish(amqp_url, stream_name, "a", "b")
    consumer, collector = Consumer(), collector_of(streams=[])
    collector.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01))
    messages = read_all(amqp_url, stream_name)
    with collector:
        assert collector.collect_many([messages[0], messages[0]]) == [True, True]
        wait_status(collector, SUCCEEDED, "a")
        assert collector.collect(messages[0])
        collector.flush()
    follower = collector_of()
    follower.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01))
    with follower:
        wait_status(follower, SUCCEEDED, "a", "b")
    assert sorted(consumer.bodies) == ["a", "b"]


# --- wrong input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 256}, "name"),
        ({"streams": "orders"}, "list of names"),
        ({"start": "last"}, "start= takes"),
        ({"start": -1}, "start= takes"),
        ({"lease_s": 0}, "lease_s"),
        ({"bytes_max": 0}, "bytes_max"),
        ({"bulks_max": 0}, "bulks_max"),
        ({"keep_s": 0}, "keep_s"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    """A collector's option that cannot be one is one clear error, before anything is opened."""
    with pytest.raises(InvalidInput, match=said):
        MessageCollector(**{"name": "billing", "database": NOWHERE} | options)


def test_options_that_need_a_broker_say_so(database_url: str) -> None:
    """What cannot work without a broker is refused when it is asked for."""
    with pytest.raises(ConfigurationError, match="broker"):
        MessageCollector("billing", database=NOWHERE, streams=["orders"])
    with pytest.raises(ConfigurationError, match="broker"):
        MessageCollector("billing", database=NOWHERE, dead_letter_stream="dead")
    collector = MessageCollector("billing", database=database_url)
    with pytest.raises(ConfigurationError, match="broker"):
        collector.register_executor("order", Consumer(), ExecutorOptions(when_full="spill"))
    with pytest.raises(InvalidInput, match="called"):
        collector.register_executor("order", "no executor")  # type: ignore[arg-type]
    collector.register_executor("order", Consumer())
    with pytest.raises(InvalidInput, match="already"):
        collector.register_executor("order", Consumer())
    with collector, pytest.raises(ConfigurationError, match="before"):
        collector.register_executor("parcel", Consumer())


def test_a_dead_letter_stream_that_is_missing_is_noticed_at_the_start(
    collector_of: Callable[..., MessageCollector],
) -> None:
    """A collector does not begin where it could not publish dead letters."""
    collector = collector_of(dead_letter_stream=unique_name("missing"))
    collector.register_executor("order", Consumer())
    with pytest.raises(StreamNotFound):
        collector.start()


def test_a_queue_is_not_followed(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector], caplog: pytest.LogCaptureFixture
) -> None:
    """It never becomes a stream; a stream that is missing may, so it is waited for, which is logged with its name."""
    queue, missing = unique_name("queue"), unique_name("missing")
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        connection.channel().queue_declare(queue, exclusive=False, auto_delete=True, durable=True)
        collector = collector_of(streams=[stream_name, queue])
        collector.register_executor("order", Consumer())
        with pytest.raises(NotAStream, match=queue):
            collector.start()
        connection.channel().queue_delete(queue)
    collector = collector_of(streams=[missing])
    consumer = Consumer()
    collector.register_executor("order", consumer, ExecutorOptions(max_age_s=0.01))

    def warnings() -> list[str]:
        records = [record.message for record in caplog.records if record.name == "relatum.collector"]
        return [message for message in records if f"There is no stream {missing!r}" in message]

    with caplog.at_level("WARNING", "relatum.collector"):
        collector.start()
        try:
            wait_until(warnings, what="a warning")
            declare_stream(amqp_url, missing)
            publish(amqp_url, missing, "a")
            wait_status(collector, SUCCEEDED, "a")
        finally:
            collector.close()
            delete_stream(amqp_url, missing)
    assert len(warnings()) == 1


def test_streams_are_not_followed_for_nobody(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """Without any executor the whole stream would be passed over."""
    with pytest.raises(ConfigurationError, match="executor"):
        collector_of().start()


def test_dead_letters_are_not_collected_again(
    amqp_url: str, stream_name: str, collector_of: Callable[..., MessageCollector]
) -> None:
    """Where dead letters would go to a stream that is followed, also as a partition, the collector is refused."""
    with pytest.raises(ConfigurationError, match="for ever"):
        collector_of(dead_letter_stream=stream_name)
    name = unique_name("super")
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        channel = connection.channel()
        channel.exchange_declare(name, "direct", durable=True, arguments={"x-super-stream": True})
        try:
            channel.queue_bind(stream_name, name, "0", {"x-stream-partition-order": 0})
            collector = collector_of(streams=[name], dead_letter_stream=stream_name)
            collector.register_executor("order", Consumer())
            with pytest.raises(ConfigurationError, match="for ever"):
                collector.start()
        finally:
            channel.exchange_delete(name)
