"""Messages of a stream, from all over it."""

from contextlib import closing
from typing import Final

from relatum.reading import StreamReader
from relatum_consumer.suggesting._fields import Sample

SAMPLE_MESSAGES: Final = 4_000
"""Messages of each stream that are looked at, unless told otherwise."""

_WINDOWS: Final = 8
"""Places of a stream at which messages are read one after another: those of a moment belong together."""

_BYTES_MAX: Final = 64 << 20
"""Bytes of bodies of one stream that are looked at."""


def sample(reader: StreamReader, stream: str, messages: int = SAMPLE_MESSAGES) -> Sample:
    """Look at so many messages of a stream, at the same places of each.

    Raises:
        StreamNotFound, NotAStream, AccessRefused: it cannot be read.
    """
    found = Sample(stream)
    first, last = reader.bounds(stream)
    if first is None or last is None:
        return found
    window = max(1, messages // _WINDOWS)
    span, size, read_to = last + 1 - first, 0, first
    for number in range(_WINDOWS):
        # A stream may have begun anew meanwhile: what is not there is not read.
        start = max(read_to, first + span * number // _WINDOWS)
        with closing(reader.iterate(stream, start, stop=last + 1)) as following:
            for message, _ in zip(following, range(window), strict=False):
                found.add(message)
                read_to = message.offset + 1
                size += len(message.body)
        if size > _BYTES_MAX or read_to > last:
            break
    return found
