"""Compares the rows stored for a window of a stream with the expected rows. Only `Stored` reads the database.

Each message with a time belongs to exactly one block of the time index. A block's messages are those whose offset and
time are both in its ranges. Each end of its ranges is the offset or time of one of its messages, of which it has at
most 128.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import sqlalchemy as sa

from relatum.common.limits import TIME_BLOCK_MESSAGES_MAX
from relatum.errors import RelatumError
from relatum.keys import bases_of
from relatum.reading import Broker, Message, TimeSource
from relatum.recording.batch import width_class
from relatum.store.catalog import key_definitions
from relatum.store.coverage import TIME, CoverageRow, Range, coverage_of, merged
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_offsets

DIFFERENCES_MAX: Final = 1_000
"""Maximum differences listed for one stream. Further ones are counted and repaired, but not listed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A row, message or range of offsets on which table and stream disagree.

    `table` names the table. `offset` is the first offset; `to_offset` is the end of a range, None for a single offset.
    `kind` is one of:

    - `missing`: a message's value has no row;
    - `unsound`: a row has no message, a value or time that its message lacks, or a key id without a definition;
    - `duplicate`: a row exists more than once, or two blocks of the time index include the same message;
    - `time_missing`: no block of the time index includes the message;
    - `time_wrong`: a block's ends differ from those of its messages;
    - `uncovered`: a row or block is correct, but its offset is outside the coverage;
    - `coverage`: a range of the coverage is invalid; `detail` says why;
    - `replaced`: the last recorded message is not in the stream, which was declared again or lost its tail.
    """

    kind: str
    offset: int
    key: str = ""
    value: str = ""
    time_us: int | None = None
    table: str = "relationships"
    to_offset: int | None = None
    detail: str = ""


def end_of(difference: Difference) -> int:
    """Return the offset after a difference."""
    return max(difference.offset + 1, difference.to_offset or 0)


@dataclass(slots=True)
class StreamVerified:
    """The comparison of one stream, and its differences.

    `windows` of `windows_total` windows were compared; `damaged` holds the offsets of those with differences, listed
    or not. `unproven` says which parts could not be compared, and why. `is_recorded` is False if the table has nothing
    of the stream, so nothing was compared. `stream_id` identifies the stream's generation. `super_stream` is the
    partition's super stream, unless the caller named the partition itself.
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
        """Count a difference, and list it if it is one of the first 1,000."""
        self.difference_count += 1
        if len(self.differences) < DIFFERENCES_MAX:
            self.differences.append(difference)

    def add_window(self, window: Range, found: Iterable[Difference]) -> None:
        """Count a compared window, and add the differences found in it."""
        self.windows += 1
        end = 0
        for difference in found:
            self.add(difference)
            end = max(end, window[1], end_of(difference))
        self.damaged = merged([*self.damaged, (window[0], end)])


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The comparison of several streams. `exact` is False if only a sample, chosen by `seed`, was compared.

    `failed` holds the streams that could not be compared, with the errors; they are not in `streams`.
    """

    streams: list[StreamVerified]
    exact: bool
    seed: int | None
    broker: str | Broker = field(repr=False, compare=False)
    failed: dict[str, RelatumError] = field(default_factory=dict, compare=False)

    @property
    def ok(self) -> bool:
        """Whether all streams were compared and no difference was found."""
        return not self.failed and not any(stream.difference_count for stream in self.streams)


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


# PostgreSQL counts duplicate rows, so that any number of them takes the memory of one.
_ROWS_OF: Final = sql(f"""
    SELECT stream_offset, key_id, value, time_us, count(*) FROM relatum.relationships r
    WHERE stream_id = :stream_id::integer AND stream_offset >= :start::bigint AND stream_offset < :stop::bigint
        AND {part_may_hold_offsets("r", ":stream_id::integer", ":start::bigint", ":stop::bigint")}
    GROUP BY stream_offset, key_id, value, time_us""")

_BLOCKS_OF: Final = sql("""
    SELECT first_offset, last_offset, min_us, max_us, width_class FROM relatum.time_blocks
    WHERE stream_id = :stream_id::integer AND first_offset < :stop::bigint AND last_offset >= :start::bigint""")

_REMOVED: Final = sql("SELECT key_id FROM relatum.keys WHERE removed_at IS NOT NULL")


class Stored:
    """The rows stored for a window, with the coverage and key definitions that determine the expected rows.

    `connection` must read from one snapshot, or hold the stream's locks.
    """

    def __init__(self, connection: sa.Connection, stream_id: int, window: Range) -> None:
        self.window = window
        wanted = {"stream_id": stream_id, "start": window[0], "stop": window[1]}
        self.rows = [(Row(*row), int(count)) for *row, count in connection.execute(_ROWS_OF, wanted)]
        self.blocks = [Block(*block) for block in connection.execute(_BLOCKS_OF, wanted)]
        rows = coverage_of(connection, [stream_id])
        self._covering = [row for row in rows if row.from_offset < window[1] and row.to_offset > window[0]]
        self.definitions = {definition.key_id: definition for definition in key_definitions(connection)}
        self.removed_key_ids = frozenset(connection.scalars(_REMOVED))

    def covers(self, offset: int, key_id: int) -> bool:
        """Return whether the offset is recorded for a key id, which may be `TIME`."""
        return any(row.from_offset <= offset < row.to_offset and row.holds(key_id) for row in self._covering)

    def proves(self, offset: int, key_id: int) -> bool:
        """Return whether each value of the key must have a row; False if the offset was recorded over AMQP 0.9.1."""
        return any(row.from_offset <= offset < row.to_offset and row.proves(key_id) for row in self._covering)

    def values(self, message: Message) -> Iterator[tuple[int, str]]:
        """Yield (key id, value) for each value of a message, recorded or not."""
        if not message.is_amqp:
            return
        base_of = bases_of(message)
        for key_id, definition in self.definitions.items():
            for value in definition.read(base_of)[0]:
                yield key_id, value


def compare_window(
    messages: Sequence[Message], later: Sequence[Message], stored: Stored, first_retained: int
) -> Iterator[Difference]:
    """Yield the differences between the table and a window's messages. `later` holds messages after the window."""
    yield from _compare_rows(messages, stored)
    yield from _compare_blocks([*messages, *later], stored, first_retained)


