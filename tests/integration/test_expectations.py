"""What is missing: late, missing and not known are never confused, and followers tell of each once.

What follows what, of streams and super streams, by chance: test_expectation_oracle.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from relatum import metrics
from relatum.errors import InvalidInput, KeyNotDefined, NotFound, StreamNotFound, TimeNotRecorded
from relatum.keys import moment as at
from relatum.reading import StreamReader
from relatum.recording import backfill, set_record_time
from relatum.store.catalog import add_keys, remove_key
from relatum_consumer import (
    AsyncRelations,
    Expectation,
    ExpectationResult,
    MissingReport,
    Reason,
    Relations,
    Status,
    UnmetExpectation,
)
from relatum_consumer.expectations import add_expectations, defined_expectations, remove_expectation
from tests.support import recording, unique_name, wait_recorded, wait_until
from tests.support.place import FailingPlace, Place
from tests.support.relations import FACES, open_relations

KEYS = ["order_id"]
SECOND = 1_000_000
BASE_US = (time.time_ns() // 1_000_000_000 - 7_200) * SECOND
"""Two hours ago: what is due within a minute of it has been due for long."""

Said = tuple[Any, int]
"""A value and a time."""


@dataclass(frozen=True)
class Shop:
    """Orders, which payments are to follow, and a face to ask by."""

    place: Place
    orders: str
    payments: str
    asked: Relations | None = None

    def order(self, *said: Said) -> None:
        """Publish orders."""
        self._put(self.orders, said)

    def pay(self, *said: Said) -> None:
        """Publish payments."""
        self._put(self.payments, said)

    def record(self) -> None:
        """Record both, to their ends."""
        self.place.record(self.orders, self.payments)

    @property
    def relations(self) -> Relations:
        """The face to ask by."""
        assert self.asked is not None
        return self.asked

    def expects(self, within_s: float, grace_s: float = 1) -> Expectation:
        """That an order is paid in time."""
        return Expectation("paid", self.orders, "order_id", self.payments, within_s, grace_s)

    def missing(self, within_s: float, grace_s: float = 1, **options: Any) -> MissingReport:
        """The answer to whether it is."""
        return self.relations.missing(self.expects(within_s, grace_s), **options)

    def _put(self, stream: str, said: tuple[Said, ...]) -> None:
        messages = [(b"", {"order_id": value, "relatum_time": time_us}) for value, time_us in said]
        self.place.put(*messages, to=stream)


@pytest.fixture
def shop(place: Place, other_stream: str, one_face: str) -> Iterator[Shop]:
    """A shop, asked through a face."""
    with open_relations(one_face, place.amqp, place.database, timeout_s=60) as relations:
        yield Shop(place, place.stream, other_stream, relations)


def values(unmet: tuple[UnmetExpectation, ...]) -> list[str]:
    """What orders say, in the order of the answer."""
    return [each.value for each in unmet]


# --- what follows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grace_s", [0, 2])
def test_the_edges_of_the_time_allowed(shop: Shop, grace_s: int) -> None:
    """Just then is in time, a microsecond later is late; what is earlier by more than clocks may differ is none."""
    cases = {
        "just then": (10 * SECOND, "in time"),
        "too late": (10 * SECOND + 1, "late"),
        "the same time": (0, "in time"),
        "by other clocks": (-grace_s * SECOND, "in time"),
        "before": (-grace_s * SECOND - 1, "missing"),
        "never": (None, "missing"),
    }
    shop.order(*[(name, BASE_US) for name in cases], ("twice", BASE_US), ("twice", BASE_US + 5 * SECOND))
    # Out of order, with doubles, one before the first in time.
    shop.pay(("too late", BASE_US + 99 * SECOND), ("twice", BASE_US + 7 * SECOND))
    shop.pay(*[(name, BASE_US + after) for name, (after, _) in cases.items() if after is not None] * 2)
    shop.pay(("twice", BASE_US - 3 * SECOND))
    shop.record()
    report = shop.missing(10, grace_s)
    assert report
    found = {each.value: str(each.finding) for each in (*report.late, *report.missing, *report.not_known)}
    assert found == {name: word for name, (_, word) in cases.items() if word != "in time"}
    [late] = report.late
    assert (late.due, late.came_at) == (at(BASE_US + 10 * SECOND), at(BASE_US + 10 * SECOND + 1))
    assert report.streams == (shop.orders,)


# --- what is not known ------------------------------------------------------------------------------------


def test_by_a_new_key_the_cure_is_a_back_fill(shop: Shop) -> None:
    """What was recorded before the key was defined is no recorder's to look at again."""
    shop.order(("a", BASE_US))
    shop.pay(("a", BASE_US))
    shop.place.record(shop.orders, shop.payments, keys=["another"])
    add_keys(shop.place.engine, KEYS)
    report = shop.missing(60, since=at(BASE_US))
    assert report.status is Status.NOT_RECORDED_YET
    assert (report.unrecorded_streams, report.new_keys) == ((), (("order_id", (shop.payments,)),))
    assert "relatum backfill --keys order_id" in report.words
    backfill(shop.place.amqp, shop.place.database, shop.payments, keys=KEYS)
    assert shop.missing(60, since=at(BASE_US)).status is Status.ABSENT


