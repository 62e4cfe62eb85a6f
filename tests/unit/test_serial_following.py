"""What a serial consumer does with a partition: control messages, verdicts, batches, and what is held. No I/O."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pika import BasicProperties

from relatum.common.headers import CONTEXT_HEADER, PLACED_HEADER
from relatum.common.limits import INTEGER_MAX
from relatum.contexts import SerialOptions
from relatum.contexts._partition_following import Following, Opened, Piece, Step
from relatum.contexts._partition_log import (
    Adoption,
    Control,
    Data,
    Entry,
    Fence,
    Marker,
    MovedBefore,
    PartitionLog,
    Placed,
    Verdict,
    consistent_starts,
    decode,
    encode,
    entry_of,
)
from relatum.reading import Message, RecordBatch, UnreadableRecord

MOVE = 7


def record(headers: dict[str, str], body: bytes) -> bytes:
    pairs = b""
    for name, value in headers.items():
        pairs += b"\xa1%c%b\xa1%c%b" % (len(name), name.encode(), len(value.encode()), value.encode())
    applied = b"\0St\xd1%b%b%b" % ((len(pairs) + 4).to_bytes(4), (2 * len(headers)).to_bytes(4), pairs)
    return applied + b"\0Su\xb0%b%b" % (len(body).to_bytes(4), body)


def data(context: str, epoch: int, body: str) -> bytes:
    return record({CONTEXT_HEADER: context, PLACED_HEADER: str(Placed(epoch, "ab", 1))}, body.encode())


def control(entry: Control) -> bytes:
    headers, body = encode(entry)
    return record(headers, body)


MARKER = control(Marker(MOVE, 2, frozenset("a"), "s", 5))


def following(
    position: int = 0, *, holds: dict[int, int] | None = None, since: dict[int, float] | None = None, **options: float
) -> Following:
    return Following(
        1,
        "p",
        Opened(position, 1, None, holds or {}, since or {}, {}, 0),
        header=CONTEXT_HEADER,
        options=SerialOptions(**{"batch_s": 0.02, **options}),  # type: ignore[arg-type]
        now=0.0,
    )


def put(partition: Following, *records: bytes, first: int = 0, now: float = 0.0) -> None:
    batch = RecordBatch("p", first, range(first, first + len(records)), records)
    piece = Piece.plain(batch)
    if piece is None:
        piece = Piece.of(batch, lambda adoption: Message.from_record(adoption.stream, adoption.offset, b""))
    partition.put(piece, now)


def bodies(step: Step) -> list[str]:
    return [message.body.decode() for message in step.messages]


def commit(partition: Following, now: float = 0.0) -> Step:
    step = partition.take(now)
    partition.committed(step, now)
    return step


def test_a_batch_waits_for_more_until_it_is_full_or_old() -> None:
    """What is not full is due `batch_s` after its first message; what is full is due at once."""
    partition = following(batch_messages=2)
    put(partition, data("a", 1, "a1"), now=5.0)
    assert partition.due_at() == pytest.approx(5.02)
    put(partition, data("a", 1, "a2"), data("a", 1, "a3"), first=1, now=5.01)
    assert (partition.due_at(), bodies(commit(partition, 5.01)), partition.position) == (0.0, ["a1", "a2"], 2)
    assert bodies(partition.take(6.0)) == ["a3"]


def test_a_batch_given_back_while_it_was_committed_is_not_handed_out_again() -> None:
    """A task that is cancelled as its commit is under way gives the batch back, and the commit counts anyway."""
    partition = following()
    put(partition, data("a", 1, "a1"))
    step = partition.take(1.0)
    partition.give_back(step)
    partition.committed(step, 1.0)
    assert (partition.due_at(), partition.position) == (None, 1)


def test_a_fence_is_stored_at_once_with_what_is_before_it() -> None:
    """A step ends behind a fence and is due at once: a target waits for it."""
    partition = following()
    put(partition, data("a", 1, "a1"), control(Fence(MOVE, 2, frozenset("a"))), data("a", 1, "stray"), now=1.0)
    assert partition.due_at() == 0.0
    step = commit(partition, 1.0)
    assert (bodies(step), step.position) == (["a1"], 2)
    assert partition.due_at() is None
    assert partition.silent_due_at() == pytest.approx(1.5), "a stray alone is in no hurry"
    assert (commit(partition, 2.0).position, partition.silent_due_at()) == (3, None)


def test_a_hold_is_stored_before_it_is_asked_about() -> None:
    """A marker is stored at once; its hold waits from then on, and is handed out when it is released."""
    partition = following()
    put(partition, MARKER, data("a", 2, "a1"), data("b", 1, "b1"), now=1.0)
    assert (partition.silent_due_at(), partition.waiting_holds()) == (0.0, [])
    assert [hold.move_id for hold in commit(partition, 1.0).begun] == [MOVE]
    assert partition.waiting_holds() == [MOVE]
    held = commit(partition, 1.1)
    assert (bodies(held), held.holds) == (["b1"], ((MOVE, 1, 1),))
    partition.release(MOVE, 1.2)
    put(partition, data("a", 2, "a2"), first=3, now=1.2)
    ended = partition.take(1.25)
    assert partition.committed(ended, 1.25) == [pytest.approx(0.25)]
    assert (bodies(ended), ended.ended, ended.holds) == (["a1"], [MOVE], ())
    assert bodies(commit(partition, 1.3)) == ["a2"]


def test_no_more_is_held_than_may_be() -> None:
    """A partition where too much is held judges no further until the hold is released."""
    partition = following(held_messages_max=2)
    put(partition, MARKER)
    commit(partition)
    put(partition, *[data("a", 2, f"a{number}") for number in range(3)], data("b", 1, "b"), first=1)
    assert (partition.is_blocked, partition.due_at()) == (True, None)
    partition.release(MOVE, 0.0)
    found = [body for _ in range(3) if partition.due_at() is not None for body in bodies(commit(partition, 1.0))]
    assert found == ["a0", "a1", "a2", "b"]


def test_reading_again_repeats_nothing_but_what_is_held() -> None:
    """Below the position, only messages that an open hold has not delivered yet are delivered again."""
    partition = following(4, holds={MOVE: 2}, since={MOVE: 0.0})
    put(partition, MARKER, data("a", 2, "a1"), data("a", 2, "a2"), data("b", 1, "b1"), data("b", 1, "b2"))
    assert bodies(commit(partition, 1.0)) == ["b2"]
    partition.release(MOVE, 1.0)
    assert bodies(commit(partition, 1.0)) == ["a2"]


def test_no_hold_is_released_before_all_is_read_again() -> None:
    """A hold that was open when the partition was opened waits until all below the position was read again."""
    partition = following(3, holds={MOVE: 1}, since={MOVE: 60.0})
    put(partition, MARKER, data("a", 2, "a1"))
    assert partition.waiting_holds() == []
    partition.release(MOVE, 0.0)
    assert partition.due_at() is None
    put(partition, data("a", 2, "a2"), first=2)
    assert partition.waiting_holds() == [MOVE]
    partition.release(MOVE, 0.0)
    step = partition.take(1.0)
    assert (bodies(step), partition.committed(step, 1.0)) == (["a1", "a2"], [61.0])


def test_what_retention_dropped_still_counts() -> None:
    """A marker known from the database alone begins its hold, and the position moves behind what is gone."""
    partition = following(2)
    partition.replay(5, Marker(MOVE, 2, frozenset("a"), "s", 5), 0.0)
    partition.lost_to(9, 0.0)
    assert partition.silent_due_at() == 0.0
    step = commit(partition)
    assert (step.position, [hold.move_id for hold in step.begun]) == (9, [MOVE])


def test_a_stored_hold_whose_marker_is_gone_ends() -> None:
    """Neither stream nor database has the marker of an aborted move that retention dropped: its hold ends."""
    partition = following(4, holds={MOVE: 2}, since={MOVE: 60.0})
    partition.lost_to(3, 0.0)
    assert partition.silent_due_at() is None, "not all below the position was read again"
    put(partition, data("a", 2, "a1"), data("a", 2, "a2"), first=3)
    assert commit(partition).ended == [MOVE]
    partition = following(4, holds={MOVE: 2}, since={MOVE: 60.0})
    partition.lost_to(9, 0.0)
    assert (commit(partition).ended, partition.stored_holds) == ([MOVE], set())


def test_adoptions_of_messages_that_are_gone_end_with_their_hold() -> None:
    """A batch that is full of adoptions without a message is stored, and the rest of the hold follows."""
    partition = following(batch_messages=1)
    put(partition, MARKER)
    commit(partition)
    batch = RecordBatch("p", 1, range(1, 2), [control(Adoption("a", 2, "s", 3))])
    partition.put(Piece.of(batch, lambda adoption: None), 0.0)
    put(partition, data("a", 2, "a1"), first=2)
    commit(partition)
    partition.release(MOVE, 0.0)
    found = []
    while partition.due_at() is not None or partition.silent_due_at() is not None:
        found += bodies(commit(partition, 1.0))
    assert found == ["a1"]
    assert partition.stored_holds == set()


RECORDS = st.lists(
    st.one_of(
        st.builds(lambda context, epoch: data(context, epoch, "x"), st.sampled_from("abc"), st.integers(1, 4)),
        st.just(b"no message"),
        st.builds(lambda epoch: control(Fence(epoch, epoch, frozenset("ab"))), st.integers(1, 4)),
        st.builds(lambda epoch: control(Marker(epoch + 9, epoch, frozenset("bc"), "s", 1)), st.integers(1, 4)),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(RECORDS, st.lists(st.integers(1, 4), max_size=12), st.integers(1, 4))
def test_however_it_is_cut_the_log_alone_decides(records: Sequence[bytes], cuts: Sequence[int], size: int) -> None:
    """However records are cut into chunks and batches, each context's messages come once and in order."""
    partition = following(batch_messages=size, batch_s=0)
    handed: list[int] = []

    def drain(*, release: bool) -> None:
        while partition.due_at() is not None or partition.silent_due_at() is not None:
            handed.extend(message.offset for message in commit(partition, 9.0).messages)
            for move_id in partition.waiting_holds() if release else ():
                partition.release(move_id, 9.0)

    at, cut = 0, iter(cuts)
    while at < len(records):
        end = at + next(cut, len(records))
        put(partition, *records[at:end], first=at)
        drain(release=False)
        at = end
    for move_id in partition.waiting_holds():
        partition.release(move_id, 9.0)
    drain(release=True)
    log, messages = PartitionLog(), [Message.from_record("p", *each) for each in enumerate(records)]
    entries = [entry_of(message, CONTEXT_HEADER) for message in messages]
    expected: dict[str | None, list[int]] = {}
    for offset, entry in enumerate(entries):
        verdict = log.judge(offset, entry)
        if isinstance(entry, Data) and verdict is not None and verdict.value in ("deliver", "hold"):
            expected.setdefault(entry.context, []).append(offset)
    found: dict[str | None, list[int]] = {}
    for offset in handed:
        entry = entries[offset]
        assert isinstance(entry, Data)
        found.setdefault(entry.context, []).append(offset)
    assert found == expected


