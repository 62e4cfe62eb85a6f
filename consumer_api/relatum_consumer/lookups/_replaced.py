"""Streams that are not the ones that were recorded: what a lookup does where it meets one, and what became of it."""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from relatum.errors import AccessRefused, NotFound, StreamReplaced, Transient
from relatum.ids import MessageId
from relatum.reading import Message, StreamBounds
from relatum.store import last_position
from relatum_consumer.lookups._catalog import Catalog
from relatum_consumer.lookups._proof import coverage_by_stream
from relatum_consumer.lookups._requests import Bounds, Read, Steps

_Result = TypeVar("_Result")


def again_if_replaced(
    catalog: Catalog, begin: Callable[[], Generator[Any, Any, _Result]], *, leaves_out: bool = False
) -> Generator[Any, Any, _Result]:
    """Take steps; once more from the start where the recorder replaced a stream under our hands.

    `leaves_out`: True leaves out a stream that stays another than what was recorded: where none is named.

    Raises:
        StreamReplaced: it is not the stream that was recorded; where that can be found out, the error says why.
    """
    try:
        return (yield from begin())
    except StreamReplaced:
        pass
    while True:
        try:
            return (yield from begin())
        except StreamReplaced as error:
            if leaves_out and catalog.leave_out(error):
                continue
            became = yield from _became(catalog, error.stream)
            if not became:
                raise
            raise StreamReplaced(f"the stream {error.stream!r} {became}", stream=error.stream) from error


def _became(catalog: Catalog, stream: str) -> Steps[str]:
    """What happened to a stream that is not the one that was recorded, and what to do; empty where nobody can say.

    A stream that begins with a message younger than the last one recorded is another stream.
    """
    try:
        rows = yield from coverage_by_stream((yield from catalog.streams([stream])))
        last = last_position(row for ranges in rows.values() for row in ranges)
        bounds: StreamBounds = yield from Bounds(stream)
        if last is None or last.chunk_ms is None or bounds.first is None:
            return ""
        first = (yield from Read([MessageId(stream, bounds.first)]))[0]
    except (NotFound, AccessRefused, Transient):
        return ""
    if not isinstance(first, Message) or first.chunk_ms is None:
        return ""
    if first.chunk_ms > last.chunk_ms:
        return f"was deleted and declared again: relatum record {stream} records it anew"
    return f"has lost its tail: relatum record {stream} records it again from there, and its publishers know the rest"
