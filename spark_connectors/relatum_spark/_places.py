"""Where a read begins in a stream, and where the stream ends: an option's words turned into an offset."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from relatum.errors import InvalidInput
from relatum.reading import StreamBounds, StreamReader
from relatum_spark._offsets import EARLIEST, LATEST
from relatum_spark._options import Earliest, Latest, Moment, Offsets, Place

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def start_of(
    reader: StreamReader, stream: str, place: Place, bounds: StreamBounds, *, strategy: Literal["error", "latest"]
) -> int | None:
    """The offset a place stands for; None for the end of the stream.

    Args:
        reader: Asked for moments alone.
        stream: The stream's name.
        place: Where to begin.
        bounds: The stream's first and last offset.
        strategy: What to do where nothing was written at or after a moment.

    Raises:
        InvalidInput: the option says nothing of this stream; or nothing was written at or after the moment, and
            `strategy` is "error".
    """
    if isinstance(place, Latest):
        return None
    if isinstance(place, Earliest):
        return bounds.first or 0
    if isinstance(place, Offsets):
        offset = _of(place.by_stream, stream, "startingOffsets")
        return None if offset == LATEST else (bounds.first or 0) if offset == EARLIEST else offset
    ms = place.ms if isinstance(place, Moment) else _of(place.by_stream, stream, "startingOffsetsByTimestamp")
    found = _offset_at(reader, stream, ms)
    if found is None and strategy == "error":
        raise InvalidInput(
            f"nothing was written to the stream {stream!r} at or after {_EPOCH + timedelta(milliseconds=ms)}; set "
            "startingOffsetsByTimestampStrategy to latest to begin at its end"
        )
    return found


def _of(numbers: Mapping[str, int], stream: str, option: str) -> int:
    if stream not in numbers:
        raise InvalidInput(f"option {option} says nothing of the stream {stream!r}")
    return numbers[stream]


def _offset_at(reader: StreamReader, stream: str, ms: int) -> int | None:
    for message in reader.iterate(stream, _EPOCH + timedelta(milliseconds=ms)):
        return message.offset
    return None
