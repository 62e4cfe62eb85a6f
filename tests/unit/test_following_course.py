"""Whether a stream is the one that is known, and what of it is given."""

from collections.abc import Iterator
from typing import Any

from relatum.following._course import Course, Differs, Doubt, Drop, Finding, Give, Missed, Rewind
from relatum.following._held import Held
from relatum.reading import Agreement, Message, Position, Properties, StreamBounds, position_of
from relatum.wire import Chunk
from tests.unit.wire_samples import record


def message(offset: int, body: bytes = b"") -> Message:
    """A message at an offset."""
    return Message("s", offset, None, None, lambda: ({}, Properties(), body or b"%d" % offset, True))


def held(*offsets: int, other: bool = False) -> Held:
    """Messages that were read at once; `other` ones are another stream's."""
    bodies = [b"other" if other else b"%d" % offset for offset in offsets]
    data = b"".join(record(b"\0\x53\x75\xa0%c%b" % (len(body), body)) for body in bodies)
    return Held(Chunk(0, offsets[0], len(offsets), len(offsets), 1_700_000_000_000, 1, data, 0, len(data)))


def known(offset: int) -> Position:
    """What is known of a stream that has such messages."""
    return Position(offset, position_of(message(offset)).fingerprint, None)


def begun(next_offset: int, at: int | None = None) -> Course:
    """A course that reading has begun of."""
    course = Course(next_offset, None if at is None else known(at))
    course.begin()
    return course


def kinds(steps: Iterator[Any]) -> list[type]:
    """What steps there are."""
    return [type(step) for step in steps]


def test_what_is_known_is_read_first_and_not_given() -> None:
    """The message that is known says that it is the stream; what lies behind it is given."""
    course = begun(7, at=6)
    assert course.start == 6
    (drop,) = course.arrived(held(6))
    assert isinstance(drop, Drop)
    assert course.is_agreed
    (give,) = course.arrived(held(7, 8))
    assert isinstance(give, Give)
    assert (give.held.begin, course.next_offset) == (7, 9)


def test_a_chunk_with_what_is_known_and_more_is_given_from_what_is_wanted_on() -> None:
    """A chunk begins where it begins."""
    (give,) = begun(7, at=6).arrived(held(4, 5, 6, 7, 8))
    assert isinstance(give, Give)
    assert give.held.begin == 7


def test_something_else_at_the_place_is_another_stream() -> None:
    """It is proven by what was read; nothing is asked, and nothing given, also of what comes later."""
    course = begun(7, at=6)
    (differs,) = course.arrived(held(6, 7, other=True))
    assert differs == Differs(Agreement.OTHER, None)
    assert not list(course.arrived(held(8)))
    assert not list(course.nothing_came())


def test_nothing_at_the_place_is_asked_about_once() -> None:
    """A node that is behind shows nothing; its leader says that the message is there, and it is waited for."""
    course = begun(7, at=6)
    (doubt,) = course.nothing_came()
    assert doubt == Doubt(known(6), is_end=True)
    assert not list(course.nothing_came())
    assert not list(course.answered(Finding(Agreement.SAME, None)))
    assert not list(course.nothing_came())
    assert (course.is_known, course.is_agreed) == (True, False)
    assert kinds(course.arrived(held(6, 7))) == [Give]


def test_what_lies_before_the_place_proves_nothing() -> None:
    """A node that is behind attaches at its own end: what comes of it is passed over, and its leader is asked."""
    course = begun(7, at=6)
    assert kinds(course.arrived(held(2, 3))) == [Drop, Doubt]
    assert not list(course.arrived(held(4, 5)))
    assert kinds(course.answered(Finding(Agreement.SAME, None))) == [Drop]
    assert kinds(course.arrived(held(6, 7))) == [Give]


def test_an_end_before_the_place_is_another_stream_where_its_leader_says_so() -> None:
    """It lost its end, or was declared anew."""
    course = begun(7, at=6)
    list(course.nothing_came())
    bounds = StreamBounds(0, 2, is_proven=True)
    assert list(course.answered(Finding(Agreement.ENDS_BEFORE, bounds))) == [Differs(Agreement.ENDS_BEFORE, bounds)]


def test_what_retention_took_is_missed() -> None:
    """What is known has expired, too: nothing speaks against the stream."""
    course = begun(7, at=6)
    assert list(course.arrived(held(20, 21))) == [Doubt(known(6), is_end=False)]
    assert not list(course.arrived(held(22)))
    steps = list(course.answered(Finding(Agreement.EXPIRED, StreamBounds(18, 22))))
    assert steps[0] == Missed(7, 20)
    assert kinds(iter(steps)) == [Missed, Give, Give]
    assert course.next_offset == 23


def test_a_gap_of_a_healthy_stream_is_nothing() -> None:
    """Offsets have gaps where the broker used them itself: the stream still begins before."""
    course = begun(7)
    assert list(course.arrived(held(9))) == [Doubt(None, is_end=False)]
    assert kinds(course.answered(Finding(None, StreamBounds(0, 9)))) == [Give]


def test_what_is_known_behind_what_is_wanted_is_looked_at_and_then_gone_back_from() -> None:
    """Whoever has more to read again than what it knows the stream by."""
    course = begun(3, at=6)
    assert course.start == 6
    assert kinds(course.arrived(held(6, 7))) == [Rewind]
    waited = course.begin()
    assert [each.first_offset for each in waited] == [6]
    assert course.start == 3
    assert kinds(course.arrived(held(3, 4))) == [Give]


def test_an_answer_to_what_has_ended_is_nobodys() -> None:
    """After a break, all begins anew: what waited is read again."""
    course = begun(7)
    list(course.arrived(held(9)))
    assert [each.first_offset for each in course.begin()] == [9]
    assert kinds(course.arrived(held(7, 8))) == [Give]
