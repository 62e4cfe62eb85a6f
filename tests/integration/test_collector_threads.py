"""What executors and handlers may do to the collector in whose threads they run; what must not hold up its lease."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from relatum.collecting import Bulk, ExecutorOptions, MessageCollector, Outcome, OutcomeStatus, _collector_life
from tests.integration.test_collector import publish, read_all
from tests.support import declare_stream, delete_stream, unique_name, wait_until
from tests.support.collectors import CollectorStore
from tests.support.leases import LEASE_S
from tests.support.threads import Threads

COLLECTED, SUCCEEDED = OutcomeStatus.COLLECTED, OutcomeStatus.SUCCEEDED

RUN_UNTIL_INTERRUPTED = """
import signal, sys, threading
from relatum import MessageCollector
from relatum.collecting import ExecutorOptions
# A shell has what it starts in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
collector = MessageCollector("billing", database=sys.argv[1], broker=sys.argv[2], streams=[sys.argv[3]])
collector.register_executor("order", lambda bulk: None, ExecutorOptions(max_age_s=600.0))
collector.register_result_handler(lambda outcome: print(outcome.status.value, flush=True))
try:
    collector.run(threading.Event())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.fixture
def collector(amqp_url: str, database_url: str, stream_name: str) -> MessageCollector:
    """A collector that follows the test's stream."""
    return MessageCollector("billing", database=database_url, broker=amqp_url, streams=[stream_name])


@pytest.mark.parametrize("where", ["executor", "collected", "succeeded"])
def test_it_may_be_closed_from_inside(
    amqp_url: str, database_url: str, stream_name: str, collector: MessageCollector, where: str
) -> None:
    """It cannot wait for itself: it says so, and is closed in the background, with the message consumed."""
    publish(amqp_url, stream_name, "a")
    answers: list[bool] = []

    def close_at(place: str) -> None:
        if place == where:
            answers.append(collector.close(timeout_s=90))

    collector.register_executor("order", lambda bulk: close_at("executor"), ExecutorOptions(max_age_s=0.05))
    collector.register_result_handler(lambda outcome: close_at(outcome.status.value))
    collector.start()
    wait_until(lambda: answers == [False], what="closed from inside")
    assert collector.close(timeout_s=90)
    store = CollectorStore("billing", database_url)
    assert store.outcomes_of(["a"])["a"].status is SUCCEEDED
    store.dispose()


def test_a_handler_of_collected_does_not_wait_for_what_comes_after_it(
    amqp_url: str, database_url: str, stream_name: str
) -> None:
    """Storing goes on after the handler only: flushing there, and giving messages to a full type, must not wait."""
    publish(amqp_url, stream_name, *"abcdef")
    first, *others = read_all(amqp_url, stream_name)
    collector = MessageCollector("billing", database=database_url, broker=amqp_url)
    given: list[bool] = []

    def give(outcome: Outcome) -> None:
        if outcome.status is COLLECTED and not given:
            given.extend(collector.collect(message) for message in others)
            collector.flush()

    collector.register_executor("order", lambda bulk: None, ExecutorOptions(bulk_messages=1, queue_bulks=2))
    collector.register_result_handler(give)
    with collector:
        assert collector.collect(first)
        wait_until(lambda: len(given) == 5, what="all messages offered")
        wait_until(lambda: collector.held_messages == 0, what="what was taken is consumed")
        assert given == [True, False, False, False, False]


def test_a_handler_that_exits_ends_no_thread(amqp_url: str, stream_name: str, collector: MessageCollector) -> None:
    """`SystemExit` would end the thread that stores, and nobody would notice."""
    told: list[str] = []

    def leave(outcome: Outcome) -> None:
        told.append(f"{outcome.message_id} {outcome.status.value}")
        sys.exit(3)

    collector.register_executor("order", lambda bulk: None, ExecutorOptions(max_age_s=0.05))
    collector.register_result_handler(leave)
    with collector:
        for body in "ab":
            publish(amqp_url, stream_name, body)
            wait_until(lambda each=body: f"{each} succeeded" in told, what="the message consumed")


