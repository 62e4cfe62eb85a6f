"""The tasks of the source: read a part of a stream and yield Arrow record batches."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from relatum import MessageId
from relatum.checks import seconds_text
from relatum.errors import InvalidRelationshipKey, OffsetNotFound, ReadTimeout, RelatumError
from relatum.keys import InvalidValue, KeyDefinition
from relatum.reading import Message, RecordBatch, StreamReader
from relatum.recording.extractor import Extractor
from relatum_spark._columns import ColumnBuilder, rows_of
from relatum_spark._options import SourceOptions
from relatum_spark._planning import Slice, lose_range

_log: Final = logging.getLogger("relatum.spark")


@dataclass(frozen=True)
class KeyFilter:
    """A filter for messages with one of several canonical values of a key. Can be pickled."""

    definition: KeyDefinition
    values: frozenset[str]

    @classmethod
    def of(cls, definition: KeyDefinition, values: Iterable[Any]) -> "KeyFilter":
        """Return a filter for values in the caller's form; raises `InvalidRelationshipKey` if one is invalid."""
        try:
            return cls(definition, frozenset(definition.canonical_query(value) for value in values))
        except InvalidValue as error:
            message = f"option keyValues: no message can have one of these values of {definition.name!r}: {error}"
            raise InvalidRelationshipKey(message, key=definition.name, reason=error.reason.value) from error

    def passes(self, message: Message) -> bool:
        return not self.values.isdisjoint(self.definition.values_of(message))

    def passing(self, batches: Iterable[RecordBatch]) -> Iterator[RecordBatch]:
        """Yield the records with one of the values; only the key is decoded."""
        values, extract = self.values, Extractor([self.definition]).from_record
        for batch in batches:
            found = (extract(record, batch.chunk_ms).values for record in batch.records)
            rows = [row for row, pairs in enumerate(found) if any(value in values for _, value in pairs)]
            if rows:
                yield batch if len(rows) == len(batch) else rows_of(batch, rows)


def read_slice(
    options: SourceOptions, keys: Sequence[KeyDefinition], wanted: Slice | None, only: KeyFilter | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a slice over a connection of its own; `keys` are the definitions of `options.keys`.

    If there are no partitions, Spark calls this once with None.

    Raises:
        OffsetExpired: retention has dropped a part of the slice, and `failOnDataLoss` is true.
        ReadTimeout: the broker sent nothing in time; safe to retry, as all transient errors are.
    """
    if wanted is None:
        return
    columns = ColumnBuilder(value=options.include_value, headers=options.include_headers, keys=keys)
    with options.open_reader() as reader:
        if wanted.offsets is not None:
            yield from _picked(reader, options, wanted, columns, only)
            return
        found = _scanned(reader, wanted, options)
        passing = found if only is None else only.passing(found)
        yield from columns.batches(passing, rows_max=options.batch_rows, bytes_max=options.batch_bytes)


def _picked(
    reader: StreamReader, options: SourceOptions, wanted: Slice, columns: ColumnBuilder, only: KeyFilter | None
) -> Iterator[pa.RecordBatch]:
    """Yield the messages at a slice's offsets that pass the filter, which checks the table's answer."""
    ids = [MessageId(wanted.stream, offset) for offset in wanted.offsets or ()]
    for place, found in zip(ids, reader.read_many(ids), strict=True):
        if isinstance(found, RelatumError):
            if options.fail_on_data_loss or not isinstance(found, OffsetNotFound):
                raise found
            _log.warning("offset %d of %s is lost, reading continues: %s", place.offset, place.stream, found)
        elif only is None or only.passes(found):
            columns.add_message(found)
            if len(columns) >= options.batch_rows or columns.bytes >= options.batch_bytes:
                yield columns.take()
    if len(columns):
        yield columns.take()


def _scanned(reader: StreamReader, wanted: Slice, options: SourceOptions) -> Iterator[RecordBatch]:
    """Yield the records of a slice in batches, ascending.

    The broker silently moves a reader past missing offsets, at the start as in the middle, and healthy streams have
    gaps. So offsets are lost only if the stream's bounds exclude them. With `failOnDataLoss`, a loss is an error after
    the earlier messages were yielded; otherwise it is a warning, and reading continues after it.
    """
    expected = before = wanted.start
    while expected < wanted.stop:
        # A scan ends where the stream ended when the scan began; more messages of the slice may have arrived since.
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
    """Whether the offsets of a gap are lost, which is then raised or logged; healthy streams have other gaps."""
    first, last = reader.bounds(gap.stream)
    if first is None or last is None:
        lose_range(options, gap, "the stream is empty", first=gap.stop)
    elif first > gap.start:
        dropped = Slice(gap.stream, gap.start, min(first, gap.stop))
        lose_range(options, dropped, "retention has dropped them", first=first)
    elif last < gap.start:
        lose_range(options, gap, f"the stream ends at offset {last}; it was declared again or lost its tail")
    else:
        return False
    return True
