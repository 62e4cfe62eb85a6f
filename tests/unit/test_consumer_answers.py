"""Answers, proofs and traces, without servers; and the ranges of offsets that they rest on."""

import json
import pickle
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import BasicProperties

from relatum import MessageId
from relatum.common.ids import fingerprint
from relatum.errors import OffsetExpired, OffsetNotFound, StreamNotFound, StreamReplaced, StreamUnavailable
from relatum.reading import Agreement, ChunkCache, Message, Position, Properties, StreamBounds, UnreadableRecord
from relatum.recording.ranges import unrecorded
from relatum.store.coverage import TIME, CoverageRow, covered, last_position, merged, missing
from relatum_consumer import Answer, Hit, MissingKey, Status, Trace
from relatum_consumer.groups._finding import unscanned_ranges
from relatum_consumer.lookups.answering import first_retained, is_sure
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.proof import Evidence, Uncovered, check_identity, gaps
from relatum_consumer.lookups.servers import Servers
from relatum_consumer.traces import Edge, Step, Stop, StopReason


def message(offset: int, body: bytes = b"", chunk_ms: int | None = None) -> Message:
    return Message("s", offset, None, chunk_ms, lambda: ({}, Properties(), body, True))


def covers(
    start: int, stop: int, *keys: int, kind: str = "recorded", position: Position | None = None, number: int = 1
) -> CoverageRow:
    row = CoverageRow(1, start, stop, keys, TIME in keys, kind, coverage_id=number, recorded_at=datetime.now(UTC))
    return row.known_by(position)


def test_an_answer_is_a_sequence_of_messages_that_does_not_change() -> None:
    """Length, order, index, slice, membership and truth; without messages it is false, and says why."""
    messages = [message(offset) for offset in (5, 3, 9)]
    answer = Answer(Status.FOUND, tuple(Hit(each, ("k",)) for each in messages), expired=(MessageId("s", 1),))
    assert len(answer) == 3
    assert list(answer) == list(answer.messages) == messages
    assert answer.ids == (("s", 5), ("s", 3), ("s", 9))
    assert (answer[0], answer[-1], answer[1:]) == (messages[0], messages[2], tuple(messages[1:]))
    assert answer.first is messages[0]
    assert messages[1] in answer
    assert [hit.keys for hit in answer.hits] == [("k",)] * 3
    assert pickle.loads(pickle.dumps(answer)) == answer
    nothing = Answer(Status.ABSENT)
    assert (bool(nothing), nothing.first, nothing.messages, nothing.ids, nothing.expired) == (False, None, (), (), ())
    assert str(nothing.status) == "absent"
    with pytest.raises(AttributeError):
        nothing.status = Status.FOUND  # type: ignore[misc]


def test_an_answer_says_what_holds_and_what_to_run() -> None:
    """An unproven answer with messages does not deny them; a command names each stream as a shell takes it."""
    assert Answer(Status.UNPROVEN, (Hit(message(1)),)).words != Answer(Status.UNPROVEN).words
    behind = Answer(Status.NOT_RECORDED_YET, unrecorded_streams=("it's", "b"))
    assert shlex.split(behind.explanation.rpartition(": ")[2]) == ["relatum", "record", "it's", "b"]
    gone = Answer(Status.DELETED, deleted=(MessageId("it's", 1),))
    assert shlex.join(["relatum", "forget", "it's"]) in gone.explanation


ranges = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)
some_ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=8)


def points(spans: Any) -> set[int]:
    return {offset for start, stop in spans for offset in range(start, stop)}


@given(some_ranges, st.integers(0, 60), st.integers(0, 60))
def test_merged_and_missing_ranges_make_the_whole(spans: list[list[int]], a: int, b: int) -> None:
    """Merged ranges are apart and cover the same offsets; the missing ones are their complement within a range."""
    result = merged(map(tuple, spans))
    assert points(result) == points(spans)
    assert all(a[1] < b[0] for a, b in pairwise(result))
    within = (min(a, b), max(a, b))
    assert points(missing(within, result)) == points([within]) - points(spans)


