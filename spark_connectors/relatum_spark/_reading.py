"""Reading a range of offsets inside a task: to its end, or to an error in time."""

import contextlib
from collections.abc import Callable, Iterator

from relatum.checks import seconds_text
from relatum.errors import OffsetExpired, OffsetNotFound, ReadTimeout
from relatum.reading import RecordBatch, StreamReader
from relatum_spark._offsets import Slice

LossListener = Callable[[Slice, OffsetNotFound], None]
"""Told of offsets that cannot be read any more, and of the error that says why."""


def read_slice(
    reader: StreamReader, wanted: Slice, *, poll_timeout_s: float, on_loss: LossListener | None = None
) -> Iterator[RecordBatch]:
    """The records of a slice, in batches, ascending.

    Streams in good health have gaps; offsets count as lost where the broker says that the stream begins behind them.
    It moves a reader forward without a word, at the start as in the middle.

    Args:
        reader: Where to read.
        wanted: What to read.
        poll_timeout_s: Seconds within which something must come.
        on_loss: Called with what is lost, and reading goes on behind it; None raises instead.

    Raises:
        OffsetExpired: Retention has dropped a part; `first` is the first offset retained. What lies before was given.
        OffsetNotFound: The stream ends before the slice does: it was declared again, or lost its tail.
        ReadTimeout: Nothing came for `poll_timeout_s`; safe to repeat, as the transient errors of `StreamReader` are.
    """
    expected = before = wanted.start
    while expected < wanted.stop:
        # A scan ends where the stream ended when it began; before the stop more may have come meanwhile.
        batches = reader.batches(wanted.stream, expected, stop=wanted.stop, follow=False, idle_s=poll_timeout_s)
        with contextlib.closing(batches):
            for batch in batches:
                if batch is None:
                    raise ReadTimeout(f"the stream {wanted.stream!r} gave nothing for {seconds_text(poll_timeout_s)}")
                if batch.first_offset > expected:
                    _check(reader, Slice(wanted.stream, expected, batch.first_offset), on_loss)
                expected = batch.last_offset + 1
                yield batch
        if expected < wanted.stop:
            lost = _check(reader, Slice(wanted.stream, expected, wanted.stop), on_loss)
            if lost or expected == before:
                return
        before = expected


def _check(reader: StreamReader, gap: Slice, on_loss: LossListener | None) -> bool:
    """Whether a gap is one of lost offsets; those of a stream in good health are none."""
    error = _why_lost(reader, gap)
    if error is None:
        return False
    if on_loss is None:
        raise error
    on_loss(gap, error)
    return True


def _why_lost(reader: StreamReader, gap: Slice) -> OffsetNotFound | None:
    stream, start, stop = gap.stream, gap.start, gap.stop
    first, last = reader.bounds(stream)
    if first is None or last is None:
        return OffsetExpired(
            f"the stream {stream!r} is empty: its offsets {start} to {stop - 1} are gone",
            stream=stream,
            offset=start,
            first=stop,
        )
    if first > start:
        return OffsetExpired(
            f"retention has dropped the offsets {start} to {min(first, stop) - 1} of the stream {stream!r}; "
            f"the first one available is {first}",
            stream=stream,
            offset=start,
            first=first,
        )
    if last < start:
        return OffsetNotFound(
            f"the stream {stream!r} ends at offset {last}, before {start}: it was declared again or lost its tail",
            stream=stream,
            offset=start,
        )
    return None
