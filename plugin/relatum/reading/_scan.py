"""Reading on from a point: what is wanted, the subscription that brings it, the batches it comes in."""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import index
from typing import Final, Literal

from relatum.checks import checked_count, checked_name, shown
from relatum.errors import InvalidInput, StreamUnavailable
from relatum.limits import INTEGER_MAX
from relatum.reading._attach import Attach, not_settled
from relatum.reading._batches import RecordBatch
from relatum.reading._connection import GOODBYE_S, SocketConnection
from relatum.reading._questions import attach_at_end, check_leading
from relatum.reading._stream_errors import check_time, moved, refusal
from relatum.waiting import left_s
from relatum.wire import (
    NEXT,
    Answer,
    Chunk,
    Code,
    CreditRefused,
    Event,
    StartSpec,
    StreamMoved,
    frames,
    split,
)

Start = int | datetime | Literal["first", "last", "next"]
"""An offset; a moment (by the broker's clock when it wrote the message); the first message; the first message of the
last chunk; or what is published from now on."""

_NAMED: Final = {"first": frames.FIRST, "last": frames.LAST, "next": frames.NEXT}
_NO_START: Final = "A start is an offset, a datetime, 'first', 'last' or 'next', not {}."
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Beginning:
    """A start as readers use it.

    Attributes:
        offset: Messages below it are passed over; 0 for none.
        time_ms: Chunks written before it are passed over; None for none.
        spec: Where a stream subscription attaches.
    """

    offset: int
    time_ms: int | None
    spec: StartSpec


