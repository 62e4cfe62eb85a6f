"""The pure parts of following: a stream's course, what waits for the taker, credit, and subscriptions."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from relatum.following import Event
from relatum.following._course import Course, Differs, Doubt, Finding, Give, Missed
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


COURSES: dict[str, tuple[int, int | None, list[str]]] = {
    "what is known is read first and not given": (7, 6, ["6: drop", "7 8: give 7"]),
    "a chunk with it and more is given from what is wanted on": (7, 6, ["4 5 6 7 8: give 7"]),
    "something else there is another stream": (7, 6, ["other 6 7: differs OTHER", "8:", "nothing:"]),
    "nothing there is asked about once, and waited for where the leader has it": (
        *(7, 6),
        ["nothing: ask of 6 and not of the begin", "nothing:", "SAME 0 7:", "nothing:", "6 7: give 7"],
    ),
    "what lies before proves nothing: the node is behind": (
        *(7, 6),
        ["2 3: drop, ask of 6 and not of the begin", "4 5:", "SAME 0 7: drop", "6 7: give 7"],
    ),
    "an end before is another stream where the leader says so": (
        *(7, 6),
        ["nothing: ask of 6 and not of the begin", "ENDS_BEFORE 0 2: differs ENDS_BEFORE 0 2"],
    ),
    "what retention took is missed: what is known has expired, too": (
        *(7, 6),
        ["20 21: ask of 6", "22:", "EXPIRED 18 22: miss 7 to 20, give 20, give 22"],
    ),
    "a gap of a healthy stream is nothing: the broker uses offsets itself": (7, None, ["9: ask", "NONE 0 9: give 9"]),
    "from what is known behind what is wanted one goes back": (3, 6, ["6 7: rewind", "again: 6", "3 4: give 3"]),
    "an answer to what has ended is nobody's: all is read again": (
        7,
        None,
        ["9: ask", "again: 9", "7 8: give 7"],
    ),
}
"""By what they show: what is wanted, what is known, and what follows from what happens."""


def happen(course: Course, what: str) -> str:
    """Let happen what the table says: what is read, nothing, a break, or the leader's answer; gives what follows."""
    word, *numbers = what.split()
    if word == "again":
        return ", ".join(str(each.first_offset) for each in course.begin())
    if word == "nothing":
        steps = course.nothing_came()
    elif word.isupper():
        bounds = StreamBounds(*map(int, numbers), is_proven=True)
        steps = course.answered(Finding(Agreement.__members__.get(word), bounds))
    elif word == "other":
        steps = course.arrived(held(*map(int, numbers), other=True))
    else:
        steps = course.arrived(held(*map(int, what.split())))
    return ", ".join(map(shown, steps))


def shown(step: Any) -> str:
    """A step as the table has it."""
    match step:
        case Give(given):
            return f"give {max(given.begin, given.first_offset)}"
        case Missed(from_offset, to_offset):
            return f"miss {from_offset} to {to_offset}"
        case Differs(found, bounds):
            return " ".join(["differs", found.name, *map(str, bounds or ())])
        case Doubt(position, is_end):
            return "ask" + (f" of {position.offset}" if position else "") + (" and not of the begin" if is_end else "")
        case _:
            return type(step).__name__.lower()


@pytest.mark.parametrize("course", COURSES)
def test_a_course_gives_what_is_wanted_of_the_stream_that_is_known(course: str) -> None:
    """Step by step; reading begins at what is known, and ends behind what was given last."""
    next_offset, at, happenings = COURSES[course]
    one = Course(next_offset, None if at is None else known(at))
    one.begin()
    assert one.start == (next_offset if at is None else at)
    for what, _, expected in (each.partition(":") for each in happenings):
        assert happen(one, what) == expected.strip()
        if what == "again":
            assert one.start == next_offset
    if "give" in expected:
        assert one.next_offset == int(what.split()[-1]) + 1


def test_a_stream_is_known_by_its_leaders_word_before_it_is_seen() -> None:
    """It has agreed once the message that is known was read."""
    course = Course(7, known(6))
    course.begin()
    seen = []
    for what in ("nothing", "SAME 0 7", "6"):
        happen(course, what)
        seen.append((course.is_known, course.is_agreed))
    assert seen == [(False, False), (True, False), (True, True)]


# --- what waits for a taker: in turn among streams, bounded, and done when it says so ---------------------------------


class Waiting:
    """Shelves, and what they called."""

    def __init__(self, bytes_max: int = 1 << 20) -> None:
        self.called: list[str] = []
        self.shelves = Shelves(bytes_max, lambda: self.called.append("changed"), lambda: self.called.append("ready"))

    def put(self, shelf: Shelf, item: Held) -> None:
        """Put something that was read on a shelf and announce it, as the reading thread does at the end of a turn."""
        self.shelves.put(shelf, item, is_new=True)
        self.shelves.announce()

    def take(self) -> list[Event]:
        """What there is to take."""
        return self.shelves.take(0.0)


@pytest.fixture
def waiting() -> Waiting:
    """Shelves with room."""
    return Waiting()


def sized(offset: int, size: int = 10) -> Held:
    """A message that was read."""
    data = record(b"x" * size)
    read = Held(Chunk(0, offset, 1, 1, 1_700_000_000_000, 1, data, 0, len(data)))
    read.bytes = size
    return read


def streams(events: list[Event]) -> list[str | None]:
    """The streams of events."""
    return [event.stream for event in events]


def test_a_taker_is_woken_by_what_comes_and_by_the_end(waiting: Waiting) -> None:
    """Who waits gets what comes, and nothing where it is closed."""
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(waiting.shelves.take, 60.0)
        waiting.put(Shelf("s", 1), sized(0))
        assert len(taken.result(90)) == 1
        taken = thread.submit(waiting.shelves.take, 60.0)
        waiting.shelves.close()
        assert taken.result(90) == []


def test_a_take_is_bounded_in_bytes_and_the_others_keep_their_turn() -> None:
    """Streams that were not reached come first the next time, and nothing of them is lost or released before."""
    waiting = Waiting(bytes_max=1 << 30)
    parts = [Shelf(str(number), number) for number in range(5)]
    for shelf in parts:
        waiting.put(shelf, sized(0, TAKE_BYTES // 2))
    waiting.put(parts[0], sized(1))
    first = waiting.take()
    assert streams(first) == ["0", "1"]
    waiting.shelves.end(parts[3])
    assert waiting.shelves.count == 5
    assert [streams(waiting.take()) for _ in range(2)] == [["2", "4"], ["0"]]
    waiting.shelves.done(tuple(first))
    assert waiting.shelves.count == 3


def test_the_taker_hears_once_of_all_that_a_turn_brought(waiting: Waiting) -> None:
    """However many chunks were put, and not again of what it has not taken yet."""
    for called in ([], ["ready"]):
        for number in range(3):
            waiting.shelves.put(Shelf(str(number), number), sized(0), is_new=True)
        assert waiting.called == called
        waiting.shelves.announce()
    assert waiting.called == ["ready"]


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