def _compare_rows(messages: Sequence[Message], stored: Stored) -> Iterator[Difference]:
    """Yield the differences between a window's rows and those its messages should have, by offset."""
    wanted, allowed = _wanted_rows(messages, stored)
    found = [("missing", row) for row in wanted - {row for row, _ in stored.rows}]
    for row, count in stored.rows:
        if row.key_id in stored.removed_key_ids:
            continue  # The next prune deletes the row.
        if row not in wanted and row not in allowed:
            found.append(("unsound", row))
        elif count > 1:
            found.append(("duplicate", row))
        elif not stored.covers(row.offset, row.key_id):
            found.append(("uncovered", row))
    for kind, row in sorted(found, key=lambda each: (each[1].offset, each[1].key_id, each[1].value, each[0])):
        definition = stored.definitions.get(row.key_id)
        name = f"#{row.key_id}" if definition is None else definition.name
        yield Difference(kind, row.offset, name, row.value, row.time_us)


def _wanted_rows(messages: Sequence[Message], stored: Stored) -> tuple[set[Row], set[Row]]:
    """Return rows that must exist, and rows that may exist."""
    wanted: set[Row] = set()
    allowed: set[Row] = set()
    for message in messages:
        for key_id, value in stored.values(message):
            offset, time_us = message.offset, message.time_us
            row = Row(offset, key_id, value, time_us)
            if stored.proves(offset, key_id):
                wanted.add(row)
                continue
            # Rows recorded over AMQP 0.9.1 may be incomplete, and may lack times.
            allowed.add(row)
            if message.time_source is TimeSource.CHUNK and stored.covers(offset, key_id):
                allowed.add(row._replace(time_us=None))
    return wanted, allowed


