"""Reads a stream from a point on: the scan, the subscription that serves it, and the batches it yields."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import index
from typing import Final, Literal

from relatum.common.checks import checked_count, checked_name, shown
from relatum.common.limits import INTEGER_MAX
from relatum.common.waiting import left_s
from relatum.errors import InvalidInput, StreamNotFound, StreamNotHere, StreamUnavailable
from relatum.reading._bounds import check_time
from relatum.reading._connection import GOODBYE_S, Attach, SocketConnection
from relatum.reading._leaders import Leaders, NotSettled, NotTheLeader, attach_at_end, check_leading, not_settled
from relatum.reading._message import Message
from relatum.reading._nodes import Nodes
from relatum.reading._pool import Use
from relatum.wire import frames
from relatum.wire.chunk import Chunk, split
from relatum.wire.frames import NEXT, StartSpec
from relatum.wire.session import CreditRefused, Event

Start = int | datetime | Literal["first", "last", "next"]
"""An offset; a moment (by the broker's clock when it wrote the message); the first message; the first message of the
last chunk; or what is published from now on."""

CREDIT: Final = 16
"""Default number of chunks sent ahead: it keeps the socket busy. They wait in its buffers, not in ours."""

CREDIT_MAX: Final = 0x7FFF
"""The most chunks the protocol can grant at once."""

SHORT_SCAN_CREDIT: Final = 2
"""Chunks granted at first to a scan with a stop: chunks beyond the stop are wasted, so the credit grows on the way."""

NODES_TRIED_MAX: Final = 4
"""The most nodes tried in a row because the one before has no replica of the stream."""

PART_RECORDS: Final = 1000
"""The most records yielded together, except those of one batch."""

_NAMED: Final = {"first": frames.FIRST, "last": frames.LAST, "next": frames.NEXT}
_NO_START: Final = "A start is an offset, a datetime, 'first', 'last' or 'next', not {}."
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Consecutive records of a stream from one chunk.

    Attributes:
        stream: The stream's name.
        first_offset: The offset of the first record of the batch.
        offsets: The offset of each record, ascending.
        records: Each record's bytes (AMQP 1.0 sections, or whatever a publisher wrote), for `Message.from_record`; an
            `UnreadableRecord` if its batch cannot be unpacked.
        chunk_ms: When the chunk was written, milliseconds since 1970, UTC.
        epoch: The leader's term.
    """

    stream: str
    first_offset: int
    offsets: Sequence[int]
    records: Sequence[bytes]
    chunk_ms: int | None = None
    epoch: int | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def last_offset(self) -> int:
        """The offset of the last record of the batch."""
        return self.offsets[-1]

    def each_message(self) -> list[Message]:
        """Return the batch's messages, not decoded yet."""
        stream, chunk_ms = self.stream, self.chunk_ms
        pairs = zip(self.offsets, self.records, strict=True)
        return [Message.from_record(stream, offset, record, chunk_ms) for offset, record in pairs]


@dataclass(frozen=True, slots=True)
class Scan:
    """A range of a stream to read.

    The subscription attaches at `spec`; messages below `first` and chunks written before `time_ms` are skipped. It ends
    before `stop`, and without `follow` after the existing messages: with `any_node`, at the end known to a node that
    does not lead the stream.
    """

    stream: str
    first: int
    time_ms: int | None
    spec: StartSpec
    stop: int | None
    follow: bool
    credit: int
    any_node: bool = False

    @classmethod
    def of(cls, stream: str, start: Start, stop: int | None, *, follow: bool, credit: int = CREDIT) -> "Scan":
        """Check the arguments of a caller; `InvalidInput` if one is invalid."""
        checked_name("stream", stream)
        if stop is not None:
            try:
                is_offset = not isinstance(stop, bool) and 0 <= index(stop) <= INTEGER_MAX + 1
            except TypeError:
                is_offset = False
            if not is_offset:
                raise InvalidInput(f"stop= takes an offset, or None, not {shown(stop)}")
        return cls(stream, *_beginning(start), stop, follow, checked_count("credit", credit, most=CREDIT_MAX))

    def end(self, tail: Attach) -> int | None:
        """Return the last offset to read, given the last chunk; None if there is nothing to read."""
        tail.check()
        if self.spec == NEXT:
            return None
        if not tail.chunks:
            raise not_settled(tail, may_be_empty=True)
        chunk = tail.chunks[-1]
        end = chunk.last_offset if self.stop is None else min(chunk.last_offset, self.stop - 1)
        return None if end < self.first or not self.wants(chunk) else end

    def wants(self, chunk: Chunk) -> bool:
        """Whether a chunk reaches the beginning of the scan or a later offset."""
        return chunk.last_offset >= self.first and (self.time_ms is None or chunk.time_ms >= self.time_ms)


def _beginning(start: Start) -> tuple[int, int | None, StartSpec]:
    """Return the first offset, the first time, and where to attach."""
    if isinstance(start, str):
        if start not in _NAMED:
            raise InvalidInput(_NO_START.format(shown(start)))
        return 0, None, _NAMED[start]
    if isinstance(start, datetime):
        moment = start if start.tzinfo is not None else start.replace(tzinfo=UTC)
        # In integers: as a float, 0.123 s may be a millisecond less.
        time_ms = max(0, (moment - _EPOCH) // _MILLISECOND)
        # The documentation says that the broker attaches at the chunk before the moment, its code at the one after. A
        # second earlier is right in both cases; earlier chunks are skipped.
        return 0, time_ms, StartSpec(frames.Start.TIMESTAMP, max(0, time_ms - 1000))
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= INTEGER_MAX:
        raise InvalidInput(_NO_START.format(shown(start)))
    return start, None, StartSpec(frames.Start.OFFSET, start)


def batches_of(
    nodes: Nodes, leaders: Leaders, scan: Scan, idle_s: float, use: Use
) -> Generator[list[RecordBatch], None, None]:
    """Yield the batches of a scan, those that arrived together in one list; an empty one after `idle_s` of silence."""
    with closing(_chunks(nodes, leaders, scan, idle_s, use)) as given:
        for chunks in given:
            part: list[RecordBatch] = []
            count = 0
            for chunk in chunks:
                for batch in _batches_in(chunk, scan):
                    part.append(batch)
                    count += len(batch)
                    if count >= PART_RECORDS:
                        yield part
                        part, count = [], 0
            if part or not chunks:
                yield part


def _batches_in(chunk: Chunk, scan: Scan) -> Iterator[RecordBatch]:
    """Yield a chunk's records within the scan, in one batch unless unpacking makes it large."""
    for first, records in split(chunk):
        end = first + len(records)
        if scan.stop is not None and end > scan.stop:
            records, end = records[: max(0, scan.stop - first)], scan.stop
        if first < scan.first:
            records, first = records[scan.first - first :], scan.first
        if records:
            yield RecordBatch(scan.stream, first, range(first, end), records, chunk.time_ms, chunk.epoch)


def _chunks(nodes: Nodes, leaders: Leaders, scan: Scan, idle_s: float, use: Use) -> Generator[list[Chunk], None, None]:
    """Yield the chunks of a scan as they arrive; an empty list after `idle_s` of silence.

    A node refuses before the first chunk; then the scan restarts on a node that has the stream.
    """
    stream, node, hops = scan.stream, None, 0
    while True:
        try:
            with nodes.connection(use, node) as connection:
                yield from _chunks_at(connection, scan, idle_s)
        except (NotTheLeader, NotSettled):
            # The end must come from the node that is read.
            bounds = leaders.bounds(stream)
            if bounds.first is None:
                return
            node = leaders.of(stream) if bounds.is_proven else None
            scan = replace(scan, any_node=not bounds.is_proven)
        except StreamNotHere:
            node, hops = nodes.other_node(stream, node), hops + 1
            if node is None or hops > NODES_TRIED_MAX:
                raise
        except StreamNotFound as error:
            raise nodes.named(error) from None
        else:
            return


def _chunks_at(connection: SocketConnection, scan: Scan, idle_s: float) -> Generator[list[Chunk], None, None]:
    """Yield the chunks from one node. The credit of a handled chunk is granted again."""
    if scan.follow and scan.stop is not None and scan.stop <= scan.first:
        return
    subscription = Subscription(connection, scan)
    try:
        while not subscription.is_over:
            check_time()
            events = connection.wait(left_s(idle_s))
            if events is None:
                yield []
                continue
            # Chunks before another event are delivered first: it may be an error.
            for _, run in groupby(events, key=lambda event: type(event) is Chunk):
                if came := [chunk for event in run if (chunk := subscription.take(event)) is not None]:
                    yield came
                subscription.grant()
    finally:
        subscription.close()


class Subscription:
    """A lasting subscription, its credit, and its end: `is_over` once all wanted chunks have arrived."""

    def __init__(self, connection: SocketConnection, scan: Scan) -> None:
        self._connection = connection
        self._scan = scan
        self._end = scan.stop - 1 if scan.follow and scan.stop is not None else None
        self.is_over = False
        # Requested first, so that the end is known before the first chunk arrives; both go out in one write.
        self._tail = None if scan.follow else attach_at_end(connection, scan.stream)
        self._credit = scan.credit if scan.stop is None else min(SHORT_SCAN_CREDIT, scan.credit)
        self._outstanding = self._credit
        self._attach = Attach(connection, scan.stream, scan.spec, self._credit)

    def take(self, event: Event) -> Chunk | None:
        """Return the chunk in an event, if it belongs to this subscription and is wanted."""
        if self._tail is not None:
            self._tail.take(event)
            if self._tail.is_at_barrier:
                check_leading(self._connection, self._tail, any_node=self._scan.any_node)
                self._end, self._tail = self._scan.end(self._tail), None
                self.is_over = self._end is None
        attach = self._attach
        if type(event) is Chunk:
            if event.subscription != attach.subscription or self.is_over:
                return None
            self._outstanding -= 1
            self.is_over = self._end is not None and event.last_offset >= self._end
            return event if self._scan.wants(event) else None
        attach.take(event)
        attach.check()
        if type(event) is CreditRefused and event.subscription == attach.subscription:
            raise StreamUnavailable(f"The broker dropped the subscription to {attach.stream!r}.", stream=attach.stream)
        return None

    def grant(self) -> None:
        """Grant the credit of handled chunks again, several at once: a frame for each would cost a system call."""
        if not self.is_over and self._outstanding * 2 <= self._credit:
            self._credit = min(self._scan.credit, self._credit * 2)
            more = frames.credit(self._attach.subscription, self._credit - self._outstanding)
            self._connection.session.send(more)
            self._outstanding = self._credit

    def close(self) -> None:
        """Unsubscribe. Chunks that still come for the old number are dropped."""
        self._attach.end()
        self._connection.put_by(GOODBYE_S)
