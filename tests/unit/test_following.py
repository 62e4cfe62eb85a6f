"""Following without a broker: how a stream is recognised, what is given of many, credit, and subscriptions."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, cast

import pytest

from relatum.errors import BrokerUnavailable, ConnectionLost, StreamNotHere
from relatum.reading import (
    Agreement,
    Message,
    NodeAddress,
    Position,
    Properties,
    SocketConnection,
    StreamBounds,
    position_of,
)
from relatum.reading.following import Attached, CaughtUp, Event, Failed, Hole, Records, Replaced, _delivery
from relatum.reading.following._connection import (
    CHUNKS_MAX,
    CROWDED_STREAMS,
    IN_FLIGHT_MAX,
    UNSENT_BYTES_MAX,
    WINDOW_BYTES,
    Connection,
    Interrupted,
    Subscription,
    Subscriptions,
)
from relatum.reading.following._delivery import BYTES, STREAMS, UNRELEASED_BYTES_MAX, Delivery, Gathering
from relatum.reading.following._followed import Finding, Followed
from relatum.wire.chunk import Chunk
from relatum.wire.session import StreamSession
from tests.unit.wire_samples import record


def message(offset: int, body: bytes = b"") -> Message:
    return Message("s", offset, None, None, lambda: ({}, Properties(), body or b"%d" % offset, True))


def chunk(*offsets: int, other: bool = False) -> Chunk:
    """Messages that are read at once; `other` ones are another stream's."""
    bodies = [b"other" if other else b"%d" % offset for offset in offsets]
    return chunk_of(offsets[0], [b"\0\x53\x75\xa0%c%b" % (len(body), body) for body in bodies])


def chunk_of(first: int, records: list[bytes], *, count: int | None = None) -> Chunk:
    """Records that are read at once; `count` is what the chunk says of their number."""
    data = b"".join(map(record, records))
    count = len(records) if count is None else count
    return Chunk(0, first, count, count, 1_700_000_000_000, 1, data, 0, len(data))


def known(offset: int) -> Position:
    return Position(offset, position_of(message(offset)).fingerprint, None)


class Bench:
    """A follower's streams without a broker: the test delivers chunks and answers for the leader."""

    def __init__(self, on_event: Callable[[Event], object] = lambda _: None) -> None:
        self.seen: list[str] = []
        self.events: list[Event] = []
        self.is_away = False
        self.is_paused = False
        self.connections = self
        self._on_event = on_event
        self.delivery: Any = Delivery(self._tell, Gathering(0.0), self._pause)
        drop = self.delivery.drop
        self.delivery.drop = lambda held: (self.seen.append("drop"), drop(held))
        self.asked: asyncio.Future[Finding] | None = None
        self.is_end = False
        self.begun_at = 0
        self.begun = asyncio.Event()

    def follow(self, next_offset: int = 0, at: Position | None = None, *, stream: str = "s") -> Followed:
        followed = Followed(cast(Any, self), stream, 1, next_offset, at)
        followed.task = asyncio.get_running_loop().create_task(followed.run())
        return followed

    def _pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused

    def _tell(self, event: Event) -> None:
        self.events.append(event)
        self.seen.append(shown(event))
        self._on_event(event)

    async def subscribe(self, followed: Followed) -> Subscription:
        self.begun_at = followed.begin()
        self.begun.set()
        self.seen.append(f"begin at {self.begun_at}")
        return Subscription(followed, 0)

    async def look(self, _stream: str, position: Position | None, gap: tuple[int, int] | None) -> Finding:
        of = f" of {position.offset}" if position else ""
        self.seen.append("ask" + of + (" and not of the begin" if gap is None else ""))
        self.asked, self.is_end = asyncio.get_running_loop().create_future(), gap is None
        return await self.asked

    def on_attached(self, _: object) -> None:
        """Nothing."""

    async def other_node(self, _stream: str, _tried: object) -> None:
        raise Interrupted if self.is_away else StreamNotHere("No other node has it.")

    def on_failed(self, followed: Followed, error: Exception) -> None:
        self.delivery.put(followed, Failed(followed.stream, followed.number, error))

    async def after(self) -> str:
        for _ in range(20):
            await asyncio.sleep(0)
        said = ", ".join(self.seen)
        self.seen.clear()
        return said


def shown(event: Event) -> str:
    match event:
        case Attached():
            return f"attached {event.next_offset}"
        case Records():
            return f"give {event.batch.first_offset}"
        case Hole():
            return f"miss {event.from_offset} to {event.to_offset}"
        case Replaced():
            return "differs"
        case CaughtUp():
            return f"caught up {event.next_offset}"
        case _:
            return "failed"


