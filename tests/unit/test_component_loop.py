"""The loop of a component: what it runs, ends, stops and leaves to a fork; and what its outages say and do."""

import asyncio
import gc
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relatum import errors
from relatum.common.waiting import ANSWER_S, ComponentLoop, Deadline, LoopThread, Outages, Server, pause
from relatum.reading.following import BrokerReach
from tests.support import LIMIT_S, wait_until
from tests.support.forking import in_child
from tests.support.loop_guard import BlockedLoop, blocked

logger = logging.getLogger("relatum.test-loop")


@pytest.fixture
def loop() -> Iterator[ComponentLoop]:
    loop = ComponentLoop("relatum-test", logger)
    loop.start()
    yield loop
    assert loop.stop(LIMIT_S)


def running(loop: ComponentLoop, function: Callable[..., Any], *arguments: object) -> Future[Any]:
    future = loop.run(function, *arguments)
    assert future is not None
    return future


async def nothing() -> None:
    pass


async def wait_for_cancelling(begun: threading.Event, at_end: Callable[[], object]) -> None:
    begun.set()
    try:
        await asyncio.Event().wait()
    finally:
        at_end()


def assert_goes_on(loop: ComponentLoop) -> None:
    came = threading.Event()
    assert loop.call(came.set)
    assert came.wait(LIMIT_S)


def test_calls_and_coroutines_run_in_its_thread(loop: ComponentLoop) -> None:
    """A coroutine runs in the loop's daemon thread, asks in another one, and raises to its caller."""

    async def where() -> tuple[threading.Thread, threading.Thread]:
        return threading.current_thread(), await loop.ask(threading.current_thread)

    async def fail() -> None:
        raise KeyError("no")

    found = running(loop, where).result(LIMIT_S)
    assert [(isinstance(each, LoopThread), each.daemon) for each in found] == [(True, True), (False, True)]
    with pytest.raises(KeyError):
        running(loop, fail).result(LIMIT_S)


def test_a_defect_or_an_exit_ends_nothing_else(loop: ComponentLoop, caplog: pytest.LogCaptureFixture) -> None:
    """An error of a call or a task, and even SystemExit, is logged by the component's logger; the loop continues."""

    async def fail(error: BaseException) -> None:
        raise error

    def fail_at_once() -> None:
        raise KeyError("in a call")

    loop.call(lambda: loop.spawn(fail(KeyError("in a task"))))
    loop.call(fail_at_once)
    wait_until(lambda: len(caplog.records) == 2, what="both defects told")
    loop.call(lambda: loop.spawn(fail(SystemExit(3))))
    wait_until(lambda: len(caplog.records) > 2, what="the exit told")
    assert {record.name for record in caplog.records} == {logger.name}
    assert_goes_on(loop)


def test_a_duty_is_done_when_due_and_when_woken(loop: ComponentLoop) -> None:
    """A duty runs when due or woken, and again after an error, which its outages get."""
    outages, calls, fails = Outages(logger), list[int](), [errors.BrokerUnavailable("away")]

    async def call() -> float:
        calls.append(len(calls))
        if fails:
            raise fails.pop()
        return 0.01 if len(calls) < 4 else math.inf

    duties = list[object]()
    loop.call(lambda: duties.append(loop.repeat(call, "a duty", outages)))
    wait_until(lambda: len(calls) == 4, what="what is due")
    time.sleep(0.05)
    assert len(calls) == 4
    loop.call(lambda: duties[0].wake())  # type: ignore[attr-defined]
    wait_until(lambda: len(calls) == 5, what="what was woken")


def test_stopping_cancels_tasks_and_lets_questions_go() -> None:
    """Stopping waits for no server: coroutines are cancelled, and later calls are refused."""
    ending = Deadline(None)
    loop = ComponentLoop("relatum-test", logger, ending=ending)
    loop.start()

    async def wait() -> None:
        await loop.ask(pause, LIMIT_S)
        # The request may be released before the loop is stopped.
        await asyncio.Event().wait()

    future = running(loop, wait)
    wait_until(lambda: loop.threads._unfinished == 1, what="the question under way")
    begun = time.monotonic()
    ending.end_in(0.0)
    assert loop.stop(LIMIT_S)
    assert time.monotonic() - begun < LIMIT_S / 4
    with pytest.raises(CancelledError):
        future.result(0)
    assert not loop.call(print)
    assert loop.run(wait) is None


def test_it_is_stopped_from_its_own_threads() -> None:
    """Which do not wait for themselves."""
    for where in ("loop", "helper"):
        loop = ComponentLoop("relatum-test", logger)
        loop.start()
        ended = threading.Event()

        async def stop(loop: ComponentLoop = loop, where: str = where, ended: threading.Event = ended) -> None:
            stopping: Callable[[], object] = lambda: (loop.stop(LIMIT_S), ended.set())  # noqa: E731
            if where == "loop":
                stopping()
            else:
                await loop.ask(stopping)

        loop.run(stop)
        assert ended.wait(LIMIT_S)
        assert loop.stop(LIMIT_S)


