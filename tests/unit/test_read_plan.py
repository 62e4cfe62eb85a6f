"""A batched read's plan: complete, bounded, and never much dearer than the better of the two simple ways."""

import random
import socket
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.errors import OffsetNotFound
from relatum.reading import ChunkCache, Message, SocketConnection
from relatum.reading._plan import (
    ATTACH_S,
    BYTE_S,
    CHUNK_S,
    RECORD_BYTES,
    WINDOW_BYTES_MAX,
    Density,
    Part,
    Place,
    PlannedAttach,
    StreamPlan,
)
from relatum.wire import frames
from relatum.wire.chunk import Chunk
from relatum.wire.frames import Code, Command
from relatum.wire.session import ATTACHES_MAX

ROUND_TRIP_S = 0.2e-3


class Stream:
    """A stream of chunks as the plan's executor meets it, counting what reading costs."""

    def __init__(self, chunks: list[tuple[int, int]], record_bytes: int = 200) -> None:
        self.chunks = chunks
        self.record_bytes = record_bytes
        self.cost_s = 0.0

    def read(self, plan: StreamPlan) -> dict[int, int]:
        """Run a plan to its end: how often each offset was found."""
        found: dict[int, int] = {}
        waiting: list[PlannedAttach] = []
        while True:
            while len(waiting) < 4 and (request := plan.next_request()) is not None:
                waiting.append(request)
            if not waiting:
                return found
            self._answer(plan, waiting.pop(0), found)

    def _answer(self, plan: StreamPlan, request: PlannedAttach, found: dict[int, int]) -> None:
        self.cost_s += ATTACH_S
        begin = bisect_right(self.chunks, request.offsets[0], key=lambda chunk: chunk[0] + chunk[1])
        granted, reached = request.chunks, None
        for number, (first, count) in enumerate(islice(self.chunks, begin, None)):
            if number == granted:
                break
            size = count * self.record_bytes
            # The first chunk is a part of what an attach costs.
            self.cost_s += CHUNK_S + BYTE_S * size if number else 0
            for offset in plan.arrived(request, first, count, size):
                found[offset] = found.get(offset, 0) + 1
            reached = first + count - 1
            ahead = granted - number - 1
            if len(request.offsets) > 1 and (more := plan.more(request, reached, number + 1, ahead)):
                granted += more
                # It is requested ahead, so nobody waits for it.
                self.cost_s += 0 if ahead else ROUND_TRIP_S
        plan.answered(request, reached if len(self.chunks) - begin >= granted else None)


def stream_of(sizes: list[int], gaps: bool = False) -> Stream:
    chunks, first = [], 0
    for size in sizes:
        chunks.append((first, size))
        first += size + gaps
    return Stream(chunks)


def learned(records: int) -> Density:
    density = Density()
    density.learn(records, 200 * records)
    return density


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.sets(st.integers(0, 1300), min_size=1, max_size=60),
    st.booleans(),
)
def test_every_offset_is_read_once_or_known_to_be_missing(sizes: list[int], wanted: set[int], gaps: bool) -> None:
    """Each wanted offset is found exactly once if it exists, whatever the chunks are."""
    stream = stream_of(sizes, gaps)
    existing = {offset for first, count in stream.chunks for offset in range(first, first + count)}
    found = stream.read(StreamPlan(sorted(wanted), Density()))
    assert found == dict.fromkeys(wanted & existing, 1)


