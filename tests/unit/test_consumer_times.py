"""Lookups by time, without servers: against a table of blocks and messages in memory."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.common.ids import MessageId
from relatum.common.limits import INTEGER_MAX, TIME_BLOCK_DISORDER_US_MAX, TIME_BLOCK_MESSAGES_MAX
from relatum.errors import InvalidInput
from relatum.keys import moment as moment_of
from relatum.reading import Message, Properties, StreamBounds
from relatum.store.coverage import CoverageRow
from relatum_consumer import Answer, Status
from relatum_consumer.lookups import answering
from relatum_consumer.lookups.by_time import TimeMethods
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.servers import Servers
from relatum_consumer.lookups.telemetry import Lookups
from relatum_consumer.lookups.time_index import BLOCKS_BETWEEN, BLOCKS_NEIGHBOUR, WIDTHS_US, Block, earliest, mirrored
from tests.support import times as slow
from tests.support._recording import time_blocks, width_class


@dataclass
class World:
    """A database and a broker in memory; the time index is the recorder's, and is searched block by block."""

    times: dict[str, list[int | None]]
    batch: int = 1000
    first: int = 0
    super_stream: str | None = None
    witness: int = 1
    """How far the message beyond a moment is up to which blocks are given: any does."""
    blocks: dict[int, list[Block]] = field(default_factory=dict)
    reads: int = 0
    messages_read: int = 0

    def __post_init__(self) -> None:
        for number, times in enumerate(self.times.values(), 1):
            rows: list[Block] = []
            high = None
            for start in range(0, len(times), self.batch):
                timed = [(o, t) for o, t in enumerate(times[start : start + self.batch], start) if t is not None]
                if timed:
                    made, high = time_blocks([o for o, _ in timed], [t for _, t in timed], high)
                    rows += [Block(*each[:4]) for each in made]
            self.blocks[number] = rows

    def message(self, stream: str, offset: int) -> Message:
        self.messages_read += 1
        time_us = self.times[stream][offset]
        headers = {} if time_us is None else {"relatum_time": time_us}
        return Message(stream, offset, None, None, lambda: (headers, Properties(), b"", True))

    @property
    def relations(self) -> Any:
        broker: Any = self
        relations = TimeMethods()
        relations._catalog = Catalog(Servers(self.rows, broker), "/")
        relations._lookups = Lookups(10.0, 2, ())
        return relations

    def bounds(self, stream: str) -> StreamBounds:
        count = len(self.times[stream])
        ends = (self.first, count - 1) if count > self.first else (None, None)
        return StreamBounds(*ends, is_proven=True)

    def all_bounds(self, streams: Sequence[str], _: Any, lasts: Collection[str]) -> dict[str, StreamBounds]:
        ends = {stream: self.bounds(stream) for stream in streams}
        is_unknown = {stream: stream in lasts and ends[stream].last is not None for stream in ends}
        return {s: StreamBounds(0, each.last, is_proven=True) if is_unknown[s] else each for s, each in ends.items()}

    def partitions(self, _: str) -> list[str]:
        return []

    def scan(self, stream: str, start: int, stop: int, take: Callable[[Message], Any]) -> list[Message]:
        self.reads += 1
        offsets = range(max(start, self.first), min(stop, len(self.times[stream])))
        return [message for offset in offsets if take(message := self.message(stream, offset))]

    def read(self, stream: str, offset: int) -> Message:
        return self.message(stream, offset)

    def read_all(self, ids: Sequence[MessageId], **_: Any) -> list[Message]:
        return [self.message(*each) for each in ids]

    def rows(self, sql: Any, given: Any) -> list[Any]:
        if "relatum.keys" in sql.text:
            return []
        if "relatum.streams" in sql.text:
            return [(number, name, self.super_stream, True) for number, name in enumerate(self.times, 1)]
        if "relatum.coverage" in sql.text:
            rows = [
                CoverageRow(n, 0, len(times), with_time=True, is_tail=True)
                for n, times in enumerate(self.times.values(), 1)
            ]
            return [row for row in rows if row.stream_id in given["stream_ids"]]
        if sql is BLOCKS_BETWEEN:
            return [
                (number, *block)
                for number in given["stream_ids"]
                for block in self.blocks[number]
                if block.min_us <= given["high"] and block.max_us >= given["low"]
            ]
        rows = [block for block in self.blocks[given["stream_id"]] if block.last_offset >= given["floor"]]
        return self._beside(sql, given, rows)

    def _beside(self, sql: Any, given: Any, rows: list[Block]) -> list[Block]:
        t = given["t"]
        if sql is BLOCKS_NEIGHBOUR["after"]:
            beyond = sorted(block.min_us for block in rows if block.min_us > t)
            low, high = t, [t, *beyond][: self.witness + 1][-1]
        else:
            beyond = sorted((block.max_us for block in rows if block.max_us < t), reverse=True)
            low, high = [t, *beyond][: self.witness + 1][-1], t
        return [block for block in rows if block.min_us <= high and block.max_us >= low]


