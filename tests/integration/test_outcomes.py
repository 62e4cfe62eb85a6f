"""Asking what became of a message: by id, one or many, waiting for it, by handlers, and by receipts."""

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import sqlalchemy as sa

from relatum import MessageId
from relatum.collecting import AsyncOutcomes, Collected, MessageCollector, Outcome, Outcomes, OutcomeStatus
from relatum.collecting._collector_core import Result
from relatum.errors import ConfigurationError, DatabaseUnavailable, InvalidInput, NotFinishedInTime, NotFound
from relatum.store.database import Database
from tests.contract._clients import open_line
from tests.support import wait_until
from tests.support.collectors import COLLECTED, DEAD, FAILED, FORWARDED, SUCCEEDED, UNKNOWN, StoreMember
from tests.support.place import Place
from tests.support.threads import Threads

BULK = 7
NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


class Collecting(StoreMember):
    """A collector's store, step by step: what its faces would do."""

    def collect(self, message_id: str, offset: int = 0) -> None:
        self.add([Collected(MessageId("orders", offset), message_id, "order", 1, None)])

    def hand_on(self, offset: int = 0) -> None:
        self.forward(BULK, [MessageId("orders", offset)])

    def end(self, status: OutcomeStatus, offset: int = 0, reason: str | None = None) -> None:
        self.finish(BULK, [Result(MessageId("orders", offset), status, reason)])

    def all_at_once(self, message_id: str, status: OutcomeStatus, offset: int = 0, reason: str | None = None) -> None:
        self.collect(message_id, offset)
        self.hand_on(offset)
        self.end(status, offset, reason)


@pytest.fixture
def collecting(database: Database) -> Collecting:
    return Collecting(database)


@pytest.fixture
def outcomes(database_url: str) -> Iterator[Outcomes]:
    """Where another process asks."""
    with Outcomes(database_url) as asked:
        yield asked


def test_each_state_is_told_apart(collecting: Collecting, outcomes: Outcomes) -> None:
    """Each state of a message is distinguished, and a failed wait carries the outcome so far."""
    assert outcomes.of("id") == Outcome("id", UNKNOWN)
    steps = {UNKNOWN: lambda: None, COLLECTED: lambda: collecting.collect("id"), FORWARDED: collecting.hand_on}
    for status, step in steps.items():
        step()
        assert outcomes.of("id").status is status
        with pytest.raises(NotFinishedInTime) as caught:
            outcomes.wait("id", 0)
        assert caught.value.outcome.status is status
    collecting.end(SUCCEEDED)
    for offset, status in enumerate((FAILED, DEAD), 1):
        collecting.all_at_once(status.value, status, offset, "no such order")
    for message_id, status in (("id", SUCCEEDED), ("failed", FAILED), ("dead", DEAD)):
        outcome = outcomes.of(message_id)
        assert (outcome.status, outcome.is_final) == (status, True)
        assert outcome.reason == (None if status is SUCCEEDED else "no such order")


def test_many_are_asked_at_once(collecting: Collecting, outcomes: Outcomes) -> None:
    """Each id asked has an outcome, in the order asked; more than one question holds them all."""
    collecting.collect("b", 1)
    ids = ["b", "a", *(f"id-{n}" for n in range(12_000)), "b"]
    found = outcomes.of_many(ids)
    assert list(found) == list(dict.fromkeys(ids))
    assert [found[each].status for each in ("b", "a")] == [COLLECTED, UNKNOWN]
    assert outcomes.of_many([]) == {}
    for impossible in ("a\0b", "\udcff"):
        assert outcomes.of(impossible).status is UNKNOWN, "no message has such an id"


def test_several_collectors_answer_for_themselves(database: Database, outcomes: Outcomes) -> None:
    """Asked for none, the least advanced counts; asked for one, that one."""
    billing, audit = Collecting(database), Collecting(database, "audit")
    billing.all_at_once("id", SUCCEEDED)
    audit.collect("id")
    outcome = outcomes.of("id")
    assert (outcome.status, outcome.collector) == (COLLECTED, "audit")
    assert [other.collector for other in outcome.others] == ["billing"]
    assert outcomes.of("id", collector="billing").status is SUCCEEDED
    assert outcomes.of("nothing", collector="billing").status is UNKNOWN
    for ask in (
        lambda: outcomes.of("id", collector="biling"),
        lambda: outcomes.of_many([], collector="biling"),
        lambda: outcomes.wait("id", 0.05, collector="biling"),
    ):
        with pytest.raises(NotFound, match="'biling'"):
            ask()
    with pytest.raises(InvalidInput, match="collector"):
        outcomes.of("id", collector="")


