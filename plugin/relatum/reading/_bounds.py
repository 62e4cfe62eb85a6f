"""A stream's first and last offset, and the errors of streams and offsets that cannot be read."""

from collections.abc import Iterable
from operator import index
from typing import Any, NamedTuple, Self

from relatum.common.checks import shown
from relatum.common.limits import INTEGER_MAX
from relatum.common.waiting import current, has_passed
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConnectionLost,
    InvalidInput,
    OffsetExpired,
    OffsetNotFound,
    ReadTimeout,
    RelatumError,
    StreamNotFound,
    StreamNotHere,
    StreamUnavailable,
)
from relatum.wire.frames import Code
from relatum.wire.session import code_name


class _Ends(NamedTuple):
    first: int | None
    last: int | None


class StreamBounds(_Ends):
    """The pair of the first and last retained offset; both None if the stream is empty.

    Attributes:
        is_proven: True if the stream's leader gave the offsets: all messages confirmed before the request are within
            them. False if another node gave them, because the leader is unreachable. Not an item of the pair.
        is_silence: True if the stream counts as empty because its leader returned no message for a while. The leader
            may be waiting for replicas, so this does not prove that a known message is gone.
    """

    is_proven: bool
    is_silence: bool

    def __new__(cls, first: int | None, last: int | None, *, is_proven: bool = False, is_silence: bool = False) -> Self:
        bounds = super().__new__(cls, first, last)
        bounds.is_proven, bounds.is_silence = is_proven, is_silence
        return bounds

    @property
    def is_sure(self) -> bool:
        """Whether a confirmed message outside the bounds is certainly gone."""
        return self.is_proven and not self.is_silence

    @property
    def end(self) -> int:
        """The offset after the last message; 0 if there is none."""
        return 0 if self.last is None else self.last + 1

    def holds(self, offset: int) -> bool:
        """Whether an offset is within the bounds."""
        return self.first is not None and self.last is not None and self.first <= offset <= self.last

    def lag(self, position: int) -> int:
        """Return the number of retained offsets from a position on."""
        return max(0, self.end - max(position, self.first or 0))


def check_time() -> None:
    """Raise `ReadTimeout` if the call has no time left."""
    if has_passed():
        raise ReadTimeout(f"The call has timed out ({current()}). Try again.")


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, also one of another library (numpy)."""
    try:
        return index(value) is not None and not isinstance(value, bool)
    except TypeError:
        return False


def check_integers(offsets: Iterable[int]) -> None:
    """Raise `InvalidInput` for an offset that is not an integer."""
    for offset in offsets:
        if not is_integer(offset):
            raise InvalidInput(f"An offset must be an integer, not {shown(offset)}.")


def check_offset(stream: str, offset: int) -> None:
    """Raise `InvalidInput` if an offset is not an integer, `OffsetNotFound` if it is not from 0 to 2^63 - 1."""
    if type(offset) is not int:
        check_integers((offset,))
    if not 0 <= offset <= INTEGER_MAX:
        message = f"Offset {offset} of {stream!r} does not exist: offsets are from 0 to 2^63 - 1."
        raise OffsetNotFound(message, stream=stream, offset=offset, last=None, is_proven=True)


def refusal(stream: str, code: int) -> RelatumError:
    """Return the error for a response code about a stream."""
    if code == Code.STREAM_DOES_NOT_EXIST:
        return StreamNotFound(f"There is no stream {stream!r}: declare it, or correct its name.", stream=stream)
    if code == Code.ACCESS_REFUSED:
        message = f"The broker does not let this user read the stream {stream!r}: grant the user the permission."
        return AccessRefused(message, stream=stream)
    if code == Code.STREAM_NOT_AVAILABLE:
        message = f"The stream {stream!r} has no replica on this node, or the replica does not answer: try again."
        return StreamNotHere(message, stream=stream)
    message = f"Reading the stream {stream!r} failed: the broker answered {code_name(code)!r}."
    return BrokerUnavailable(message, stream=stream)


def stream_moved(stream: str) -> StreamUnavailable:
    """Return the error for a stream whose subscriptions the broker has ended."""
    return StreamUnavailable(f"The stream {stream!r} moved or was deleted: try again.", stream=stream)


def offset_error(stream: str, offset: int, bounds: StreamBounds) -> OffsetNotFound:
    """Return the error of an offset without a message: expired, past the end, or used by the broker itself."""
    first, last = bounds
    proven = bounds.is_sure
    if first is not None and offset < first:
        message = f"Offset {offset} of {stream!r} has expired: the stream now begins at {first}."
        return OffsetExpired(message, stream=stream, offset=offset, first=first, last=last, is_proven=proven)
    why = "is empty" if last is None else f"ends at {last}" if offset > last else "uses it for the broker's own data"
    if bounds.is_silence:
        why = "returns no message at present"
    message = f"There is no message at offset {offset}: the stream {stream!r} {why}."
    return OffsetNotFound(message, stream=stream, offset=offset, last=last, is_proven=proven)


def concerns_broker(error: RelatumError) -> bool:
    """Whether an error of one stream's request concerns the broker, so that requests for other streams would fail."""
    return isinstance(error, BrokerUnavailable) and not isinstance(error, (StreamUnavailable, ConnectionLost))