def test_what_was_held_is_handed_out_in_batches_of_their_bytes() -> None:
    """However much was held back: a batch of it is as large as any other."""
    partition = following(batch_bytes=10_000)
    put(partition, control(Marker(MOVE, 9, frozenset({"a"}), "s", 5)), *[data("a", 9, "x" * 3_000)] * 10)
    while partition.silent_due_at() is not None:
        commit(partition)
    partition.release(MOVE, 1.0)
    sizes = []
    while partition.due_at() is not None:
        assert partition.due_at() == 0.0
        sizes.append(len(commit(partition, 1.0).messages))
    assert sizes == [3, 3, 3, 1]
    assert not partition.log.holds


A = frozenset({"a"})
AB = frozenset({"a", "b"})


def entry(context: str | None, epoch: int | None) -> Data:
    return Data(context, None if epoch is None else Placed(epoch, "0", 1))


def marker(epoch: int, contexts: frozenset[str] = A, *, move_id: int | None = None) -> Marker:
    return Marker(epoch if move_id is None else move_id, epoch, contexts, "source", 7)


def test_late_fences_and_markers_say_nothing_new() -> None:
    """Floors only rise: a late fence or marker of an earlier move neither delivers nor holds anything new."""
    log = PartitionLog({"a": 9})
    log.judge(0, Fence(1, 5, A))
    assert log.judge(1, entry("a", 8)) is Verdict.STRAY
    log.judge(2, marker(5, AB))
    assert log.holds[5].contexts == {"b"}
    assert log.judge(3, entry("a", 9)) is Verdict.DELIVER


