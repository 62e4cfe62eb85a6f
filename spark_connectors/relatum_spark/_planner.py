"""Which offsets a batch or a micro-batch reads, decided on the driver.

An offset is `{stream: next offset to read}`. Spark's checkpoint is the only truth: nothing is stored elsewhere, and
what is kept between two calls only saves a question. Three rules make every replay read the same:

- A stream that appears, or begins anew, enters a batch with nothing to read, at its first offset; the next batch
  reads on from there. So a range never depends on what the checkpoint does not hold.
- A range that goes backwards is empty.
- The first batch of a query reads nothing of a stream that begins at its end: the checkpoint does not hold where the
  first batch began, and the end is elsewhere when the batch is replayed.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, TypeVar

from relatum.errors import (
    InvalidInput,
    OffsetExpired,
    OffsetNotFound,
    RelatumError,
    StreamNotFound,
    StreamReplaced,
    Transient,
)
from relatum.limits import INTEGER_MAX
from relatum.reading import StreamBounds, StreamReader
from relatum.waiting import Outages
from relatum_spark._offsets import EARLIEST, LATEST, Place, Slice, plan_end, slices
from relatum_spark._options import SourceOptions
from relatum_spark._where import Broker

_log: Final = logging.getLogger("relatum.spark")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_PAUSE_S_MIN: Final = 0.1
_PAUSE_S_MAX: Final = 2.0
"""Between two attempts to reach a broker that is away."""

_CONFIRM_S: Final = 2.0
"""For how long a stream must be missing, empty or shorter than it was, to be believed: a broker that has just started,
and a replica that lags, say so of streams in good health."""

_QUESTION: Final = "asking where streams end"

Offset = dict[str, int]
"""The next offset to read, by stream."""

Bounds = dict[str, StreamBounds | None]
"""The ends of streams; None for one that does not exist."""

_Result = TypeVar("_Result")


class Tails:
    """Asks a broker about streams over one connection that is kept between questions.

    A question is repeated for `patience_s` while the broker is away.
    """

    def __init__(self, broker: Broker, *, patience_s: float) -> None:
        self._broker = broker
        self._patience_s = patience_s
        self._reader: StreamReader | None = None
        self._outages = Outages(_log, broker=str(broker.address))

    def ask(self, question: Callable[[StreamReader], _Result]) -> _Result:
        """Return the answer to a question; raises `Transient` where the broker was away for `patience_s`."""
        limit, pause_s = time.monotonic() + self._patience_s, _PAUSE_S_MIN
        while True:
            try:
                if self._reader is None:
                    self._reader = self._broker.open()
                answer = question(self._reader)
            except Transient as error:
                self.close()
                if time.monotonic() + pause_s > limit:
                    self._outages.forget(_QUESTION)
                    raise
                self._outages.failed(_QUESTION, error)
            except BaseException:
                self._outages.forget(_QUESTION)
                raise
            else:
                self._outages.over(_QUESTION)
                return answer
            time.sleep(pause_s)
            pause_s = min(_PAUSE_S_MAX, 2 * pause_s)

    def partitions(self, super_stream: str) -> list[str]:
        """Return the streams of a super stream; none where there is no such super stream."""
        return self.ask(lambda reader: reader.partitions(super_stream))

    def bounds(self, stream: str, *, read_to: int | None = None) -> StreamBounds | None:
        """Return the first and the last offset; None where there is no such stream.

        Where the stream is missing or ends before `read_to`, it is asked for again for `_CONFIRM_S`.
        """
        doubted_at: float | None = None
        while True:
            found: StreamBounds | None = None
            with suppress(StreamNotFound):
                found = self.ask(lambda reader: reader.bounds(stream))
            if read_to is None or (found is not None and found.end >= read_to):
                return found
            now = time.monotonic()
            if doubted_at is None:
                doubted_at = now
            elif now - doubted_at > _CONFIRM_S:
                return found
            self.close()
            time.sleep(_PAUSE_S_MIN)

    def close(self) -> None:
        """Close the connection; the next question opens another."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


# --- batches ----------------------------------------------------------------------------------------------


def range_of(reader: StreamReader, stream: str, options: SourceOptions) -> Slice:
    """Return the offsets a batch reads of a stream, within what the stream holds now; there may be none.

    Raises:
        StreamNotFound: there is no such stream.
        OffsetExpired: the start has been dropped by retention, and `failOnDataLoss` is true.
        OffsetNotFound: start or end lie beyond the end of the stream, and `failOnDataLoss` is true.
        InvalidInput: nothing was written at or after the starting moment; or an option says nothing of this stream.
    """
    try:
        bounds = reader.bounds(stream)
    except StreamNotFound as error:
        raise missing(reader, stream) from error
    remedy = "; set failOnDataLoss to false to read what there is" if options.fail_on_data_loss else ""
    end = bounds.end
    start = _offset_of(reader, stream, options.starting, bounds, is_latest_allowed=options.is_latest_allowed)
    stop = _offset_of(reader, stream, options.ending, bounds, is_latest_allowed=True)
    start = end if start is None else start
    stop = end if stop is None else stop
    if bounds.first is not None and start < min(bounds.first, stop):
        lost = Slice(stream, start, min(bounds.first, stop))
        message = f"{_dropped(lost, bounds.first)}{remedy}"
        _lose(lost, OffsetExpired(message, stream=stream, offset=start, first=bounds.first), options)
        start = lost.stop
    for wanted in (start, stop):
        if wanted > end:
            message = f"offset {wanted} lies beyond the end of the stream {stream!r}, which is {end}{remedy}"
            beyond = OffsetNotFound(message, stream=stream, offset=wanted, last=bounds.last)
            _lose(Slice(stream, end, wanted), beyond, options)
    return Slice(stream, min(start, end), min(stop, end))


