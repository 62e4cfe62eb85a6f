"""What both faces of the message collector do: each limit, each refusal, each result, and their end."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from relatum.collecting import Bulk, ExecutorOptions, Failure, FlushReason, Outcome, OutcomeStatus
from relatum.errors import ConfigurationError, InvalidInput
from relatum.reading import Message, Properties
from relatum.store.members import LEASE_S
from tests.support import wait_until
from tests.support.collectors import (
    COLLECTED,
    COLLECTOR_FACES,
    FAILED,
    FOREVER,
    FORWARDED,
    SUCCEEDED,
    UNKNOWN,
    Collecting,
    Consumer,
    Gate,
    collectors_of,
    wait_status,
)
from tests.support.place import Place

FULL: dict[str, Any] = {"bulk_messages": 1, "queue_bulks": 1, "max_age_s": 600.0}


@pytest.fixture(params=COLLECTOR_FACES)
def collecting(request: pytest.FixtureRequest, place: Place) -> Iterator[Collecting]:
    with collectors_of(request.param) as make:
        yield Collecting(place, make)


def test_each_limit_of_a_type_closes_its_bulks(collecting: Collecting) -> None:
    """By itself; the bulk says which limit it was, and its messages are in order."""
    limits: dict[FlushReason, dict[str, Any]] = {
        FlushReason.BYTES: {"bulk_bytes": 1},
        FlushReason.MESSAGES: {"bulk_messages": 3},
        FlushReason.AGE: {"max_age_s": 0.3},
        FlushReason.IDLE: {"idle_s": 0.3},
    }
    collector, consumers = collecting.collector(), {reason: Consumer() for reason in limits}
    bodies = {reason: [f"{reason.value}-{n}" for n in range(3)] for reason in limits}
    for reason, options in limits.items():
        collecting.put(*bodies[reason], type_=reason.value)
        collector.register_executor(reason.value, consumers[reason], ExecutorOptions(**FOREVER | options))
    with collector:
        wait_status(collector, SUCCEEDED, *(each for its in bodies.values() for each in its))
    assert {reason: consumer.bodies for reason, consumer in consumers.items()} == bodies
    reasons = {reason: {each for each, _ in consumer.bulks} for reason, consumer in consumers.items()}
    assert reasons == {reason: {reason} for reason in limits}


def test_an_explicit_flush_takes_all_that_was_given(collecting: Collecting) -> None:
    """`flush` hands on what `collect` took before, of one type or of all."""
    collecting.put("a", "b")
    collecting.put("c", type_="parcel")
    orders, parcels = Consumer(), Consumer()
    collector = collecting.collector(orders, streams=[], **FOREVER)
    collector.register_executor("parcel", parcels, ExecutorOptions(**FOREVER))
    with collector:
        assert collector.collect_many(collecting.place.messages()) == [True] * 3
        collector.flush("order")
        wait_status(collector, SUCCEEDED, "a", "b")
        assert collector.outcome("c").status is COLLECTED
        collector.flush()
        wait_status(collector, SUCCEEDED, "c")
    assert orders.bulks == [(FlushReason.EXPLICIT, ["a", "b"])]
    assert parcels.bulks == [(FlushReason.EXPLICIT, ["c"])]


def test_an_orderly_stop_flushes_and_waits(collecting: Collecting) -> None:
    """Closing hands on what is being filled, waits for the executor, and stores its results."""
    collecting.put("a", "b")
    consumer = Consumer()
    collector = collecting.collector(consumer, **FOREVER)
    collector.start()
    wait_status(collector, COLLECTED, "a", "b")
    assert collector.close()
    assert consumer.bulks == [(FlushReason.STOP, ["a", "b"])]
    with collecting.collector(streams=[]) as again:
        assert again.outcome("b").status is SUCCEEDED


def test_what_is_not_done_when_the_stop_ends_is_done_by_the_next(collecting: Collecting) -> None:
    """An executor that does not come to its end is not waited for longer than was said; its bulk is another's then."""
    collecting.put("a")
    gate, consumer = Gate(), Consumer()
    collector = collecting.collector(gate)
    with gate.closed():
        collector.start()
        wait_until(lambda: gate.bulks, what="a bulk at the executor")
        assert not collector.close(timeout_s=0.2)
        assert not collector.close(), "closed again, it is as little done as before"
        with collecting.collector(consumer) as successor:
            [outcome] = wait_status(successor, SUCCEEDED, "a")
        assert (consumer.bodies, outcome.attempts) == (["a"], 2)