@given(st.lists(st.tuples(some_ranges, st.sets(st.integers(0, 3) | st.just(TIME))), max_size=4))
def test_segments_name_the_keys_each_offset_lacks(parts: list[tuple[list[list[int]], set[int]]]) -> None:
    """Each offset's segment names exactly the keys for which no range covers it."""
    rows = [covers(*ends, *ids) for spans, ids in parts for ends in spans]
    segments = unrecorded(rows, (0, 60), range(4))
    for offset in range(60):
        lacking = {key for key in range(4) if not any(a <= offset < b for a, b in covered(rows, key))}
        found = [set(segment.key_ids) for segment in segments if segment.from_offset <= offset < segment.to_offset]
        assert found == ([lacking] if lacking else [])


def test_a_hole_covers_nothing() -> None:
    """Offsets in a hole are not recorded."""
    assert covered([covers(0, 10, 1), covers(10, 20, 1, kind="hole")], 1) == [(0, 10)]


KEY = 7


@given(some_ranges, some_ranges, st.integers(0, 60))
def test_what_is_not_scanned_is_due(recorded: list[list[int]], scanned: list[list[int]], low: int) -> None:
    """A stretch holds each offset that is recorded, not scanned and not before the start, and no other."""
    rows = [covers(*ends, KEY, number=number) for number, ends in enumerate(recorded)]
    found = unscanned_ranges(rows, [(start, stop) for start, stop in scanned], KEY, low)
    due = {offset for offset in points(recorded) - points(scanned) if offset >= low}
    assert points((each.start, each.stop) for each in found) == due
    for each in found:
        of_range = rows[each.coverage_id]
        assert of_range.from_offset <= each.start < each.stop <= of_range.to_offset
        assert each.grows == each.start or [each.grows, each.start] in scanned


def test_ranges_without_groups_are_left_out_and_scanned_ones_grow() -> None:
    """Holes and ranges without the group key are not scanned; a stretch extends the scanned range before it."""
    rows = [covers(0, 10, 3), covers(10, 20, KEY, number=2), covers(20, 30, KEY, number=3, kind="hole")]
    assert [(each.start, each.stop) for each in unscanned_ranges(rows, [], KEY)] == [(10, 20)]
    (found,) = unscanned_ranges([covers(0, 50, KEY)], [(0, 20)], KEY)
    assert (found.grows, found.start, found.stop) == (0, 20, 50)


@given(
    st.lists(st.tuples(ranges, st.sets(st.integers(0, 2)), st.booleans()), max_size=6),
    ranges,
    st.sets(st.integers(0, 2)),
)
def test_a_gap_is_what_is_not_recorded_of_some_key(recorded: list[Any], retained: list[int], keys: set[int]) -> None:
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
    """It is a gap for a proof of absence, but not for a read of what there is."""
    rows = [covers(0, 5, 1)._replace(over_amqp=True), covers(5, 8, 1)]
    assert gaps(StreamBounds(0, 9, is_proven=True), rows, [1]) == [(0, 5), (8, 10)]
    assert gaps(StreamBounds(0, 9, is_proven=True), rows, [1], recorded_as=covered) == [(8, 10)]
    assert gaps(StreamBounds(None, None, is_proven=True), [], [1]) == [], "an empty stream retains nothing"


GAP = [Uncovered("s", 3, 5)]