@pytest.mark.differs
def test_a_hole_proves_nothing_missing_and_nothing_late(shop: Shop) -> None:
    """What came in a time of which a part was lost may have come in time; what came before and behind it is known."""
    for part in range(3):
        # One by one, so that each is a block of its own.
        shop.pay((f"z{part}", BASE_US + part * 100 * SECOND))
        shop.place.record(shop.payments)
    shop.pay(("late", BASE_US + 290 * SECOND))
    orders = {"first": 10, "late": 110, "lost": 150, "last": 250}
    shop.order(*[(name, BASE_US + after * SECOND) for name, after in orders.items()])
    shop.record()
    report = shop.missing(20)
    assert (values(report.missing), values(report.late)) == (["first", "lost", "last"], ["late"])
    of_payments = "FROM relatum.streams s WHERE s.name = :name"
    cut = "UPDATE relatum.coverage c SET from_offset = 2"
    shop.place.sql(f"{cut} {of_payments} AND c.stream_id = s.stream_id", name=shop.payments)
    hole = "INSERT INTO relatum.coverage (stream_id, from_offset, to_offset, key_ids, with_time, kind)"
    shop.place.sql(f"{hole} SELECT stream_id, 0, 2, '{{}}', false, 'hole' {of_payments}", name=shop.payments)
    report = shop.missing(20)
    assert values(report.missing) == ["last"]
    unproven = [(name, Reason.UNPROVEN) for name in ("first", "late", "lost")]
    assert [(each.value, each.why) for each in report.not_known] == unproven
    unknown = shop.missing(20, until=at(BASE_US + 200 * SECOND))
    assert (bool(unknown), unknown.status) == (False, Status.UNPROVEN)


def test_what_retention_may_have_dropped_is_not_known(shop: Shop, short_stream: str) -> None:
    """A stream that does not retain the span proves nothing of it, whatever rows there are."""
    said = [(f"z{n % 100}", BASE_US + n * SECOND) for n in range(400)]
    for part in (said[:100], said[100:200], said[200:300], said[300:]):
        messages = [(b"." * 1_000, {"order_id": value, "relatum_time": time_us}) for value, time_us in part]
        shop.place.put(*messages, to=short_stream)
    # Retention may leave the last message alone: "late" is behind it, by more than clocks may differ.
    shop.order(("early", BASE_US + 1), ("z5", BASE_US), ("late", BASE_US + 600 * SECOND))
    with StreamReader.open(shop.place.amqp) as reader:
        wait_until(lambda: reader.bounds(short_stream).first, what="retention")
    shop.place.record(shop.orders, short_stream)
    report = shop.relations.missing(Expectation("paid", shop.orders, "order_id", short_stream, 10))
    assert values(report.missing) == ["late"]
    assert {(each.value, each.why) for each in report.not_known} >= {("early", Reason.UNPROVEN)}
    # The messages to be followed: those that are gone are not looked at, and an explicit span says so.
    back = Expectation("back", short_stream, "order_id", shop.orders, 10)
    assert shop.relations.missing(back, since=at(BASE_US), until=at(BASE_US + 1)).status is Status.UNPROVEN
    assert shop.relations.missing(back).since > at(BASE_US)