def check_named(options: SourceOptions, streams: list[str]) -> None:
    """Refuse offsets and moments of streams that are not read."""
    for place in (options.starting, options.ending):
        for stream in () if isinstance(place.number, int) else place.number:
            if stream not in streams:
                raise InvalidInput(f"option {place.option}: the stream {stream!r} is not among those read")


def missing(reader: StreamReader, stream: str) -> StreamNotFound:
    """Return the error for a stream that does not exist; it says where the name is that of a super stream."""
    partitions: list[str] = []
    with suppress(RelatumError):
        partitions = reader.partitions(stream)
    hint = f"; {stream!r} is a super stream: give it as the option superStream" if partitions else ""
    return StreamNotFound(f"there is no stream {stream!r}{hint}", stream=stream)


def _offset_of(
    reader: StreamReader, stream: str, place: Place, bounds: StreamBounds, *, is_latest_allowed: bool
) -> int | None:
    """Return the offset of a place in a stream; None for the end of the stream."""
    number = place.of(stream)
    if not place.is_moment:
        return None if number == LATEST else (bounds.first or 0) if number == EARLIEST else number
    moment = _EPOCH + timedelta(milliseconds=number)
    for message in reader.iterate(stream, moment):
        return message.offset
    if is_latest_allowed:
        return None
    raise InvalidInput(
        f"nothing was written to the stream {stream!r} at or after {moment}; set startingOffsetsByTimestampStrategy to"
        " latest to begin at its end"
    )


def _dropped(lost: Slice, first: int) -> str:
    return (
        f"retention has dropped the offsets {lost.start} to {lost.stop - 1} of the stream {lost.stream!r}; "
        f"the first one available is {first}"
    )


def _lose(lost: Slice, error: OffsetNotFound, options: SourceOptions) -> None:
    if options.fail_on_data_loss:
        raise error
    _log.warning("offsets %d to %d of %s are not there: %s", lost.start, lost.stop - 1, lost.stream, error)


# --- micro-batches ----------------------------------------------------------------------------------------


