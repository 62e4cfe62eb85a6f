"""What becomes of a bulk: results from answers, decisions from results, and the steps of a worker. No I/O."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from relatum import MessageId
from relatum.collecting import Bulk, Collected, ExecutorOptions, Failure, FlushReason, _intake
from relatum.collecting._collector_core import Core, Followed, Result, Stored, Verdict
from relatum.collecting._consuming import CRASHES_MAX, Answered, BulkConsumer, Consumed, Judge, Letter
from relatum.collecting._intake import Intake, describe, type_of_property
from relatum.errors import OffsetExpired
from relatum.outcomes import OutcomeStatus
from relatum.reading import Message, Properties

NOW = datetime(2026, 11, 21, tzinfo=UTC)
OPTIONS = ExecutorOptions(attempts=3, backoff_s=2.0)


def read(offset: int, message_id: str | None = None, body: bytes = b"body", type_: str | None = "a") -> Message:
    """A message as AMQP 0.9.1 shows it."""
    properties = Properties(message_id=message_id or f"m{offset}", type=type_)
    return Message("orders", offset, None, None, lambda: ({}, properties, body, True))


def bulk_of(count: int, *, with_bodies: bool = True, attempts: int = 0) -> Bulk:
    """A bulk as the core closes it."""
    messages = tuple(
        Collected(MessageId("orders", n), f"m{n}", "a", 10, read(n) if with_bodies else None, attempts)
        for n in range(count)
    )
    return Bulk(7, "a", messages, FlushReason.AGE)


class Script(BulkConsumer):
    """Does the steps of a bulk as it is told, and notes them."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__(OPTIONS, may_die=False)
        self.executor = answer if callable(answer) else lambda bulk: answer
        self.steps: list[str] = []
        self.letters: list[tuple[int, str]] = []
        self.not_ours: set[int] = set()
        self.unreadable: dict[int, Any] = {}
        self.joined_commits = True

    def run(self, options: ExecutorOptions, bulk: Bulk, *, may_die: bool = False) -> Consumed:
        """Consume the bulk."""
        super().__init__(options, may_die=may_die)
        return self.consume(bulk)

    def answered(self, bulk: Bulk) -> Answered:
        """What the executor comes to."""
        try:
            return self.executor(bulk), None
        except Exception as error:
            return None, error

    def load(self, places: Sequence[MessageId]) -> dict[MessageId, Any]:
        """Of the interface."""
        self.steps.append("load")
        return {place: self.unreadable.get(place.offset, read(place.offset)) for place in places}

    def forward(self, bulk: Bulk) -> Stored:
        """Of the interface."""
        self.steps.append("forward")
        return Stored(frozenset(each.place for each in bulk.messages if each.place.offset not in self.not_ours), NOW)

    def execute(self, bulk: Bulk) -> Answered:
        """Of the interface."""
        self.steps.append("execute")
        return self.answered(bulk)

    def join(self, bulk: Bulk, judge: Judge) -> tuple[list[Result], Stored | None]:
        """Of the interface."""
        self.steps.append("join")
        results = judge(self.answered(bulk))
        return results, Stored(frozenset(each.place for each in results), NOW) if self.joined_commits else None

    def bury(self, letters: Sequence[Letter]) -> dict[MessageId, str]:
        """Of the interface."""
        self.steps.append("bury")
        self.letters += [(letter.offset, reason) for letter, reason in letters]
        return {}

    def finish(self, bulk: Bulk, results: Sequence[Result]) -> Stored:
        """Of the interface."""
        self.steps.append("finish")
        return Stored(frozenset(result.place for result in results), NOW)


def ends(consumed: Consumed) -> dict[int, tuple[OutcomeStatus, str | None, float | None]]:
    """What was stored, by offset."""
    return {each.place.offset: (each.status, each.reason, each.retry_in_s) for each in consumed.results}


def note_and_raise(bulk: Bulk) -> None:
    """Note a success and a failure, and raise."""
    bulk.succeeded(bulk.messages[0])
    bulk.failed(bulk.messages[1], OSError("disk"), retry=False)
    raise RuntimeError("stop")


def by(key: Callable[[Collected], Any]) -> Callable[[Bulk], Any]:
    """An executor that names the first and the last of three messages in a mapping."""
    return lambda bulk: {key(bulk.messages[0]): None, key(bulk.messages[2]): KeyError("k")}