def test_a_type_without_executor_is_refused(collecting: Collecting) -> None:
    """`collect` refuses a message without an executor; one of a followed stream is passed over, counted, not stored."""
    collecting.put("a", type_="nobody's")
    collecting.put("b", type_=None)
    collecting.put("c")
    with collecting.collector(Consumer()) as collector:
        wait_status(collector, SUCCEEDED, "c")
        assert collector.collect_many(collecting.place.messages()[:2]) == [False, False]
        assert (collector.outcome("a").status, collector.outcome("b").status) == (UNKNOWN, UNKNOWN)
        assert collector.statistics().passed_over == 4
    assert collecting.place.sql("SELECT count(*) FROM relatum.collected_messages") == [(1,)]


def test_a_message_that_is_refused_keeps_none_of_another_stream(collecting: Collecting) -> None:
    """A message that was collected together with one that PostgreSQL refuses is consumed all the same."""
    collecting.put("a")
    collecting.place.sql("ALTER TABLE relatum.collected_messages ADD CHECK (message_id <> 'refused')")
    refused = Message("~", 0, None, None, lambda: ({}, Properties(message_id="refused", type="order"), b"", True))
    with collecting.collector(Consumer(), streams=[]) as collector:
        assert collector.collect_many([*collecting.place.messages(), refused]) == [True, True]
        wait_status(collector, SUCCEEDED, "a")
        assert collector.outcome("refused").status is UNKNOWN


def test_a_collector_that_does_not_run_takes_nothing(collecting: Collecting) -> None:
    """Before the start `collect` is an error, after the end a refusal."""
    collecting.put("a")
    [message] = collecting.place.messages()
    collector = collecting.collector(Consumer(), streams=[])
    with pytest.raises(ConfigurationError, match="start"):
        collector.collect(message)
    collector.start()
    collector.close()
    assert not collector.collect(message)
    with pytest.raises(ConfigurationError, match="once"):
        collector.start()


def test_wrong_arguments_are_refused_while_it_runs(collecting: Collecting) -> None:
    """A wrong argument is refused by an error that names it, and takes nothing; the collector works on."""
    message = Message("orders", 1, None, None, lambda: ({}, Properties(message_id="m1"), b"body", True))
    with collecting.collector(Consumer(), streams=[], broker=None) as collector:
        refused: list[tuple[str, Callable[[], object]]] = [
            ("NoneType", lambda: collector.collect(None)),
            ("tuple", lambda: collector.collect((message,))),
            ("bytes", lambda: collector.collect_many([message, b"body"])),
            ("NoneType", lambda: collector.collect_many(None)),
            ("'oder'", lambda: collector.flush("oder")),
            ("timeout_s", lambda: collector.close(-1)),
            ("message_id", lambda: collector.outcome("")),
            ("before", lambda: collector.register_executor("parcel", Consumer())),
        ]
        for said, call in refused:
            with pytest.raises((InvalidInput, ConfigurationError), match=said):
                call()
        for timeout_s in (-1, "3", float("inf"), 10**12):
            with pytest.raises(InvalidInput, match="timeout_s"):
                collector.collect(message, timeout_s=timeout_s)
        assert collector.statistics().held_messages == 0
        collector.flush("order")
        assert (collector.collect(message), collector.statistics().passed_over) == (False, 1), "it has no type"


def fill(collector: Any, gate: Gate, messages: Iterable[Message]) -> list[Message]:
    """Give a running and a waiting bulk of one message each; gives the messages that are left.

    There is room for the second as soon as a worker takes the first, not only when that was consumed.
    """
    first, second, *rest = messages
    assert collector.collect(first)
    collector.flush()
    assert collector.collect(second, timeout_s=90)
    assert not gate.opened.is_set()
    collector.flush()
    return rest


def test_who_has_no_room_waits_or_is_refused(collecting: Collecting) -> None:
    """For the given time, or until there is room; nothing refused is stored, and it may come again."""
    collecting.put(*"abcd")
    gate = Gate()
    with collecting.collector(gate, streams=[], **FULL) as collector, gate.closed():
        [third, fourth] = fill(collector, gate, collecting.place.messages())
        for timeout_s in (0, 0.05):
            assert not collector.collect(third, timeout_s=timeout_s)
        answers: list[bool] = []
        waiting = threading.Thread(target=lambda: answers.append(collector.collect(fourth)))
        waiting.start()
        assert (collector.statistics().refused, {collector.outcome(each).status for each in "cd"}) == (2, {UNKNOWN})
        gate.opened.set()
        waiting.join(90)
        assert answers == [True]
        wait_status(collector, SUCCEEDED, *"abd")
        assert collector.outcome("c").status is UNKNOWN
        assert collector.collect(third, timeout_s=0)
        wait_status(collector, SUCCEEDED, "c")


