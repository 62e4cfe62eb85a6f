"""What a task of the source does: reads its part of a stream and yields Arrow record batches."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from relatum import MessageId
from relatum.checks import seconds_text
from relatum.errors import InvalidRelationshipKey, OffsetExpired, OffsetNotFound, ReadTimeout, RelatumError
from relatum.keys import InvalidValue, KeyDefinition
from relatum.reading import Message, RecordBatch, StreamReader
from relatum.recording.extractor import Extractor
from relatum_spark._columns import ColumnBuilder, rows_of
from relatum_spark._options import SourceOptions
from relatum_spark._planning import Slice, expired

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

    def passing(self, batches: Iterable[RecordBatch]) -> Iterator[RecordBatch]:
        """Yield the records that carry one of the values; only the key is decoded."""
        values, extract = self.values, Extractor([self.definition]).from_record
        for batch in batches:
            found = (extract(record, batch.chunk_ms).values for record in batch.records)
            rows = [row for row, pairs in enumerate(found) if any(value in values for _, value in pairs)]
            if rows:
                yield batch if len(rows) == len(batch) else rows_of(batch, rows)


@dataclass(frozen=True, slots=True)
class Part:
    """What one task reads: a range of a stream, or only those of its offsets that the table names."""

    wanted: Slice
    offsets: tuple[int, ...] | None = None


def read_part(
    options: SourceOptions, keys: Sequence[KeyDefinition], part: Part | None, *, only: KeyFilter | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a part, read over a connection of its own; `keys` are those of `options.keys`.

    Where there are no partitions Spark reads None, once.

    Raises:
        OffsetExpired: retention has dropped some of it, and `failOnDataLoss` is true.
        ReadTimeout: the broker gave nothing in time; safe to repeat, as all transient errors are.
    """
    if part is None:
        return
    columns = ColumnBuilder(value=options.include_value, headers=options.include_headers, keys=keys)
    with options.open_reader() as reader:
        if part.offsets is not None:
            yield from _picked(reader, options, part, columns, only)
            return
        found = _read_slice(reader, part.wanted, options)
        passing = found if only is None else only.passing(found)
        yield from columns.batches(passing, rows_max=options.batch_rows, bytes_max=options.batch_bytes)


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


def _read_slice(reader: StreamReader, wanted: Slice, options: SourceOptions) -> Iterator[RecordBatch]:
    """Yield the records of a slice in batches, ascending.

    Streams in good health have gaps; offsets count as lost where the broker says that the stream begins behind them.
    It moves a reader forward without a word, at the start as in the middle. With `failOnDataLoss` a loss is an error,
    after what lies before it was given; else a warning, and reading goes on behind it.
    """
    expected = before = wanted.start
    while expected < wanted.stop:
        # A scan ends where the stream ended when it began; more may have come before the slice's stop since.
        batches = reader.batches(wanted.stream, expected, stop=wanted.stop, follow=False, idle_s=options.poll_timeout_s)
        with contextlib.closing(batches):
            for batch in batches:
                if batch is None:
                    silence = seconds_text(options.poll_timeout_s)
                    raise ReadTimeout(f"the stream {wanted.stream!r} gave nothing for {silence}")
                if batch.first_offset > expected:
                    _is_lost(reader, Slice(wanted.stream, expected, batch.first_offset), options)
                expected = batch.last_offset + 1
                yield batch
        rest = Slice(wanted.stream, expected, wanted.stop)
        if len(rest) and (_is_lost(reader, rest, options) or expected == before):
            return
        before = expected


def _is_lost(reader: StreamReader, gap: Slice, options: SourceOptions) -> bool:
    """Whether a gap is one of lost offsets, which is an error or logged; a stream in good health has others."""
    first, last = reader.bounds(gap.stream)
    error: OffsetNotFound
    if first is None or last is None:
        message = f"the stream {gap.stream!r} is empty: its offsets {gap.start} to {gap.stop - 1} are gone"
        error = OffsetExpired(message, stream=gap.stream, offset=gap.start, first=gap.stop)
    elif first > gap.start:
        error = expired(Slice(gap.stream, gap.start, min(first, gap.stop)), first)
    elif last < gap.start:
        ended = f"the stream {gap.stream!r} ends at offset {last}, before {gap.start}"
        error = OffsetNotFound(f"{ended}: it was declared again or lost its tail", stream=gap.stream, offset=gap.start)
    else:
        return False
    if options.fail_on_data_loss:
        raise error
    _log_loss(gap, error)
    return True


def _log_loss(lost: Slice, error: OffsetNotFound) -> None:
    _log.warning("offsets %d to %d of %s are lost, reading goes on: %s", lost.start, lost.stop - 1, lost.stream, error)