SECOND = 1_000_000

ordered = st.lists(st.integers(0, 30 * SECOND), max_size=400).map(sorted)
disordered = st.lists(st.integers(0, 1000 * SECOND) | st.integers(0, 3), max_size=400)
nearly = ordered.map(lambda each: [time + offset % 7 * SECOND // 3 for offset, time in enumerate(each)])
some_without = disordered.map(lambda each: [None if time % 5 == 0 else time for time in each])
any_times = ordered | disordered | nearly | some_without


def offsets_of(answer: Answer) -> list[int]:
    return [message.offset for message in answer]


@given(any_times, any_times, st.sampled_from([1, 50, 128, 300, 1000]), st.data())
def test_look_ups_by_time_give_what_looking_at_every_message_gives(
    own: list[int | None], other: list[int | None], batch: int, data: st.DataObject
) -> None:
    """Lookups by time, from a message or a datetime and in either stream, agree with a scan of all messages."""
    witness = data.draw(st.sampled_from([1, 2, 16]))
    world = World({"a": own, "b": other}, batch)
    timed = [offset for offset, time in enumerate(own) if time is not None]
    at: Any = (
        world.message("a", data.draw(st.sampled_from(timed)))
        if timed and data.draw(st.booleans())
        else moment_of(data.draw(st.integers(-1, 1001 * SECOND) | st.sampled_from([t for t in other if t] or [0])))
    )
    time = at.time_us if isinstance(at, Message) else round((at - moment_of(0)) / timedelta(microseconds=1))
    for stream in ("a", "b"):
        is_own = isinstance(at, Message) and stream == "a"
        places = [(t, 0, o) for o, t in enumerate(world.times[stream]) if t is not None]
        moment: slow.Moment = (time, 0 if is_own else None, at.offset if is_own else 0)
        relations = World({stream: world.times[stream]}, batch, witness=witness).relations
        for inclusive in (False, True):
            for where, find in (("after", slow.after), ("before", slow.before)):
                expected = find(places, moment, inclusive=inclusive)
                found = offsets_of(getattr(relations, where)(at, stream, inclusive=inclusive))
                assert found == [place[2] for place in (expected,) if place]
        expected = slow.nearest(places, moment)
        found = offsets_of(relations.nearest(at, stream))
        assert found == [place[2] for place in (expected,) if place]
        span = data.draw(st.integers(0, 40))
        around = slow.window(places, moment, span * SECOND, 2 * SECOND)
        found = offsets_of(relations.window(at, stream, before_s=span, after_s=2))
        assert found == [place[2] for place in around]


@given(st.lists(st.lists(st.integers(0, 9), max_size=60), min_size=1, max_size=4), st.data())
def test_going_on_through_a_super_stream_passes_every_message_once(parts: list[list[int]], data: st.DataObject) -> None:
    """Equal times are ordered by partition, `s-2` before `s-10`, then by offset; backwards likewise."""
    numbers = data.draw(st.lists(st.integers(0, 20), min_size=len(parts), max_size=len(parts), unique=True))
    world = World({f"s-{number}": list(times) for number, times in zip(numbers, parts, strict=True)}, super_stream="s")
    relations = world.relations
    order = sorted(
        (time, number, offset)
        for number, times in zip(numbers, parts, strict=True)
        for offset, time in enumerate(times)
    )
    ways: list[tuple[Any, int, list[tuple[int, int, int]]]] = [("after", -1, order), ("before", 10, order[::-1])]
    for where, start, expected in ways:
        seen: list[tuple[int, int, int]] = []
        at: Any = moment_of(start)
        while (answer := getattr(relations, where)(at, "s")).hits:
            at = answer[0]
            seen.append((at.time_us, int(at.stream[2:]), at.offset))
        assert seen == expected


@given(any_times, st.integers(0, 400), st.integers(-1, 1001 * SECOND), st.sampled_from([1, 16]))
def test_what_retention_dropped_is_passed_over(times: list[int | None], first: int, time: int, witness: int) -> None:
    """The answer is exact for the retained messages; it is `expired` where only a dropped message fits."""
    # Retention never drops the last segment, so something always remains.
    first = max(0, min(first, len(times) - 1))
    world = World({"a": times}, first=first, witness=witness)
    retained = [(t, 0, o) for o, t in enumerate(times) if t is not None and o >= first]
    lost = [(t, 0, o) for o, t in enumerate(times) if t is not None and o < first]
    moment: slow.Moment = (time, None, 0)
    for where, find in (("after", slow.after), ("before", slow.before)):
        answer = getattr(world.relations, where)(moment_of(time), "a")
        expected = find(retained, moment)
        assert offsets_of(answer) == ([] if expected is None else [expected[2]])
        if expected is None:
            assert answer.status is (Status.EXPIRED if find(lost, moment) else Status.ABSENT)


def test_few_blocks_are_read_however_many_there_are() -> None:
    """The next of equal times is one block away; of times in order, one block holds the answer, two at a border."""
    world = World({"a": [5] * 20_000})
    at: Any = world.message("a", 12_345)
    for where, next_to in (("after", 12_346), ("before", 12_344)):
        assert getattr(world.relations, where)(at, "a").ids == (("a", next_to),)
    assert world.reads <= 4
    world = World({"a": [offset * 1000 for offset in range(20_000)]})
    for offset in (0, 1, 127, 128, 5000, 19_998):
        world.reads = 0
        at = world.message("a", offset)
        assert world.relations.after(at, "a").ids == (("a", offset + 1),)
        assert world.reads <= 2


@pytest.mark.parametrize("complete", [False, True])
def test_a_window_reads_no_more_than_an_answer_may_have(monkeypatch: pytest.MonkeyPatch, *, complete: bool) -> None:
    """The limit holds over all partitions together, and at the message that is one too many, not behind it."""
    monkeypatch.setattr(answering, "ANSWER_MESSAGES_MAX", 500)
    partitions = {f"orders-{number}": [offset * 1000 for offset in range(400)] for number in range(3)}
    world = World(partitions, super_stream="orders")
    with pytest.raises(InvalidInput, match="more than 500 messages match: ask for a shorter"):
        world.relations.window(moment_of(0), "orders", after_s=1e6, complete=complete)
    assert world.messages_read == 501


def test_a_window_counts_each_message_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is read twice is one message of a window."""
    monkeypatch.setattr(answering, "ANSWER_MESSAGES_MAX", 500)
    world = World({"orders": [offset * 1000 for offset in range(500)]}, batch=100)
    found = world.relations.window(moment_of(0), "orders", after_s=1e6, complete=True)
    assert len(found) == 500


some_times = st.lists(st.integers(-(10**7), 10**7) | st.integers(0, 100), min_size=1, max_size=400)


@given(some_times, st.none() | st.integers(-(10**7), 10**7))
def test_every_message_lies_in_a_block_whose_ends_are_real(values: list[int], high: int | None) -> None:
    """Each message is in a block, and a block's ends are times of its messages."""
    offsets = [3 * place + 7 for place in range(len(values))]
    blocks, after = time_blocks(offsets, values, high)
    for offset, time_us in zip(offsets, values, strict=True):
        holding = [b for b in blocks if b.min_us <= time_us <= b.max_us and b.first_offset <= offset <= b.last_offset]
        assert holding
    for block in blocks:
        inside = {t for o, t in zip(offsets, values, strict=True) if block.first_offset <= o <= block.last_offset}
        assert {block.min_us, block.max_us} <= inside
        assert block.max_us - block.min_us <= 4 ** width_class(block.max_us - block.min_us)
    assert after == max(values if high is None else [*values, high])


@given(some_times)
def test_blocks_are_full_in_order_and_narrow_in_disorder(values: list[int]) -> None:
    """Messages in order take one block for each full count; a block in disorder is at most a second wide."""
    blocks, _ = time_blocks(range(len(values)), values, 10**8)
    assert all(block.max_us - block.min_us <= TIME_BLOCK_DISORDER_US_MAX for block in blocks)
    blocks, _ = time_blocks(range(len(values)), sorted(values), None)
    assert len(blocks) == -(-len(values) // TIME_BLOCK_MESSAGES_MAX)


@given(st.integers(0, 2**62))
def test_a_width_class_is_the_smallest_that_holds_the_width(width: int) -> None:
    """The class bounds the width from above, and the next smaller one does not."""
    found = width_class(width)
    assert width <= 4**found or found == width == 0
    assert found <= 1 or width > 4 ** (found - 1)
    assert width >= 2**58 or width <= WIDTHS_US[found], "the range that is probed holds the block"


@given(
    st.builds(lambda a, b, c, d: Block(min(a, b), max(a, b), min(c, d), max(c, d)), *[st.integers(0, 50)] * 4),
    st.tuples(st.integers(-1, 51), st.sampled_from([-1, INTEGER_MAX]) | st.integers(0, 50)),
)
def test_a_blocks_promise_is_kept(block: Block, beyond: tuple[int, int]) -> None:
    """No message a block can hold comes earlier after a place than it promises, nor in the mirror."""
    for held, place in ((block, beyond), (block.mirrored(), mirrored(beyond))):
        possible = [
            (time, offset)
            for time in range(held.min_us, held.max_us + 1)
            for offset in range(held.first_offset, held.last_offset + 1)
            if (time, offset) > place
        ]
        assert earliest(held, place) == min(possible, default=None)