def test_running_until_interrupted_closes(amqp_url: str, database_url: str, stream_name: str) -> None:
    """Ctrl-C is an orderly stop: what is in a bulk is consumed before."""
    publish(amqp_url, stream_name, "a")
    arguments = [sys.executable, "-c", RUN_UNTIL_INTERRUPTED, database_url, amqp_url, stream_name]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "collected\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=90)[0].split() == ["succeeded", "interrupted"]
        finally:
            process.kill()


def test_joined_executors_do_not_keep_the_lease_from_being_renewed(
    amqp_url: str, database_url: str, stream_name: str, collector: MessageCollector
) -> None:
    """Each holds a connection for as long as it runs, however many there are."""
    workers = 24
    publish(amqp_url, stream_name, *(str(number) for number in range(workers)))
    gate, begun = threading.Event(), []

    def wait(bulk: Bulk) -> None:
        assert bulk.connection is not None
        bulk.connection.execute(sa.text("SELECT 1"))
        begun.append(bulk)
        assert gate.wait(90)

    options = {"bulk_messages": 1, "workers": workers, "queue_bulks": workers, "joins_transaction": True}
    collector.register_executor("order", wait, ExecutorOptions(**options))  # type: ignore[arg-type]
    with collector:
        try:
            wait_until(lambda: len(begun) == workers, what="all executors at once")
            assert collector.outcome("0").status is OutcomeStatus.FORWARDED
        finally:
            gate.set()


def test_streams_have_no_threads_of_their_own(amqp_url: str, database_url: str) -> None:
    """Twelve streams are followed by as many threads as one is, and each is collected."""
    names = [unique_name() for _ in range(12)]
    for name in names:
        declare_stream(amqp_url, name)
        publish(amqp_url, name, name)
    told: list[str] = []

    def threads(streams: list[str], what: str) -> int:
        collector = MessageCollector(what, database=database_url, broker=amqp_url, streams=streams)
        collector.register_executor("order", lambda bulk: None, ExecutorOptions(max_age_s=0.05))
        collector.register_result_handler(lambda outcome: told.append(f"{outcome.message_id} {outcome.status.value}"))
        before = Threads()
        with collector:
            wait_until(lambda: {f"{name} succeeded" for name in streams} <= set(told), what="all consumed")
            # Those who ask end when there is nothing to ask; the one for readers' idle connections is the process's.
            asking = [each for each in before.begun() if each.name.endswith("-asks")]
            wait_until(lambda: not any(each.is_alive() for each in asking), what="nothing asked any more")
            return sum(each.name != "relatum-heartbeats" for each in before.begun())

    try:
        assert threads(names[:1], "few") == threads(names, "many")
    finally:
        for name in names:
            delete_stream(amqp_url, name)


@pytest.mark.usefixtures("quick_rhythm")
def test_a_broker_that_hangs_costs_no_lease(
    amqp_url: str, database_url: str, stream_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions are looked for beside what renews the lease."""
    looked, gate, renewed = threading.Event(), threading.Event(), []

    def look(collector: MessageCollector) -> None:
        looked.set()
        assert gate.wait(90)

    monkeypatch.setattr(_collector_life, "PARTITIONS_S", 0.05)
    monkeypatch.setattr(MessageCollector, "_look", look)
    options = {"database": database_url, "broker": amqp_url, "streams": [stream_name], "lease_s": LEASE_S}
    collector = MessageCollector("billing", **options)  # type: ignore[arg-type]
    collector.register_executor("order", lambda bulk: None)
    renew = collector._shared.store.renew
    monkeypatch.setattr(collector._shared.store, "renew", lambda member: renewed.append(member) or renew(member))
    with collector:
        assert looked.wait(90)
        before = len(renewed)
        wait_until(lambda: len(renewed) > before + 2, what="the lease renewed")
        gate.set()
    assert len(set(renewed)) == 1