def test_a_message_given_twice_is_consumed_once(collecting: Collecting) -> None:
    """A message's place is its identity: given again, by `collect` or in its stream, it is taken and left alone."""
    collecting.put("a", "b")
    consumer, messages = Consumer(), collecting.place.messages()
    with collecting.collector(consumer, streams=[]) as collector:
        assert collector.collect_many([messages[0], messages[0]]) == [True, True]
        wait_status(collector, SUCCEEDED, "a")
        assert collector.collect(messages[0])
        collector.flush()
    with collecting.collector(consumer) as follower:
        wait_status(follower, SUCCEEDED, "a", "b")
    assert sorted(consumer.bodies) == ["a", "b"]


def test_each_message_has_its_own_result(collecting: Collecting) -> None:
    """Of one bulk, one message succeeds, one is tried again and succeeds then, one fails for good."""
    collecting.put(*"abc")
    answers = iter([[None, ValueError("later"), Failure("never", retry=False)], [None]])
    consumer = Consumer(lambda bulk: next(answers))
    with collecting.collector(consumer, bulk_messages=3, max_age_s=2.0, backoff_s=0.05) as collector:
        [a, b] = wait_status(collector, SUCCEEDED, "a", "b")
        [c] = wait_status(collector, FAILED, "c")
    assert [(each.attempts, each.reason) for each in (a, b, c)] == [(1, None), (2, None), (1, "never")]
    assert [bodies for _, bodies in consumer.bulks] == [["a", "b", "c"], ["b"]]
    assert a.finished_at is not None
    assert a.collected_at is not None
    assert a.collected_at <= a.finished_at


def test_raising_fails_what_has_no_result(collecting: Collecting) -> None:
    """What the executor noted before it raised stays; the rest is tried again, with back-off, then failed."""
    collecting.put("a", "b")
    times: list[float] = []

    def answer(bulk: Bulk) -> None:
        times.append(time.monotonic())
        for each in bulk.messages:
            if each.message_id == "a":
                bulk.succeeded(each)
        raise RuntimeError("no room on disk")

    consumer = Consumer(answer)
    options = {"bulk_messages": 2, "max_age_s": 2.0, "attempts": 3, "backoff_s": 0.2}
    with collecting.collector(consumer, **options) as collector:
        [a] = wait_status(collector, SUCCEEDED, "a")
        [b] = wait_status(collector, FAILED, "b")
    assert (a.attempts, b.attempts, b.reason) == (1, 3, "RuntimeError: no room on disk")
    assert [bodies for _, bodies in consumer.bulks] == [["a", "b"], ["b"], ["b"]]
    assert times[1] - times[0] >= 0.2
    assert times[2] - times[1] >= 0.4


def test_handlers_are_told_of_each_message(collecting: Collecting) -> None:
    """Handlers of all, of a type and of a message hear of `collected`, then of the end; a broken one harms nobody."""
    collecting.put("a", "b")
    collecting.put("c", type_="parcel")
    told: dict[str, list[tuple[str, OutcomeStatus]]] = {"all": [], "parcel": [], "b": []}

    def handler(name: str) -> Callable[[Outcome], None]:
        return lambda outcome: told[name].append((outcome.message_id, outcome.status))

    def broken(outcome: Outcome) -> None:
        raise RuntimeError("a handler's own trouble")

    collector = collecting.collector(Consumer(), max_age_s=0.05)
    collector.register_result_handler(broken)
    collector.register_result_handler(handler("all"))
    collector.register_result_handler(handler("parcel"), type="parcel")
    collector.register_result_handler(handler("b"), message_id="b")
    failing = Consumer(lambda bulk: [Failure("no", retry=False)])
    collector.register_executor("parcel", failing, ExecutorOptions(max_age_s=0.05))
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