@pytest.mark.parametrize("chunk", [1, 10, 100, 1000])
@pytest.mark.parametrize("gap", [1, 10, 100, 10_000])
@pytest.mark.parametrize("spread", ["even", "random"])
def test_cost(chunk: int, gap: int, spread: str) -> None:
    """At each density a plan costs at most 1.3 times the cheaper of attaching for each offset and reading through."""
    count = 1000 if gap < 10_000 else 100
    total = count * gap
    stream = stream_of([chunk] * (total // chunk + 1))
    offsets = list(range(0, total, gap)) if spread == "even" else sorted(random.Random(1).sample(range(total), count))
    found = stream.read(StreamPlan(offsets, learned(chunk)))
    assert len(found) == count
    chunks_through = (offsets[-1] - offsets[0]) / chunk + 1
    through_s = ATTACH_S + chunks_through * (CHUNK_S + BYTE_S * 200 * chunk)
    each_s = count * ATTACH_S
    assert stream.cost_s <= 1.3 * min(each_s, through_s) + ATTACH_S


def test_cost_where_chunks_become_small() -> None:
    """A request for large chunks ends where chunks become small and the next offset is far away."""
    stream = stream_of([100] * 20 + [1] * 20_000)
    offsets = list(range(0, 22_000, 2000))
    found = stream.read(StreamPlan(offsets, learned(100)))
    assert len(found) == len(offsets)
    assert stream.cost_s <= 3 * len(offsets) * ATTACH_S


def test_only_the_furthest_request_reads_ahead() -> None:
    """Only the last request of a plan reads ahead, for as much as one attach costs."""
    density = learned(1)
    offsets = [0, 1_000, 2_000]
    usual, ahead = StreamPlan(offsets, density), StreamPlan(offsets, density, is_ahead=True)
    more = [ahead.next_request().chunks - usual.next_request().chunks for _ in offsets]  # type: ignore[union-attr]
    assert more == [0, 0, density.chunks_ahead]
    assert more[-1] > 1


@pytest.fixture
def connection() -> Iterator[SocketConnection]:
    near, far = socket.socketpair()
    with near, far:
        yield SocketConnection(near)


def end(connection: SocketConnection, number: int) -> None:
    correlation = connection.session.next_correlation()
    connection.session.unsubscribe(number, correlation)
    connection.session.receive(frames.answer(Command.UNSUBSCRIBE, correlation, Code.OK))


@pytest.mark.parametrize(
    ("version", "is_used_up"), [("3.10.8", True), ("3.11.28", True), ("3.12.0", False), ("4.3.6", False), ("", False)]
)
def test_a_connection_wears_out_at_a_leaky_broker(connection: SocketConnection, version: str, is_used_up: bool) -> None:
    """A connection is used up after ATTACHES_MAX attaches, and only at a broker that leaks files."""
    connection.session.server_properties = {"version": version}
    for _ in range(ATTACHES_MAX):
        assert not connection.session.is_used_up
        # The lowest id each time: it is free once the broker has answered its Unsubscribe.
        assert connection.session.take_subscription() == 0
        end(connection, 0)
    assert connection.session.is_used_up is is_used_up


def test_ids_of_subscriptions_are_not_used_before_they_are_free(connection: SocketConnection) -> None:
    """An id that the broker may still deliver for is nobody else's; the least that is free comes next."""
    assert [connection.session.take_subscription() for _ in range(2)] == [0, 1]
    connection.session.unsubscribe(1)
    end(connection, 0)
    assert [connection.session.take_subscription() for _ in range(2)] == [0, 2]


def read(asked: list[Place], size: int, bytes_max: int, record: bytes) -> tuple[list[Place], list[bool]]:
    """Read ids part by part, as a batched read does, each in any order: what is given, and which parts were full."""
    given: list[Place] = []
    are_full: list[bool] = []
    most, rest = size, asked
    while rest:
        part = Part(rest[:size], bytes_max)
        places = [(stream, offset) for stream, offsets in part.wanted.items() for offset in offsets]
        random.Random(len(are_full)).shuffle(places)
        for stream, offset in places:
            part.put_records(stream, [offset], [record], 7)
        given += [message.id for messages in part.results() for message in messages]
        are_full.append(part.is_full)
        rest, size = part.rest + rest[size:], part.following_size(most)
    return given, are_full


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 20)), max_size=60), st.integers(1, 70))
def test_results_come_in_the_order_asked_for(asked: list[Place], size: int) -> None:
    """Results have the order of the ids, with repetitions, whatever order records come in."""
    assert read(asked, size, WINDOW_BYTES_MAX, b"x")[0] == asked


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 1200))
def test_a_part_holds_bounded_bytes_and_reading_still_ends(asked: list[int], bytes_max: int) -> None:
    """With little memory and larger messages, all results come in order within bounded bytes."""
    places = [("s", offset) for offset in asked]
    given, are_full = read(places, 16, bytes_max, bytes(100))
    assert given == places
    assert len(are_full) < 5 * len(asked) + 10
    part = Part(places or [("s", 0)], bytes_max)
    part.put_records("s", part.wanted["s"], [bytes(100)] * len(part.wanted["s"]), 7)
    held = [each for each in part._results["s"].values() if each is not None]
    assert len(held) == min(len(part.wanted["s"]), max(1, bytes_max // (RECORD_BYTES + 100)))


def test_ids_are_read_in_parts_that_can_be_held() -> None:
    """One part shows what can be held; those after it are as large as that, and none is begun needlessly."""
    asked = [("s", offset) for offset in random.Random(1).sample(range(1_000), 1_000)]
    given, are_full = read(asked, 1_000, 250_000, bytes(2_000))
    assert given == asked
    assert are_full.count(True) == 1
    assert len(are_full) < 4 * 1_000 * 2_000 / 250_000


def test_numbers_that_are_no_offsets_are_answered_at_once() -> None:
    """They are never asked for, and what is not a message comes by itself."""
    part = Part([("s", 5), ("s", -1), ("s", 5), ("s", 2**63)])
    assert part.wanted == {"s": [5]}
    part.put_records("s", [5], [b""], 7)
    kinds = [[type(each) for each in results] for results in part.results()]
    assert kinds == [[Message], [OffsetNotFound], [Message], [OffsetNotFound]]


def chunk(first: int, records: int, size: int = 100) -> Chunk:
    return Chunk(0, first, records, records, 0, 1, bytes(size), 0, size)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=30),
    offsets=st.sets(st.integers(0, 400)),
    chance=st.randoms(use_true_random=False),
)
def test_offsets_are_found_in_chunks(lengths: list[tuple[int, int]], offsets: set[int], chance: random.Random) -> None:
    """An offset is found in its cached chunk, whatever order, gaps and repetitions chunks came with."""
    chunks, first = [], 0
    for records, gap in lengths:
        chunks.append(chunk(first, records))
        first += records + gap
    held = [each for each in chunks if chance.random() < 0.7]
    kept = ChunkCache()
    for each in sorted([*held, *held[:3]], key=lambda _: chance.random()):
        kept.keep("s", each)
    expected = {each: [n for n in sorted(offsets) if each.first_offset <= n <= each.last_offset] for each in held}
    assert dict(kept.holding("s", sorted(offsets))) == {each: inside for each, inside in expected.items() if inside}
    assert list(kept.holding("other", sorted(offsets))) == []


def test_the_oldest_go_where_there_are_too_many() -> None:
    """Bytes are counted over all streams; one that came twice is one."""
    kept = ChunkCache(bytes_max=350)
    for n in (3, 1, 1, 2, 0):
        kept.keep(f"s{n % 2}", chunk(10 * n, 10))
    found = [n for n in range(4) if list(kept.holding(f"s{n % 2}", [10 * n]))]
    assert found == [0, 1, 2]
    kept.keep("s0", chunk(100, 1, size=1000))
    assert not any(list(kept.holding(f"s{n % 2}", [10 * n])) for n in (0, 1, 2, 10))