def _compare_blocks(messages: Sequence[Message], stored: Stored, first_retained: int) -> Iterator[Difference]:
    """Yield the differences between the time index and a window's messages, by offset."""
    counts = Counter(stored.blocks)
    start, end = stored.window
    timed = [(message.offset, message.time_us) for message in messages if message.time_us is not None]
    offsets = [offset for offset, _ in timed]
    messages_of: dict[Block, list[tuple[int, int]]] = {}
    blocks_of: dict[int, list[Block]] = {offset: [] for offset in offsets}
    for block in sorted(counts):
        between = timed[bisect_left(offsets, block.first_offset) : bisect_right(offsets, block.last_offset)]
        messages_of[block] = [each for each in between if block.min_us <= each[1] <= block.max_us]
        for offset, _ in messages_of[block]:
            blocks_of[offset].append(block)
    found = [
        Difference("time_missing", offset, "time", "", time_us, "time_blocks")
        for offset, time_us in timed
        if not blocks_of[offset] and start <= offset < end and stored.covers(offset, TIME)
    ]
    # A wrong block may include anything: only a message in two correct blocks is a duplicate.
    exact = {block for block in counts if _is_exact(block, messages_of[block], first_retained)}
    overlapping = {block for blocks in blocks_of.values() for block in [each for each in blocks if each in exact][1:]}
    for block, count in counts.items():
        # A block that begins before the first retained offset belongs to the first window.
        if not (start <= block.first_offset < end or block.first_offset < first_retained == start):
            continue
        wrong = {
            "time_wrong": block not in exact,
            "duplicate": block in exact and (count > 1 or block in overlapping),
            "uncovered": block in exact and not all(stored.covers(offset, TIME) for offset, _ in messages_of[block]),
        }
        at, stop, detail = block.first_offset, block.last_offset + 1, f"{tuple(block)}"
        kinds = [kind for kind, applies in wrong.items() if applies]
        found += [Difference(kind, at, "time", "", block.min_us, "time_blocks", stop, detail) for kind in kinds]
    yield from sorted(found, key=lambda each: (each.offset, each.kind, each.detail))


def _is_exact(block: Block, pairs: Sequence[tuple[int, int]], first_retained: int) -> bool:
    """Return whether a block exactly matches its (offset, time) pairs, as far as they are retained."""
    if not 0 < len(pairs) <= TIME_BLOCK_MESSAGES_MAX or block.last_offset != pairs[-1][0]:
        return False
    if block.width_class != width_class(block.max_us - block.min_us):
        return False
    if block.first_offset < first_retained:
        return block.first_offset >= 0
    times = [time_us for _, time_us in pairs]
    return (block.first_offset, block.min_us, block.max_us) == (pairs[0][0], min(times), max(times))


# --- the coverage -----------------------------------------------------------------------------------------------------


def compare_coverage(rows: Sequence[CoverageRow], first: int | None, last: int | None) -> Iterator[Difference]:
    """Yield differences for an invalid tail, and for ranges that contradict the stream's ends, if these are known.

    Overlapping ranges are valid: no lookup depends on disjoint ranges, and other comparisons detect duplicate rows.
    """
    for row in rows:
        if last is not None and row.to_offset > last + 1:
            yield _of_coverage(max(row.from_offset, last + 1), row.to_offset, "the stream ends earlier")
        if first is not None and row.kind == "hole" and row.to_offset > first:
            yield _of_coverage(max(row.from_offset, first), row.to_offset, "a hole where the stream has messages")
    if rows and not has_valid_tail(rows):
        end = max(row.to_offset for row in rows)
        yield _of_coverage(end, end, "the range that ends last is not the tail")


def _of_coverage(start: int, end: int, detail: str) -> Difference:
    return Difference("coverage", start, table="coverage", to_offset=end, detail=detail)


def has_valid_tail(rows: Sequence[CoverageRow]) -> bool:
    """Return whether exactly one range is the tail, and it ends last."""
    tails = [row for row in rows if row.is_tail]
    return len(tails) == 1 and tails[0].kind == "recorded" and tails[0].to_offset == max(row.to_offset for row in rows)