def beginning(start: Start) -> Beginning:
    """The beginning a caller asked for.

    Raises:
        InvalidInput: Not an offset, a moment, or one of the names.
    """
    if isinstance(start, str):
        if start not in _NAMED:
            raise InvalidInput(_NO_START.format(shown(start)))
        return Beginning(0, None, _NAMED[start])
    if isinstance(start, datetime):
        moment = start if start.tzinfo is not None else start.replace(tzinfo=UTC)
        # In whole numbers: as a float, 0.123 s may be a millisecond less.
        time_ms = max(0, (moment - _EPOCH) // _MILLISECOND)
        # The documentation says the broker attaches at the chunk before the moment, its code at the one after: a
        # second earlier, what is too early is passed over in both cases.
        spec = StartSpec(frames.Start.TIMESTAMP, max(0, time_ms - 1000))
        return Beginning(0, time_ms, spec)
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= INTEGER_MAX:
        raise InvalidInput(_NO_START.format(shown(start)))
    return Beginning(start, None, StartSpec(frames.Start.OFFSET, start))


SHORT_SCAN_CREDIT: Final = 2
"""Chunks a scan with a stop is granted at first."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What a scan reads.

    Attributes:
        begin: Where it begins.
        stop: The offset it ends before; None for none.
        follow: True goes on with what is published later; False ends at what is there.
        credit: Chunks the broker may send ahead of those handled.
        any_node: True ends, without `follow`, where a node ends that does not lead the stream.
    """

    begin: Beginning
    stop: int | None
    follow: bool
    credit: int
    any_node: bool = False

    def end(self, tail: Attach) -> int | None:
        """The last offset to read, given the last chunk; None where nothing is to be read."""
        tail.check()
        if self.begin.spec == NEXT:
            return None
        if not tail.chunks:
            raise not_settled(tail, may_be_empty=True)
        chunk = tail.chunks[-1]
        end = chunk.last_offset if self.stop is None else min(chunk.last_offset, self.stop - 1)
        is_past = end < self.begin.offset or not self.wants(chunk)
        return None if is_past else end

    def wants(self, chunk: Chunk) -> bool:
        """True where a chunk is not before the beginning."""
        begin = self.begin
        return chunk.last_offset >= begin.offset and (begin.time_ms is None or chunk.time_ms >= begin.time_ms)


class Subscription:
    """A subscription that lasts, its credit, and where it ends.

    Attributes:
        is_over: Whether all that is wanted has come.
    """

    def __init__(self, connection: SocketConnection, stream: str, scan: Scan) -> None:
        self._connection = connection
        self._session = session = connection.session
        self._stream = stream
        self._scan = scan
        self._end = scan.stop - 1 if scan.follow and scan.stop is not None else None
        self.is_over = False
        # Asked first, so that the end is known before the first chunk comes; both go out in one write.
        self._tail = None if scan.follow else attach_at_end(connection, stream)
        self._number = connection.next_subscription()
        self._correlation = session.next_correlation()
        # A scan with a stop is mostly short: what is sent beyond it is wasted, so its credit grows on the way.
        self._credit = scan.credit if scan.stop is None else min(SHORT_SCAN_CREDIT, scan.credit)
        self._outstanding = self._credit
        session.send(frames.subscribe(self._correlation, self._number, stream, scan.begin.spec, self._credit))

    def take(self, event: Event) -> Chunk | None:
        """The chunk in an event, if it is one of this subscription's that is wanted.

        Raises:
            StreamNotFound, AccessRefused: The broker refuses the subscription.
            StreamUnavailable: The stream moved or was deleted.
            LedElsewhere, NotSettled: Where it ends cannot be said here, or not yet.
        """
        if self._tail is not None:
            self._take_tail(self._tail, event)
        if type(event) is Chunk:
            if event.subscription != self._number or self.is_over:
                return None
            self._outstanding -= 1
            self.is_over = self._end is not None and event.last_offset >= self._end
            return event if self._scan.wants(event) else None
        stream = self._stream
        if type(event) is Answer:
            if event.correlation == self._correlation and event.code != Code.OK:
                raise refusal(stream, event.code)
        elif type(event) is StreamMoved:
            if event.stream == stream:
                raise moved(stream)
        elif type(event) is CreditRefused and event.subscription == self._number:
            raise StreamUnavailable(f"The broker dropped the subscription to {stream!r}.", stream=stream)
        return None

    def _take_tail(self, tail: Attach, event: Event) -> None:
        tail.take(event)
        if tail.is_at_barrier:
            check_leading(self._connection, tail, any_node=self._scan.any_node)
            self._end, self._tail = self._scan.end(tail), None
            self.is_over = self._end is None

    def grant(self) -> None:
        """Grant anew what was handled, several chunks together: a frame for each would cost a system call each."""
        if not self.is_over and self._outstanding * 2 <= self._credit:
            self._credit = min(self._scan.credit, self._credit * 2)
            self._session.send(frames.credit(self._number, self._credit - self._outstanding))
            self._outstanding = self._credit

    def close(self) -> None:
        """End it. What is still under way is for a number nobody has any more: it is dropped as it comes."""
        self._session.unsubscribe(self._number)
        self._connection.put_by(GOODBYE_S)


def chunks_of(
    connection: SocketConnection, stream: str, scan: Scan, idle_s: float
) -> Generator[list[Chunk] | None, None, None]:
    """The chunks of a scan, those that came together in one list; None where nothing came for `idle_s`.

    A chunk is granted anew after it was handled. Errors are those of `Subscription.take`, and `ReadTimeout` where the
    call has no time left.
    """
    if scan.follow and scan.stop is not None and scan.stop <= scan.begin.offset:
        return
    subscription = Subscription(connection, stream, scan)
    try:
        while not subscription.is_over:
            check_time()
            events = connection.wait(left_s(idle_s))
            if events is None:
                yield None
                continue
            # What came before an event that is no chunk is given first: it may be an error.
            for _, run in groupby(events, key=_is_chunk):
                if came := [chunk for event in run if (chunk := subscription.take(event)) is not None]:
                    yield came
                subscription.grant()
    finally:
        subscription.close()


def _is_chunk(event: Event) -> bool:
    return type(event) is Chunk


def batches_of(stream: str, chunk: Chunk, scan: Scan) -> Iterator[RecordBatch]:
    """A chunk's records within the scan, in one batch unless unpacking makes it large."""
    begin = scan.begin.offset
    for first, records in split(chunk):
        end = first + len(records)
        if scan.stop is not None and end > scan.stop:
            records, end = records[: max(0, scan.stop - first)], scan.stop
        if first < begin:
            records, first = records[begin - first :], begin
        if records:
            yield RecordBatch(stream, first, range(first, end), records, chunk.time_ms, chunk.epoch)


CREDIT: Final = 16
"""Chunks sent ahead unless the caller says otherwise: keeps the socket busy. They wait in its buffers, not in ours."""

CREDIT_MAX: Final = 0x7FFF
"""The most chunks the protocol can grant at once."""

IDLE_S: Final = 60.0
"""Seconds after which a reader that waits for ever looks up; nothing depends on it."""


def checked_ids(ids: Iterable[tuple[str, int]]) -> Iterable[tuple[str, int]]:
    """Ids that can be gone through; each is looked at in its turn.

    Raises:
        InvalidInput: they cannot.
    """
    given: object = ids
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise InvalidInput(f"ids= takes pairs of a stream's name and an offset (MessageId), not {shown(ids)}")
    return ids


def checked_scan(stream: str, start: Start, stop: int | None, *, follow: bool, credit: int = CREDIT) -> Scan:
    """What a scan reads, all of it checked before anything is asked.

    Raises:
        InvalidInput: an argument cannot be.
    """
    checked_name("stream", stream)
    if stop is not None:
        try:
            is_offset = not isinstance(stop, bool) and 0 <= index(stop) <= INTEGER_MAX + 1
        except TypeError:
            is_offset = False
        if not is_offset:
            raise InvalidInput(f"stop= takes an offset, or None, not {shown(stop)}")
    return Scan(beginning(start), stop, follow, checked_count("credit", credit, most=CREDIT_MAX))
