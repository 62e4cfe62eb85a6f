"""Answers and proofs, without servers."""

import contextlib
import pickle
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum import MessageId
from relatum.errors import (
    InvalidInput,
    KeyNotDefined,
    OffsetExpired,
    OffsetNotFound,
    StreamNotFound,
    StreamReplaced,
    StreamUnavailable,
)
from relatum.reading import Agreement, KeptChunks, Message, Properties, StreamBounds, UnreadableRecord
from relatum.steps import run
from relatum.store import TIME, CoverageRow, Position, covered, last_position
from relatum.wire._identity import fingerprint
from relatum_consumer import Answer, Hit, Lacking, Status
from relatum_consumer.lookups import (
    Agree,
    Bounds,
    Catalog,
    Evidence,
    LookupRequest,
    Lookups,
    Partitions,
    Pause,
    Select,
    Sift,
    Uncovered,
    check_identity,
    first_retained,
)
from relatum_consumer.lookups import _lookup_statements as statements
from relatum_consumer.lookups._proof import gaps
from relatum_consumer.lookups._related import is_sure


def message(offset: int, body: bytes = b"", chunk_ms: int | None = None) -> Message:
    """A message at an offset of the stream "s"."""
    return Message("s", offset, None, chunk_ms, lambda: ({}, Properties(), body, True))


def covers(start: int, stop: int, *keys: int, kind: str = "recorded", position: Position | None = None) -> CoverageRow:
    """A range of coverage."""
    last = (None, None, None) if position is None else (position.offset, position.fingerprint, position.chunk_ms)
    return CoverageRow(1, 1, start, stop, keys, TIME in keys, kind, False, *last, datetime.now(UTC))


def test_an_answer_is_a_sequence_of_messages() -> None:
    """Length, order, index, slice, membership and truth."""
    messages = [message(offset) for offset in (5, 3, 9)]
    answer = Answer(Status.FOUND, tuple(Hit(each, ("k",)) for each in messages), (MessageId("s", 1),))
    assert len(answer) == 3
    assert list(answer) == list(answer.messages) == messages
    assert answer.ids == (("s", 5), ("s", 3), ("s", 9))
    assert (answer[0], answer[-1], answer[1:]) == (messages[0], messages[2], tuple(messages[1:]))
    assert answer.first is messages[0]
    assert messages[1] in answer
    assert [hit.keys for hit in answer.hits] == [("k",)] * 3
    assert pickle.loads(pickle.dumps(answer)) == answer


def test_an_answer_without_messages_is_false_and_has_no_first() -> None:
    """It says why instead."""
    answer = Answer(Status.ABSENT)
    assert not answer
    assert answer.first is None
    assert (answer.messages, answer.ids, answer.expired) == ((), (), ())
    assert str(answer.status) == "absent"


def test_an_answer_does_not_change() -> None:
    """Nobody can add to it."""
    with pytest.raises(AttributeError):
        Answer(Status.ABSENT).status = Status.FOUND  # type: ignore[misc]


ranges = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)


@given(
    st.lists(st.tuples(ranges, st.sets(st.integers(0, 2)), st.booleans()), max_size=6),
    ranges,
    st.sets(st.integers(0, 2)),
)
def test_a_gap_is_what_some_key_is_not_recorded_for(
    recorded: list[tuple[list[int], set[int], bool]], retained: list[int], keys: set[int]
) -> None:
    """Offset by offset; holes record nothing; what is not retained does not count."""
    rows = [covers(*each, *held, kind="hole" if is_hole else "recorded") for each, held, is_hole in recorded]
    first, last = retained

    def is_recorded(offset: int, key: int) -> bool:
        return any(row.from_offset <= offset < row.to_offset and row.holds(key) for row in rows)

    expected = {o for o in range(first, last + 1) if not all(is_recorded(o, key) for key in keys)}
    found = gaps(StreamBounds(first, last, is_proven=True), rows, keys)
    assert {offset for start, stop in found for offset in range(start, stop)} == expected
    assert found == sorted(found)


def test_what_was_recorded_over_amqp_is_no_proof() -> None:
    """It is a gap for whoever proves that there is nothing, and none for whoever takes what there is."""
    rows = [replace(covers(0, 5, 1), over_amqp=True), covers(5, 8, 1)]
    assert gaps(StreamBounds(0, 9, is_proven=True), rows, [1]) == [(0, 5), (8, 10)]
    assert gaps(StreamBounds(0, 9, is_proven=True), rows, [1], recorded_as=covered) == [(8, 10)]