def test_what_is_lost_is_not_waited_for() -> None:
    """A hold can end once retention has dropped what was to be read again."""
    log = PartitionLog(open_holds={5: 1}, position=3)
    log.judge(0, marker(5))
    log.lost_to(3)
    log.end(5)
    assert log.judge(3, entry("a", 5)) is Verdict.DELIVER


def test_a_partition_with_a_position_is_looked_at_until_that() -> None:
    """A partition is judged up to its position, then passed through unjudged until the first fence."""
    log = PartitionLog(position=2)
    assert not log.is_plain
    assert [log.judge(offset, entry(None, None)) for offset in (0, 1)] == [None, None]
    assert log.is_plain
    entries: list[Entry] = [entry("a", 1), entry(None, None), entry("a", None), Adoption("a", 1, "other", 3)]
    assert [log.judge(offset, entry) for offset, entry in enumerate(entries, 2)] == [Verdict.DELIVER] * 4
    assert log.is_plain
    log.judge(6, Fence(1, 5, A))
    assert log.judge(7, entry("a", None)) is Verdict.DELIVER
    assert not log.is_plain


def test_starts_are_pulled_back_to_markers_whose_fence_is_not_passed() -> None:
    """A start before a move's fence pulls the target's start back to its marker, move after move."""
    moves = [
        MovedBefore("t", "u", fence_offset=6, begins=2),
        MovedBefore("s", "t", fence_offset=4, begins=5),
        MovedBefore("u", "s", fence_offset=None, begins=0),
        MovedBefore("gone", "s", fence_offset=9, begins=0),
    ]
    assert consistent_starts({"s": 4, "t": 7, "u": 9}, moves) == {"s": 4, "t": 5, "u": 2}
    assert consistent_starts({"s": 5, "t": 7, "u": 9}, moves) == {"s": 5, "t": 7, "u": 9}


