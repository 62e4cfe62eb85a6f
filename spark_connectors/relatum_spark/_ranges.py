"""The offsets a batch reads of each stream, fixed on the driver before any task begins."""

import logging
from contextlib import suppress
from typing import Final

from relatum.errors import InvalidInput, OffsetExpired, OffsetNotFound, RelatumError, StreamNotFound
from relatum.reading import StreamBounds, StreamReader
from relatum_spark._offsets import Slice
from relatum_spark._options import Moment, Moments, Offsets, SourceOptions
from relatum_spark._places import start_of

_log: Final = logging.getLogger("relatum.spark")
_REMEDY: Final = "; set failOnDataLoss to false to read what there is"


def range_of(reader: StreamReader, stream: str, options: SourceOptions) -> Slice:
    """The offsets a batch reads of a stream, within what the stream holds now; it may be empty.

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
    remedy = _REMEDY if options.fail_on_data_loss else ""
    end = bounds.end
    start = start_of(reader, stream, options.starting, bounds, strategy=options.starting_strategy)
    stop = _end_of(reader, stream, options, bounds)
    start = end if start is None else start
    stop = end if stop is None else stop
    if bounds.first is not None and start < min(bounds.first, stop):
        lost = Slice(stream, start, min(bounds.first, stop))
        message = _dropped(lost, bounds.first) + remedy
        _lose(lost, OffsetExpired(message, stream=stream, offset=start, first=bounds.first), options)
        start = lost.stop
    for wanted in (start, stop):
        if wanted > end:
            message = f"offset {wanted} lies beyond the end of the stream {stream!r}, which is {end}{remedy}"
            beyond = OffsetNotFound(message, stream=stream, offset=wanted, last=bounds.last)
            _lose(Slice(stream, end, wanted), beyond, options)
    return Slice(stream, min(start, end), min(stop, end))


def missing(reader: StreamReader, stream: str) -> StreamNotFound:
    """The error for a stream that is not there; it says where the name is that of a super stream."""
    partitions: list[str] = []
    with suppress(RelatumError):
        partitions = reader.partitions(stream)
    hint = f"; {stream!r} is a super stream: give it as the option superStream" if partitions else ""
    return StreamNotFound(f"there is no stream {stream!r}{hint}", stream=stream)


def _dropped(lost: Slice, first: int) -> str:
    return (
        f"retention has dropped the offsets {lost.start} to {lost.stop - 1} of the stream {lost.stream!r}; "
        f"the first one available is {first}"
    )


def _lose(lost: Slice, error: OffsetNotFound, options: SourceOptions) -> None:
    if options.fail_on_data_loss:
        raise error
    _log.warning("offsets %d to %d of %s are not there: %s", lost.start, lost.stop - 1, lost.stream, error)


def _end_of(reader: StreamReader, stream: str, options: SourceOptions, bounds: StreamBounds) -> int | None:
    """The offset to end before; None for the end of the stream. What has no entry, or no message, ends there too."""
    place = options.ending
    if isinstance(place, Offsets) and stream not in place.by_stream:
        raise InvalidInput(f"option endingOffsets says nothing of the stream {stream!r}")
    if isinstance(place, Moments) and stream not in place.by_stream:
        raise InvalidInput(f"option endingOffsetsByTimestamp says nothing of the stream {stream!r}")
    if isinstance(place, (Offsets, Moment, Moments)):
        return start_of(reader, stream, place, bounds, strategy="latest")
    return None


def check_named(options: SourceOptions, streams: list[str]) -> None:
    """See that offsets and moments are given for streams that are read.

    Raises:
        InvalidInput: they name another one.
    """
    for side, place in (("starting", options.starting), ("ending", options.ending)):
        if isinstance(place, (Offsets, Moments)):
            option = f"{side}Offsets" if isinstance(place, Offsets) else f"{side}OffsetsByTimestamp"
            for stream in place.by_stream:
                if stream not in streams:
                    raise InvalidInput(f"option {option}: the stream {stream!r} is not among those read")