class StreamPlanner:
    """Plans the micro-batches of one query. Lives in one process of the driver, as long as the query."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._tails = Tails(options.broker, patience_s=options.poll_timeout_s)
        self._initial: Offset | None = None
        self._held: Offset = {}
        """Where streams that begin at their end began: the first batch reads nothing of them."""
        self._position: Offset | None = None
        self._target: Offset | None = None
        self._bounds: Bounds = {}
        self._emptied: set[str] = set()
        self._remedy = "; set failOnDataLoss to false to go on without" if options.fail_on_data_loss else ""

    def initial(self) -> Offset:
        """Return where a new query begins, the same each time; raises `StreamNotFound`."""
        if self._initial is None:
            bounds = self._ask_listed({})
            check_named(self._options, list(bounds))
            if not bounds:
                super_stream = self._options.super_stream
                raise StreamNotFound(f"there is no super stream {super_stream!r}", stream=super_stream)
            begins = {stream: self._begin(stream, found) for stream, found in bounds.items()}
            self._initial = {stream: offset for stream, (offset, _) in begins.items()}
            self._held = {stream: offset for stream, (offset, is_end) in begins.items() if is_end}
        return dict(self._initial)

    def _begin(self, stream: str, bounds: StreamBounds | None) -> tuple[int, bool]:
        """Return where to begin with a stream, and whether that is its end."""
        found, options = self._existing(stream, bounds), self._options
        begin = self._tails.ask(
            lambda reader: _offset_of(
                reader, stream, options.starting, found, is_latest_allowed=options.is_latest_allowed
            )
        )
        if begin is None:
            frozen = None if self._target is None else self._target.get(stream)
            return found.end if frozen is None else frozen, True
        if begin > found.end:
            raise OffsetNotFound(
                f"offset {begin} lies beyond the end of the stream {stream!r}, which is {found.end}: begin with an "
                "offset up to that, or with latest",
                stream=stream,
                offset=begin,
                last=found.last,
            )
        return begin, False

    def freeze(self) -> None:
        """Take the streams' ends of now as the target: later batches reach it and do not go beyond."""
        self._target = {stream: found.end for stream, found in self._ask_listed({}).items() if found is not None}

    def latest(self, start: Offset | None, limit: int | None) -> Offset:
        """Return where the next batch ends: at most `limit` offsets after its start in all.

        `start` is None where Spark does not say it: the batch then begins where the last one planned ended.

        Raises:
            OffsetExpired: retention has dropped what was to be read next.
            StreamNotFound: a stream was deleted.
            StreamReplaced: a stream is shorter than what was read of it.
        """
        if start is None:
            start = self.initial() if self._position is None else self._position
        self._bounds = self._ask_listed(start)
        end = self._end(start, limit)
        self._position = end
        return dict(sorted(end.items()))

    def _end(self, start: Offset, limit: int | None) -> Offset:
        held, self._held = self._held, {}
        begins, ends, kept = {}, {}, {stream: start[stream] for stream in start.keys() - self._bounds.keys()}
        for stream, bounds in self._bounds.items():
            if stream not in start:
                if bounds is not None or self._options.fail_on_data_loss:
                    kept[stream] = self._existing(stream, bounds).first or 0
            elif bounds is None:
                self._lost(StreamNotFound(f"the stream {stream!r} was deleted{self._remedy}", stream=stream))
            elif bounds.last is None:
                kept[stream] = start[stream]
                self._emptied.add(stream)
            elif self._begins_anew(stream, start[stream], bounds):
                self._lost(self._replaced(stream, start[stream], bounds))
                kept[stream] = bounds.first or 0
            else:
                begins[stream] = self._begin_read(stream, start[stream], bounds)
                ends[stream] = min(bounds.end, self._allowed(stream, start[stream], held))
        return kept | plan_end(begins, ends, limit)

    def _begins_anew(self, stream: str, start: int, bounds: StreamBounds) -> bool:
        """Whether it is not the stream that was read: it ends before, or was seen empty and begins before.

        A stream that retention emptied goes on behind what it had, whatever is written to it next.
        """
        was_empty = stream in self._emptied
        self._emptied.discard(stream)
        return bounds.end < start or (was_empty and (bounds.first or 0) < start)

    def _allowed(self, stream: str, start: int, held: Offset) -> int:
        """Return how far a stream may be read, however much there is."""
        frozen = INTEGER_MAX if self._target is None else self._target.get(stream, start)
        return min(frozen, held[stream]) if held.get(stream) == start else frozen

    def _begin_read(self, stream: str, start: int, bounds: StreamBounds) -> int:
        """Return the first offset from the start on that is retained."""
        first = bounds.first or 0
        if first > start:
            message = f"{_dropped(Slice(stream, start, first), first)}{self._remedy}"
            self._lost(OffsetExpired(message, stream=stream, offset=start, first=first, last=bounds.last))
        return max(first, start)

    def _lost(self, error: OffsetExpired | StreamNotFound | StreamReplaced) -> None:
        if self._options.fail_on_data_loss:
            raise error
        _log.warning("going on after a loss: %s", error)

    def _replaced(self, stream: str, start: int, bounds: StreamBounds) -> StreamReplaced:
        message = (
            f"the stream {stream!r} was read up to {start - 1}, but now has offsets {bounds.first} to {bounds.last}: "
            f"it was declared again or lost its tail{self._remedy}"
        )
        return StreamReplaced(message, stream=stream)

    def reported(self) -> Offset | None:
        """Return the ends of the streams as they were last seen; None before."""
        ends = {stream: bounds.end for stream, bounds in self._bounds.items() if bounds is not None}
        return dict(sorted(ends.items())) or None

    def slices(self, start: Offset, end: Offset) -> list[Slice]:
        """Return what the tasks of a batch read."""
        self._position = end
        ranges = [Slice(stream, start[stream], stop) for stream, stop in sorted(end.items()) if stream in start]
        if not self._options.fail_on_data_loss:
            ranges = [self._left(each) for each in ranges if len(each)]
        options = self._options
        return slices(ranges, min_partitions=options.min_partitions, max_records=options.max_records_per_partition)

    def _left(self, wanted: Slice) -> Slice:
        """Leave out of a range what is known to be lost, so that no task is made for it."""
        stream = wanted.stream
        if stream not in self._bounds:
            self._bounds[stream] = self._tails.bounds(stream, read_to=wanted.start)
        bounds = self._bounds[stream]
        first = wanted.stop if bounds is None else bounds.first or 0
        return Slice(stream, max(wanted.start, first), wanted.stop)

    def _ask_listed(self, start: Offset) -> Bounds:
        """Ask for the ends of the streams named; of a super stream also of those that were taken out of it."""
        listed = list(self._options.streams)
        if self._options.super_stream is not None:
            listed = list(dict.fromkeys((*self._tails.partitions(self._options.super_stream), *start)))
        # Of a stream that is known to have lain empty, nothing is doubtful.
        return {
            stream: self._tails.bounds(stream, read_to=None if stream in self._emptied else start.get(stream))
            for stream in listed
        }

    def _existing(self, stream: str, bounds: StreamBounds | None) -> StreamBounds:
        if bounds is None:
            raise self._tails.ask(partial(missing, stream=stream))
        return bounds

    def close(self) -> None:
        """Close the connection to the broker."""
        self._tails.close()
