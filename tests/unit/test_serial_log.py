"""What control messages say, and what a serial consumer does with each message of a partition."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from relatum.limits import INTEGER_MAX

A = frozenset({"a"})
AB = frozenset({"a", "b"})


def data(context: str | None, epoch: int | None) -> Data:
    return Data(context, None if epoch is None else Placed(epoch, "0", 1))


def marker(epoch: int, contexts: frozenset[str] = A, *, move_id: int | None = None) -> Marker:
    return Marker(epoch if move_id is None else move_id, epoch, contexts, "source", 7)


def test_late_fences_and_markers_say_nothing_new() -> None:
    """Floors only rise: a late fence or marker of an earlier move neither delivers nor holds anything new."""
    log = PartitionLog({"a": 9})
    log.judge(0, Fence(1, 5, A))
    assert log.judge(1, data("a", 8)) is Verdict.STRAY
    log.judge(2, marker(5, AB))
    assert log.holds[5].contexts == {"b"}
    assert log.judge(3, data("a", 9)) is Verdict.DELIVER


def test_what_is_lost_is_not_waited_for() -> None:
    """A hold can end once retention has dropped what was to be read again."""
    log = PartitionLog(open_holds={5: 1}, position=3)
    log.judge(0, marker(5))
    log.lost_to(3)
    log.end(5)
    assert log.judge(3, data("a", 5)) is Verdict.DELIVER


def test_a_partition_with_a_position_is_looked_at_until_that() -> None:
    """A partition is judged up to its position, then passed through unjudged until the first fence."""
    log = PartitionLog(position=2)
    assert not log.is_plain
    assert [log.judge(offset, data(None, None)) for offset in (0, 1)] == [None, None]
    assert log.is_plain
    entries: list[Entry] = [data("a", 1), data(None, None), data("a", None), Adoption("a", 1, "other", 3)]
    assert [log.judge(offset, entry) for offset, entry in enumerate(entries, 2)] == [Verdict.DELIVER] * 4
    assert log.is_plain
    log.judge(6, Fence(1, 5, A))
    assert log.judge(7, data("a", None)) is Verdict.DELIVER
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
    assert log.judge(2, data("a", 6)) is Verdict.HOLD
    assert log.judge(3, data("b", 6)) is Verdict.DELIVER
    assert log.holds[1].marker_offset == 0
    with pytest.raises(ValueError, match="1 entries"):
        log.end(1)
    log.delivered(1, 2)
    log.end(1)
    assert log.judge(4, data("a", 6)) is Verdict.DELIVER


number = st.integers(0, INTEGER_MAX)
name = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
names = st.frozensets(name, max_size=4)
control = st.one_of(
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


@given(control)
def test_what_is_encoded_is_decoded(entry: Control) -> None:
    """Every control message is read as it was written."""
    headers, body = encode(entry)
    assert entry_of(headers, body, "context") == entry


@given(kind, fields)
def test_what_is_decoded_can_be_stored(kind: object, facts: dict[str, Any]) -> None:
    """A foreign body is no control message, or one that can be written and read again."""
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
    ],
)
def test_what_is_not_as_we_write_it_is_an_applications_message(kind: str, facts: object) -> None:
    """A body that only resembles a control message is an application's message."""
    assert decode(kind, json.dumps(facts).encode()) is None


def test_a_body_that_nests_too_deep_is_an_applications_message() -> None:
    """A body that Python cannot parse is an application's message."""
    assert decode("fence", b"[" * 100_000) is None


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