def test_a_collector_that_nobody_made_yet_is_waited_for(database: Database, outcomes: Outcomes) -> None:
    """A publisher may ask for the outcome before the first member started; a handler is called then, too."""
    told: queue.Queue[Outcome] = queue.Queue()
    outcomes.register_result_handler(told.put, "id", collector="late")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(outcomes.wait, "id", 30, collector="late")
        Collecting(database, "late").all_at_once("id", SUCCEEDED)
        assert waiting.result(90).status is SUCCEEDED
    while not told.get(timeout=90).is_final:
        pass


def test_a_database_that_is_away_is_waited_for() -> None:
    """A wait lasts its time while the database is away, and then raises what is wrong."""
    with Outcomes(NOWHERE) as asked:
        with pytest.raises(DatabaseUnavailable):
            asked.of("id")
        started = time.monotonic()
        with pytest.raises(DatabaseUnavailable):
            asked.wait("id", 0.3)
        assert time.monotonic() - started >= 0.3


def test_handlers_are_told_each_status_until_it_is_final(collecting: Collecting, outcomes: Outcomes) -> None:
    """Each handler of an id is called once with every status, and a late one with the final status."""
    first: list[OutcomeStatus] = []
    second: list[OutcomeStatus] = []
    outcomes.register_result_handler(lambda outcome: first.append(outcome.status), "id")
    collecting.collect("id")
    wait_until(lambda: first == [COLLECTED], what="the first handler")
    outcomes.register_result_handler(lambda outcome: second.append(outcome.status), "id")
    wait_until(lambda: second == [COLLECTED], what="the second handler")
    collecting.hand_on()
    wait_until(lambda: first[-1] is FORWARDED, what="the next status")
    collecting.end(SUCCEEDED)
    wait_until(lambda: second == [COLLECTED, FORWARDED, SUCCEEDED], what="the last status")
    assert first == second
    # A late caller gets an outcome that is final already.
    late = threading.Event()
    outcomes.register_result_handler(lambda outcome: late.set(), "id")
    assert late.wait(90)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_handler_that_raises_or_exits_breaks_nothing(
    collecting: Collecting, outcomes: Outcomes, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    """A handler's error is logged with the message's id, and other handlers are called."""
    told = threading.Event()
    collecting.all_at_once("id", SUCCEEDED)
    outcomes.register_result_handler(Mock(side_effect=error), "id")
    with caplog.at_level("ERROR", "relatum.collector"):
        wait_until(lambda: "message id (succeeded)" in caplog.text, what="the log")
    outcomes.register_result_handler(lambda outcome: told.set(), "id")
    assert told.wait(90)
    assert {line.name for line in caplog.records} == {"relatum.collector"}


def test_a_handler_that_takes_its_time_delays_no_wait(collecting: Collecting, outcomes: Outcomes) -> None:
    """A slow handler delays no wait, and it may close the outcomes that call it."""
    called, done, closed = threading.Event(), threading.Event(), threading.Event()

    def slow(outcome: Outcome) -> None:
        called.set()
        done.wait(90)
        outcomes.close()
        closed.set()

    collecting.all_at_once("id", SUCCEEDED)
    outcomes.register_result_handler(slow, "id")
    assert called.wait(90)
    assert outcomes.wait("id", 60).status is SUCCEEDED
    done.set()
    assert closed.wait(90)


@pytest.mark.parametrize("message_id", ["\0", "\ud800"])
def test_an_id_that_no_message_can_have_is_unknown(collecting: Collecting, outcomes: Outcomes, message_id: str) -> None:
    """Such an id is no error, and fails no other wait."""
    assert outcomes.of(message_id).status is UNKNOWN
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(outcomes.wait, each, limit_s) for each, limit_s in [("id", 60), (message_id, 0.2)]]
        with pytest.raises(NotFinishedInTime):
            waits[1].result()
        collecting.all_at_once("id", SUCCEEDED)
        assert waits[0].result().status is SUCCEEDED