def test_a_child_leaves_it_to_the_parent(loop: ComponentLoop) -> None:
    """A fork's child can stop its copy of the loop, and the parent's loop still takes calls."""
    report = in_child(lambda: [loop.call(print), loop.stop(LIMIT_S)])
    assert report[1]
    assert_goes_on(loop)


def test_what_blocks_is_refused_in_it(loop: ComponentLoop) -> None:
    """The tests' guard refuses a blocking call in a component's loop, and in no other thread."""

    async def call(function: Callable[[], object]) -> None:
        function()

    for function in (lambda: time.sleep(0.001), lambda: threading.Event().wait(0.001), lambda: asyncio.run(None)):  # type: ignore[arg-type]
        with pytest.raises((BlockedLoop, RuntimeError, ValueError)):
            running(loop, call, function).result(LIMIT_S)
    assert len(blocked) == 2
    blocked.clear()
    time.sleep(0)
    assert not threading.Event().wait(0.001)
    assert not blocked


def test_a_call_that_is_cancelled_is_cancelled_in_the_loop(loop: ComponentLoop) -> None:
    """Cancelling the future of a coroutine cancels the coroutine in the loop."""
    begun, ended = threading.Event(), threading.Event()
    future = running(loop, wait_for_cancelling, begun, ended.set)
    assert begun.wait(LIMIT_S)
    assert future.cancel()
    assert ended.wait(LIMIT_S)


def test_a_call_that_a_loop_never_comes_to_is_cancelled() -> None:
    """A caller waits no longer than the loop's end, even if it called while the loop ended."""
    loop = ComponentLoop("relatum-test", logger)
    loop.start()
    futures = []

    stopping = threading.Thread(target=loop.stop, args=(LIMIT_S,))
    stopping.start()
    while (future := loop.run(nothing)) is not None:
        futures.append(future)
    stopping.join(LIMIT_S)
    wait_until(lambda: all(future.done() for future in futures), what="all done, or cancelled")


@pytest.mark.parametrize("steps", range(8))
def test_what_is_called_while_a_loop_ends_leaves_no_task(steps: int, caplog: pytest.LogCaptureFixture) -> None:
    """At whichever of its last steps a call comes, no task is made that never runs."""
    loop = ComponentLoop("relatum-test", logger)
    loop.start()
    begun = threading.Event()
    futures = []

    def call_after(steps: int) -> None:
        if steps:
            loop.call(call_after, steps - 1)
        else:
            futures.append(loop.run(nothing))

    running(loop, wait_for_cancelling, begun, lambda: call_after(steps))
    assert begun.wait(LIMIT_S)
    assert loop.stop(LIMIT_S)
    gc.collect()
    assert not caplog.records
    assert all(future is None or future.done() for future in futures)


outage_logger = logging.getLogger("relatum.test-outages")
AWAY = errors.DatabaseUnavailable("refused")
GONE = errors.BrokerUnavailable("gone")
NO_STREAM = errors.StreamNotFound("no such stream", stream="s")

ON = "goes on"
ENDS = "ends while it waits"

POSTGRESQL_AWAY = "WARNING PostgreSQL d:2/n is unavailable; retrying: DatabaseUnavailable: refused"
POSTGRESQL_BACK = "INFO PostgreSQL d:2/n is back, after 0 s"
RABBITMQ_AWAY = "WARNING RabbitMQ amqp://u@b:1 is unavailable; retrying: BrokerUnavailable: gone"
RABBITMQ_BACK = "INFO RabbitMQ amqp://u@b:1 is back, after 0 s"

ALL = ("a", "b", "c")

CASES: dict[str, tuple[list[tuple[str, Exception | str]], list[str]]] = {
    "whoever waits, and however often": ([(who, AWAY) for _ in range(20) for who in ALL], [POSTGRESQL_AWAY]),
    "nobody says that it is back who did not wait, or while others do": (
        [*((who, AWAY) for who in ALL), ("a", ON), ("b", ON), ("x", ON)],
        [POSTGRESQL_AWAY],
    ),
    "the last that goes on says that it is back": (
        [*((who, AWAY) for who in ALL), ("a", ON), ("b", ON), ("c", ON)],
        [POSTGRESQL_AWAY, POSTGRESQL_BACK],
    ),
    "who ends while it waits does not": ([("a", AWAY), ("a", ENDS)], [POSTGRESQL_AWAY]),
    "the last that ends does where another has gone on": (
        [("a", AWAY), ("b", AWAY), ("a", ON), ("b", ENDS)],
        [POSTGRESQL_AWAY, POSTGRESQL_BACK],
    ),
    **{
        f"streams of a broker that was away: {type(error).__name__}": (
            [("s", GONE), ("s", error), ("s", ON)],
            [RABBITMQ_AWAY, RABBITMQ_BACK],
        )
        for error in (errors.StreamUnavailable("", stream="s"), errors.ReadTimeout("t"), errors.ConnectionLost("l"))
    },
    "one that comes anew meets a broker before its streams": (
        [("the members", GONE), ("reading", errors.StreamNotHere("no replica", stream="s")), ("the members", ON)],
        [RABBITMQ_AWAY, RABBITMQ_BACK],
    ),
    "a stream that is gone when its broker is back is another outage": (
        [("s", GONE), ("s", NO_STREAM), ("s", NO_STREAM), ("s", ON)],
        [
            RABBITMQ_AWAY,
            RABBITMQ_BACK,
            "WARNING s is waiting and will retry: StreamNotFound: no such stream",
            "INFO s is no longer waiting, after 0 s",
        ],
    ),
}


