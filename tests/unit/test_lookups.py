"""What lookups ask by, share, refuse, know and hold, without servers."""

import gc
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from relatum import metrics
from relatum.common.limits import INTEGER_MAX, MESSAGE_BYTES
from relatum.common.waiting import Deadline, within
from relatum.errors import InvalidInput, ReadTimeout, RelatumError
from relatum.reading import Message, ReaderStatistics, StreamBounds
from relatum_consumer._known_spans import ALWAYS, KnownSpans, _intersection, _low, _union
from relatum_consumer.lookups import answering, servers
from relatum_consumer.lookups.answering import Matches
from relatum_consumer.lookups.by_key import sought
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.proof import Evidence, Uncovered
from relatum_consumer.lookups.servers import Servers, SharedRequests
from relatum_consumer.lookups.telemetry import Lookups
from tests.support import wait_until
from tests.support.standstill import in_time


class _Broker:
    asked = 0

    def bounds(self, _: str) -> StreamBounds:
        self.asked += 1
        return StreamBounds(0, 8)


def test_the_broker_is_not_asked_without_time() -> None:
    """A question whose deadline has passed does not reach the broker."""
    broker: Any = _Broker()
    servers = Servers(lambda *_: [], broker)
    servers.bounds("orders")
    with within(0.0), pytest.raises(ReadTimeout, match="no time left"):
        servers.bounds("orders")
    assert broker.asked == 1


OTHERS = 5
LIMIT_S = 80.0


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is waited for, once for each waiting caller."""
    begun: list[Any] = []
    wait = servers.wait_for

    def waits(flight: Any, until: float) -> None:
        begun.append(flight)
        wait(flight, until)

    monkeypatch.setattr(servers, "wait_for", waits)
    return begun


class _Proof:
    """A question that threads share: it returns how often it was asked, and its first call waits for `go_on`."""

    def __init__(self, threads: ThreadPoolExecutor, error: RelatumError | None = None) -> None:
        self.begun = 0
        self.is_under_way, self.go_on = threading.Event(), threading.Event()
        self.flights = SharedRequests(LIMIT_S)
        self._threads, self._error = threads, error

    def __call__(self) -> int:
        self.begun += 1
        mine = self.begun
        if mine == 1:
            self.is_under_way.set()
            assert self.go_on.wait(LIMIT_S)
        elif self._error is not None:
            raise self._error
        return mine

    def ask(self) -> "Future[Any]":
        return self._threads.submit(self.flights.run, "it", self)

    def first(self) -> "Future[Any]":
        first = self.ask()
        assert self.is_under_way.wait(LIMIT_S)
        return first


@pytest.mark.parametrize("error", [None, InvalidInput("no")])
def test_who_comes_while_it_is_under_way_shares_the_next(error: RelatumError | None, waiting: list[Any]) -> None:
    """Callers that come during a question share the next one's result, or each gets its own copy of its error."""
    with ThreadPoolExecutor(1 + OTHERS) as threads:
        proof = _Proof(threads, error)
        first = proof.first()
        others = [proof.ask() for _ in range(OTHERS)]
        wait_until(lambda: len(waiting) == OTHERS, what="all others")
        proof.go_on.set()
        assert first.result(LIMIT_S) == 1
        if error is None:
            assert [other.result(LIMIT_S) for other in others] == [2] * OTHERS
        else:
            errors = [other.exception(LIMIT_S) for other in others]
            assert [type(each) for each in errors] == [InvalidInput] * OTHERS
            assert len({id(each) for each in errors}) == OTHERS
    assert proof.begun == 2


def test_that_the_time_of_one_is_over_is_nothing_to_the_others(waiting: list[Any]) -> None:
    """A question that ends at its caller's deadline is asked again for the others that wait for it."""
    flights, goes_on = SharedRequests(LIMIT_S), threading.Event()
    begun: list[int] = []

    def ask() -> int:
        begun.append(1)
        if len(begun) == 1:
            assert goes_on.wait(LIMIT_S)
            raise ReadTimeout("too late")
        return len(begun)

    def in_no_time() -> int:
        with within(0.0):
            return flights.run("it", ask)

    with ThreadPoolExecutor(2) as threads:
        hurried = threads.submit(in_no_time)
        wait_until(lambda: begun, what="the first")
        patient = threads.submit(flights.run, "it", ask)
        wait_until(lambda: len(waiting) == 1, what="the second")
        goes_on.set()
        assert isinstance(hurried.exception(LIMIT_S), ReadTimeout)
        assert patient.result(LIMIT_S) == 2


def test_who_waits_for_anothers_proof_lets_go_at_its_deadline(waiting: list[Any]) -> None:
    """A caller stops waiting for a shared question at its deadline, also at one brought forward by cancelling."""
    deadline = Deadline(LIMIT_S)
    with ThreadPoolExecutor(3) as threads:
        proof = _Proof(threads)
        first = proof.first()
        second = proof.ask()  # it waits for the first call, to begin after it

        def third() -> int:
            with within(deadline):
                return proof.flights.run("it", proof)

        hurried = threads.submit(third)
        wait_until(lambda: len(waiting) == 2, what="both")
        with in_time(1.0):
            deadline.end_in(0)
            assert isinstance(hurried.exception(LIMIT_S), ReadTimeout)
        proof.go_on.set()
        assert (first.result(LIMIT_S), second.result(LIMIT_S)) == (1, 2)


def of_spans(*spans: tuple[int, int]) -> KnownSpans:
    return KnownSpans("payments", 100, spans, Evidence(("payments",), ends={"payments": StreamBounds(0, 8)}))