def test_a_second_marker_of_a_move_begins_no_second_hold() -> None:
    """A foreign marker of the same move raises floors and leaves the move's hold as it is."""
    log = PartitionLog()
    log.judge(0, marker(5, move_id=1))
    log.judge(1, marker(6, AB, move_id=1))
    assert log.judge(2, entry("a", 6)) is Verdict.HOLD
    assert log.judge(3, entry("b", 6)) is Verdict.DELIVER
    assert log.holds[1].marker_offset == 0
    with pytest.raises(ValueError, match="1 undelivered"):
        log.end(1)
    log.delivered(1, 2)
    log.end(1)
    assert log.judge(4, entry("a", 6)) is Verdict.DELIVER


number = st.integers(0, INTEGER_MAX)
name = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
names = st.frozensets(name, max_size=4)
controls = st.one_of(
    st.builds(Fence, number, number, names),
    st.builds(Marker, number, number, names, name, number),
    st.builds(Adoption, name, number, name, number),
)
fields = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("move_id", "epoch", "contexts", "source", "fence_offset", "context", "stream", "offset"),
        st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=3),
    ),
)
kind = st.sampled_from(["fence", "marker", "adoption", "other", None, 5])


@given(controls)
def test_what_is_encoded_is_decoded(entry: Control) -> None:
    """Every controls message is read as it was written."""
    headers, body = encode(entry)
    message = Message.from_amqp("p", 0, BasicProperties(headers=headers), body)
    assert entry_of(message, "context") == entry