@pytest.fixture
def outages(caplog: pytest.LogCaptureFixture) -> Outages:
    caplog.set_level(logging.INFO, outage_logger.name)
    return Outages(outage_logger, broker="amqp://u@b:1", database="d:2/n")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    # On a machine that stands still, the outage lasts longer.
    return [re.sub(r"after \d+ s$", "after 0 s", f"{line.levelname} {line.getMessage()}") for line in caplog.records]


@pytest.mark.parametrize("case", CASES)
def test_an_outage_is_a_line_and_one_at_its_end(case: str, outages: Outages, caplog: pytest.LogCaptureFixture) -> None:
    """An outage is logged once at its start and once at its end, regardless of how many parts wait for the server."""
    steps, expected = CASES[case]
    for who, what in steps:
        if isinstance(what, Exception):
            outages.failed(who, what)
        else:
            {ON: outages.over, ENDS: outages.forget}[what](who)
    assert lines(caplog) == expected
    server = Server.DATABASE if "PostgreSQL" in expected[0] else Server.BROKER
    if ENDS not in (what for _, what in steps):
        assert outages.is_up(server) == (len(expected) > 1)


def test_a_pool_that_others_use_up_is_no_outage(outages: Outages, caplog: pytest.LogCaptureFixture) -> None:
    """An exhausted pool is not an outage, and does not end one."""
    used_up = errors.DatabaseUnavailable("no connection became free", reason="pool")
    outages.answered(Server.DATABASE)
    outages.failed("a", used_up)
    assert outages.is_up(Server.DATABASE)
    assert "is unavailable; retrying" not in caplog.text
    outages.over("a")
    outages.failed("b", AWAY)
    outages.failed("b", used_up)
    assert not outages.is_up(Server.DATABASE)


@pytest.mark.parametrize("kind", [errors.StreamUnavailable, errors.StreamNotFound])
def test_a_stream_that_starts_after_its_broker_is_no_news_unless_it_lasts(
    outages: Outages, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """A stream that is not ready just after its broker is back is logged only if that lasts."""
    starts = kind("starts", stream="s")
    outages.failed("connections", GONE)
    outages.over("connections")
    outages.failed("s", starts)
    outages.over("s")
    assert lines(caplog) == [RABBITMQ_AWAY, RABBITMQ_BACK]
    monkeypatch.setattr("relatum.common.waiting._failures.STARTING_S", 0.0)
    for _ in range(2):
        outages.failed("s", starts)
    assert lines(caplog)[2:] == [f"WARNING s is waiting and will retry: {kind.__name__}: starts"]


def test_a_defect_is_told_with_its_traceback_once(outages: Outages, caplog: pytest.LogCaptureFixture) -> None:
    """An unforeseen error is logged once, with its traceback."""
    for _ in range(3):
        outages.failed("leases", KeyError("x"))
    outages.failed("leases", errors.AccessRefused("no"))
    assert [(line.levelname, bool(line.exc_info)) for line in caplog.records] == [("ERROR", True), ("WARNING", False)]


def test_a_server_never_asked_or_silent_is_not_up(outages: Outages, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is up once it has answered, unless a question has been open for long."""
    assert not outages.is_up(Server.DATABASE)
    outages.answered(Server.DATABASE)
    assert outages.is_up(Server.DATABASE)
    with outages.asking(Server.DATABASE):
        assert outages.is_up(Server.DATABASE)
        monkeypatch.setattr("relatum.common.waiting._failures.ANSWER_S", -ANSWER_S)
        assert not any(map(outages.is_up, (Server.DATABASE, Server.BROKER)))
    assert outages.is_up(Server.DATABASE)


def test_what_a_stop_ends_says_nothing_of_the_broker(outages: Outages, caplog: pytest.LogCaptureFixture) -> None:
    """A read that a stop ended is not an outage; a database's silence is one."""
    stop = threading.Event()
    outages = Outages(outage_logger, broker="amqp://u@b:1", database="d:2/n", stop=stop)
    stop.set()
    outages.failed("leases", errors.ReadTimeout("The call has timed out (the work was ended)."))
    assert lines(caplog) == []
    outages.failed("leases", AWAY)
    assert lines(caplog) == [POSTGRESQL_AWAY]


def test_a_closed_reach_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that stores its last messages after its streams are closed still checks whether it is cut off."""
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("relatum.reading.following._follower.time", clock)
    follower = SimpleNamespace(may_log_in=False, is_attached=False, is_closed=True)
    outages = SimpleNamespace(is_up=lambda _: False)
    reach = BrokerReach(cast(Any, follower), cast(Any, outages), lambda: "orders")
    for _ in range(4):
        clock.now += 5.0
        reach.look()
    assert reach.is_cut_off