COURSES: dict[str, tuple[int, int | None, list[str]]] = {
    "what is known is read first and not given": (7, 6, ["6: drop, attached 7", "7 8: give 7"]),
    "a chunk with it and more is given from what is wanted on": (7, 6, ["4 5 6 7 8: attached 7, give 7"]),
    "something else there is another stream": (7, 6, ["other 6 7: drop, differs"]),
    "nothing there is asked about once, and waited for where the leader has it": (
        *(7, 6),
        ["nothing: ask of 6 and not of the begin", "nothing:", "SAME 0 7: attached 7", "nothing:", "6 7: give 7"],
    ),
    "nothing there is all there is where retention took what is known": (
        *(7, 6),
        ["nothing: ask of 6 and not of the begin", "EXPIRED 0 0: attached 7, caught up 7", "7: give 7"],
    ),
    "what lies before proves nothing: the node is behind": (
        *(7, 6),
        ["2 3: ask of 6 and not of the begin", "4 5:", "SAME 0 7: drop, drop, attached 7", "6 7: give 7"],
    ),
    "an end before is another stream where the leader says so": (
        *(7, 6),
        ["nothing: ask of 6 and not of the begin", "OTHER 0 2: differs"],
    ),
    "what retention took is missed: what is known has expired, too": (
        *(7, 6),
        ["20 21: ask of 6", "22:", "EXPIRED 18 22: attached 7, miss 7 to 20, give 20, give 22"],
    ),
    "retention may take what is known while that is asked": (
        *(7, 6),
        [
            "nothing: ask of 6 and not of the begin",
            "20:",
            "EXPIRED 18 20: ask, attached 7",
            "NONE 18 20: miss 7 to 20, give 20",
        ],
    ),
    "a gap of a healthy stream is nothing: the broker uses offsets itself": (
        *(7, None),
        ["9: ask", "NONE 0 9: attached 7, give 9", "nothing: caught up 10"],
    ),
    "from what is known behind what is wanted one goes back": (
        *(3, 6),
        ["6 7: drop, begin at 3", "3 4: attached 3, give 3"],
    ),
    "an answer holds for what came before a break, and reading begins at it": (
        *(7, None),
        ["9: ask", "break:", "NONE 0 9: begin at 9, attached 7, give 9", "9 10: attached 10, give 10"],
    ),
    "a question that fails after a break is no failure of the stream": (
        *(7, None),
        ["9: ask", "break:", "fails: drop, begin at 7", "7 8: attached 7, give 7"],
    ),
    "what was given already is passed over": (7, None, ["5 6: drop", "6 7: attached 7, give 7"]),
}
"""By what they show: what is wanted, what is known, and what follows from what happens."""


def happen(bench: Bench, followed: Followed, what: str) -> None:
    word, *numbers = what.split()
    if word == "break":
        followed.on_ended(Interrupted())
    elif word == "nothing":
        followed.on_drained()
    elif word == "fails":
        assert bench.asked is not None
        bench.asked.set_exception(BrokerUnavailable("away"))
    elif word.isupper():
        assert bench.asked is not None
        bounds = StreamBounds(*map(int, numbers), is_proven=True)
        agreement = Agreement.__members__.get(word)
        # As `StreamFollower.look` does: the beginning is not requested if nothing was seen of the stream.
        is_enough = bench.is_end and agreement in (Agreement.SAME, Agreement.EXPIRED)
        bench.asked.set_result(Finding(agreement, None if is_enough else bounds))
    else:
        followed.on_chunk(chunk(*map(int, numbers if word == "other" else [word, *numbers]), other=word == "other"))


@pytest.mark.parametrize("course", COURSES)
async def test_what_is_wanted_is_given_of_the_stream_that_is_known(course: str) -> None:
    """A stream starts at the known message, proves its identity, and delivers from the wanted offset on."""
    next_offset, at, happenings = COURSES[course]
    bench = Bench()
    followed = bench.follow(next_offset, None if at is None else known(at))
    assert await bench.after() == f"begin at {next_offset if at is None else at}"
    for what, _, expected in (each.partition(":") for each in happenings):
        happen(bench, followed, what)
        assert await bench.after() == expected.strip()
    followed.end()


async def attached(bench: Bench, *streams: str) -> list[Followed]:
    found = [bench.follow(stream=stream) for stream in streams]
    await bench.after()
    for followed in found:
        followed.on_drained()
    await bench.after()
    bench.events.clear()
    return found


