"""What waits for a taker: in turn among streams, bounded, and done when it says so."""

import threading

from relatum.following import CaughtUp, Event, Records
from relatum.following._followed import WINDOW_MAX, Followed
from relatum.following._follower import WINDOW_BYTES
from relatum.following._gathering import BYTES, STREAMS, Gathering
from relatum.following._held import Held
from relatum.following._shelf import TAKE_BYTES, Shelf, Shelves
from relatum.wire import Chunk
from tests.unit.wire_samples import record


def held(offset: int, size: int = 10) -> Held:
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
        put(all_, hot, held(offset))
    put(all_, cold, held(0))
    assert streams(all_.take(0.0)) == ["hot", "cold", "hot", "hot"]
    assert all_.take(0.0) == []


def test_what_was_taken_is_held_until_it_is_done() -> None:
    """Bytes are counted from when they were read on, and the reading thread is told once of all that is done."""
    all_, called = shelves(bytes_max=15)
    shelf = Shelf("s", 1)
    fullness = []
    for offset in range(2):
        put(all_, shelf, held(offset))
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
    put(all_, shelf, held(0))
    events = all_.take(0.0)
    put(all_, shelf, held(1))
    all_.end(shelf)
    put(all_, shelf, held(2))
    assert all_.take(0.0) == []
    assert all_.count == 1
    all_.done(tuple(events))
    assert all_.count == 0


def test_events_come_between_the_records_where_they_were_put() -> None:
    """The order of a stream is kept, whatever is told of it."""
    all_, _ = shelves()
    shelf = Shelf("s", 1)
    put(all_, shelf, held(0))
    all_.put(shelf, CaughtUp("s", 1, 1))
    put(all_, shelf, held(1))
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
    put(all_, Shelf("s", 1), held(0))
    assert first.wait(90)
    all_.close()
    taker.join(90)
    assert [len(events) for events in taken] == [1, 0]


def test_what_is_known_last_is_what_was_put_last() -> None:
    """Taken or not: a break goes on behind it."""
    all_, _ = shelves()
    shelf = Shelf("s", 1)
    assert all_.last_of(shelf) is None
    put(all_, shelf, held(4))
    put(all_, shelf, held(5))
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
        put(all_, shelf, held(0, TAKE_BYTES // 2))
    put(all_, parts[0], held(1))
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
            all_.put(Shelf(str(number), number), held(0), is_new=True)
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
        item = held(number)
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
        item = held(0, size)
        followed.came(item)
        followed.free(item)
        assert followed.credit() == granted