LEFT_OUT = "the executor gave no result for this message"


@pytest.mark.parametrize(
    ("answer", "reasons"),
    [
        (None, [None, None, None]),
        (lambda bulk: bulk.failed(bulk.messages[1], "not this one"), [None, "not this one", None]),
        ([None, ValueError("bad"), Failure("worse", retry=False)], [None, "ValueError: bad", "worse"]),
        (by(lambda message: message), [None, LEFT_OUT, "KeyError: 'k'"]),
        (by(lambda message: message.place), [None, LEFT_OUT, "KeyError: 'k'"]),
        (by(lambda message: message.message_id), [None, LEFT_OUT, "KeyError: 'k'"]),
        (note_and_raise, [None, "OSError: disk", "RuntimeError: stop"]),
        ([None], ["the executor returned 1 results for 3 messages"] * 3),
        (True, ["the executor returned bool"] * 3),
        ("ok", ["the executor returned str"] * 3),
        ([None, True, None], [None, "the executor's result is bool", None]),
    ],
)
def test_each_message_has_a_result_by_what_the_executor_answers(answer: Any, reasons: list[str | None]) -> None:
    """None is success; what has no result, or one that makes no sense, failed; what was noted before an error stays."""
    found = [each.reason for each in Script(answer).run(OPTIONS, bulk_of(3)).results]
    assert [each is None for each in found] == [expected is None for expected in reasons]
    assert all((each or "").startswith(expected or "") for each, expected in zip(found, reasons, strict=True)), found


def test_reasons_are_cut_to_what_can_be_stored() -> None:
    """A reason of any length and with any characters can be stored."""
    failure = Failure("a\0b" + "x" * 2000 + "\ud800")
    assert failure.stored_reason == "ab" + "x" * 998
    assert Failure("\ud800").stored_reason == "?"


# --- the steps of a worker --------------------------------------------------------------------------------------


def test_a_bulk_is_forwarded_executed_and_finished() -> None:
    """Without anything special there are three steps, and each message has one attempt more."""
    script, bulk = Script(), bulk_of(2)
    consumed = script.run(OPTIONS, bulk)
    assert script.steps == ["forward", "execute", "finish"]
    assert ends(consumed) == {0: (OutcomeStatus.SUCCEEDED, None, None), 1: (OutcomeStatus.SUCCEEDED, None, None)}
    assert [(each.attempts, each.forwarded_at) for each in bulk.messages] == [(1, NOW), (1, NOW)]


@pytest.mark.parametrize(("attempts", "wait_s"), [(0, 2.0), (1, 4.0)])
def test_a_failure_is_tried_again_later(attempts: int, wait_s: float) -> None:
    """While attempts are left, a failed message is collected again, with back-off; where it forbids that, it failed."""
    consumed = Script([ValueError("bad"), Failure("no", retry=False)]).run(OPTIONS, bulk_of(2, attempts=attempts))
    assert ends(consumed) == {
        0: (OutcomeStatus.COLLECTED, "ValueError: bad", wait_s),
        1: (OutcomeStatus.FAILED, "no", None),
    }


@pytest.mark.parametrize(("may_die", "status"), [(False, OutcomeStatus.FAILED), (True, OutcomeStatus.DEAD)])
def test_the_last_attempt_decides(may_die: bool, status: OutcomeStatus) -> None:
    """After the last attempt a message is failed, or dead where there is a stream for it; it is published first."""
    script = Script([ValueError("bad"), None])
    consumed = script.run(OPTIONS, bulk_of(2, attempts=2), may_die=may_die)
    assert ends(consumed)[0] == (status, "ValueError: bad", None)
    assert script.steps == ["forward", "execute", *(["bury"] if may_die else []), "finish"]
    if may_die:
        assert script.letters == [(0, "ValueError: bad")]


def test_messages_of_another_member_are_left_alone() -> None:
    """What the store says belongs to another member is neither executed nor stored; where nothing is left, all ends."""
    script, bulk = Script(), bulk_of(3)
    script.not_ours = {1}
    assert list(ends(script.run(OPTIONS, bulk))) == [0, 2]
    assert (len(bulk.messages), bulk.bytes, len(bulk.taken)) == (2, 20, 3)
    script.not_ours, script.steps = {0, 1}, []
    assert ends(script.run(OPTIONS, bulk_of(2))) == {}
    assert script.steps == ["forward"]