GAP = [Uncovered("s", 3, 5)]


@pytest.mark.parametrize(
    ("known", "options", "status"),
    [
        (Evidence(("s",)), {"is_found": True}, Status.FOUND),
        (Evidence(("s",), uncovered=GAP, unproven={"s"}), {"is_found": True}, Status.FOUND),
        (Evidence(("s",), unproven={"s"}), {"is_found": True, "was_read": True}, Status.UNPROVEN),
        (Evidence(("s",)), {"is_found": True, "is_whole": False}, Status.UNPROVEN),
        (Evidence(("s",)), {"is_whole": False, "has_expired": True}, Status.UNPROVEN),
        (Evidence(("s",), uncovered=GAP, unproven={"s"}), {}, Status.NOT_RECORDED_YET),
        (Evidence(("s",), uncovered=GAP), {"has_expired": True}, Status.NOT_RECORDED_YET),
        (Evidence(("s",), uncovered=GAP), {"was_read": True}, Status.ABSENT),
        (Evidence(("s",), uncovered=GAP, unproven={"s"}), {"was_read": True}, Status.UNPROVEN),
        (Evidence(("s",), unproven={"s"}), {"has_expired": True}, Status.UNPROVEN),
        (Evidence(("s",)), {"has_expired": True}, Status.EXPIRED),
        (Evidence(("s",)), {}, Status.ABSENT),
    ],
)
def test_the_rule_of_statuses(known: Evidence, options: dict[str, bool], status: Status) -> None:
    """What may be said of what was found, by what is recorded, read and proven."""
    facts = {"is_found": False, "was_read": False, "has_expired": False, "is_whole": True} | options
    assert known.status(**facts) is status


def test_a_batch_that_cannot_be_unpacked_proves_nothing() -> None:
    """A scan that meets one leaves its stream unproven, and keeps what it could read."""
    known = Evidence(("s",), uncovered=GAP)
    seen: list[int] = []
    steps = known.scan(lambda each: seen.append(each.offset))
    request = next(steps)
    assert isinstance(request, Sift)
    packed = Message.from_record("s", 3, UnreadableRecord("no codec"), None)
    assert [request.take(each) for each in (packed, message(4), message(5))] == [None, None, None]
    assert seen == [4, 5]
    assert known.unproven == {"s"}


def test_an_empty_stream_has_no_gap() -> None:
    """It retains nothing."""
    assert gaps(StreamBounds(None, None, is_proven=True), [], [1]) == []


def test_a_stream_is_known_again_by_its_furthest_position() -> None:
    """A log grows at its end only."""
    body = fingerprint(None, b"body")
    rows = [
        covers(0, 5, 1, position=Position(4, 1, None)),
        covers(5, 9, 1, position=Position(8, body, 70)),
        covers(9, 9),
    ]
    position = last_position(rows)
    assert position == Position(8, body, 70)
    assert last_position([covers(9, 9)]) is None


def test_a_row_without_its_message_has_expired_or_belongs_to_another_stream() -> None:
    """Retention says where the stream begins; anything else is no retention."""
    where = MessageId("s", 4)
    assert first_retained(where, expired(is_proven=True), is_named=True) == 7
    assert first_retained(where, StreamNotFound("", stream="s"), is_named=False) > 10**18
    with pytest.raises(StreamNotFound):
        first_retained(where, StreamNotFound("", stream="s"), is_named=True)
    with pytest.raises(StreamReplaced):
        first_retained(where, OffsetNotFound("", stream="s", offset=4, is_proven=True), is_named=False)


def expired(*, is_proven: bool) -> OffsetExpired:
    """Retention took offset 4; the stream begins at 7."""
    return OffsetExpired("", stream="s", offset=4, first=7, is_proven=is_proven)


def test_what_a_node_alone_says_of_a_row_is_no_proof() -> None:
    """Its own retention is doubtful; that it does not have the offset yet is no answer at all."""
    where = MessageId("s", 4)
    assert first_retained(where, expired(is_proven=False), is_named=True) == 7
    assert not is_sure(expired(is_proven=False))
    assert is_sure(expired(is_proven=True))
    assert is_sure(StreamNotFound("", stream="s"))
    with pytest.raises(StreamUnavailable):
        first_retained(where, OffsetNotFound("", stream="s", offset=4, is_proven=False), is_named=False)


POSITION = Position(4, 1, None)
KEPT = KeptChunks()


