"""What a task of a batch does: reads its part of a stream and gives Arrow record batches."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from relatum import MessageId
from relatum.errors import NotFound, OffsetNotFound, RelatumError
from relatum.keys import KeyDefinition
from relatum.reading import RecordBatch, StreamReader
from relatum_spark._columns import ColumnBuilder
from relatum_spark._keyfilter import KeyFilter
from relatum_spark._offsets import Slice
from relatum_spark._options import SourceOptions
from relatum_spark._reading import read_slice
from relatum_spark._schema import arrow_schema

_log: Final = logging.getLogger("relatum.spark")


@dataclass(frozen=True, slots=True)
class Part:
    """What one task reads.

    Attributes:
        wanted: A range of a stream.
        offsets: The offsets in it that the table names; None to read all of it.
    """

    wanted: Slice
    offsets: tuple[int, ...] | None = None


def read_part(
    options: SourceOptions, keys: Sequence[KeyDefinition], part: Part, *, only: KeyFilter | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a part, over a connection of its own.

    Args:
        options: The options of the read.
        keys: The definitions of the key columns, in the order of `options.keys`.
        part: What to read.
        only: The filter that a message must pass; None for none.

    Raises:
        OffsetExpired: Retention has dropped a part, and `failOnDataLoss` is true.
        ReadTimeout: The broker gave nothing in time; safe to repeat, as all transient errors are.
    """
    schema = arrow_schema(value=options.include_value, headers=options.include_headers, keys=options.keys)
    columns = ColumnBuilder(schema, keys=keys)
    with options.broker.open() as reader:
        if part.offsets is None:
            found = _through(reader, options, part.wanted)
            passing = found if only is None else _filtered(found, only)
            yield from record_batches(columns, passing, rows_max=options.batch_rows, bytes_max=options.batch_bytes)
        else:
            yield from _picked(reader, options, part, columns, only)


def record_batches(
    columns: ColumnBuilder, batches: Iterable[RecordBatch], *, rows_max: int, bytes_max: int
) -> Iterator[pa.RecordBatch]:
    """Arrow record batches of a stream's batches, capped by rows, and by bytes unless one record has more.

    Args:
        columns: Where to build them; it is empty, and is empty again at the end.
        batches: What to build from.
        rows_max: Rows of one Arrow batch.
        bytes_max: Bytes of the records in one.
    """
    for batch in batches:
        for piece, size in _pieces(batch, rows_max, bytes_max):
            if len(columns) and (len(columns) + len(piece) > rows_max or columns.bytes + size > bytes_max):
                yield columns.take()
            columns.add_batch(piece)
    if len(columns):
        yield columns.take()


def _pieces(batch: RecordBatch, rows_max: int, bytes_max: int) -> Iterator[tuple[RecordBatch, int]]:
    """A batch in pieces within the caps, each with its size; nearly always the batch itself."""
    total = sum(map(len, batch.records))
    if len(batch) <= rows_max and total <= bytes_max:
        yield batch, total
        return
    start = held = 0
    for row, size in enumerate(map(len, batch.records)):
        if row > start and (row - start >= rows_max or held + size > bytes_max):
            yield _cut(batch, range(start, row)), held
            start, held = row, 0
        held += size
    yield _cut(batch, range(start, len(batch))), held


def _cut(batch: RecordBatch, rows: Sequence[int]) -> RecordBatch:
    """Some rows of a batch, at least one."""
    return replace(
        batch,
        first_offset=batch.offsets[rows[0]],
        offsets=[batch.offsets[row] for row in rows],
        records=[batch.records[row] for row in rows],
    )


def _filtered(batches: Iterable[RecordBatch], only: KeyFilter) -> Iterator[RecordBatch]:
    """The records that pass the filter."""
    for batch in batches:
        rows = only.passing(batch)
        if rows:
            yield batch if len(rows) == len(batch) else _cut(batch, rows)


def _through(reader: StreamReader, options: SourceOptions, wanted: Slice) -> Iterator[RecordBatch]:
    on_loss = None if options.fail_on_data_loss else log_loss
    return read_slice(reader, wanted, poll_timeout_s=options.poll_timeout_s, on_loss=on_loss)


def _picked(
    reader: StreamReader, options: SourceOptions, part: Part, columns: ColumnBuilder, only: KeyFilter | None
) -> Iterator[pa.RecordBatch]:
    """The messages at the part's offsets that pass the filter: what the table says is checked."""
    stream = part.wanted.stream
    ids = [MessageId(stream, offset) for offset in part.offsets or ()]
    for place, found in zip(ids, reader.read_many(ids), strict=True):
        if isinstance(found, RelatumError):
            _settle(found, Slice(stream, place.offset, place.offset + 1), options)
        elif only is None or only.passes(found):
            columns.add_message(found)
            if len(columns) >= options.batch_rows or columns.bytes >= options.batch_bytes:
                yield columns.take()
    if len(columns):
        yield columns.take()


def _settle(error: RelatumError, lost: Slice, options: SourceOptions) -> None:
    if options.fail_on_data_loss or not isinstance(error, OffsetNotFound):
        raise error
    log_loss(lost, error)


def log_loss(lost: Slice, error: NotFound) -> None:
    """Say what is lost, and go on."""
    _log.warning("offsets %d to %d of %s are lost, reading goes on: %s", lost.start, lost.stop - 1, lost.stream, error)
