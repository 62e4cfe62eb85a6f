"""What is said of a stream, or of an offset, that cannot be read."""

from collections.abc import Iterable
from operator import index
from typing import TYPE_CHECKING

from relatum.checks import shown
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
from relatum.limits import INTEGER_MAX
from relatum.reading._batches import StreamBounds
from relatum.waiting import current, has_passed
from relatum.wire import Code, code_name

if TYPE_CHECKING:
    from relatum.reading._reader import StreamReader


def check_time() -> None:
    """Raise `ReadTimeout` where the call has no time left: before anything is asked, and between what comes."""
    if has_passed():
        raise ReadTimeout(f"The time of the call is over ({current()}).")


def check_integers(offsets: Iterable[int]) -> None:
    """Raise for an offset that is no integer; what counts as one in Python (a number of numpy) is taken.

    Raises:
        InvalidInput: One is none.
    """
    for offset in offsets:
        try:
            is_integer = index(offset) is not None and not isinstance(offset, bool)
        except TypeError:
            is_integer = False
        if not is_integer:
            raise InvalidInput(f"An offset is an integer, not {shown(offset)}.")


def check_offset(stream: str, offset: int) -> None:
    """Raise for a number that no message can lie at.

    Raises:
        InvalidInput: It is no integer.
        OffsetNotFound: It is none of 0 to 2^63 - 1.
    """
    if type(offset) is not int:
        check_integers((offset,))
    if not 0 <= offset <= INTEGER_MAX:
        raise OffsetNotFound(f"{offset} is no offset.", stream=stream, offset=offset, last=None, is_proven=True)


def refusal(stream: str, code: int) -> RelatumError:
    """The error for a stream a command was refused for."""
    if code == Code.STREAM_DOES_NOT_EXIST:
        return StreamNotFound(f"There is no stream {stream!r}.", stream=stream)
    if code == Code.ACCESS_REFUSED:
        return AccessRefused(f"The broker refuses this user to read the stream {stream!r}.", stream=stream)
    if code == Code.STREAM_NOT_AVAILABLE:
        message = f"The stream {stream!r} has no replica on this node, or none that answers."
        return StreamNotHere(message, stream=stream)
    return BrokerUnavailable(f"Reading the stream {stream!r} failed: {code_name(code)}.", stream=stream)


def moved(stream: str) -> StreamUnavailable:
    """The error for a stream whose reading the broker ended."""
    return StreamUnavailable(f"The stream {stream!r} moved or was deleted.", stream=stream)


def not_there(stream: str, offset: int, bounds: StreamBounds) -> OffsetNotFound:
    """The error for an offset without a message: expired, past the end, or one the broker used itself."""
    first, last = bounds
    proven = bounds.is_sure
    if first is not None and offset < first:
        message = f"Offset {offset} of {stream!r} has expired: the stream now begins at {first}."
        return OffsetExpired(message, stream=stream, offset=offset, first=first, last=last, is_proven=proven)
    where = "is empty" if last is None else f"ends at {last}" if offset > last else "has none there"
    if bounds.is_silence:
        where = "shows none at all now"
    message = f"There is no message at offset {offset}: the stream {stream!r} {where}."
    return OffsetNotFound(message, stream=stream, offset=offset, last=last, is_proven=proven)


def is_inside(offset: int, bounds: StreamBounds) -> bool:
    """Whether an offset lies between a stream's ends."""
    return bounds.first is not None and bounds.last is not None and bounds.first <= offset <= bounds.last


def proven_not_there(stream: str, offset: int, bounds: StreamBounds) -> OffsetNotFound | StreamUnavailable:
    """As `not_there`, after the leader was asked; where it could not be, a node that lags is no proof of an end."""
    error = not_there(stream, offset, bounds)
    if bounds.is_proven or isinstance(error, OffsetExpired):
        return error
    message = f"This node has no message at offset {offset} of {stream!r}, and the leader cannot be asked from here."
    return StreamUnavailable(message, stream=stream)


def bounds_or_error(reader: "StreamReader", stream: str) -> StreamBounds | RelatumError:
    """A stream's ends, or why this one cannot be read: not there, a queue, no permission, no leader, bad data.

    Raises:
        BrokerUnavailable: it is not about this stream: no other could be asked, either.
    """
    try:
        return reader.bounds(stream)
    except RelatumError as error:
        if is_of_all(error):
            raise
        return error


def is_of_all(error: RelatumError) -> bool:
    """Whether an error that one stream met is the broker's, so that the others need not be asked."""
    return isinstance(error, BrokerUnavailable) and not isinstance(error, (StreamUnavailable, ConnectionLost))