def test_a_record_that_cannot_be_unpacked_is_no_entry() -> None:
    """Its body raises an error, which nobody asks for."""
    assert entry_of(Message.from_record("p", 0, UnreadableRecord("no codec")), "x-context") == Data(None, None)


@given(kind, fields)
def test_what_is_decoded_can_be_stored(kind: object, facts: dict[str, Any]) -> None:
    """A foreign body is not a control message, or one that can be written and read again."""
    entry = decode(kind, json.dumps(facts).encode())
    if entry is not None:
        headers, body = encode(entry)
        assert decode(headers["relatum_control"], body) == entry


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("fence", {"move_id": 1, "epoch": "2", "contexts": ["a"]}),
        ("fence", {"move_id": 1, "epoch": INTEGER_MAX + 1, "contexts": ["a"]}),
        ("fence", {"move_id": True, "epoch": 2, "contexts": ["a"]}),
        ("fence", {"move_id": 1, "epoch": 2, "contexts": [1]}),
        ("fence", {"move_id": 1, "epoch": 2, "contexts": ["\0"]}),
        ("fence", [1, 2, 3]),
        ("marker", {"move_id": 1, "epoch": 2, "contexts": ["a"], "source": 3, "fence_offset": 4}),
        ("marker", {"move_id": 1, "epoch": 2, "contexts": ["a"], "source": "\ud800", "fence_offset": 4}),
        ("adoption", {"context": "a", "epoch": 1, "stream": "s", "offset": -1}),
        ("fence", b"[" * 100_000),
    ],
)
def test_what_is_not_as_we_write_it_is_an_applications_message(kind: str, facts: object) -> None:
    """A body that only resembles a controls message, or that Python cannot parse, is an application's message."""
    assert decode(kind, facts if isinstance(facts, bytes) else json.dumps(facts).encode()) is None


@pytest.mark.parametrize(
    "text", ["", "1", "1-a", "1--1", "-a-1", "x-a-1", "1-a-²", "1-a-" + "9" * 5_000, 5, None, b"1-a-1"]
)
def test_a_header_that_we_did_not_write_places_nothing(text: object) -> None:
    """A placement header in another form places nothing."""
    assert Placed.parse(text) is None


@given(number, st.text("0123456789abcdef", min_size=16, max_size=16), number)
def test_where_a_message_was_placed_is_read_as_it_was_written(epoch: int, session: str, numbered: int) -> None:
    """A placement survives being written to its header and read again."""
    placed = Placed(epoch, session, numbered)
    assert Placed.parse(str(placed)) == placed


def test_once_a_context_moved_headers_that_are_no_text_are_delivered() -> None:
    """A list in the header that names contexts is no context: its message does not wait, nor stop the partition."""
    partition = following()
    put(partition, control(Fence(MOVE, 2, frozenset("a"))))
    commit(partition)
    pairs = b"\xa1%c%b\x45" % (len(CONTEXT_HEADER), CONTEXT_HEADER.encode())
    listed = b"\0St\xc1%c\2%b\0Su\xa0\1x" % (len(pairs) + 1, pairs)
    assert Message.from_record("p", 0, listed).headers == {CONTEXT_HEADER: []}
    put(partition, listed, data("a", 1, "stray"), data("b", 1, "b1"), first=1)
    assert bodies(commit(partition)) == ["x", "b1"]