def test_bodies_left_in_streams_are_read_first() -> None:
    """Spilled messages are read again; what retention took, or replaced, failed as expired, and the rest goes on."""
    script = Script()
    script.unreadable = {1: OffsetExpired("dropped", stream="orders", offset=1, first=5), 2: read(2, "another")}
    consumed = script.run(OPTIONS, bulk_of(4, with_bodies=False), may_die=True)
    assert script.steps == ["load", "forward", "finish", "execute", "finish"]
    by_offset = ends(consumed)
    assert by_offset[1] == (OutcomeStatus.FAILED, "expired: dropped", None)
    assert by_offset[2] == (OutcomeStatus.FAILED, "expired: another message lies there now", None)
    assert [by_offset[n][0] for n in (0, 3)] == [OutcomeStatus.SUCCEEDED] * 2


def test_a_message_that_kills_its_collectors_is_given_up() -> None:
    """A message that was handed on so often without any result is not handed on once more."""
    script = Script()
    last, beyond = bulk_of(1, attempts=3 + CRASHES_MAX - 1), bulk_of(1, attempts=3 + CRASHES_MAX)
    assert ends(script.run(OPTIONS, last))[0][0] is OutcomeStatus.SUCCEEDED
    script.steps.clear()
    status, reason, _ = ends(script.run(OPTIONS, beyond))[0]
    assert (status, script.steps) == (OutcomeStatus.FAILED, ["forward", "finish"])
    assert "died" in (reason or "")


def test_a_joined_executor_has_its_results_stored_with_it() -> None:
    """What was committed with the executor's own writes is not stored a second time."""
    script = Script()
    options = ExecutorOptions(joins_transaction=True)
    assert ends(script.run(options, bulk_of(1)))[0][0] is OutcomeStatus.SUCCEEDED
    assert script.steps == ["forward", "join"]


def test_a_joined_executor_that_raised_has_failures_stored_after_it() -> None:
    """What was rolled back is stored as failed in a transaction of its own."""

    def executor(bulk: Bulk) -> None:
        raise ValueError("bad")

    script = Script(executor)
    script.joined_commits = False
    options = ExecutorOptions(joins_transaction=True, attempts=1)
    assert ends(script.run(options, bulk_of(1))) == {0: (OutcomeStatus.FAILED, "ValueError: bad", None)}
    assert script.steps == ["forward", "join", "finish"]


class Inscrutable(Exception):
    """An exception that fails at saying what it is."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("error", [TypeError("a defect"), Inscrutable()])
@pytest.mark.parametrize("is_forwarded", [False, True])
def test_a_defect_ends_the_attempt(error: Exception, is_forwarded: bool) -> None:
    """Wherever a bulk's consumption breaks off, its attempt counts once, and its messages failed for that reason."""
    bulk, script = bulk_of(2), Script()
    if is_forwarded:
        script._forward(bulk)
        script.steps.clear()
    ended = script.fail(bulk, error)
    assert script.steps == ["forward", "finish"]
    assert [each.attempts for each in bulk.messages] == [1, 1]
    assert {status for status, *_ in ends(ended).values()} == {OutcomeStatus.COLLECTED}
    assert (ended.results[0].reason or "").startswith(type(error).__name__)


# --- messages on their way into the store -----------------------------------------------------------------------


def test_ids_are_given_or_made_of_the_place() -> None:
    """A message without `message_id`, or with one that cannot be stored, is asked for by where it lies."""
    nameless = Message("orders", 4, None, None, lambda: ({}, Properties(), b"", True))
    asked_by = [describe(each, type_of_property).message_id for each in (read(3), nameless, read(5, "a\0b"))]
    assert asked_by == ["m3", "orders:4", "orders:5"]


def test_described_messages_are_undecoded_again() -> None:
    """A description keeps the stream's bytes alone, and counts them."""
    record = Message.from_record("orders", 1, b"no AMQP at all")
    described = describe(record, type_of_property)
    assert (described.type, described.bytes, described.message_id) == ("", 14, "orders:1")
    assert described.message is not record
    assert described.message == record


