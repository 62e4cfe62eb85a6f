"""Streams that are not the ones that were recorded: the error, and what a lookup does where it meets one."""

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from relatum.errors import StreamReplaced
from relatum_consumer.lookups._catalog import Catalog

_Result = TypeVar("_Result")


def again_if_replaced(
    begin: Callable[[], Generator[Any, Any, _Result]], *, leaving: Catalog | None = None
) -> Generator[Any, Any, _Result]:
    """Take steps; once more from the start where the recorder replaced a stream under our hands.

    `leaving`: where no stream is named, which is to leave out those that stay another than what was recorded.
    """
    try:
        return (yield from begin())
    except StreamReplaced:
        pass
    while True:
        try:
            return (yield from begin())
        except StreamReplaced as error:
            if leaving is None or not leaving.leave_out(error):
                raise


def replaced(stream: str, offset: int) -> StreamReplaced:
    """The error for a stream that is not the one that was recorded."""
    return StreamReplaced(
        f"the stream {stream!r} is not the one that was recorded: at offset {offset} lies something else, or nothing. "
        "It was declared again, or lost its tail; a recorder puts that right",
        stream=stream,
        offset=offset,
    )
