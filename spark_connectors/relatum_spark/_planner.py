"""What each micro-batch of a streaming query reads: from where, up to where, cut into which slices.

An offset is `{stream: next offset to read}`. Spark's checkpoint is the only truth: nothing is stored elsewhere, and
what is kept between two calls is only what spares a question. Three rules make every replay read the same:

- A stream that appears, or begins anew, enters a batch with nothing to read, at its first offset; the next batch
  reads on from there. So a range never depends on what the checkpoint does not hold.
- A range that goes backwards is empty.
- The first batch of a query reads nothing of a stream that begins at its end: the checkpoint does not hold where the
  first batch began, and the end is elsewhere when the batch is replayed.
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Final

from relatum.errors import OffsetExpired, OffsetNotFound, StreamNotFound, StreamReplaced
from relatum.limits import INTEGER_MAX
from relatum.reading import StreamBounds
from relatum_spark._admission import plan_end
from relatum_spark._offsets import Slice, slices
from relatum_spark._options import SourceOptions
from relatum_spark._places import start_of
from relatum_spark._ranges import check_named, missing
from relatum_spark._tails import Tails

_log: Final = logging.getLogger("relatum.spark")

Offset = dict[str, int]
"""The next offset to read, by stream."""

Bounds = dict[str, StreamBounds | None]
"""The ends of streams; None for one that is not there."""

REMEDY: Final = "; set failOnDataLoss to false to go on without"


class StreamPlanner:
    """Plans the micro-batches of one query. Lives in one process of the driver, as long as the query.

    Args:
        options: The options of the read.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._tails = Tails(options.broker, patience_s=options.poll_timeout_s)
        self._initial: Offset | None = None
        self._held: Offset = {}
        self._position: Offset | None = None
        self._target: Offset | None = None
        self._bounds: Bounds = {}
        self._emptied: set[str] = set()
        self._remedy = REMEDY if options.fail_on_data_loss else ""

    # --- where a query begins, and where one that takes what is there ends ---------------------------------

    def initial(self) -> Offset:
        """Where a new query begins. The same each time it is asked for.

        Raises:
            StreamNotFound: a stream is not there.
        """
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
        """Where to begin with a stream, and whether that is its end."""
        found = self._existing(stream, bounds)
        options = self._options
        frozen = None if self._target is None else self._target.get(stream)
        begin = self._tails.ask(
            lambda reader: start_of(reader, stream, options.starting, found, strategy=options.starting_strategy)
        )
        if begin is not None and begin > found.end:
            raise OffsetNotFound(
                f"offset {begin} lies beyond the end of the stream {stream!r}, which is {found.end}: begin with an "
                "offset up to that, or with latest",
                stream=stream,
                offset=begin,
                last=found.last,
            )
        if begin is not None:
            return begin, False
        return found.end if frozen is None else frozen, True

    def freeze(self) -> None:
        """Take what is there now as the end: later batches reach it and do not go beyond."""
        self._target = {stream: found.end for stream, found in self._ask_listed({}).items() if found is not None}

    # --- where a batch ends --------------------------------------------------------------------------------

    def latest(self, start: Offset | None, limit: int | None) -> Offset:
        """Where the next batch ends.

        Args:
            start: Where it begins; None where Spark does not say: then where the last one planned ended.
            limit: Offsets in all at most; None for no limit.

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
        """Whether a stream is another than the one that was read: it ends before, or lay empty and begins before.

        One that retention emptied goes on behind what it had, whatever is written to it next.
        """
        was_empty = stream in self._emptied
        self._emptied.discard(stream)
        return bounds.end < start or (was_empty and (bounds.first or 0) < start)

    def _allowed(self, stream: str, start: int, held: Offset) -> int:
        """How far a stream may be read, however much there is."""
        frozen = INTEGER_MAX if self._target is None else self._target.get(stream, start)
        return min(frozen, held[stream]) if held.get(stream) == start else frozen

    def _begin_read(self, stream: str, start: int, bounds: StreamBounds) -> int:
        """Where there is something to read, from the start on."""
        first = bounds.first or 0
        if first <= start:
            return start
        message = (
            f"retention has dropped the offsets {start} to {first - 1} of the stream {stream!r}; "
            f"the first one available is {first}{self._remedy}"
        )
        self._lost(OffsetExpired(message, stream=stream, offset=start, first=first, last=bounds.last))
        return first

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
        """The end of each stream as it was when it was last asked for; None before."""
        ends = {stream: bounds.end for stream, bounds in self._bounds.items() if bounds is not None}
        return dict(sorted(ends.items())) or None

    # --- what the tasks read -------------------------------------------------------------------------------

    def slices(self, start: Offset, end: Offset) -> list[Slice]:
        """What the tasks of a batch read; empty where there is nothing."""
        self._position = end
        ranges = [Slice(stream, start[stream], stop) for stream, stop in sorted(end.items()) if stream in start]
        if not self._options.fail_on_data_loss:
            ranges = [self._left(each) for each in ranges if len(each)]
        options = self._options
        return slices(ranges, min_partitions=options.min_partitions, max_records=options.max_records_per_partition)

    def _left(self, wanted: Slice) -> Slice:
        """What is left of a range: no task is made for what is known to be lost."""
        stream = wanted.stream
        if stream not in self._bounds:
            self._bounds[stream] = self._tails.bounds(stream, read_to=wanted.start)
        bounds = self._bounds[stream]
        first = wanted.stop if bounds is None else bounds.first or 0
        return Slice(stream, max(wanted.start, first), wanted.stop)

    # --- questions to the broker ---------------------------------------------------------------------------

    def _listed(self) -> list[str]:
        super_stream = self._options.super_stream
        if super_stream is None:
            return list(self._options.streams)
        return self._tails.partitions(super_stream)

    def _ask_listed(self, start: Mapping[str, int]) -> Bounds:
        """The ends of the streams to read: those named; of a super stream also those that were taken out of it."""
        listed = self._listed()
        if self._options.super_stream is not None:
            listed = list(dict.fromkeys((*listed, *start)))
        return self._ask(listed, start)

    def _ask(self, streams: list[str], start: Mapping[str, int]) -> Bounds:
        # Of a stream that is known to have lain empty, nothing is doubtful.
        return {
            stream: self._tails.bounds(stream, read_to=None if stream in self._emptied else start.get(stream))
            for stream in streams
        }

    def _existing(self, stream: str, bounds: StreamBounds | None) -> StreamBounds:
        if bounds is None:
            raise self._tails.ask(partial(missing, stream=stream))
        return bounds

    def close(self) -> None:
        """Close the connection to the broker."""
        self._tails.close()
