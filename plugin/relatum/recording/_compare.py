"""What the table holds of a window of a stream, what it should hold, and where the two differ.

Each message with a time lies in exactly one block of the time index, and a block's ends are exactly those of its
messages: the messages between its offsets whose times lie between its times. At most 128 messages lie between a
block's offsets.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import sqlalchemy as sa

from relatum.keys import KeyDefinition, bases_of
from relatum.limits import INTEGER_MAX, TIME_BLOCK_MESSAGES_MAX
from relatum.reading import Message, TimeSource
from relatum.recording._time_blocks import width_class
from relatum.store.catalog import key_definitions
from relatum.store.coverage import TIME, CoverageRow, Range, coverage_of, covered, merged, missing, proven
from relatum.store.parts import may_hold_offsets
from relatum.store.tables import keys, relationships, time_blocks

DIFFERENCES_MAX: Final = 1_000
"""Differences listed for one stream; more are counted, and mended as well."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One row, message or range of offsets on which table and stream disagree.

    `table` says where; `offset` is the first offset, `to_offset` ends a range where it is one. `kind` is

    - of `relationships`: `missing` (a message's value has no row), `unsound` (a row's message has no such value, or
      there is no such message), `duplicate` (a row is there more than once), `unknown_key` (no definition has its key
      id), `uncovered` (right rows of offsets that the coverage does not hold);
    - of `time_blocks`: `time_missing` (no block holds the message), `time_wrong` (a block's ends are not those of its
      messages), `time_duplicate` (a block whose messages another one holds), `uncovered`;
    - of `coverage`: `coverage_overlap`, `coverage_past_end`, `coverage_hole` (a hole where messages are),
      `coverage_tail` (none, or not the last range), `coverage_position` (what lay last is not there), `unknown_key`;
    - of `streams`: `replaced` (it is not the one that was recorded);
    - of any: `unknown_stream` (rows of a stream id that no stream has).
    """

    kind: str
    offset: int
    key: str = ""
    value: str = ""
    time_us: int | None = None
    table: str = "relationships"
    to_offset: int | None = None
    detail: str = ""


@dataclass(slots=True)
class StreamVerified:
    """What was compared of one stream, and where it differs.

    `windows` of `windows_total` were compared; `damaged` are the ranges of offsets that hold all differences found,
    also those that are not listed. `unproven` says what could not be judged, and why. `is_recorded` is False where the
    database has no such stream, so that nothing was compared. `stream_id` is the generation's number, `super_stream`
    the name by which the stream was asked for.
    """

    stream: str
    messages: int = 0
    rows: int = 0
    from_offset: int = 0
    to_offset: int = 0
    differences: list[Difference] = field(default_factory=list)
    difference_count: int = 0
    windows: int = 0
    windows_total: int = 0
    damaged: list[Range] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    is_recorded: bool = False
    stream_id: int | None = None
    super_stream: str | None = None

    def add(self, difference: Difference) -> None:
        """Count a difference, and list it while there is room."""
        self.difference_count += 1
        if len(self.differences) < DIFFERENCES_MAX:
            self.differences.append(difference)

    def add_window(self, window: Range, found: Iterable[Difference]) -> None:
        """Count a compared window and what was found in it."""
        before = self.difference_count
        for difference in found:
            self.add(difference)
        self.windows += 1
        if self.difference_count > before:
            self.damaged = merged([*self.damaged, window])


class Row(NamedTuple):
    """A row of the relationship table."""

    offset: int
    key_id: int
    value: str
    time_us: int | None


class Block(NamedTuple):
    """A row of the time index."""

    first_offset: int
    last_offset: int
    min_us: int
    max_us: int
    width_class: int


class Expected:
    """What the table should hold of a window's messages: by the definitions in force and what the coverage says."""

    def __init__(self, definitions: Sequence[KeyDefinition], covering: Sequence[CoverageRow], within: Range) -> None:
        self.definitions = {definition.key_id: definition for definition in definitions}
        key_ids = [*self.definitions, TIME]
        self._gaps = {key_id: missing(within, covered(covering, key_id)) for key_id in key_ids}
        self._unproven = {key_id: missing(within, proven(covering, key_id)) for key_id in key_ids}

    def covers(self, offset: int, key_id: int) -> bool:
        """Whether the offset is recorded for the key, or for `TIME`."""
        return not _within(offset, self._gaps[key_id])

    def proves(self, offset: int, key_id: int) -> bool:
        """Whether all that the offset holds for the key is recorded; not where AMQP 0.9.1 recorded it."""
        return not _within(offset, self._unproven[key_id])

    def gap_at(self, offset: int, key_id: int) -> Range:
        """The unrecorded range that an offset lies in, as far as it lies in the window."""
        return next((start, end) for start, end in self._gaps[key_id] if start <= offset < end)

    def values(self, message: Message) -> Iterator[tuple[int, str]]:
        """The message's values by key id, recorded or not."""
        if not message.is_amqp:
            return
        base_of = bases_of(message)
        for key_id, definition in self.definitions.items():
            for value in definition.read(base_of)[0]:
                yield key_id, value

    def rows(self, message: Message) -> Iterator[Row]:
        """The rows the message must have, where its keys are recorded."""
        for key_id, value in self.values(message):
            if self.covers(message.offset, key_id):
                yield Row(message.offset, key_id, value, self.row_time(message, key_id))

    def row_time(self, message: Message, key_id: int) -> int | None:
        """The time of a message's row. AMQP 0.9.1 does not show a chunk's, so what it recorded lacks it."""
        is_unseen = message.time_source is TimeSource.CHUNK and not self.proves(message.offset, key_id)
        return None if is_unseen else message.time_us