@pytest.mark.parametrize(
    ("known", "options", "status"),
    [
        (Evidence(("s",)), {"outcome": Status.FOUND}, Status.FOUND),
        (Evidence(("s",), uncovered=GAP, unproven={"s"}), {"outcome": Status.FOUND}, Status.FOUND),
        (Evidence(("s",), unproven={"s"}), {"outcome": Status.FOUND, "was_read": True}, Status.UNPROVEN),
        (Evidence(("s",)), {"outcome": Status.FOUND, "is_whole": False}, Status.UNPROVEN),
        (Evidence(("s",)), {"is_whole": False, "outcome": Status.EXPIRED}, Status.UNPROVEN),
        (Evidence(("s",), uncovered=GAP, unproven={"s"}), {}, Status.NOT_RECORDED_YET),
        (Evidence(("s",), uncovered=GAP), {"outcome": Status.EXPIRED}, Status.NOT_RECORDED_YET),
        (Evidence(("s",), uncovered=GAP), {"was_read": True}, Status.ABSENT),
        (Evidence(("s",), uncovered=GAP, unproven={"s"}), {"was_read": True}, Status.UNPROVEN),
        (Evidence(("s",), unproven={"s"}), {"outcome": Status.EXPIRED}, Status.UNPROVEN),
        (Evidence(("s",)), {"outcome": Status.EXPIRED}, Status.EXPIRED),
        (Evidence(("s",)), {}, Status.ABSENT),
    ],
)
def test_the_rule_of_statuses(known: Evidence, options: dict[str, Any], status: Status) -> None:
    """What may be said of what was found, by what is recorded, read and proven."""
    facts = {"outcome": Status.ABSENT, "was_read": False, "is_whole": True} | options
    assert known.status(**facts) is status


class Broker(Servers):
    """Answers a scan with these messages, and each question about the last recorded message with an agreement."""

    def __init__(self, messages: Sequence[Message] = (), agreements: Any = (), patience_s: float = 10.0) -> None:
        def nobody(*_: Any) -> Any:
            raise AssertionError("nothing else is asked")

        super().__init__(nobody, nobody, patience_s)
        self._messages = messages
        self._ways = iter(agreements)
        self.taken: list[Any] = []
        self.asked: list[str] = []

    def scan(self, stream: str, start: int, stop: int, take: Callable[[Message], Any]) -> list[Any]:
        assert Uncovered(stream, start, stop) in GAP
        self.taken = [take(each) for each in self._messages]
        return []

    def agreements(self, positions: Mapping[str, Position], _: ChunkCache) -> dict[str, Agreement]:
        self.asked.append("agree")
        return {stream: next(self._ways) for stream in positions}


def test_a_batch_that_cannot_be_unpacked_proves_nothing() -> None:
    """A scan that meets one leaves its stream unproven, and keeps what it could read."""
    known = Evidence(("s",), uncovered=GAP)
    seen: list[int] = []
    packed = Message.from_record("s", 3, UnreadableRecord("no codec"), None)
    broker = Broker([packed, message(4), message(5)])
    known.scan(broker, lambda each: seen.append(each.offset))
    assert broker.taken == [None, None, None]
    assert seen == [4, 5]
    assert known.unproven == {"s"}


def test_a_stream_is_known_again_by_its_furthest_position() -> None:
    """The last position of a coverage is the furthest one that any of its rows knows."""
    body = fingerprint(None, b"body")
    rows = [
        covers(0, 5, 1, position=Position(4, 1, None)),
        covers(5, 9, 1, position=Position(8, body, 70)),
        covers(9, 9),
    ]
    assert last_position(rows) == Position(8, body, 70)
    assert last_position([covers(9, 9)]) is None


def expired(*, is_proven: bool) -> OffsetExpired:
    """Retention took offset 4; the stream begins at 7."""
    return OffsetExpired("", stream="s", offset=4, first=7, is_proven=is_proven)


def test_a_row_without_its_message_has_expired_or_belongs_to_another_stream() -> None:
    """Retention says where the stream begins; what a node alone says is not proof, or no answer at all."""
    where, gone = MessageId("s", 4), StreamNotFound("", stream="s")
    assert first_retained(where, expired(is_proven=True), is_named=True) == 7
    assert first_retained(where, expired(is_proven=False), is_named=True) == 7
    assert first_retained(where, gone, is_named=False) > 10**18
    assert [is_sure(each) for each in (expired(is_proven=True), expired(is_proven=False), gone)] == [True, False, True]
    never = {proven: OffsetNotFound("", stream="s", offset=4, is_proven=proven) for proven in (True, False)}
    for error, is_named, said in (
        (gone, True, StreamNotFound),
        (never[True], False, StreamReplaced),
        (never[False], False, StreamUnavailable),
    ):
        with pytest.raises(said):
            first_retained(where, error, is_named=is_named)


