"""What the table should hold of messages, and where it differs. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from relatum.keys import KeyDefinition, bases_of
from relatum.reading import Message, TimeSource
from relatum.store import TIME, CoverageRow, Range, covered, merged, missing, proven

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

    def merge(self, part: "StreamVerified") -> None:
        """Add what was found in a later part of the stream."""
        self.messages += part.messages
        self.rows += part.rows
        self.windows += part.windows
        self.difference_count += part.difference_count
        self.differences += part.differences[: DIFFERENCES_MAX - len(self.differences)]
        self.damaged = merged([*self.damaged, *part.damaged])


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