def identity(bounds: StreamBounds, *agreements: Agreement, patience_s: float = 60.0) -> list[Any]:
    """The requests of a look at a stream's identity that gets these answers."""
    steps = check_identity(Catalog("/", patience_s), {"s": [covers(0, 5, 1, position=POSITION)]}, {"s": bounds}, KEPT)
    requests: list[Any] = []
    given = iter(agreements)
    answer: Any = None
    with contextlib.suppress(StopIteration):
        while True:
            requests.append(steps.send(answer))
            answer = {"s": next(given)} if isinstance(requests[-1], Agree) else None
    return requests


@pytest.mark.parametrize("agreement", [Agreement.OTHER, Agreement.ENDS_BEFORE])
def test_only_another_message_or_the_leaders_end_is_another_stream(agreement: Agreement) -> None:
    """Both are known for sure; the same message, or an expired one, is the same stream."""
    with pytest.raises(StreamReplaced):
        identity(StreamBounds(0, 9, is_proven=True), agreement)
    for sound in (Agreement.SAME, Agreement.EXPIRED):
        assert identity(StreamBounds(0, 9, is_proven=True), sound) == [Agree({"s": POSITION}, KEPT)]


def test_while_nobody_knows_the_stream_it_is_waited_for_and_then_to_be_repeated() -> None:
    """No conclusion is drawn from a leader that does not answer."""
    unknown = [Agreement.UNKNOWN] * 3
    kinds = [type(each) for each in identity(StreamBounds(0, 9, is_proven=True), *unknown, Agreement.SAME)]
    assert kinds == [Agree, Pause, Agree, Pause, Agree, Pause, Agree]
    with pytest.raises(StreamUnavailable):
        identity(StreamBounds(0, 9, is_proven=True), Agreement.UNKNOWN, patience_s=0.0)


def test_a_node_that_cannot_prove_anything_is_not_waited_for() -> None:
    """Over AMQP 0.9.1 nobody ever knows; the answer says `unproven`."""
    bounds = StreamBounds(0, 9, is_proven=False)
    assert identity(bounds, Agreement.UNKNOWN) == [Agree({"s": POSITION}, KEPT)]
    with pytest.raises(StreamReplaced):
        identity(bounds, Agreement.OTHER)


def test_what_is_no_message_is_told_how_to_make_one() -> None:
    """The error of look-ups that are given a client's properties names both ways."""
    with pytest.raises(InvalidInput, match=r"not Properties: .*relations\.read\(.*\(method, properties, body\)"):
        next(Lookups("/").related(Properties(), None, None, None, "oldest", complete=False))  # type: ignore[arg-type]


def test_misspelt_names_are_told_what_may_be_meant() -> None:
    """Keys and streams that are known are at hand; a name like none of them gets no question."""

    def carry_out(request: LookupRequest) -> Any:
        if isinstance(request, Bounds):
            raise StreamNotFound("no such stream", stream=request.stream)
        if isinstance(request, Partitions):
            return []
        assert isinstance(request, Select)
        is_of_keys = request.sql == statements.definitions()
        return (
            [(1, "order_id", ["header:order_id"], "text", None, None, False)]
            if is_of_keys
            else [(1, "payments", None, True)]
        )

    with pytest.raises(KeyNotDefined, match=r"'orderid' is defined \(did you mean 'order_id'\?\)"):
        run(Catalog("/").definition("orderid"), carry_out)
    with pytest.raises(KeyNotDefined) as caught:
        run(Catalog("/").definition("zzz"), carry_out)
    assert "did you mean" not in str(caught.value)
    with pytest.raises(StreamNotFound, match=r"\(did you mean 'payments'\?\)") as missed:
        run(Catalog("/").check_names(["payment"]), carry_out)
    assert missed.value.stream == "payment"


def test_an_explanation_is_short_however_much_is_lacking() -> None:
    """Five are named, the others counted; in a pickled answer, too."""
    lacking = tuple(Lacking(f"k{n}", f"no header:k{n}") for n in range(7))
    answer = pickle.loads(pickle.dumps(Answer(Status.ABSENT, streams=("s",), lacking=lacking)))
    assert answer.explanation.endswith("k4 (no header:k4) and 2 more: nothing was looked for")
    assert "k5" not in repr(answer)
    answer = Answer(Status.NOT_RECORDED_YET, streams=("s",), unattended=tuple("abcdef"))
    assert answer.explanation == "nobody records 'a', 'b', 'c', 'd', 'e' and 1 more: relatum record a b c d e"