# --- definitions and wrong questions ----------------------------------------------------------------------


def test_expectations_are_defined_in_the_database(shop: Shop) -> None:
    """As keys are: once, by what they say; another of the name is refused, and one is taken back."""
    paid, database, relations = shop.expects(10), shop.place.database, shop.relations
    with pytest.raises(KeyNotDefined):
        add_expectations(database, paid)
    shop.order(("a", BASE_US))
    shop.record()
    assert add_expectations(database, [paid, paid]) == [paid, paid]
    for other, said in ((shop.expects(11), "is already defined"), (shop.expects(10, 0), "clocks may differ by 1 s")):
        with pytest.raises(InvalidInput, match=said):
            add_expectations(database, other)
    assert relations.expectations() == (paid,)
    assert defined_expectations(database, vhost="other") == []
    assert values(relations.missing("paid").missing) == ["a"]
    with pytest.raises(NotFound, match="did you mean 'paid'"):
        relations.missing("paied")
    remove_key(shop.place.engine, "order_id")
    with pytest.raises(KeyNotDefined):
        relations.missing("paid")
    remove_expectation(database, "paid")
    with pytest.raises(NotFound):
        remove_expectation(database, "paid")
    assert relations.expectations() == ()


def test_wrong_questions_are_refused(shop: Shop) -> None:
    """A span that ends before it begins; a stream that is not there, or has no times, by its name."""
    shop.record()
    with pytest.raises(StreamNotFound):
        shop.relations.missing(Expectation("x", shop.orders, "order_id", "nobody-knows-it", 1))
    with pytest.raises(InvalidInput):
        shop.missing(1, since=at(2), until=at(1))
    set_record_time(shop.place.amqp, shop.place.database, shop.orders, on=False)
    with pytest.raises(TimeNotRecorded):
        shop.missing(1)


