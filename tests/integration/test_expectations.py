"""What is missing: late, missing and not known are never confused. By chance: test_expectation_oracle."""

import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relatum.errors import InvalidInput, KeyNotDefined, NotFound, StreamNotFound, StreamReplaced, TimeNotRecorded
from relatum.keys import moment as at
from relatum.recording import backfill, forget, set_record_time
from relatum.store.catalog import add_keys, remove_key
from relatum.store.coverage import TIME
from relatum.store.database import Database
from relatum_consumer import Expectation, MissingReport, Reason, Relations, Status, UnmetExpectation
from relatum_consumer._known_spans import known, still
from relatum_consumer.expectations import add_expectations, defined_expectations, remove_expectation
from tests.support import wait_until
from tests.support.place import Place
from tests.support.relations import open_relations

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
    relations: Relations

    def order(self, *said: Said) -> None:
        self._put(self.orders, said)

    def pay(self, *said: Said) -> None:
        self._put(self.payments, said)

    def record(self) -> None:
        self.place.record(self.orders, self.payments)

    def expects(self, within_s: float, grace_s: float = 1) -> Expectation:
        return Expectation("paid", self.orders, "order_id", self.payments, within_s, grace_s)

    def missing(self, within_s: float, grace_s: float = 1, **options: Any) -> MissingReport:
        return self.relations.missing(self.expects(within_s, grace_s), **options)

    def _put(self, stream: str, said: tuple[Said, ...]) -> None:
        messages = [(b"", {"order_id": value, "relatum_time": time_us}) for value, time_us in said]
        self.place.put(*messages, to=stream)


@pytest.fixture
def shop(place: Place, other_stream: str, one_face: str) -> Iterator[Shop]:
    with open_relations(one_face, place.amqp, place.database, timeout_s=60) as relations:
        yield Shop(place, place.stream, other_stream, relations)


def values(unmet: tuple[UnmetExpectation, ...]) -> list[str]:
    return [each.value for each in unmet]


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
    # Out of order, with duplicates, one before the first in time.
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
    shop.order(("waits", time.time_ns() // 1_000))
    shop.record()
    report = shop.missing(10, grace_s)
    assert (report.missing_count, report.not_known_count, report.not_due_count) == (2, 1, 1)


@pytest.mark.parametrize(("within_s", "words"), [(3_600, "1 h"), (5_400, "90 min"), (3_601.5, "3601.5 s")])
def test_the_time_allowed_is_said_in_its_largest_unit(within_s: float, words: str) -> None:
    """An expectation's meaning has the exact time, in a unit people use."""
    meaning = Expectation("paid", "orders", "order_id", "payments", within_s, 0).meaning
    assert meaning.endswith(f"within {words} (clocks may differ by 0 s)")


def test_by_a_new_key_the_cure_is_a_back_fill(shop: Shop) -> None:
    """No recorder looks again at what was recorded before the key was defined."""
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
        # One by one, so that each has its own block.
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


@pytest.mark.parametrize("is_forgotten", [True, False], ids=["stream forgotten", "key defined anew"])
def test_what_is_forgotten_meanwhile_proves_nothing_missing(shop: Shop, is_forgotten: bool) -> None:
    """What was known before a stream's rows were deleted, or a key was removed, does not prove that none followed."""
    shop.order(("a", BASE_US))
    shop.pay(("a", BASE_US))
    shop.record()
    with Relations(shop.place.amqp, shop.place.database) as relations:
        (key,) = relations.keys()
        before = known(relations._catalog, shop.payments, (key.key_id, TIME))
        assert still(relations._catalog, before, key).spans
        if is_forgotten:
            forget(shop.place.database, [shop.payments])
        else:
            remove_key(shop.place.engine, key.name)
            add_keys(shop.place.engine, [key])
        with pytest.raises(StreamReplaced if is_forgotten else KeyNotDefined):
            still(relations._catalog, before, key)
    assert not shop.missing(10).missing


def test_what_retention_may_have_dropped_is_not_known(shop: Shop, short_stream: str) -> None:
    """A stream that does not retain the span proves nothing of it, whatever rows there are."""
    said = [(f"z{n % 100}", BASE_US + n * SECOND) for n in range(400)]
    for part in (said[:100], said[100:200], said[200:300], said[300:]):
        messages = [(b"." * 1_000, {"order_id": value, "relatum_time": time_us}) for value, time_us in part]
        shop.place.put(*messages, to=short_stream)
    # Retention may keep only the last message: "late" is behind it, by more than clocks may differ.
    shop.order(("early", BASE_US + 1), ("z5", BASE_US), ("late", BASE_US + 600 * SECOND))
    wait_until(lambda: shop.place.bounds(short_stream).first, what="retention")
    shop.place.record(shop.orders, short_stream)
    report = shop.relations.missing(Expectation("paid", shop.orders, "order_id", short_stream, 10))
    assert values(report.missing) == ["late"]
    assert {(each.value, each.why) for each in report.not_known} >= {("early", Reason.UNPROVEN)}
    # Dropped messages are not checked, and an explicit span reports that.
    back = Expectation("back", short_stream, "order_id", shop.orders, 10)
    assert shop.relations.missing(back, since=at(BASE_US), until=at(BASE_US + 1)).status is Status.UNPROVEN
    assert shop.relations.missing(back).since > at(BASE_US)


def test_expectations_are_defined_in_the_database(shop: Shop) -> None:
    """Once, by what they say; another of the name is refused, one is taken back; a consumer's role only reads them."""
    paid, database, relations = shop.expects(10), shop.place.database, shop.relations
    with pytest.raises(KeyNotDefined):
        add_expectations(database, paid)
    shop.order(("a", BASE_US))
    shop.record()
    assert add_expectations(database, [paid, paid]) == [paid, paid]
    wrong: Any = 5
    with pytest.raises(InvalidInput, match="must be an"):
        add_expectations(database, wrong)
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
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("SET ROLE relatum_consumer")
        assert connection.execute("SELECT count(*) FROM relatum.expectations").fetchone() == (0,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("DELETE FROM relatum.expectations")


def test_an_expectation_may_be_removed_while_it_is_added_again(shop: Shop) -> None:
    """Whoever comes first: the call that adds it returns it."""
    shop.record()
    paid = shop.expects(10)
    add_expectations(shop.place.database, paid)

    def remove(_: Any, __: Any, statement: str, *___: Any) -> None:
        options = "-c lock_timeout=50"
        with suppress(psycopg.errors.LockNotAvailable), psycopg.connect(shop.place.database, options=options) as other:
            if "INSERT" in statement:
                other.execute("DELETE FROM relatum.expectations")

    with closing(Database(shop.place.database)) as database:
        sa.event.listen(database.engine, "after_cursor_execute", remove)
        assert add_expectations(database, paid) == [paid]


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
