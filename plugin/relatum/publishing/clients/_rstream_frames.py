"""What a frame of a stream connection takes: RabbitMQ ends a connection for a larger one, and what it held is lost.

rstream divides what `send` collects; a batch of `send_batch` and one of `send_sub_entry` it sends as one frame. A batch
that fits without ids may not fit with them.
"""

from collections.abc import Sequence
from typing import Any, Final

from relatum.errors import InvalidInput

FRAME_BYTES_MAX: Final = 1 << 20
"""Bytes of a frame, as RabbitMQ and rstream have it by default: what counts before a connection has agreed on less."""

_PUBLISH: Final = 13
_MESSAGE: Final = 12
"""Bytes of a frame of `Publish` beside its messages, and of each message beside its own.

Source: RabbitMQ, rabbitmq_stream's PROTOCOL.adoc, Publish."""

_FILTER: Final = 257
"""Bytes a message may take more in a producer with filter values."""

AROUND_MAX: Final = _PUBLISH + _MESSAGE + _FILTER
"""Bytes that a message takes beside its own, at the most."""

_SUB_ENTRY: Final = 36
_SUB_MESSAGE: Final = 4
"""The same of a sub-entry batch that is not compressed."""


def frame_bytes_max(producer: Any, stream: str) -> int:
    """Bytes that a frame to a stream may have, so far as is known."""
    client = producer._clients.get(stream)
    # 0: no limit.
    return getattr(client, "frame_max", None) or min(producer._pool._frame_max, FRAME_BYTES_MAX) or FRAME_BYTES_MAX


def in_frames(sizes: Sequence[int], bytes_max: int, *, has_filters: bool) -> list[slice]:
    """How to divide messages of these bytes among frames, in order; one that is too large for any has its own."""
    more = _MESSAGE + (_FILTER if has_filters else 0)
    parts: list[slice] = []
    begin, taken = 0, _PUBLISH
    for place, size in enumerate(sizes):
        if taken + more + size > bytes_max and place > begin:
            parts.append(slice(begin, place))
            begin, taken = place, _PUBLISH
        taken += more + size
    return [*parts, slice(begin, len(sizes))]


def check_message(size: int, given: Any, bytes_max: int) -> None:
    """Refuse a message that fits into a frame as it was given, and not with its id.

    What does not fit as it is goes its way: not every RabbitMQ minds.

    Raises:
        InvalidInput: nothing was sent.
    """
    room = bytes_max - _PUBLISH - _MESSAGE
    if size > room >= len(bytes(given)):
        raise _too_large(f"a message of {size} bytes", bytes_max, "a smaller one")


def check_sub_entry(sizes: Sequence[int], given: Sequence[Any], bytes_max: int) -> None:
    """Refuse likewise a sub-entry batch that is not compressed.

    Raises:
        InvalidInput: nothing was sent.
    """
    room = bytes_max - _SUB_ENTRY - _SUB_MESSAGE * len(sizes)
    size = sum(sizes)
    if size > room >= sum([len(bytes(each)) for each in given]):
        raise _too_large(f"a sub-entry batch of {size} bytes", bytes_max, "fewer messages at a time, or compress them")


def _too_large(what: str, bytes_max: int, instead: str) -> InvalidInput:
    return InvalidInput(
        f"{what}, ids included, does not fit into a frame of {bytes_max}, and RabbitMQ would end the connection: "
        f"send {instead}; nothing was sent"
    )