def test_more_handlers_than_one_poll_has_time_for_are_told(
    collecting: Collecting, outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many messages are waited for, the time of one poll is no limit."""
    monkeypatch.setattr("relatum.common.waiting._shared_wait.POLL_S", 0.05)
    many = [Collected(MessageId("orders", n), f"m{n}", "order", 1, None) for n in range(5_000)]
    collecting.add(many)
    told: list[str] = []
    for each in many:
        outcomes.register_result_handler(lambda outcome: told.append(outcome.message_id), each.message_id)
    wait_until(lambda: len(told) == len(many), what="all handlers called")


async def test_many_tasks_wait_and_hold_no_thread(collecting: Collecting, database_url: str, earlier: Threads) -> None:
    """The asyncio face answers as the blocking one does, and one thread asks for all tasks that wait."""
    async with AsyncOutcomes(database_url) as asked:
        assert (await asked.of("id")).status is UNKNOWN
        waits = [asyncio.create_task(asked.wait("id", 90)) for _ in range(200)]
        with pytest.raises(NotFinishedInTime):
            await asked.wait("id", 0.2)
        assert [thread.name for thread in earlier.begun()].count("relatum-outcomes") == 1
        seen: asyncio.Queue[Outcome] = asyncio.Queue()
        asked.register_result_handler(seen.put_nowait, "id")
        await asyncio.to_thread(collecting.all_at_once, "id", SUCCEEDED)
        assert {outcome.status for outcome in await asyncio.gather(*waits, asked.wait("id"))} == {SUCCEEDED}
        assert (await asked.of_many(["id"]))["id"].is_final
        while (await seen.get()).status is not SUCCEEDED:
            pass


async def test_a_handler_that_nobody_would_await_is_refused(outcomes: Outcomes, database_url: str) -> None:
    """A coroutine function is refused by both faces, which call handlers and await none."""

    async def handler(_: Outcome) -> None: ...

    async with AsyncOutcomes(database_url) as asked:
        for face in (outcomes, asked):
            with pytest.raises(InvalidInput, match="coroutine"):
                face.register_result_handler(handler, "id")


def test_closing_ends_the_thread(database_url: str, earlier: Threads) -> None:
    """Closing ends the thread, and later calls are refused."""
    asked = Outcomes(database_url)
    asked.register_result_handler(print, "id")
    asked.close()
    assert not [thread for thread in earlier.begun() if thread.name == "relatum-outcomes"]
    for ask in (lambda: asked.of("id"), lambda: asked.register_result_handler(print, "id")):
        with pytest.raises(ConfigurationError, match="closed"):
            ask()


def test_a_database_that_is_not_there_is_no_server_that_is_away(database_url: str) -> None:
    """Waiting would not cure it: the error comes at once."""
    nowhere = sa.make_url(database_url).set(database="relatum_nothing")
    with Outcomes(nowhere) as asked, pytest.raises(ConfigurationError, match="relatum_nothing"):
        asked.wait("id", 60)
    collector = MessageCollector("billing", database=nowhere.render_as_string(hide_password=False))
    collector.register_executor("order", lambda bulk: None)
    with pytest.raises(ConfigurationError, match="relatum_nothing"):
        collector.run(threading.Event())


async def test_arguments_are_checked_before_anything_is_asked() -> None:
    """Nothing listens at this address: each is refused by its name; the others are in `test_hostile_arguments`."""
    async with AsyncOutcomes(NOWHERE) as asynchronous:
        with Outcomes(NOWHERE) as asked:
            for each in (asked, asynchronous):
                with pytest.raises(InvalidInput, match="handler"):
                    each.register_result_handler(None, "id")  # type: ignore[arg-type]
            with pytest.raises(InvalidInput, match="message_id"):
                asked.register_result_handler(print, "")
            for ids in ("id", None):
                with pytest.raises(InvalidInput):
                    asked.of_many(ids)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="message_ids"):
            await asynchronous.of_many(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("client", "status"), [("pika", SUCCEEDED), ("pika", FAILED), ("aio-pika robust", SUCCEEDED)])
def test_a_receipt_waits_for_the_outcome(place: Place, database: Database, client: str, status: OutcomeStatus) -> None:
    """A receipt gives the outcome of its message, and until then how far the message is."""
    with open_line(client, place.amqp) as line:
        line.intercept(database=place.database, keys=["order_id"], broker=place.broker)
        receipt = line.receipt(line.channel(), line.message(b"pay"), place.stream)
        with pytest.raises(NotFinishedInTime) as caught:
            line.result(receipt.outcome(timeout_s=0))
        assert caught.value.outcome.status is UNKNOWN
        with pytest.raises(NotFinishedInTime, match=r"within 0\.05 s"):
            line.result(receipt.outcome(timeout_s=0.05))
        for call in (receipt.outcome, receipt.wait):
            for timeout_s in (-1, "3"):
                with pytest.raises(InvalidInput, match="timeout_s"):
                    line.result(call(timeout_s))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(Collecting(database).all_at_once, receipt.message_id, status, reason="as told")
            outcome = line.result(receipt.outcome(timeout_s=90))
        # A success needs none.
        assert (outcome.status, outcome.reason) == (status, "as told" if status is FAILED else None)
        assert line.result(receipt.outcome(collector="billing")) == outcome
        line.result(receipt.wait())