def test_one_who_reads_sees_expectations_and_defines_none(place: Place) -> None:
    """They are definitions: a consumer's role has them to read."""
    with psycopg.connect(place.database, autocommit=True) as connection:
        connection.execute("SET ROLE relatum_consumer")
        assert connection.execute("SELECT count(*) FROM relatum.expectations").fetchone() == (0,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("DELETE FROM relatum.expectations")


# --- followers: each message is told of once, as it falls due, whatever happens meanwhile ---------------------


@contextmanager
def watching(
    place: Place, expectation: str | Expectation, face: str = "blocking"
) -> Iterator[tuple[FailingPlace, Callable[[], UnmetExpectation]]]:
    """A follower through one of `FACES`: the lines to its servers, and what waits for the next message it tells of."""
    with closing(FailingPlace(place, face)) as failing:
        relations: Any = (AsyncRelations if failing.is_async else Relations)(failing.broker, failing.database)
        failing.at_end(relations.close)
        found = relations.watch_missing(expectation, poll_s=0.02, since=at(BASE_US))
        failing.at_end(found.aclose if failing.is_async else found.close)
        yield failing, lambda: failing.go(anext(found) if failing.is_async else next(found))


@pytest.fixture
def busy(place: Place, other_stream: str) -> Iterator[Shop]:
    """A shop that is recorded all the time, from a moment on at which the key is defined; nobody asks of it."""
    with recording(place.amqp, place.engine, place.stream, other_stream, keys=KEYS):
        for stream in (place.stream, other_stream):
            wait_recorded(place.amqp, place.engine, stream)
        yield Shop(place, place.stream, other_stream)


@pytest.mark.parametrize("face", FACES)
def test_each_is_told_of_once_as_it_falls_due(busy: Shop, face: str) -> None:
    """What was due, and what falls due; nothing of it again."""
    expectation = replace(busy.expects(2), name=unique_name("paid"))
    busy.pay(("b", BASE_US + 9 * SECOND), ("c", BASE_US + SECOND))
    busy.order(("a", BASE_US), ("b", BASE_US + 1), ("c", BASE_US))
    with watching(busy.place, expectation, face) as (_, take):
        first, second = take(), take()
        assert [(each.value, str(each.finding)) for each in (first, second)] == [("a", "missing"), ("b", "late")]
        assert second.came is not None
        now_us = time.time_ns() // 1_000
        busy.order(("falls due", now_us), ("is paid", now_us))
        busy.pay(("is paid", now_us + SECOND))
        due = take()
        assert (due.value, due.finding) == ("falls due", ExpectationResult.MISSING)
        assert datetime.now(UTC) > due.due
        # Paid after it was told of: that is not told.
        last_us = time.time_ns() // 1_000
        busy.pay(("falls due", last_us))
        busy.order(("last", last_us))
        assert take().value == "last"
        page, label = metrics.exposition(), f'expectation="{expectation.name}"'
        assert f'relatum_expectation_unmet_total{{{label},finding="missing"}} 3.0' in page
        assert f"relatum_expectation_checked_total{{{label}}}" in page
        assert f"relatum_expectation_lag_seconds{{{label}}}" in page


def test_nothing_is_told_while_clocks_may_differ(busy: Shop) -> None:
    """One is told of when it is surely due; one that was paid a little before it is none."""
    now_us = time.time_ns() // 1_000
    busy.pay(("paid", now_us - SECOND))
    busy.order(("paid", now_us), ("unpaid", now_us + 1))
    with watching(busy.place, busy.expects(0.2, grace_s=2)) as (_, take):
        due = take()
        assert (due.value, due.finding) == ("unpaid", ExpectationResult.MISSING)
        assert datetime.now(UTC) >= due.due + timedelta(seconds=2)


def test_what_is_too_much_for_one_step_is_told_of_in_several(busy: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, also where many have the same time."""
    monkeypatch.setattr("relatum_consumer._watch_missing.UNMET_AT_ONCE", 3)
    early = [(f"e{n}", BASE_US + n * SECOND) for n in range(20)]
    together = [(f"t{n}", BASE_US + 50 * SECOND) for n in range(10)]
    busy.order(*early, *together)
    with watching(busy.place, busy.expects(2)) as (_, take):
        assert sorted(take().value for _ in range(30)) == sorted(value for value, _ in early + together)
        busy.order(("last", time.time_ns() // 1_000))
        assert take().value == "last"


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("away", ["broker", "database"])
def test_a_server_that_is_away_is_waited_for(busy: Shop, face: str, away: str) -> None:
    """The follower goes on where it was: nothing is passed over, and nothing told of again."""
    busy.order(("a", BASE_US))
    with watching(busy.place, busy.expects(2), face) as (lines, take), ExitStack() as outage:
        assert take().value == "a"
        outage.enter_context(lines.fault(f"{away} refused"))
        busy.order(("b", time.time_ns() // 1_000))
        back = threading.Timer(0.5, outage.close)
        back.start()
        assert take().value == "b"
        back.join()


def test_what_a_person_must_mend_is_raised(busy: Shop) -> None:
    """An expectation or a stream that is not there."""
    nowhere = replace(busy.expects(2), follows="nobody-knows-it")
    for expectation, error in (("nobody-knows-it", NotFound), (nowhere, StreamNotFound)):
        with watching(busy.place, expectation) as (_, take), pytest.raises(error):
            take()