@pytest.mark.parametrize(("offsets", "unproven"), [(range(5, 9), set()), (range(5, 8), {"s"}), ((), {"s"})])
def test_a_scan_that_does_not_reach_the_known_end_proves_nothing(offsets: Iterable[int], unproven: set[str]) -> None:
    """A node that ends before the leader did, when it was asked, may lack messages that the leader has."""
    broker: Any = _Broker()
    broker.scan = lambda stream, start, stop, take: [take(message(each, stream=stream)) for each in offsets]
    ends = {"s": StreamBounds(0, 8, is_proven=True)}
    known = Evidence(("s",), ends=ends, uncovered=[Uncovered("s", 5, 9)])
    known.scan(Servers(lambda *_: [], broker), lambda _: None)
    assert known.unproven == unproven


@pytest.mark.parametrize(
    ("spans", "held", "others"),
    [
        ([(10, 20), (30, 40)], [(11, 19), (31, 39)], [(10, 15), (15, 20), (15, 35), (20, 25), (1, 2)]),
        ([(ALWAYS, 100)], [(ALWAYS + 1, 99)], []),
        ([], [], [(1, 2)]),
    ],
)
def test_a_span_is_held_between_its_ends(spans: Any, held: Any, others: Any) -> None:
    """A time is known strictly inside a span; neither its ends nor a gap between spans is, nor anything without one."""
    assert [each for each in (*held, *others) if of_spans(*spans).holds(*each)] == held
    assert spans or of_spans().until == ALWAYS


def test_all_streams_must_know() -> None:
    """A span is known if every stream knows it; a range of one stream ends where the next one begins."""
    assert _intersection([(0, 10), (20, 30)], [(5, 25)]) == [(5, 10), (20, 25)]
    assert _intersection([(0, 10)], []) == []
    assert _union([(20, 30), (0, 25), (40, 40)]) == [(0, 20), (20, 30)]


def test_a_stream_is_known_from_its_beginning_on() -> None:
    """A stream's first life is known from the start, a later one from its first message or when it was first seen."""
    assert _low((0, 9), 1, 50, 70) == ALWAYS
    assert _low((0, 9), 2, 50, 70) == 50
    assert _low((0, 9), 2, 50, 40) == 40
    assert _low((0, 0), 2, 50, None) == 50
    assert _low((3, 9), 1, 50, 70) == 70
    assert _low((3, 9), 1, 50, None) > INTEGER_MAX - 2


def message(offset: int, size: int = 10, stream: str = "s") -> Message:
    return Message.from_record(stream, offset, b"\x00" * size)


def first_three(messages: Iterable[Message]) -> list[Message]:
    return sorted(messages, key=lambda each: each.offset)[:3]


def test_with_a_limit_the_first_ones_are_kept_and_no_more() -> None:
    """With a limit the first matches are kept, whatever order messages come in, and few are held at a time."""
    gathered = Matches(lambda each: each.offset % 2 == 0, "", first=first_three, limit=3)
    most = 0
    for number in range(100_000):
        gathered.consider(message(number * 7919 % 100_003))
        if number % 1000 == 0:
            most = max(most, len(gathered.messages))
    assert [each.offset for each in first_three(gathered.messages)] == [0, 2, 4]
    assert most < 100


def test_too_many_bytes_are_refused_while_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit a lookup ends before its messages fill the memory; a small one counts as its object."""
    monkeypatch.setattr(answering, "ANSWER_BYTES_MAX", 10_000)
    for size, most in ((5_000, 2), (0, 20)):
        gathered = Matches(lambda each: True, "ask for less")
        for number in range(most - 1):
            gathered.consider(message(number, size))
        with pytest.raises(InvalidInput, match="ask for less"):
            gathered.consider(message(most, size))


def test_the_same_message_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is read twice counts once, and its bytes once."""
    monkeypatch.setattr(answering, "ANSWER_MESSAGES_MAX", 2)
    monkeypatch.setattr(answering, "ANSWER_BYTES_MAX", 2 * (MESSAGE_BYTES + 10))
    gathered = Matches(lambda each: True, "")
    for each in (message(1), message(2), message(1)):
        gathered.consider(each)
    assert len(gathered.messages) == 2


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("names", "since", "until", "said"),
    [
        (None, NOON, NOON - timedelta(microseconds=1), "since="),
        (None, None, datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))), "until="),
        (None, datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), None, "since="),
        ("s" * 256, None, None, "255 bytes"),
        (["orders", "s" * 1000], None, None, "255 bytes"),
    ],
)
def test_what_cannot_be_asked_is_refused(names: object, since: datetime, until: datetime, said: str) -> None:
    """An impossible span of time, or a name that no stream can have, is refused by its argument's name."""

    def ask(*_: Any) -> Any:
        raise AssertionError("nobody is asked")

    no_broker: Any = None
    nobody = Servers(ask, no_broker)
    with pytest.raises(InvalidInput, match=said):
        sought(Catalog(nobody, "/"), "order_id", 1, names, since, until, 1, "newest")


def test_a_scrape_may_be_what_ends_a_dropped_object() -> None:
    """The garbage collector may run within any call, also where the counts are read with their lock."""

    class Collecting:
        def __deepcopy__(self, _: object) -> int:
            gc.collect()
            return 1

    owner, lookups = type("Owner", (), {})(), Lookups(1.0, 2, [])
    metrics.report(lookups, owner=owner)
    owner.itself = owner
    del owner
    connections: Any = replace(ReaderStatistics.of_none(2), opened=Collecting())  # type: ignore[arg-type]
    scrape = threading.Thread(target=lookups.statistics, args=[connections], daemon=True)
    scrape.start()
    scrape.join(30)
    assert not scrape.is_alive()