async def test_a_stream_that_its_node_has_lost_is_read_from_the_home_node_after_an_outage() -> None:
    """A node that lacks the stream is not asked again and again while the home node is away."""
    bench = Bench()
    (one,) = await attached(bench, "one")
    bench.is_away, one.node = True, NodeAddress("other", 5552)
    one.on_ended(StreamNotHere("It has no replica."))
    await bench.after()
    assert one.node is None
    one.end()


async def test_streams_have_their_turn_one_after_the_other() -> None:
    """Streams with pending chunks are served in turn, however many chunks one of them has."""
    bench = Bench()
    one, other = await attached(bench, "one", "other")
    for offset in range(3):
        one.on_chunk(chunk(offset))
    other.on_chunk(chunk(0))
    await bench.after()
    assert [event.stream for event in bench.events] == ["one", "other", "one", "one"]


async def test_what_is_held_is_released_once_the_owner_is_done() -> None:
    """Held bytes are released when the owner is done or the stream ends; releasing twice changes nothing."""
    bench = Bench()
    one, other = await attached(bench, "one", "other")
    for followed in (one, other):
        followed.on_chunk(chunk(0))
    await bench.after()
    other.on_chunk(chunk(1))
    assert bench.delivery.count == 3
    other.end()
    assert bench.delivery.count == 2
    for _ in range(2):
        bench.delivery.done(bench.events)
        assert (bench.delivery.count, bench.delivery.bytes) == (0, 0)
    assert len(bench.events) == 2