@pytest.mark.parametrize(
    ("is_proven", "agreements", "patience_s", "ends"),
    [
        # The same message, or an expired one, means the same stream; another one, or the leader's end, another stream.
        (True, [Agreement.SAME], 60, ["agree"]),
        (True, [Agreement.EXPIRED], 60, ["agree"]),
        (True, [Agreement.OTHER], 60, StreamReplaced),
        # If a leader does not answer, it is waited for, and then the request is repeated.
        (True, [*[Agreement.UNKNOWN] * 3, Agreement.SAME], 60, [*["agree", "pause"] * 3, "agree"]),
        (True, [Agreement.UNKNOWN], 0, StreamUnavailable),
        # Over AMQP 0.9.1 this is never known; the answer says `unproven`.
        (False, [Agreement.UNKNOWN], 60, ["agree"]),
        (False, [Agreement.OTHER], 60, StreamReplaced),
    ],
)
def test_a_stream_is_the_same_by_its_furthest_message(
    is_proven: bool, agreements: list[Agreement], patience_s: float, ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may be concluded from what a broker says of the last message that was recorded."""
    broker = Broker(agreements=agreements, patience_s=patience_s)
    monkeypatch.setattr("relatum_consumer.lookups.proof.pause", lambda _: broker.asked.append("pause"))
    of_stream = {"s": [covers(0, 5, 1, position=Position(4, 1, None))]}, {"s": StreamBounds(0, 9, is_proven=is_proven)}
    if isinstance(ends, list):
        check_identity(Catalog(broker, "/"), *of_stream, ChunkCache())
        assert broker.asked == ends
    else:
        with pytest.raises(ends):
            check_identity(Catalog(broker, "/"), *of_stream, ChunkCache())


def test_an_explanation_is_short_however_much_is_lacking() -> None:
    """Five are named, the others counted; in a pickled answer, too."""
    missing_keys = tuple(MissingKey(f"k{n}", f"no header:k{n}") for n in range(7))
    answer = pickle.loads(pickle.dumps(Answer(Status.ABSENT, streams=("s",), missing_keys=missing_keys)))
    assert answer.explanation.endswith("k4 (no header:k4) and 2 more: nothing was searched")
    assert "k5" not in repr(answer)
    answer = Answer(Status.NOT_RECORDED_YET, streams=("s",), unrecorded_streams=tuple("abcdef"))
    assert answer.explanation == "no recorder runs for 'a', 'b', 'c', 'd', 'e' and 1 more: relatum record a b c d e"


def test_a_trace_is_as_sure_as_its_worst_step() -> None:
    """Found where something was and each step is sure; what may lack is worse than that."""

    def status(*steps: Status) -> Status:
        return Trace((), {}, steps=tuple(Step(n, 1, 0, each) for n, each in enumerate(steps))).status

    assert status() is Status.ABSENT
    assert status(Status.FOUND, Status.ABSENT) is Status.FOUND
    assert status(Status.FOUND, Status.EXPIRED) is Status.FOUND
    assert status(Status.EXPIRED, Status.ABSENT) is Status.EXPIRED
    assert status(Status.FOUND, Status.NOT_RECORDED_YET) is Status.NOT_RECORDED_YET
    assert status(Status.NOT_RECORDED_YET, Status.UNPROVEN) is Status.UNPROVEN


def test_a_trace_is_one_json_document() -> None:
    """All but bodies, with names of fields as they are in Python."""
    message = Message.from_amqp("s", 1, BasicProperties(), b"secret")
    edge, stop = Edge(None, message.id, "cause", "x"), Stop(StopReason.HOPS, 2)
    found = json.loads(Trace((message,), {message.id: 0}, (edge,), stopped=(stop,)).to_json())
    assert found["messages"] == [{"stream": "s", "offset": 1, "time": None, "hop": 0}]
    assert found["edges"] == [{"cause": None, "effect": {"stream": "s", "offset": 1}, "key": "cause", "value": "x"}]
    assert found["stopped"] == [{"reason": "hops", "count": 2, "key": None, "value": None}]
    assert "secret" not in json.dumps(found)
