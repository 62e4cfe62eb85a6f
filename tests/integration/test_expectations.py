"""What is missing: late, missing and not known are never confused, through both faces."""

import random
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relatum.errors import InvalidInput, KeyNotDefined, NotFound, StreamNotFound, TimeNotRecorded
from relatum.reading import StreamReader
from relatum.recording import backfill, set_record_time
from relatum.store import add_keys, remove_key
from relatum_consumer import Expectation, Finding, MissingReport, Relations, Status, Unmet, Why
from relatum_consumer.expectations import (
    _expectation_limits,
    add_expectations,
    defined_expectations,
    remove_expectation,
)
from tests import support
from tests.support import (
    declare_stream,
    delete_stream,
    publish_plain,
    recording,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.relations import FACES, open_relations
from tests.support.super_streams import super_stream

MS = 1_000
BASE_US = (time.time_ns() // 1_000_000_000 - 7_200) * 1_000_000
"""Two hours ago: what is due within a minute of it has been due for long."""


@pytest.fixture(params=FACES)
def relations(request: pytest.FixtureRequest, amqp_url: str, database_url: str) -> Iterator[Relations]:
    """Look-ups through each face."""
    with open_relations(request.param, amqp_url, database_url, timeout_s=60) as relations:
        yield relations


@pytest.fixture
def payments(other_stream: str) -> str:
    """A second stream, which is to follow the first."""
    return other_stream


def about(value: Any, time_us: int) -> tuple[bytes, dict[str, Any]]:
    """A message of a value and a time."""
    return b"", {"order_id": value, "relatum_time": time_us}


def at(time_us: int) -> datetime:
    """A moment."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)


record = partial(support.record, keys=["order_id"])
"""Records all that is in some streams."""


def publish(amqp_url: str, messages: Mapping[str, list[tuple[Any, int]]]) -> None:
    """Publish values and times to streams."""
    for stream, each in messages.items():
        publish_plain(amqp_url, stream, [about(value, time_us) for value, time_us in each])


def offsets(unmet: tuple[Unmet, ...]) -> list[int]:
    """Where the messages lie in their one stream."""
    return sorted(each.id.offset for each in unmet)


# --- what follows -----------------------------------------------------------------------------------------


def test_what_is_late_and_what_is_missing_is_as_brute_force_says(
    amqp_url: str,
    engine: sa.Engine,
    relations: Relations,
    stream_name: str,
    payments: str,
    chance: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Times in no order, several of one value, some before: the first that is not a second earlier counts."""
    monkeypatch.setattr(_expectation_limits, "BATCH", 32)
    monkeypatch.setattr(_expectation_limits, "PAGE_BLOCKS", 150)
    monkeypatch.setattr(_expectation_limits, "PIECE", 50)
    within_us = 60_000 * MS
    values = [f"v{n}" for n in range(120)]
    orders = [(chance.choice(values), BASE_US + chance.randrange(600) * 1_000_000) for _ in range(400)]
    paid = [(chance.choice(values), BASE_US + chance.randrange(700) * 1_000_000) for _ in range(300)]
    publish(amqp_url, {stream_name: orders, payments: paid})
    record(amqp_url, engine, stream_name, payments)
    expectation = Expectation("paid", stream_name, "order_id", payments, 60)
    since, until = BASE_US + 50_000_000, BASE_US + 500_000_000
    late: list[int] = []
    missing: list[int] = []
    for offset, (value, time_us) in enumerate(orders):
        first = min((came for each, came in paid if each == value and came >= time_us - 1_000 * MS), default=None)
        if since <= time_us < until and (first is None or first > time_us + within_us):
            (missing if first is None else late).append(offset)
    report = relations.missing(expectation, since=at(since), until=at(until))
    assert report.status is Status.FOUND
    assert (offsets(report.late), offsets(report.missing), report.not_known) == (late, missing, ())
    assert report.checked == sum(since <= time_us < until for _, time_us in orders)
    for each in report.late:
        assert each.came is not None
        value, came_us = paid[each.came.offset]
        assert (value, at(came_us)) == (each.value, each.came_at)
        assert each.due == each.time + timedelta(seconds=60)
    few = relations.missing(expectation, since=at(since), until=at(until), limit=3)
    assert few.missing == report.missing[:3]
    assert (few.late_count, few.missing_count) == (len(late), len(missing))


@pytest.mark.parametrize("face", FACES[:1])
def test_the_edges_of_the_time_allowed(
    amqp_url: str, engine: sa.Engine, database_url: str, face: str, stream_name: str, payments: str
) -> None:
    """Just then is in time, a microsecond later is late; the same time follows, an earlier one does not."""
    second = 1_000_000
    cases = {
        "just then": (10 * second, "in time"),
        "too late": (10 * second + 1, "late"),
        "the same time": (0, "in time"),
        "before": (-1, "missing"),
        "never": (None, "missing"),
    }
    publish(
        amqp_url,
        {
            stream_name: [(name, BASE_US) for name in cases] + [("twice", BASE_US), ("twice", BASE_US + 5 * second)],
            # Out of order, with doubles, one before the first in time.
            payments: [("too late", BASE_US + 99 * second), ("twice", BASE_US + 7 * second)]
            + [(name, BASE_US + after) for name, (after, _) in cases.items() if after is not None] * 2
            + [("twice", BASE_US - 5)],
        },
    )
    record(amqp_url, engine, stream_name, payments)
    with open_relations(face, amqp_url, database_url) as relations:
        report = relations.missing(Expectation("paid", stream_name, "order_id", payments, 10, grace_s=0))
    found = {each.value: str(each.finding) for each in (*report.late, *report.missing, *report.not_known)}
    assert found == {name: word for name, (_, word) in cases.items() if word != "in time"}
    assert [each.came_at for each in report.late] == [at(BASE_US + 10 * second + 1)]


def test_clocks_that_differ(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, payments: str
) -> None:
    """What came before by no more than they may follows, but not in one stream; nothing is said while it may be due."""
    second = 1_000_000
    now_us = time.time_ns() // 1_000
    cases = {"ahead": 0, "behind": -2 * second, "before": -2 * second - 1, "just then": 10 * second}
    late = {"late": 10 * second + 1}
    publish(
        amqp_url,
        {
            stream_name: [(name, BASE_US) for name in cases | late] + [("twice", BASE_US), ("twice", BASE_US - second)],
            payments: [(name, BASE_US + after) for name, after in (cases | late).items()],
        },
    )
    publish(amqp_url, {stream_name: [("just due", now_us - 11 * second)]})
    record(amqp_url, engine, stream_name, payments)
    expectation = Expectation("paid", stream_name, "order_id", payments, 10, grace_s=2)
    report = relations.missing(expectation, until=at(BASE_US + second))
    assert [each.value for each in report.late] == ["late"]
    assert [each.value for each in report.missing] == ["twice", "before", "twice"]
    itself = Expectation("paid", stream_name, "order_id", stream_name, 10, grace_s=2)
    assert [each.time for each in relations.missing(itself).missing if each.value == "twice"] == [at(BASE_US)]
    patient = Expectation("paid", stream_name, "order_id", payments, 10, grace_s=3_600)
    (unmet,) = [each for each in relations.missing(patient).not_known if each.value == "just due"]
    assert (unmet.why, unmet.due) == (Why.NOT_DUE, at(now_us - second))


def test_what_is_not_due_changes_nothing_and_what_has_no_value_is_counted(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, payments: str
) -> None:
    """Nothing is missing while there is time; nobody guesses what a message without the key is to be followed by."""
    now_us = time.time_ns() // 1_000
    publish(amqp_url, {stream_name: [("paid", BASE_US), ("open", now_us), ("early", now_us)], payments: []})
    publish(amqp_url, {payments: [("paid", BASE_US + 1), ("early", now_us + 1)]})
    publish_plain(amqp_url, stream_name, [b"", (b"", {"order_id": "x" * 3_000})])
    record(amqp_url, engine, stream_name, payments)
    report = relations.missing(Expectation("paid", stream_name, "order_id", payments, 7_000))
    assert report.status is Status.ABSENT
    assert not report
    assert [(each.value, each.finding, each.why) for each in report.not_known] == [
        ("open", Finding.NOT_KNOWN, Why.NOT_DUE)
    ]
    assert (report.checked, report.without_value) == (3, 2)
    assert report.streams == (stream_name,)


def test_nothing_came_into_an_empty_stream(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, payments: str
) -> None:
    """One that is recorded and holds nothing proves it, too; a message never follows itself."""
    publish(amqp_url, {stream_name: [("a", BASE_US), ("b", BASE_US), ("b", BASE_US)]})
    record(amqp_url, engine, stream_name, payments)
    assert offsets(relations.missing(Expectation("x", stream_name, "order_id", payments, 1)).missing) == [0, 1, 2]
    itself = relations.missing(Expectation("x", stream_name, "order_id", stream_name, 1))
    assert offsets(itself.missing) == [0]


def test_partitions_count_together(amqp_url: str, stream_url: str, engine: sa.Engine, relations: Relations) -> None:
    """Of super streams, on either side, a message in any partition follows one of any."""
    with super_stream(amqp_url, stream_url, 2) as orders, super_stream(amqp_url, stream_url, 2) as paid:
        publish(
            amqp_url,
            {
                orders.partitions[0].stream: [("a", BASE_US), ("b", BASE_US)],
                orders.partitions[1].stream: [("c", BASE_US), ("d", BASE_US)],
                paid.partitions[0].stream: [("c", BASE_US + 1), ("b", BASE_US + 99_000_000)],
                paid.partitions[1].stream: [("a", BASE_US + 1)],
            },
        )
        names = [partition.stream for layout in (orders, paid) for partition in layout.partitions]
        with recording(amqp_url, engine, orders.super_stream, paid.super_stream, keys=["order_id"]):
            for name in names:
                wait_recorded(amqp_url, engine, name)
        report = relations.missing(Expectation("paid", orders.super_stream, "order_id", paid.super_stream, 10))
        assert [each.value for each in report.late] == ["b"]
        assert [each.value for each in report.missing] == ["d"]
        assert report.streams == tuple(sorted(names[:2]))


# --- what is not known ------------------------------------------------------------------------------------


def chunk_us(amqp_url: str, stream: str, offset: int) -> int:
    """When the broker wrote a message."""
    with StreamReader.open(amqp_url) as reader:
        return (reader.read(stream, offset).chunk_ms or 0) * MS


def test_what_a_recorder_has_not_reached_is_not_known(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, payments: str
) -> None:
    """Up to the moment that its coverage reaches, missing is missing; beyond it, nobody can say."""
    publish(amqp_url, {payments: [("z", BASE_US)]})
    reached_us = chunk_us(amqp_url, payments, 0)
    expectation = Expectation("paid", stream_name, "order_id", payments, 0.001, grace_s=0)
    publish(amqp_url, {stream_name: [("before", BASE_US), ("behind", reached_us)]})
    record(amqp_url, engine, stream_name, payments)
    assert offsets(relations.missing(expectation).missing) == [0, 1]
    publish(amqp_url, {payments: [("behind", reached_us)]})
    report = relations.missing(expectation)
    assert offsets(report.missing) == [0]
    assert [(each.value, each.why) for each in report.not_known] == [("behind", Why.BEHIND)]
    report = relations.missing(expectation, since=at(reached_us - MS))
    assert report.status is Status.NOT_RECORDED_YET
    assert report.unattended == (payments,)
    record(amqp_url, engine, payments)
    assert relations.missing(expectation, since=at(reached_us - MS)).status is Status.ABSENT


def test_messages_that_are_not_recorded_are_not_passed_over(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, payments: str
) -> None:
    """That nothing is missing is not said while a message that was due may lie behind what is recorded."""
    expectation = Expectation("paid", stream_name, "order_id", payments, 0.001, grace_s=0)
    publish(amqp_url, {stream_name: [("a", BASE_US)], payments: [("a", BASE_US)]})
    record(amqp_url, engine, stream_name, payments)
    assert relations.missing(expectation).status is Status.ABSENT
    publish(amqp_url, {stream_name: [("b", BASE_US)]})
    report = relations.missing(expectation)
    assert (report.status, report.unattended) == (Status.NOT_RECORDED_YET, (stream_name,))


def test_by_a_new_key_the_cure_is_a_back_fill(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, payments: str
) -> None:
    """What was recorded before the key was defined is no recorder's to look at again."""
    publish_plain(amqp_url, stream_name, [about("a", BASE_US)])
    publish_plain(amqp_url, payments, [about("a", BASE_US)])
    support.record(amqp_url, engine, stream_name, payments, keys=["another"])
    add_keys(engine, ["order_id"])
    expectation = Expectation("paid", stream_name, "order_id", payments, 60)
    report = relations.missing(expectation, since=at(BASE_US))
    assert report.status is Status.NOT_RECORDED_YET
    assert (report.unattended, report.new_keys) == ((), (("order_id", (payments,)),))
    assert "relatum backfill --keys order_id" in report.words
    backfill(amqp_url, engine, payments, keys=["order_id"])
    assert relations.missing(expectation, since=at(BASE_US)).status is Status.ABSENT


@pytest.mark.differs
def test_a_hole_proves_nothing_missing_and_nothing_late(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, payments: str
) -> None:
    """What came in a time of which a part was lost may have come in time; what came before and behind it is known."""
    second = 1_000_000
    for part in range(3):
        # One by one, so that each is a block of its own.
        publish(amqp_url, {payments: [(f"z{part}", BASE_US + part * 100 * second)]})
        record(amqp_url, engine, payments)
    publish(amqp_url, {payments: [("late", BASE_US + 290 * second)]})
    orders = {"first": 10, "late": 110, "lost": 150, "last": 250}
    publish(amqp_url, {stream_name: [(name, BASE_US + after * second) for name, after in orders.items()]})
    record(amqp_url, engine, stream_name, payments)
    expectation = Expectation("paid", stream_name, "order_id", payments, 20)
    report = relations.missing(expectation)
    assert [each.value for each in report.missing] == ["first", "lost", "last"]
    assert [each.value for each in report.late] == ["late"]
    with engine.begin() as connection:
        ids = sa.text(f"SELECT stream_id FROM relatum.streams WHERE name = '{payments}'")
        stream_id = connection.execute(ids).scalar_one()
        connection.execute(
            sa.text("UPDATE relatum.coverage SET from_offset = 2 WHERE stream_id = :id"), {"id": stream_id}
        )
        hole = "INSERT INTO relatum.coverage (stream_id, from_offset, to_offset, key_ids, with_time, kind) "
        connection.execute(sa.text(f"{hole} VALUES (:id, 0, 2, '{{}}', false, 'hole')"), {"id": stream_id})
    report = relations.missing(expectation)
    assert [each.value for each in report.missing] == ["last"]
    assert [(each.value, each.why) for each in report.not_known] == [
        (name, Why.UNPROVEN) for name in ("first", "late", "lost")
    ]
    assert relations.missing(expectation, until=at(BASE_US + 200 * second)).status is Status.UNPROVEN


def test_what_retention_may_have_dropped_is_not_known(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """A stream that does not retain the span proves nothing of it, whatever rows there are."""
    short = unique_name()
    declare_stream(amqp_url, short, x_max_length_bytes=100_000, x_stream_max_segment_size_bytes=50_000)
    try:
        body = b"." * 1_000
        for part in range(4):
            messages = [
                (body, {"order_id": f"z{n}", "relatum_time": BASE_US + (part * 100 + n) * 1_000_000})
                for n in range(100)
            ]
            publish_plain(amqp_url, short, messages)
        # Retention may leave the last message alone: "late" is behind it, by more than clocks may differ.
        publish(amqp_url, {stream_name: [("early", BASE_US + 1), ("z5", BASE_US), ("late", BASE_US + 600_000_000)]})
        with StreamReader.open(amqp_url) as reader:
            wait_until(lambda: reader.bounds(short).first, what="retention")
        record(amqp_url, engine, stream_name, short)
        report = relations.missing(Expectation("paid", stream_name, "order_id", short, 10))
        assert [each.value for each in report.missing] == ["late"]
        assert {(each.value, each.why) for each in report.not_known} >= {("early", Why.UNPROVEN)}
        # The messages to be followed: those that are gone are not looked at, and an explicit span says so.
        back = Expectation("back", short, "order_id", stream_name, 10)
        assert relations.missing(back, since=at(BASE_US), until=at(BASE_US + 1)).status is Status.UNPROVEN
        assert relations.missing(back).since > at(BASE_US)
    finally:
        delete_stream(amqp_url, short)


# --- definitions and wrong questions ----------------------------------------------------------------------


def test_expectations_are_defined_in_the_database(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, payments: str
) -> None:
    """As keys are: once, by what they say; another of the name is refused, and one is taken back."""
    paid = Expectation("paid", stream_name, "order_id", payments, 10)
    with pytest.raises(KeyNotDefined):
        add_expectations(engine.url, paid)
    publish(amqp_url, {stream_name: [("a", BASE_US)]})
    record(amqp_url, engine, stream_name, payments)
    assert add_expectations(engine.url, [paid, paid]) == [paid, paid]
    with pytest.raises(InvalidInput, match="is defined already"):
        add_expectations(engine.url, Expectation("paid", stream_name, "order_id", payments, 11))
    with pytest.raises(InvalidInput, match="clocks may differ by 1 s"):
        add_expectations(engine.url, Expectation("paid", stream_name, "order_id", payments, 10, grace_s=0))
    assert relations.expectations() == (paid,)
    assert defined_expectations(engine.url, vhost="other") == []
    assert offsets(relations.missing("paid").missing) == [0]
    with pytest.raises(NotFound, match="did you mean 'paid'"):
        relations.missing("paied")
    remove_key(engine, "order_id")
    with pytest.raises(KeyNotDefined):
        relations.missing("paid")
    remove_expectation(engine.url, "paid")
    with pytest.raises(NotFound):
        remove_expectation(engine.url, "paid")
    assert relations.expectations() == ()


def test_wrong_questions_are_refused(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, payments: str
) -> None:
    """Before anything is asked where that can be; a stream that is not there, or has no times, by its name."""
    for within in (0, -1, float("inf"), "1h"):
        with pytest.raises(InvalidInput):
            Expectation("x", "a", "b", "c", within)  # type: ignore[arg-type]
    for grace in (-1, 86_401, float("nan"), None):
        with pytest.raises(InvalidInput, match="grace_s"):
            Expectation("x", "a", "b", "c", 1, grace)  # type: ignore[arg-type]
    record(amqp_url, engine, stream_name)
    with pytest.raises(StreamNotFound):
        relations.missing(Expectation("x", stream_name, "order_id", "nobody-knows-it", 1))
    expectation = Expectation("x", stream_name, "order_id", payments, 1)
    wrong: list[dict[str, Any]] = [{"limit": 0}, {"since": at(2), "until": at(1)}, {"since": "yesterday"}]
    for options in wrong:
        with pytest.raises(InvalidInput):
            relations.missing(expectation, **options)
    set_record_time(amqp_url, engine.url, stream_name, on=False)
    with pytest.raises(TimeNotRecorded):
        relations.missing(expectation)


def test_one_who_reads_sees_expectations_and_defines_none(
    amqp_url: str, engine: sa.Engine, database_url: str, stream_name: str
) -> None:
    """They are definitions: a consumer's role has them to read."""
    record(amqp_url, engine, stream_name)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("SET ROLE relatum_consumer")
        assert connection.execute("SELECT count(*) FROM relatum.expectations").fetchone() == (0,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("DELETE FROM relatum.expectations")


def test_a_report_is_a_value() -> None:
    """It is true where something is late or missing."""
    paid = Expectation("paid", "orders", "order_id", "payments", 10)
    assert MissingReport(expectation=paid, status=Status.FOUND, since=at(0), until=at(1))
    assert not MissingReport(expectation=paid, status=Status.UNPROVEN, since=at(0), until=at(1))