async def test_reading_pauses_where_too_much_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading pauses at the limit of held bytes and resumes when a quarter of it is free."""
    monkeypatch.setattr(_delivery, "BYTES_MAX", 1_000)
    bench = Bench()
    (one,) = await attached(bench, "one")
    for offset in range(10):
        one.on_chunk(chunk_of(offset, [b"x" * 96]))
        assert bench.is_paused is (offset == 9)
    await bench.after()
    for number, event in enumerate(bench.events):
        assert bench.is_paused is (number < 3)
        bench.delivery.done([event])


async def test_a_stream_of_which_the_owner_has_much_is_given_no_more_until_it_is_done() -> None:
    """A stream at its limit of delivered bytes waits until the owner is done; other streams continue."""
    bench = Bench()
    one, other = await attached(bench, "one", "other")
    one.on_chunk(chunk_of(0, [b"x" * UNRELEASED_BYTES_MAX]))
    one.on_chunk(chunk(1))
    other.on_chunk(chunk(0))
    await bench.after()
    assert [event.stream for event in bench.events] == ["one", "other"]
    bench.delivery.done(bench.events[:1])
    await bench.after()
    assert [event.stream for event in bench.events] == ["one", "other", "one"]


@pytest.mark.parametrize("kind", [Attached, Records, Hole, CaughtUp])
async def test_what_the_owner_raised_at_is_given_again(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    """An event whose callback raised is delivered again, in order, without loss or repetition."""
    caplog.set_level(logging.CRITICAL, "relatum.follower")
    is_broken = True
    good: list[Event] = []

    def on_event(event: Event) -> None:
        nonlocal is_broken
        if isinstance(event, kind) and is_broken:
            is_broken = False
            raise ZeroDivisionError
        good.append(event)

    bench = Bench(on_event)
    followed = bench.follow(3)
    await bench.after()
    while not any(isinstance(event, CaughtUp) for event in good):
        # A broker delivers existing messages from the first offset of a subscription.
        if followed.is_read:
            for offset in range(max(bench.begun_at, 8), 12):
                followed.on_chunk(chunk(offset))
            followed.on_drained()
        await bench.after()
        if bench.asked is not None and not bench.asked.done():
            bench.asked.set_result(Finding(None, StreamBounds(8, 11)))
        await bench.after()
        await asyncio.sleep(0.1)
    followed.end()
    assert not is_broken
    offsets = [offset for event in good if isinstance(event, Records) for offset in event.batch.offsets]
    assert offsets == [8, 9, 10, 11]
    assert [event.to_offset for event in good if isinstance(event, Hole)] == [8]


async def test_a_chunk_that_cannot_be_split_fails_its_stream_which_is_read_again_from_there() -> None:
    """A corrupt chunk fails its stream: earlier records are delivered, and reading resumes at the chunk."""
    bench = Bench()
    (one,) = await attached(bench, "one")
    one.on_chunk(chunk(0))
    one.on_chunk(chunk_of(1, [b"x"], count=3))
    one.on_chunk(chunk(4))
    assert (await bench.after(), bench.delivery.count) == ("give 0, drop, drop, failed", 1)
    assert one.next_offset == 1
    one.end()


async def test_a_replaced_stream_is_found_again_where_what_came_before_cannot_be_split() -> None:
    """A replaced stream is reported after the failure of a corrupt chunk that came before it."""
    bench = Bench()
    (one,) = await attached(bench, "s")
    for each in (chunk_of(0, [b"x" * UNRELEASED_BYTES_MAX]), chunk_of(1, [b"x"], count=3), chunk(4)):
        one.on_chunk(each)
    one.on_ended(Interrupted())
    # The owner has not released the first, so the others wait.
    assert await bench.after() == "give 0, begin at 4"
    one.on_chunk(chunk(4, other=True))
    assert await bench.after() == "drop"
    bench.delivery.done(bench.events)
    assert await bench.after() == "drop, drop, failed"
    bench.begun.clear()
    await bench.begun.wait()
    assert await bench.after() == "begin at 0"
    one.on_chunk(chunk(0, other=True))
    assert await bench.after() == "drop, differs"
    one.end()


def test_reading_pauses_where_little_comes_of_many_streams() -> None:
    """Reading pauses only for many streams with few bytes each, and only if gathering is asked for."""

    def pause_s(count: int, bytes_: int, gather_s: float = 1.0) -> float:
        gathering = Gathering(gather_s)
        for number in range(count):
            followed = Followed(cast(Any, None), str(number), number, 0, None)
            gathering.note(followed, bytes_)
            gathering.note(followed, bytes_)
        return gathering.pause_s()

    assert 0 < pause_s(STREAMS, 100) <= 1
    assert pause_s(STREAMS - 1, 100) == 0
    assert pause_s(STREAMS, BYTES // STREAMS) == 0
    assert pause_s(STREAMS, 100, 0.0) == 0


def sized(size: int) -> Chunk:
    return Chunk(0, 0, 1, 1, 1_700_000_000_000, 1, b"x" * size, 0, size)


def test_credit_follows_the_size_of_chunks() -> None:
    """As many chunks as fit are under way, one at least; credit is granted when half of them came and are free."""
    for size, granted in ((10, CHUNKS_MAX), (WINDOW_BYTES // 4, 4), (2 * WINDOW_BYTES, 1)):
        subscription = Subscription(cast(Any, None), 0)
        subscription.on_chunk(sized(size))
        subscription.free()
        assert subscription.credit() == granted
        for _ in range(granted):
            subscription.on_chunk(sized(size))
        credit = []
        for _ in range(granted):
            subscription.free()
            credit.append(subscription.credit())
        assert set(credit) - {0} == {(granted + 1) // 2}


@pytest.mark.parametrize(
    ("version", "waits"), [("3.10.8", True), ("4.2.0", True), ("4.2.1", False), ("4.3.6", False), ("", False)]
)
def test_a_connection_is_crowded_where_the_broker_waits_for_each_stream(version: str, waits: bool) -> None:
    """From so many streams on, not before, and not where none waits for another; it takes more nevertheless."""
    session = StreamSession()
    session.server_properties = {"version": version}
    subscriptions = Subscriptions(session)
    added = list[Subscription]()
    for number in range(CROWDED_STREAMS):
        assert not subscriptions.is_crowded
        added.append(subscriptions.add(Followed(cast(Any, None), f"s{number}", number, 0, None), 0))
    added[0].on_chunk(sized(10))
    assert added[0].credit() == (IN_FLIGHT_MAX if waits else CHUNKS_MAX - 1)
    assert subscriptions.is_crowded is waits
    assert subscriptions.room > 0
    subscriptions.remove(added[0])
    assert not subscriptions.is_crowded


async def test_a_connection_of_which_the_other_side_reads_nothing_ends() -> None:
    """A connection whose unsent bytes reach the limit is lost: reported once, and closed."""
    ours, theirs = socket.socketpair()
    with theirs:
        opened, lost = SocketConnection(ours), list[Exception]()
        connection = Connection(opened, lambda _, error: lost.append(error))
        sent = 0
        while not lost:
            opened.session.send(b"x" * 65_536)
            connection.flush()
            sent += 65_536
            assert sent < 16 * UNSENT_BYTES_MAX
        connection.flush()
        connection.close()
        assert [type(error) for error in lost] == [ConnectionLost]
        assert not opened.is_usable