def _within(offset: int, ranges: Sequence[Range]) -> bool:
    return any(start <= offset < end for start, end in ranges)


def compare_rows(
    messages: Sequence[Message], stored: Sequence[tuple[Row, int]], expected: Expected, known_key_ids: frozenset[int]
) -> Iterator[Difference]:
    """Where the rows of a window are not those its messages should have, in the order of offsets."""
    wanted, allowed = _wanted(messages, expected)
    have = {row for row, _ in stored}
    found = [_of_row("missing", row, expected) for row in wanted - have]
    stray: dict[Range, list[Row]] = {}
    for row, count in stored:
        if row.key_id not in known_key_ids:
            found.append(Difference("unknown_key", row.offset, f"#{row.key_id}", row.value, row.time_us))
        elif row.key_id not in expected.definitions:
            continue
        elif row not in wanted and row not in allowed:
            found.append(_of_row("unsound", row, expected))
        elif count > 1:
            found.append(_of_row("duplicate", row, expected))
        elif not expected.covers(row.offset, row.key_id):
            stray.setdefault(expected.gap_at(row.offset, row.key_id), []).append(row)
    found += [_uncovered(rows, expected) for rows in stray.values()]
    yield from sorted(found, key=lambda each: (each.offset, each.key, each.value, each.kind))


def _wanted(messages: Sequence[Message], expected: Expected) -> tuple[set[Row], set[Row]]:
    """Rows that must be there, and rows that may be there."""
    wanted: set[Row] = set()
    allowed: set[Row] = set()
    for message in messages:
        for key_id, value in expected.values(message):
            offset, time_us = message.offset, message.time_us
            row = Row(offset, key_id, value, time_us)
            if expected.proves(offset, key_id):
                wanted.add(row)
                continue
            # What AMQP 0.9.1 recorded holds what it saw, with the times it saw.
            allowed.add(row)
            if message.time_source is TimeSource.CHUNK and expected.covers(offset, key_id):
                allowed.add(row._replace(time_us=None))
    return wanted, allowed


def _of_row(kind: str, row: Row, expected: Expected) -> Difference:
    return Difference(kind, row.offset, expected.definitions[row.key_id].name, row.value, row.time_us)


def _uncovered(rows: Sequence[Row], expected: Expected) -> Difference:
    names = sorted({expected.definitions[row.key_id].name for row in rows})
    offsets = [row.offset for row in rows]
    return Difference(
        "uncovered", min(offsets), ", ".join(names), to_offset=max(offsets) + 1, detail=f"{len(rows):,} rows"
    )


MARGIN_MESSAGES: Final = TIME_BLOCK_MESSAGES_MAX
"""Messages behind a window that a block which begins in it may hold."""


@dataclass(slots=True)
class Held:
    """A block and the messages it holds: their offsets, and the least and greatest of their times."""

    block: Block
    offsets: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)

    def is_exact(self, first_retained: int) -> bool:
        """Whether the block's row is what its messages make it; as far as they are retained."""
        block = self.block
        if not self.offsets or len(self.offsets) > TIME_BLOCK_MESSAGES_MAX:
            return False
        if block.width_class != width_class(block.max_us - block.min_us) or block.last_offset != self.offsets[-1]:
            return False
        if block.first_offset < first_retained:
            return block.first_offset >= 0
        low, high = min(self.times), max(self.times)
        return (block.first_offset, block.min_us, block.max_us) == (self.offsets[0], low, high)