def intake_of(**options: Any) -> tuple[Core, Intake]:
    """An intake that follows `orders` from 10 on."""
    core = Core()
    core.register("a", ExecutorOptions(**options))
    intake = Intake(core)
    intake.follow("orders", Followed(10))
    return core, intake


def described(*offsets: int, type_: str = "a") -> list[Collected]:
    """Messages as a follower describes them."""
    return [describe(read(offset, type_=type_), type_of_property) for offset in offsets]


def test_batches_are_gathered_into_one_transaction() -> None:
    """What arrives while the store is busy is stored at once, with one move of the position."""
    _, intake = intake_of()
    assert intake.take("orders", described(10, 11), 0.0) == 2
    assert intake.take("orders", [*described(14), *described(15, type_="z")], 0.0) == 2
    [gathered] = intake.next()
    advance = gathered.advance
    assert advance is not None
    assert [entry.place.offset for entry in gathered.entries] == [10, 11, 14]
    assert (advance.from_offset, advance.to_offset, advance.passed_over) == (10, 16, 1)
    assert advance.known_by is not None
    assert advance.known_by.offset == 15
    intake.take("orders", described(16), 0.0)
    intake.add(gathered, intake.stored(gathered, Stored(frozenset(m.place for m in gathered.messages), NOW)), 0.0)
    assert not intake.is_stored("orders")
    [second] = intake.next()
    assert second.advance is not None
    assert (second.advance.from_offset, second.advance.to_offset) == (16, 17)


def test_a_full_type_stops_its_stream_where_it_is() -> None:
    """The position moves up to the message that has to wait, not over it."""
    core, intake = intake_of(bulk_messages=1, queue_bulks=1)
    assert intake.take("orders", described(10), 0.0) == 1
    [gathered] = intake.next()
    intake.add(gathered, intake.stored(gathered, Stored(frozenset([MessageId("orders", 10)]), NOW)), 0.0)
    assert intake.take("orders", [*described(11, type_="z"), *described(12, 13)], 0.0) == 1
    [gathered] = intake.next()
    assert gathered.advance is not None
    assert (gathered.entries, gathered.advance.to_offset) == ([], 12)
    assert core.take("a") is not None
    assert intake.take("orders", described(12), 0.0) == 1


def test_a_stream_lost_to_another_member_is_let_go() -> None:
    """What was gathered of a stream that another member follows now is forgotten here: it is stored there."""
    core, intake = intake_of()
    intake.take("orders", described(10), 0.0)
    [gathered] = intake.next()
    intake.take("orders", described(11), 0.0)
    assert core.held_messages == 2
    intake.lost(gathered)
    assert (core.held_messages, intake.is_followed("orders"), intake.is_empty) == (0, False, True)


def test_messages_that_were_collected_before_are_let_go() -> None:
    """A message the store knows already is not consumed a second time."""
    core, intake = intake_of()
    assert intake.collect(described(3)[0], 0.0) is Verdict.TAKEN
    assert intake.collect(described(3)[0], 0.0) is Verdict.KNOWN
    mark = intake.mark()
    [gathered] = intake.next()
    assert intake.stored(gathered, Stored(frozenset(), NOW)) == []
    assert not intake.is_stored_to(mark)
    intake.add(gathered, [], 0.0)
    assert intake.is_stored_to(mark)
    assert (core.held_messages, core.held_bytes) == (0, 0)


def test_types_that_are_passed_over_are_gathered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept for the store, and their messages are not held; while that is away, the stream is not read on."""
    monkeypatch.setattr(_intake, "PASSED_OVER_MAX", 2)
    core, intake = intake_of()
    intake.follow("orders", Followed(10))
    assert intake.take("orders", [*described(10, 11, type_="y"), *described(12, type_="z")], 0.0) == 3
    assert intake.take("orders", described(13, type_="y"), 0.0) == 0
    [gathered] = intake.next()
    assert gathered.advance is not None
    assert (gathered.advance.passed_over_types, gathered.advance.passed_over) == (frozenset({"y", "z"}), 3)
    assert (core.held_messages, intake.passed_over) == (0, 3)
    assert intake.take("orders", described(13, type_="y"), 0.0) == 1
