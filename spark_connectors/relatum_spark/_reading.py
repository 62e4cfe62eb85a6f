"""What a task of the source does: reads its part of a stream and yields Arrow record batches."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import sqlalchemy as sa

from relatum import MessageId
from relatum.checks import seconds_text
from relatum.errors import InvalidRelationshipKey, OffsetExpired, OffsetNotFound, ReadTimeout, RelatumError
from relatum.keys import InvalidValue, KeyDefinition
from relatum.reading import Message, RecordBatch, StreamReader
from relatum.recording import Extractor, is_same
from relatum.store.catalog import current_stream
from relatum.store.coverage import coverage_of, covered, last_position, missing
from relatum.store.parts import may_hold_offsets
from relatum.store.tables import relationships
from relatum_spark._columns import ColumnBuilder, rows_of
from relatum_spark._offsets import Slice
from relatum_spark._options import SourceOptions

_log: Final = logging.getLogger("relatum.spark")


@dataclass(frozen=True)
class KeyFilter:
    """Messages that carry one of some canonical values of a key. Can be pickled."""

    definition: KeyDefinition
    values: frozenset[str]

    @classmethod
    def of(cls, definition: KeyDefinition, values: Iterable[Any]) -> "KeyFilter":
        """Return a filter for values as a caller gives them; raises `InvalidRelationshipKey`."""
        try:
            return cls(definition, frozenset(definition.canonical_query(value) for value in values))
        except InvalidValue as error:
            message = f"option keyValues: no message can carry one of these values of {definition.name!r}: {error}"
            raise InvalidRelationshipKey(message, key=definition.name, reason=error.reason.value) from error

    def passes(self, message: Message) -> bool:
        return not self.values.isdisjoint(self.definition.values_of(message))

    def passing(self, batch: RecordBatch) -> list[int]:
        """Return the rows of a batch that carry one of the values; only the key is decoded."""
        values = self.values
        extract, chunk_ms = Extractor([self.definition]).from_record, batch.chunk_ms
        found = (extract(record, chunk_ms).values for record in batch.records)
        return [row for row, pairs in enumerate(found) if any(value in values for _, value in pairs)]


def look_up(
    connection: sa.Connection, reader: StreamReader, wanted: Slice, only: KeyFilter, vhost: str
) -> tuple[tuple[int, ...], list[Slice]]:
    """Return the offsets in a range that the table names for a filter, and the parts it cannot answer for.

    Offsets that are not recorded for the key are such parts, so the answer is right however far the table is behind;
    the whole range is one where the stream is not the one that was recorded. The connection must see one state of the
    database (REPEATABLE READ).
    """
    row = current_stream(connection, vhost, wanted.stream)
    ranges = [] if row is None else coverage_of(connection, [row.stream_id])
    position = last_position(ranges)
    if row is None or (
        position is not None and not is_same(reader, wanted.stream, position, reader.bounds(wanted.stream))
    ):
        return (), [wanted]
    unknown = missing((wanted.start, wanted.stop), covered(ranges, only.definition.key_id))
    statement = (
        sa.select(relationships.c.stream_offset)
        .distinct()
        .where(
            relationships.c.key_id == only.definition.key_id,
            relationships.c.value == sa.any_(sa.literal(sorted(only.values), sa.ARRAY(sa.Text))),
            relationships.c.stream_id == row.stream_id,
            relationships.c.stream_offset >= wanted.start,
            relationships.c.stream_offset < wanted.stop,
            may_hold_offsets(row.stream_id, wanted.start, wanted.stop),
        )
        .order_by(relationships.c.stream_offset)
    )
    offsets = connection.execute(statement).scalars()
    # Rows may lie in ranges that are not recorded (yet, or of a key defined again): those ranges are read anyway.
    inside = tuple(offset for offset in offsets if not any(start <= offset < stop for start, stop in unknown))
    return inside, [Slice(wanted.stream, start, stop) for start, stop in unknown]


@dataclass(frozen=True, slots=True)
class Part:
    """What one task reads: a range of a stream, or only those of its offsets that the table names."""

    wanted: Slice
    offsets: tuple[int, ...] | None = None


def read_part(
    options: SourceOptions, keys: Sequence[KeyDefinition], part: Part, *, only: KeyFilter | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part, read over a connection of its own; `keys` are those of `options.keys`.

    Raises:
        OffsetExpired: retention has dropped some of it, and `failOnDataLoss` is true.
        ReadTimeout: the broker gave nothing in time; safe to repeat, as all transient errors are.
    """
    columns = ColumnBuilder(value=options.include_value, headers=options.include_headers, keys=keys)
    with options.broker.open() as reader:
        if part.offsets is not None:
            yield from _picked(reader, options, part, columns, only)
            return
        found = read_slice(
            reader, part.wanted, poll_timeout_s=options.poll_timeout_s, is_loss_logged=not options.fail_on_data_loss
        )
        passing = found if only is None else _filtered(found, only)
        yield from columns.batches(passing, rows_max=options.batch_rows, bytes_max=options.batch_bytes)


