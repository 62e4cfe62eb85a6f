"""Reading streams: their bounds, slices of their offsets, and the rows of a slice."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeVar

import pyarrow as pa

from relatum.common.checks import seconds_text
from relatum.common.ids import MessageId
from relatum.common.waiting import Outages, backoff
from relatum.errors import (
    ConnectionLost,
    InvalidInput,
    InvalidRelationshipKey,
    OffsetExpired,
    OffsetNotFound,
    ReadTimeout,
    RelatumError,
    StreamNotFound,
    Transient,
    UndecodableMessage,
)
from relatum.keys import InvalidValue, KeyDefinition, moment
from relatum.reading import RecordBatch, StreamBounds, StreamReader, UnreadableRecord, leaders_bounds
from relatum.reading.extractor import Extractor
from relatum_spark._columns import ColumnBuilder, batch_of, rows_of
from relatum_spark._options import EARLIEST, LATEST, Options, Place, SourceOptions
from relatum_spark._servers import open_reader

_log: Final = logging.getLogger("relatum.spark")

_PAUSE_S_MAX: Final = 2.0
"""Maximum seconds between two attempts to reach an unavailable broker."""

_CONFIRM_PAUSE_S: Final = 0.1
"""Seconds between two queries that confirm the bounds of a stream."""

_CONFIRM_S: Final = 2.0
"""Seconds for which a stream must stay missing, empty or shorter before a loss is reported: a broker that just started,
or a lagging replica, may report this of healthy streams."""

_OUTAGE_PART: Final = "querying the ends of streams"

_Result = TypeVar("_Result")


class StreamQueries:
    """Queries a broker over one connection, which stays open; retries for `retry_s` while the broker is unavailable."""

    def __init__(self, options: Options, *, retry_s: float = 0.0) -> None:
        self._options = options
        self._retry_s = retry_s
        self._reader: StreamReader | None = None
        self._outages = Outages(_log, broker=str(options.broker))

    def run(self, query: Callable[[StreamReader], _Result]) -> _Result:
        """Return the answer to a query; raises `Transient` if the broker is unavailable for `retry_s` seconds."""
        limit, pauses = time.monotonic() + self._retry_s, backoff(_PAUSE_S_MAX)
        while True:
            pause_s = next(pauses)
            try:
                if self._reader is None:
                    self._reader = open_reader(self._options.broker, self._options.timeout_s)
                answer = query(self._reader)
            except Transient as error:
                self.close()
                if time.monotonic() + pause_s > limit:
                    self._outages.forget(_OUTAGE_PART)
                    raise
                self._outages.failed(_OUTAGE_PART, error)
                time.sleep(pause_s)
            else:
                self._outages.over(_OUTAGE_PART)
                return answer

    def streams(self, known: Iterable[str] = ()) -> list[str]:
        """Return the streams that the options name; raises `StreamNotFound` if a super stream does not exist.

        `known` are streams that were read before. They are included even after their removal from the super stream.
        """
        name = self._options.super_stream
        if name is None:
            return list(self._options.streams)
        found = list(dict.fromkeys((*self.run(lambda reader: reader.partitions(name)), *known)))
        if not found:
            raise StreamNotFound(f"there is no super stream {name!r}: declare it, or correct the option", stream=name)
        return found

    def bounds(self, stream: str, *, read_to: int | None = None) -> StreamBounds | None:
        """Return the first and the last offset; None if the stream does not exist.

        If the stream is missing or ends before `read_to`, the query is repeated for `_CONFIRM_S`.
        """
        short_since: float | None = None
        while True:
            found: StreamBounds | None = None
            with suppress(StreamNotFound):
                found = self.run(lambda reader: _bounds_of(reader, stream, read_to or 0))
            if read_to is None or (found is not None and found.end >= read_to):
                return found
            now = time.monotonic()
            if short_since is None:
                short_since = now
            elif now - short_since > _CONFIRM_S:
                return found
            self.close()
            time.sleep(_CONFIRM_PAUSE_S)

    def existing(self, stream: str, bounds: StreamBounds | None) -> StreamBounds:
        """Return the bounds, or raise `StreamNotFound`, with a hint if the name belongs to a super stream."""
        if bounds is not None:
            return bounds
        partitions: list[str] = []
        with suppress(RelatumError):
            partitions = self.run(lambda reader: reader.partitions(stream))
        hint = "give this super stream as the option superStream" if partitions else "declare it, or correct its name"
        raise StreamNotFound(f"there is no stream {stream!r}: {hint}", stream=stream)

    def offset_of(self, stream: str, place: Place, bounds: StreamBounds, *, is_latest_allowed: bool) -> int | None:
        """Return the offset of a place in a stream; None for the end of the stream."""
        number = place.number if isinstance(place.number, int) else place.number[stream]
        if not place.is_moment:
            return None if number == LATEST else (bounds.first or 0) if number == EARLIEST else number
        since = moment(number * 1000)
        message = self.run(lambda reader: next(reader.iterate(stream, since), None))
        if message is not None:
            # It may have been published since the bounds were queried.
            return min(message.offset, bounds.end)
        if is_latest_allowed:
            return None
        raise InvalidInput(
            f"nothing was written to the stream {stream!r} at or after {since}; set"
            " startingOffsetsByTimestampStrategy to latest to begin at its end"
        )

    def close(self) -> None:
        """Close the connection; the next query opens a new one."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def _bounds_of(reader: StreamReader, stream: str, read_to: int) -> StreamBounds:
    """Return a stream's bounds; if it ends before `read_to`, those of its leader. An empty stream is no error."""
    bounds = reader.bounds(stream)
    return bounds if bounds.last is None or bounds.end >= read_to else leaders_bounds(reader, stream)