def compare_blocks(
    messages: Sequence[Message],
    blocks: Iterable[Block],
    expected: Expected,
    window: Range,
    first_retained: int,
) -> Iterator[Difference]:
    """Where the time index is not what a window's messages make it, in the order of offsets."""
    counts = Counter(blocks)
    held = {block: Held(block) for block in counts}
    found: list[Difference] = []
    shared: set[tuple[Block, ...]] = set()
    start, end = window
    for message, active in walk(messages, sorted(counts)):
        time_us = message.time_us
        if time_us is None:
            continue
        mine = [block for block in active if block.min_us <= time_us <= block.max_us]
        for block in mine:
            held[block].offsets.append(message.offset)
            held[block].times.append(time_us)
        if len(mine) > 1:
            shared.add(tuple(mine))
        if not mine and start <= message.offset < end and expected.covers(message.offset, TIME):
            found.append(Difference("time_missing", message.offset, "time", "", time_us, "time_blocks"))
    # A block that is wrong may claim anything: only right ones hold a message twice.
    exact = [[block for block in blocks if held[block].is_exact(first_retained)] for blocks in shared]
    twice = {block for blocks in exact for block in blocks[1:]}
    for block, count in counts.items():
        # One that begins before what is retained belongs to the first window it reaches into.
        if start <= block.first_offset < end or block.first_offset < first_retained == start:
            found += _judged(held[block], count, expected, first_retained, is_twice=block in twice)
    yield from sorted(found, key=lambda each: (each.offset, each.kind, each.detail))


def walk(messages: Sequence[Message], blocks: Sequence[Block]) -> Iterator[tuple[Message, list[Block]]]:
    """Each message with the blocks between whose offsets it lies. Both are walked in order."""
    waiting = list(reversed(blocks))
    active: list[Block] = []
    for message in messages:
        while waiting and waiting[-1].first_offset <= message.offset:
            active.append(waiting.pop())
        active = [block for block in active if block.last_offset >= message.offset]
        yield message, active


def _judged(held: Held, count: int, expected: Expected, first_retained: int, *, is_twice: bool) -> Iterator[Difference]:
    block = held.block
    place = {"table": "time_blocks", "to_offset": block.last_offset + 1, "time_us": block.min_us}
    if not held.is_exact(first_retained):
        yield Difference("time_wrong", block.first_offset, detail=f"{tuple(block)}", **place)  # type: ignore[arg-type]
        return
    if count > 1 or is_twice:
        yield Difference("time_duplicate", block.first_offset, **place)  # type: ignore[arg-type]
    if not all(expected.covers(offset, TIME) for offset in held.offsets):
        yield Difference("uncovered", block.first_offset, "time", **place)  # type: ignore[arg-type]


_ROW: Final = [relationships.c[name] for name in ("stream_offset", "key_id", "value", "time_us")]
_BLOCK: Final = [time_blocks.c[name] for name in ("first_offset", "last_offset", "min_us", "max_us", "width_class")]


@dataclass(frozen=True, slots=True)
class Stored:
    """The table's rows of a window, of one moment. Rows come with how often they are there."""

    rows: list[tuple[Row, int]]
    blocks: list[Block]
    covering: list[CoverageRow]
    definitions: list[KeyDefinition]
    known_key_ids: frozenset[int]


def stored_of(connection: sa.Connection, stream_id: int, window: Range) -> Stored:
    """Read a window. The caller's transaction is one snapshot, or holds the stream's locks.

    Rows that are there more than once are counted by PostgreSQL: however often, they take the memory of one.
    """
    start, end = window
    offset = relationships.c.stream_offset
    of_window = (relationships.c.stream_id == stream_id) & (offset >= start) & (offset < end)
    held = may_hold_offsets(stream_id, start, end)
    rows = connection.execute(sa.select(*_ROW, sa.func.count()).where(of_window, held).group_by(*_ROW)).all()
    blocks = connection.execute(
        sa.select(*_BLOCK).where(
            time_blocks.c.stream_id == stream_id, time_blocks.c.first_offset < end, time_blocks.c.last_offset >= start
        )
    ).all()
    return Stored(
        [(Row(*row[:4]), row[4]) for row in rows],
        [Block(*block) for block in blocks],
        coverage_of(connection, [stream_id]),
        key_definitions(connection),
        known_key_ids(connection),
    )


def known_key_ids(connection: sa.Connection) -> frozenset[int]:
    """The ids of all keys, those that were removed too."""
    return frozenset(connection.execute(sa.select(keys.c.key_id)).scalars())


def last_stored(connection: sa.Connection, stream_id: int, offset: int) -> int | None:
    """The greatest offset from one on of which the table holds a row or a block; None where there is none."""
    row = sa.select(sa.func.max(relationships.c.stream_offset)).where(
        relationships.c.stream_id == stream_id,
        relationships.c.stream_offset >= offset,
        may_hold_offsets(stream_id, offset, INTEGER_MAX),
    )
    block = sa.select(sa.func.max(time_blocks.c.last_offset)).where(
        time_blocks.c.stream_id == stream_id, time_blocks.c.first_offset >= offset
    )
    found: Sequence[int | None] = [connection.execute(query).scalar_one() for query in (row, block)]
    return max((each for each in found if each is not None), default=None)