@pytest.mark.parametrize("where", ["before it is handed on", "result", "joined result"])
def test_a_defect_in_a_worker_leaves_nothing_undecided(
    collecting: Collecting, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error where none is expected is the result of the bulk's messages, one attempt, and the worker continues."""
    collecting.put(*"ab")

    def load(_: object, bulk: Bulk, *_more: object) -> Any:
        return {} if bulk.messages[0].message_id == "b" else {None in Broken()}

    if where.startswith("before"):
        monkeypatch.setattr("relatum.collecting._consuming.BulkConsumer._load", load)
    answer = Consumer(lambda bulk: Broken() if bulk.messages[0].message_id == "a" else None)
    options = {"bulk_messages": 1, "attempts": 2, "backoff_s": 0.01, "joins_transaction": where.startswith("joined")}
    with collecting.collector(answer, **options) as collector:
        [a] = wait_status(collector, FAILED, "a")
        wait_status(collector, SUCCEEDED, "b")
        wait_until(lambda: collector.statistics().held_messages == 0, what="nothing held")
    assert (a.attempts, a.reason) == (2, "RuntimeError: no such question")


JOINED: dict[str, Any] = {"joins_transaction": True, "max_age_s": 3.0, "backoff_s": 0.01}


def execute(bulk: Bulk, statement: str, **parameters: str) -> None:
    """Execute a statement in the transaction that was joined."""
    assert bulk.connection is not None
    bulk.connection.execute(sa.text(statement), parameters)


def write(bulk: Bulk) -> None:
    for each in bulk.messages:
        execute(bulk, "INSERT INTO ledger VALUES (:body)", body=each.message.body.decode())


def raise_after_one(bulk: Bulk) -> None:
    bulk.succeeded(bulk.messages[0])
    raise RuntimeError("on second thought")


def swallow_an_error(bulk: Bulk) -> None:
    with pytest.raises(sa.exc.DBAPIError):
        execute(bulk, "SELECT 1 / 0")


def lose_the_connection(bulk: Bulk) -> None:
    execute(bulk, "SELECT pg_terminate_backend(pg_backend_pid())")


def test_a_joined_executor_commits_with_its_results(collecting: Collecting, ledger: Callable[[], list[str]]) -> None:
    """What it wrote is there once, with partial results, too; a failed message is the executor's own to undo."""
    collecting.put(*"abc")

    def answer(bulk: Bulk) -> list[Failure | None]:
        write(bulk)
        return [Failure("no", retry=False) if each.message_id == "b" else None for each in bulk.messages]

    with collecting.collector(answer, bulk_messages=3, **JOINED) as collector:
        wait_status(collector, SUCCEEDED, "a", "c")
        wait_status(collector, FAILED, "b")
    assert ledger() == ["a", "b", "c"]


def test_a_process_that_freezes_while_its_results_are_joined_keeps_no_locks(
    collecting: Collecting, ledger: Callable[[], list[str]]
) -> None:
    """When the results lock the rows that others may take over, the transaction may not be idle for long any more."""
    collecting.place.sql("CREATE TABLE limits (idle text)")
    collecting.place.sql(
        "CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO limits VALUES (current_setting('idle_in_transaction_session_timeout')); RETURN NEW; END $$"
    )
    collecting.place.sql(
        "CREATE TRIGGER look BEFORE UPDATE ON relatum.collected_messages FOR EACH ROW "
        "WHEN (NEW.state = 'succeeded') EXECUTE FUNCTION look()"
    )
    collecting.put("a")
    with collecting.collector(write, bulk_messages=1, **JOINED) as collector:
        wait_status(collector, SUCCEEDED, "a")
    assert collecting.place.sql("SELECT idle FROM limits") == [(f"{LEASE_S:g}s",)]


@pytest.mark.parametrize(
    ("trouble", "attempts"), [(raise_after_one, [1, 2]), (swallow_an_error, [1, 2]), (lose_the_connection, [1, 1])]
)
def test_a_joined_attempt_that_goes_wrong_has_written_nothing(
    collecting: Collecting, ledger: Callable[[], list[str]], trouble: Callable[[Bulk], None], attempts: list[int]
) -> None:
    """Its writes are rolled back with all it noted, and written once by the next; a lost connection counts for none."""
    collecting.put("a", "b")
    seen: list[int] = []

    def answer(bulk: Bulk) -> None:
        write(bulk)
        seen.append(bulk.messages[0].attempts)
        if len(seen) == 1:
            trouble(bulk)

    with collecting.collector(answer, bulk_messages=2, **JOINED) as collector:
        outcomes = wait_status(collector, SUCCEEDED, "a", "b")
    assert (seen, {each.attempts for each in outcomes}, ledger()) == (attempts, {attempts[-1]}, ["a", "b"])


def test_a_joined_executor_whose_messages_were_taken_over_writes_nothing(
    collecting: Collecting, ledger: Callable[[], list[str]]
) -> None:
    """The writes of a joined executor are rolled back if another member has taken over its messages."""
    collecting.put("a", "b")
    calls: list[list[str]] = []

    def answer(bulk: Bulk) -> None:
        write(bulk)
        calls.append([each.message_id for each in bulk.messages])
        collecting.place.sql("UPDATE relatum.collected_messages SET member_id = 0 WHERE message_id = 'a'")

    with collecting.collector(answer, bulk_messages=2, **JOINED) as collector:
        wait_status(collector, SUCCEEDED, "b")
        assert collector.outcome("a").status is FORWARDED
    assert (calls, ledger()) == ([["a", "b"], ["b"]], ["b"])