def report_loss(options: SourceOptions, kind: Callable[..., RelatumError], message: str, **fields: Any) -> None:
    """Raise an error about lost messages, or log it if `failOnDataLoss` is false."""
    if options.fail_on_data_loss:
        raise kind(f"{message}; set failOnDataLoss to false to continue despite the loss", **fields)
    _log.warning("reading continues after a loss: %s", message)


def report_lost_range(options: SourceOptions, lost: "Slice", reason: str, *, first: int | None = None) -> None:
    """Report the loss of offsets; `first` is the first available offset if retention has dropped them."""
    message = f"offsets {lost.start} to {lost.stop - 1} of {lost.stream} are lost: {reason}"
    if first is None:
        report_loss(options, OffsetNotFound, message, stream=lost.stream, offset=lost.start)
    else:
        message += f"; the first available offset is {first}"
        report_loss(options, OffsetExpired, message, stream=lost.stream, offset=lost.start, first=first)


# --- ranges of offsets ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a stream that one task reads: offsets from `start` to before `stop`, possibly with gaps."""

    stream: str
    start: int
    stop: int
    offsets: tuple[int, ...] | None = None
    """The offsets to read, ascending; None for all."""

    def __len__(self) -> int:
        return max(0, self.stop - self.start)


def slices(
    ranges: Iterable[Slice], *, min_partitions: int | None = None, max_records: int | None = None
) -> list[Slice]:
    """Cut ranges into slices of even size, in order, without empty ones.

    There are at least `min_partitions` slices, unless there are fewer offsets; none is longer than `max_records`.
    """
    whole = [each for each in ranges if len(each)]
    counts = [1 if max_records is None else -(-len(each) // max_records) for each in whole]
    total = sum(len(each) for each in whole)
    if min_partitions is not None and sum(counts) < min_partitions:
        # Each range gets its share of the minimum, rounded up, so the sum reaches it.
        shares = [-(-len(each) * min_partitions // total) for each in whole]
        counts = [max(pair) for pair in zip(counts, shares, strict=True)]
    return [part for each, count in zip(whole, counts, strict=True) for part in _cut(each, count)]


def _cut(whole: Slice, count: int) -> list[Slice]:
    count = min(count, len(whole))
    edges = [whole.start + len(whole) * number // count for number in range(count + 1)]
    return [Slice(whole.stream, start, stop) for start, stop in pairwise(edges)]


def plan_end(start: Mapping[str, int], ends: Mapping[str, int], limit: int | None) -> dict[str, int]:
    """Return where a micro-batch ends in each stream: in total at most `limit` offsets after `start`.

    Each lagging stream gets one offset, so that none starves, and a part of the rest in proportion to its lag. If more
    streams lag than `limit`, they take turns with one offset each. An end below the start counts as the start.
    """
    lags = {stream: lag for stream, offset in sorted(start.items()) if (lag := ends[stream] - offset) > 0}
    if limit is None or sum(lags.values()) <= limit:
        return dict(start) | {stream: start[stream] + lag for stream, lag in lags.items()}
    # The sum of all offsets advances by `limit` with each batch, and the turn with it.
    streams, turn = list(lags), sum(start.values()) % len(lags)
    chosen = (streams[turn:] + streams[:turn])[:limit]
    rest, lag_rest = limit - len(chosen), sum(lags.values()) - len(lags)
    end, seen, shared = dict(start), 0, 0
    for stream in chosen:
        # Shares of the sums so far, rounded down, add up to the whole.
        seen += lags[stream] - 1
        until = rest * seen // lag_rest if rest else 0
        end[stream] += 1 + until - shared
        shared = until
    return end


# --- in the tasks -----------------------------------------------------------------------------------------


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
            message = f"option keyValues: a value is invalid for the key {definition.name!r}: {error}"
            raise InvalidRelationshipKey(message, key=definition.name, reason=error.reason.value) from error

    def passing(self, batches: Iterable[RecordBatch]) -> Iterator[RecordBatch]:
        """Yield the records with one of the values; only the key is decoded."""
        values, extract = self.values, Extractor([self.definition]).from_record
        for batch in batches:
            found = (extract(record, batch.chunk_ms).values for record in batch.records)
            rows = [row for row, pairs in enumerate(found) if any(value in values for _, value in pairs)]
            if rows:
                yield batch if len(rows) == len(batch) else rows_of(batch, rows)


def read_slice(
    options: SourceOptions, keys: Sequence[KeyDefinition], wanted: Slice | None, key_filter: KeyFilter | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a slice, over its own connection; `keys` are the definitions of `options.keys`.

    If there are no partitions, Spark calls this once with None.
    """
    if wanted is None:
        return
    columns = ColumnBuilder(value=options.include_value, headers=options.include_headers, keys=keys)
    with open_reader(options.broker, options.timeout_s) as reader:
        found = _scan(reader, wanted, options) if wanted.offsets is None else _read_offsets(reader, wanted, options)
        found = _unpacked(found, options)
        # The filter also checks the offsets that the table returned.
        passing = found if key_filter is None else key_filter.passing(found)
        yield from columns.batches(passing, rows_max=options.batch_rows, bytes_max=options.batch_bytes)


def _unpacked(batches: Iterable[RecordBatch], options: SourceOptions) -> Iterator[RecordBatch]:
    """Yield the records that can be unpacked; the others are raised or logged as lost, not passed on as empty."""
    for batch in batches:
        if UnreadableRecord not in set(map(type, batch.records)):
            yield batch
            continue
        rows = []
        for row, record in enumerate(batch.records):
            if isinstance(record, UnreadableRecord):
                message = f"the message at offset {batch.offsets[row]} of {batch.stream!r} is lost: {record.reason}"
                report_loss(options, UndecodableMessage, message, stream=batch.stream, offset=batch.offsets[row])
            else:
                rows.append(row)
        if rows:
            yield rows_of(batch, rows)


def _read_offsets(reader: StreamReader, wanted: Slice, options: SourceOptions) -> Iterator[RecordBatch]:
    ids = [MessageId(wanted.stream, offset) for offset in wanted.offsets or ()]
    for place, found in zip(ids, reader.read_many(ids), strict=True):
        if not isinstance(found, RelatumError):
            yield batch_of(found)
        elif options.fail_on_data_loss or not (isinstance(found, OffsetNotFound) and found.is_proven):
            raise found
        else:
            _log.warning("offset %d of %s is lost, reading continues: %s", place.offset, place.stream, found)


def _scan(reader: StreamReader, wanted: Slice, options: SourceOptions) -> Iterator[RecordBatch]:
    """Yield the records of a slice in batches, ascending.

    The broker silently moves a reader past missing offsets, at the start as in the middle, and healthy streams have
    gaps. So offsets are lost only if the stream's bounds exclude them. With `failOnDataLoss`, a loss is an error after
    the earlier messages were yielded; otherwise it is a warning, and reading continues after it.
    """
    expected, before, idle_s = wanted.start, -1, options.poll_timeout_s
    while expected < wanted.stop:
        begun = expected
        try:
            # A scan ends at the end that the stream had when the scan began; messages may have arrived since.
            scan = reader.batches(wanted.stream, expected, stop=wanted.stop, follow=False, idle_s=idle_s)
            with closing(scan):
                for batch in scan:
                    if batch is None:
                        silence = seconds_text(idle_s)
                        reason = f"the stream {wanted.stream!r} delivered nothing for {silence}"
                        raise ReadTimeout(f"{reason}: repeat the read, or raise pollTimeoutMs")
                    if batch.first_offset > expected:
                        _is_lost(reader, Slice(wanted.stream, expected, batch.first_offset), options)
                    expected = batch.last_offset + 1
                    yield batch
            # A scan of a lagging node may end early. So a gap at the end counts as healthy only if a scan that began
            # after the stream's bounds were known delivers nothing either.
            rest = Slice(wanted.stream, expected, wanted.stop)
            if len(rest) and (_is_lost(reader, rest, options) or expected == before):
                return
        except ConnectionLost:
            if expected == begun:
                raise
            continue  # While Spark took no rows, no heartbeats were sent, and the broker closed the connection.
        except StreamNotFound:
            with closing(StreamQueries(options)) as queries:
                if options.fail_on_data_loss or queries.bounds(wanted.stream, read_to=wanted.stop) is not None:
                    raise
            report_loss(options, StreamNotFound, f"the stream {wanted.stream!r} was deleted")
            return
        before = expected


def _is_lost(reader: StreamReader, gap: Slice, options: SourceOptions) -> bool:
    """Whether the offsets of a gap are lost; a loss is raised or logged. Healthy streams have other gaps."""
    if reader.bounds(gap.stream).holds(gap.start):
        return False
    first, last = leaders_bounds(reader, gap.stream)
    if first is None or last is None:
        report_lost_range(options, gap, "the stream is empty", first=gap.stop)
    elif first > gap.start:
        dropped = Slice(gap.stream, gap.start, min(first, gap.stop))
        report_lost_range(options, dropped, "retention has dropped them", first=first)
    elif last < gap.start:
        report_lost_range(options, gap, f"the stream ends at offset {last}; it was declared again or lost its tail")
    else:
        return False
    return True
