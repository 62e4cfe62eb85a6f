"""The pure parts of following: a stream's course, what waits for the taker, credit, and subscriptions."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from relatum.following import CaughtUp, Event, Records
from relatum.following._course import Course, Differs, Doubt, Drop, Finding, Give, Missed, Rewind
from relatum.following._followed import BYTES, STREAMS, WINDOW_MAX, Followed, Gathering
from relatum.following._shelf import TAKE_BYTES, Held, Shelf, Shelves
from relatum.following._subscriptions import CROWD, Subscriptions
from relatum.reading import Agreement, Message, Position, Properties, StreamBounds, position_of
from relatum.wire import Chunk, Login, StreamSession
from tests.unit.wire_samples import record

WINDOW_BYTES = 1 << 20
"""Bytes of chunks of a stream that are under way and held."""

# --- whether a stream is the one that is known, and what of it is given -----------------------------------------------


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


# --- what waits for a taker: in turn among streams, bounded, and done when it says so ---------------------------------


def sized(offset: int, size: int = 10) -> Held:
    """A message that was read."""
    data = record(b"x" * size)
    read = Held(Chunk(0, offset, 1, 1, 1_700_000_000_000, 1, data, 0, len(data)))
    read.bytes = size
    return read


def shelves(bytes_max: int = 1 << 20) -> tuple[Shelves, list[str]]:
    """Shelves, and what they called."""
    called: list[str] = []
    return Shelves(bytes_max, lambda: called.append("changed"), lambda: called.append("ready")), called


def put(all_: Shelves, shelf: Shelf, item: Held) -> None:
    """Put something that was read on a shelf and announce it, as the reading thread does at the end of a turn."""
    all_.put(shelf, item, is_new=True)
    all_.announce()


def streams(events: list[Event]) -> list[str | None]:
    """The streams of events."""
    return [event.stream for event in events]


def test_streams_have_their_turn_one_after_the_other() -> None:
    """Much of one stream does not come before little of another."""
    all_, _ = shelves()
    hot, cold = Shelf("hot", 1), Shelf("cold", 2)
    for offset in range(3):
        put(all_, hot, sized(offset))
    put(all_, cold, sized(0))
    assert streams(all_.take(0.0)) == ["hot", "cold", "hot", "hot"]
    assert all_.take(0.0) == []


def test_what_was_taken_is_held_until_it_is_done() -> None:
    """Bytes are counted from when they were read on, and the reading thread is told once of all that is done."""
    all_, called = shelves(bytes_max=15)
    shelf = Shelf("s", 1)
    fullness = []
    for offset in range(2):
        put(all_, shelf, sized(offset))
        fullness.append(all_.is_full)
    assert fullness == [False, True]
    events = all_.take(0.0)
    assert (all_.bytes, all_.count) == (20, 2)
    all_.done(tuple(events))
    assert (all_.bytes, all_.count) == (0, 0)
    assert called == ["ready", "changed"]
    ((touched, done, broken),) = all_.collect()
    assert (touched, [each.first_offset for each in done], broken) == (shelf, [0, 1], None)


def test_an_ended_shelf_gives_nothing_and_holds_what_was_taken() -> None:
    """What was not taken is free at once; what was is until the taker says so."""
    all_, _ = shelves()
    shelf = Shelf("s", 1)
    put(all_, shelf, sized(0))
    events = all_.take(0.0)
    put(all_, shelf, sized(1))
    all_.end(shelf)
    put(all_, shelf, sized(2))
    assert all_.take(0.0) == []
    assert all_.count == 1
    all_.done(tuple(events))
    assert all_.count == 0


def test_events_come_between_the_records_where_they_were_put() -> None:
    """The order of a stream is kept, whatever is told of it."""
    all_, _ = shelves()
    shelf = Shelf("s", 1)
    put(all_, shelf, sized(0))
    all_.put(shelf, CaughtUp("s", 1, 1))
    put(all_, shelf, sized(1))
    assert [type(event) for event in all_.take(0.0)] == [Records, CaughtUp, Records]


def test_a_taker_is_woken_by_what_comes_and_by_the_end() -> None:
    """Who waits gets what comes, and nothing where it is closed."""
    all_, _ = shelves()
    taken: list[list[Event]] = []
    first = threading.Event()

    def take() -> None:
        taken.append(all_.take(60.0))
        first.set()
        taken.append(all_.take(60.0))

    taker = threading.Thread(target=take)
    taker.start()
    put(all_, Shelf("s", 1), sized(0))
    assert first.wait(90)
    all_.close()
    taker.join(90)
    assert [len(events) for events in taken] == [1, 0]


def test_what_is_known_last_is_what_was_put_last() -> None:
    """Taken or not: a break goes on behind it."""
    all_, _ = shelves()
    shelf = Shelf("s", 1)
    assert all_.last_of(shelf) is None
    put(all_, shelf, sized(4))
    put(all_, shelf, sized(5))
    last = all_.last_of(shelf)
    assert last is not None
    assert last.offset == 5
    all_.done(tuple(all_.take(0.0)))
    assert all_.last_of(shelf) == last


def test_a_take_is_bounded_in_bytes_and_the_others_keep_their_turn() -> None:
    """Streams that were not reached come first the next time, and nothing of them is lost or released before."""
    all_, _ = shelves(bytes_max=1 << 30)
    parts = [Shelf(str(number), number) for number in range(5)]
    for shelf in parts:
        put(all_, shelf, sized(0, TAKE_BYTES // 2))
    put(all_, parts[0], sized(1))
    first = all_.take(0.0)
    assert streams(first) == ["0", "1"]
    all_.end(parts[3])
    assert all_.count == 5
    assert streams(all_.take(0.0)) == ["2", "4"]
    assert streams(all_.take(0.0)) == ["0"]
    all_.done(tuple(first))
    assert all_.count == 3


def test_the_taker_hears_once_of_all_that_a_turn_brought() -> None:
    """However many chunks were put, and not again of what it has not taken yet."""
    all_, called = shelves()
    for _ in range(2):
        for number in range(3):
            all_.put(Shelf(str(number), number), sized(0), is_new=True)
        assert called == ([] if all_.count == 3 else ["ready"])
        all_.announce()
    assert called == ["ready"]


def test_reading_pauses_where_little_comes_of_many_streams() -> None:
    """Not for one stream less, not for much, and not where nobody asked for it."""

    def pause_s(count: int, bytes_: int, gather_s: float = 1.0) -> float:
        gathering = Gathering(gather_s)
        for number in range(count):
            followed = Followed(str(number), number, 0, None, WINDOW_BYTES)
            gathering.came(followed, bytes_)
            gathering.came(followed, bytes_)
        return gathering.pause_s()

    assert 0 < pause_s(STREAMS, 100) <= 1
    assert pause_s(STREAMS - 1, 100) == 0
    assert pause_s(STREAMS, BYTES // STREAMS) == 0
    assert pause_s(STREAMS, 100, 0.0) == 0


def test_a_quiet_stream_is_granted_credit_when_half_of_it_is_used_up() -> None:
    """Before it was seen to be quiet, with each chunk: a question goes with it."""
    followed = Followed("s", 1, 0, None, WINDOW_BYTES)
    followed.begin()
    granted = []
    for number in range(4 * WINDOW_MAX):
        followed.is_quiet = number >= WINDOW_MAX
        item = sized(number)
        followed.came(item)
        followed.free(item)
        granted.append(followed.credit())
    assert all(granted[:WINDOW_MAX])
    assert set(granted[WINDOW_MAX:]) == {0, WINDOW_MAX // 2}


def test_what_came_says_at_once_how_much_may_be_under_way() -> None:
    """Of small chunks as many as may be, of large ones as many as fit, of one that is larger still, the next."""
    for size, granted in ((10, WINDOW_MAX), (WINDOW_BYTES // 4, 4), (2 * WINDOW_BYTES, 1)):
        followed = Followed("s", 1, 0, None, WINDOW_BYTES)
        followed.begin()
        item = sized(0, size)
        followed.came(item)
        followed.free(item)
        assert followed.credit() == granted


# --- the subscriptions of one connection -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "waits"), [("3.10.8", True), ("4.2.0", True), ("4.2.1", False), ("4.3.6", False), ("", False)]
)
def test_a_connection_is_crowded_where_the_broker_waits_for_each_stream(version: str, waits: bool) -> None:
    """From so many streams on, not before, and not where none waits for another; it takes more nevertheless."""
    session = StreamSession(Login("user", "password"))
    session.server_properties = {"version": version}
    subscriptions = Subscriptions(session)
    all_followed = [Followed(f"s{number}", number, 0, None, WINDOW_BYTES) for number in range(CROWD)]
    for followed in all_followed:
        assert not subscriptions.is_crowded
        subscriptions.add(followed, 0)
    assert subscriptions.is_crowded is waits
    assert subscriptions.room > 0
    subscriptions.remove(all_followed[0])
    assert not subscriptions.is_crowded
