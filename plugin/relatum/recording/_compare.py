"""What the table should hold of messages, and where it differs. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from relatum.keys import InvalidValue, KeyDefinition
from relatum.reading import Message, TimeSource
from relatum.recording._ranges import unrecorded
from relatum.store import TIME, CoverageRow

DIFFERENCES_MAX: Final = 1_000
"""Differences listed for one stream; more are counted."""

Row = tuple[int, int, str, int | None]
"""Offset, key id, canonical value, time in microseconds."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One row or message on which table and stream disagree.

    `kind` is `missing` (a message's value has no row), `unsound` (a row's message has no such value, or there is no
    such message), `duplicate` (a row is there more than once), `time_missing` (no block of the time index holds the
    message) or `replaced` (the stream is not the one that was recorded).
    """

    kind: str
    offset: int
    key: str = ""
    value: str = ""
    time_us: int | None = None


@dataclass(slots=True)
class StreamVerified:
    """What was compared of one stream, and where it differs."""

    stream: str
    messages: int = 0
    rows: int = 0
    from_offset: int = 0
    to_offset: int = 0
    differences: list[Difference] = field(default_factory=list)
    difference_count: int = 0

    def add(self, difference: Difference) -> None:
        """Count a difference, and list it while there is room."""
        self.difference_count += 1
        if len(self.differences) < DIFFERENCES_MAX:
            self.differences.append(difference)

    def merge(self, part: "StreamVerified") -> None:
        """Add what was found in a later part of the stream."""
        self.messages += part.messages
        self.rows += part.rows
        self.difference_count += part.difference_count
        self.differences += part.differences[: DIFFERENCES_MAX - len(self.differences)]


class Expected:
    """What the table should hold of a message, by the definitions in force and what the coverage says of its offset."""

    def __init__(self, definitions: Sequence[KeyDefinition], covering: Sequence[CoverageRow]) -> None:
        self.definitions = {definition.key_id: definition for definition in definitions}
        everything = (0, max((row.to_offset for row in covering), default=0))
        self._gaps = unrecorded(covering, everything, [*self.definitions, TIME])
        self._over_amqp = [(row.from_offset, row.to_offset) for row in covering if row.over_amqp]

    def time(self, message: Message) -> int | None:
        """The time the table should have. AMQP 0.9.1 does not show a chunk's, so what it recorded may lack it."""
        if message.time_source is TimeSource.CHUNK and any(
            start <= message.offset < end for start, end in self._over_amqp
        ):
            return None
        return message.time_us

    def covers(self, offset: int, key_id: int) -> bool:
        """Whether the offset is recorded for the key."""
        return not any(gap.from_offset <= offset < gap.to_offset and key_id in gap.key_ids for gap in self._gaps)

    def rows(self, message: Message) -> Iterator[Row]:
        """The rows the message should have."""
        if not message.is_amqp:
            return
        for key_id, definition in self.definitions.items():
            if not self.covers(message.offset, key_id):
                continue
            try:
                value = definition.value_of(message.headers, lambda name: getattr(message.properties, name))
            except InvalidValue:
                continue
            if value is not None:
                yield message.offset, key_id, value, self.time(message)


def compare_rows(messages: Sequence[Message], rows: Sequence[Row], expected: Expected, result: StreamVerified) -> None:
    """Add where the rows of a window are not those its messages should have."""
    wanted = {row for message in messages for row in expected.rows(message)}
    stored = Counter(row for row in rows if row[1] in expected.definitions)
    for row in sorted(wanted - stored.keys(), key=_order):
        result.add(_difference("missing", row, expected))
    for row, count in sorted(stored.items(), key=lambda item: _order(item[0])):
        if row not in wanted:
            result.add(_difference("unsound", row, expected))
        elif count > 1:
            result.add(_difference("duplicate", row, expected))


def _order(row: Row) -> tuple[int, int, str]:
    """Rows in the order of offsets; a time may be None, so it takes no part."""
    return row[:3]


def _difference(kind: str, row: Row, expected: Expected) -> Difference:
    offset, key_id, value, time_us = row
    return Difference(kind, offset, expected.definitions[key_id].name, value, time_us)


def compare_times(
    messages: Sequence[Message],
    blocks: Sequence[tuple[int, int, int, int]],
    expected: Expected,
    result: StreamVerified,
) -> None:
    """Each message's time must lie in a block that holds its offset. Blocks and messages are both walked in order."""
    waiting = sorted(blocks, reverse=True)
    active: list[tuple[int, int, int, int]] = []
    for message in messages:
        while waiting and waiting[-1][0] <= message.offset:
            active.append(waiting.pop())
        active = [block for block in active if block[1] >= message.offset]
        time_us = expected.time(message)
        if time_us is None or not expected.covers(message.offset, TIME):
            continue
        if not any(low <= time_us <= high for _, _, low, high in active):
            result.add(Difference("time_missing", message.offset, "time", "", time_us))