def _filtered(batches: Iterable[RecordBatch], only: KeyFilter) -> Iterator[RecordBatch]:
    for batch in batches:
        if rows := only.passing(batch):
            yield batch if len(rows) == len(batch) else rows_of(batch, rows)


def _picked(
    reader: StreamReader, options: SourceOptions, part: Part, columns: ColumnBuilder, only: KeyFilter | None
) -> Iterator[pa.RecordBatch]:
    """Yield the messages at the part's offsets that pass the filter: what the table says is checked."""
    ids = [MessageId(part.wanted.stream, offset) for offset in part.offsets or ()]
    for place, found in zip(ids, reader.read_many(ids), strict=True):
        if isinstance(found, RelatumError):
            if options.fail_on_data_loss or not isinstance(found, OffsetNotFound):
                raise found
            _log_loss(Slice(place.stream, place.offset, place.offset + 1), found)
        elif only is None or only.passes(found):
            columns.add_message(found)
            if len(columns) >= options.batch_rows or columns.bytes >= options.batch_bytes:
                yield columns.take()
    if len(columns):
        yield columns.take()


# --- ranges -----------------------------------------------------------------------------------------------


def read_slice(
    reader: StreamReader, wanted: Slice, *, poll_timeout_s: float, is_loss_logged: bool = False
) -> Iterator[RecordBatch]:
    """Yield the records of a slice in batches, ascending.

    Streams in good health have gaps; offsets count as lost where the broker says that the stream begins behind them.
    It moves a reader forward without a word, at the start as in the middle. With `is_loss_logged` a loss is a warning,
    and reading goes on behind it.

    Raises:
        OffsetExpired: retention has dropped a part; `first` is the first offset retained. What lies before was given.
        OffsetNotFound: the stream ends before the slice does: it was declared again, or lost its tail.
        ReadTimeout: nothing came for `poll_timeout_s`; safe to repeat, as the transient errors of `StreamReader` are.
    """
    expected = before = wanted.start
    while expected < wanted.stop:
        # A scan ends where the stream ended when it began; more may have come before the slice's stop since.
        batches = reader.batches(wanted.stream, expected, stop=wanted.stop, follow=False, idle_s=poll_timeout_s)
        with contextlib.closing(batches):
            for batch in batches:
                if batch is None:
                    raise ReadTimeout(f"the stream {wanted.stream!r} gave nothing for {seconds_text(poll_timeout_s)}")
                if batch.first_offset > expected:
                    _is_lost(reader, Slice(wanted.stream, expected, batch.first_offset), is_loss_logged)
                expected = batch.last_offset + 1
                yield batch
        if expected < wanted.stop:
            is_lost = _is_lost(reader, Slice(wanted.stream, expected, wanted.stop), is_loss_logged)
            if is_lost or expected == before:
                return
        before = expected


def _is_lost(reader: StreamReader, gap: Slice, is_loss_logged: bool) -> bool:
    """Whether a gap is one of lost offsets, which is an error or logged; a stream in good health has others."""
    error = _why_lost(reader, gap)
    if error is None:
        return False
    if not is_loss_logged:
        raise error
    _log_loss(gap, error)
    return True


def _why_lost(reader: StreamReader, gap: Slice) -> OffsetNotFound | None:
    stream, start, stop = gap.stream, gap.start, gap.stop
    first, last = reader.bounds(stream)
    if first is None or last is None:
        message = f"the stream {stream!r} is empty: its offsets {start} to {stop - 1} are gone"
        return OffsetExpired(message, stream=stream, offset=start, first=stop)
    if first > start:
        message = (
            f"retention has dropped the offsets {start} to {min(first, stop) - 1} of the stream {stream!r}; "
            f"the first one available is {first}"
        )
        return OffsetExpired(message, stream=stream, offset=start, first=first)
    if last < start:
        message = f"the stream {stream!r} ends at offset {last}, before {start}: it was declared again or lost its tail"
        return OffsetNotFound(message, stream=stream, offset=start)
    return None


def _log_loss(lost: Slice, error: OffsetNotFound) -> None:
    _log.warning("offsets %d to %d of %s are lost, reading goes on: %s", lost.start, lost.stop - 1, lost.stream, error)
