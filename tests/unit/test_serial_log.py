"""What a serial consumer does with each message of a partition, beside what the model of moves proves of it."""

import pytest

from relatum.contexts._entries import Adoption, Data, Entry, Fence, Marker, Placed
from relatum.contexts._partition_log import MovedBefore, PartitionLog, Verdict, consistent_starts

A = frozenset({"a"})
AB = frozenset({"a", "b"})


def data(context: str | None, epoch: int | None) -> Data:
    """A message of a context, placed under an epoch or by nobody."""
    return Data(context, None if epoch is None else Placed(epoch, "0", 1))


def marker(epoch: int, contexts: frozenset[str] = A, *, move_id: int | None = None) -> Marker:
    """A marker of contexts that come from another partition."""
    return Marker(epoch if move_id is None else move_id, epoch, contexts, "source", 7)


def test_late_fences_and_markers_say_nothing_new() -> None:
    """A floor only rises: what an earlier move writes again lets nothing count, and holds nothing it is no news for."""
    log = PartitionLog({"a": 9})
    log.judge(0, Fence(1, 5, A))
    assert log.judge(1, data("a", 8)) is Verdict.STRAY
    log.judge(2, marker(5, AB))
    assert log.holds[5].contexts == {"b"}
    assert log.judge(3, data("a", 9)) is Verdict.DELIVER


def test_what_is_lost_is_not_waited_for() -> None:
    """Where retention has dropped what was to be read again, a hold may end."""
    log = PartitionLog(open_holds={5: 1}, position=3)
    log.judge(0, marker(5))
    log.lost_to(3)
    log.end(5)
    assert log.judge(3, data("a", 5)) is Verdict.DELIVER


def test_a_partition_with_a_position_is_looked_at_until_that() -> None:
    """What lies below the position must be told from what does not, before all is passed on unseen, up to a fence."""
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
    """One move after another: where a start was pulled back, the moves out of there count, too."""
    moves = [
        MovedBefore("t", "u", fence_offset=6, begins=2),
        MovedBefore("s", "t", fence_offset=4, begins=5),
        MovedBefore("u", "s", fence_offset=None, begins=0),
        MovedBefore("gone", "s", fence_offset=9, begins=0),
    ]
    assert consistent_starts({"s": 4, "t": 7, "u": 9}, moves) == {"s": 4, "t": 5, "u": 2}
    assert consistent_starts({"s": 5, "t": 7, "u": 9}, moves) == {"s": 5, "t": 7, "u": 9}


def test_a_second_marker_of_a_move_begins_no_second_hold() -> None:
    """A marker with a higher epoch that nobody of us wrote raises floors, and leaves the move's hold as it is."""
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
