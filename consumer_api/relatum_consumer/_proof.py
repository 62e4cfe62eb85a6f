"""What it takes to say that there is none: every message the streams retain was recorded for the keys asked by.

The order of the steps is the argument. The streams' ends are taken from the broker first, the coverage from the
database after that, and the index is probed once more after both: whatever lay in the streams when the ends were taken
is then either in an uncovered range or in the index.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relatum._ids import MessageId
from relatum.errors import OffsetExpired, OffsetNotFound, RelatumError, StreamNotFound, StreamReplaced
from relatum.reading import Message, StreamBounds
from relatum.store import CoverageRow, Position, Range, covered, last_position, merged, missing
from relatum.wire._identity import fingerprint
from relatum_consumer import _statements as statements
from relatum_consumer._catalog import Catalog, PresentStream
from relatum_consumer._requests import Bounds, Partitions, Read, Select, Steps


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Offsets from `start` to before `stop` of a stream that are retained and not recorded as asked."""

    stream: str
    start: int
    stop: int


def uncovered(catalog: Catalog, names: Sequence[str] | None, key_ids: Iterable[int]) -> Steps[list[Uncovered]]:
    """The retained ranges of the streams meant that are not recorded for each of the keys.

    Args:
        catalog: Of the database.
        names: Streams and super streams, which stand for their partitions; None for all that are recorded.
        key_ids: The keys that must be recorded; `relatum.store.TIME` for times.

    Raises:
        StreamNotFound: a named stream is unknown to the database and to the broker, or was deleted.
        StreamReplaced: what lies at the last recorded offset is not what was recorded there.
    """
    recorded = yield from catalog.streams(names)
    ends: dict[str, StreamBounds] = {}
    for stream in (yield from all_names(recorded, names)):
        try:
            ends[stream] = yield Bounds(stream)
        except StreamNotFound:
            if names is not None:
                raise
            # A stream that was recorded once and is gone holds nothing.
    ranges = yield from coverage_by_stream(recorded)
    keys = tuple(key_ids)
    result: list[Uncovered] = []
    by_name = {stream.name: stream.stream_id for stream in recorded}
    for stream, bounds in ends.items():
        rows = ranges.get(by_name.get(stream, 0), [])
        yield from _check_identity(stream, rows, bounds)
        result += [Uncovered(stream, *gap) for gap in gaps(bounds, rows, keys)]
    return result


def gaps(bounds: StreamBounds, rows: Sequence[CoverageRow], key_ids: Iterable[int]) -> list[Range]:
    """The retained offsets that are not recorded for every one of the keys."""
    first, last = bounds
    if first is None or last is None:
        return []
    retained = (first, last + 1)
    return merged(gap for key_id in key_ids for gap in missing(retained, covered(rows, key_id)))


def all_names(recorded: Sequence[PresentStream], names: Sequence[str] | None) -> Steps[list[str]]:
    """The streams meant: those recorded, and named ones or partitions of named super streams that are not."""
    found = {stream.name for stream in recorded}
    for name in names or ():
        if name not in found:
            partitions = yield Partitions(name)
            supers = {stream.super_stream for stream in recorded}
            found.update(partitions or (() if name in supers else (name,)))
    return sorted(found)


def coverage_by_stream(recorded: Sequence[PresentStream]) -> Steps[dict[int, list[CoverageRow]]]:
    """What is recorded of streams, by their numbers, in the order of offsets."""
    ids = [stream.stream_id for stream in recorded]
    rows = yield Select(statements.coverage_rows(), {"stream_ids": ids})
    ranges: dict[int, list[CoverageRow]] = defaultdict(list)
    for values in rows:
        row = CoverageRow(**dict(zip(statements.COVERAGE_COLUMNS, values, strict=True)))
        ranges[row.stream_id].append(row)
    return ranges


def _check_identity(stream: str, rows: Sequence[CoverageRow], bounds: StreamBounds) -> Steps[None]:
    """See that the stream is the one that was recorded, by what lies at the last recorded offset."""
    position = last_position(rows)
    if position is None:
        return
    if bounds.first is not None and position.offset < bounds.first:
        # Retention has dropped it; then it has dropped all that was recorded, and nothing is answered from that.
        return
    (found,) = yield Read([MessageId(stream, position.offset)])
    if isinstance(found, OffsetExpired):
        return
    if isinstance(found, OffsetNotFound):
        raise replaced(stream, position.offset) from found
    if isinstance(found, RelatumError):
        raise found
    if not agrees(position, found):
        raise replaced(stream, position.offset)


def agrees(position: Position, message: Message) -> bool:
    """Whether a message is the one that was recorded at a position."""
    return position.agrees(fingerprint(message.properties.message_id, message.body), message.chunk_ms)


def replaced(stream: str, offset: int) -> StreamReplaced:
    """The error for a stream that is not the one that was recorded."""
    return StreamReplaced(
        f"the stream {stream!r} is not the one that was recorded: at offset {offset} lies something else, or nothing. "
        "It was declared again, or lost its tail; a recorder puts that right",
        stream=stream,
        offset=offset,
    )
