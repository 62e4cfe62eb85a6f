"""Reads a stream from a start on: the scan, its subscription, and the batches that it yields."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Final, Literal

from relatum.common.checks import checked_count, checked_name, shown
from relatum.common.limits import INTEGER_MAX
from relatum.common.waiting import left_s
from relatum.errors import InvalidInput, StreamNotFound, StreamNotHere, StreamUnavailable
from relatum.reading._bounds import check_time, is_integer
from relatum.reading._connection import CLOSE_TIMEOUT_S, Attach, SocketConnection
from relatum.reading._leaders import Leaders, NotSettled, NotTheLeader, attach_at_end, check_leading, not_settled
from relatum.reading._message import Message
from relatum.reading._nodes import Nodes
from relatum.reading._pool import Use
from relatum.wire import frames
from relatum.wire.chunk import Chunk, split
from relatum.wire.frames import NEXT, StartSpec
from relatum.wire.session import CreditRefused, Event

Start = int | datetime | Literal["first", "last", "next"]
"""Where to begin: an offset; a time, compared with the broker's time of each chunk; "first" for the first message;
"last" for the last chunk; or "next" for messages published from now on."""

CREDIT: Final = 16
"""Default number of chunks sent ahead. It keeps the socket busy; the chunks wait in the socket's buffers."""

CREDIT_MAX: Final = 0x7FFF
"""Maximum chunks that one Credit can grant."""

SHORT_SCAN_CREDIT: Final = 2
"""Chunks granted at first to a scan with a stop. It grows later; chunks after the stop would be useless."""

NODES_TRIED_MAX: Final = 4
"""Maximum nodes tried in a row if they have no replica of the stream."""

PART_RECORDS: Final = 1000
"""Number of records after which a list of batches is yielded."""

_START_SPECS: Final = {"first": frames.FIRST, "last": frames.LAST, "next": frames.NEXT}
_INVALID_START: Final = "A start is an offset, a datetime, 'first', 'last' or 'next', not {}."
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Consecutive records of a stream from one chunk.

    Attributes:
        stream: The stream's name.
        first_offset: The offset of the first record.
        offsets: The offset of each record, ascending.
        records: Each record's bytes (AMQP 1.0 sections, or other bytes of a stream client), for `Message.from_record`;
            an `UnreadableRecord` if its sub-entry batch cannot be unpacked.
        chunk_ms: When the broker wrote the chunk, milliseconds since 1970, UTC.
        epoch: The leader's term when it wrote the chunk.
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
        """The offset of the last record."""
        return self.offsets[-1]

    def each_message(self) -> list[Message]:
        """Return the batch's messages, not decoded yet."""
        stream, chunk_ms = self.stream, self.chunk_ms
        pairs = zip(self.offsets, self.records, strict=True)
        return [Message.from_record(stream, offset, record, chunk_ms) for offset, record in pairs]


@dataclass(frozen=True, slots=True)
class Scan:
    """A range of a stream to read.

    The subscription begins at `spec`. Messages before `first` and chunks written before `time_ms` are skipped. The scan
    ends before `stop`; without `follow`, it also ends at the stream's present end, as its leader knows it. With
    `any_node`, the node that is read may be another one.
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
        """Return the scan of a caller's arguments; `InvalidInput` if one is invalid."""
        checked_name("stream", stream)
        if stop is not None and not (is_integer(stop) and 0 <= stop <= INTEGER_MAX + 1):
            raise InvalidInput(f"stop= takes an offset or None, not {shown(stop)}")
        return cls(stream, *_beginning(start), stop, follow, checked_count("credit", credit, most=CREDIT_MAX))

    def end(self, tail: Attach) -> int | None:
        """Return the last offset to read, given the stream's last chunk; None if there is nothing to read."""
        tail.check()
        if self.spec == NEXT:
            return None
        if not tail.chunks:
            raise not_settled(tail, may_be_empty=True)
        chunk = tail.chunks[-1]
        end = chunk.last_offset if self.stop is None else min(chunk.last_offset, self.stop - 1)
        return None if end < self.first or not self.wants(chunk) else end

    def wants(self, chunk: Chunk) -> bool:
        """Whether a chunk contains or follows the scan's start."""
        return chunk.last_offset >= self.first and (self.time_ms is None or chunk.time_ms >= self.time_ms)


def _beginning(start: Start) -> tuple[int, int | None, StartSpec]:
    """Return the first offset, the first time in milliseconds, and the start of the subscription."""
    if isinstance(start, str):
        if start not in _START_SPECS:
            raise InvalidInput(_INVALID_START.format(shown(start)))
        return 0, None, _START_SPECS[start]
    if isinstance(start, datetime):
        moment = start if start.tzinfo is not None else start.replace(tzinfo=UTC)
        # Integer arithmetic: with floats, 0.123 s may become 122 ms.
        time_ms = max(0, (moment - _EPOCH) // _MILLISECOND)
        # By the documentation, the broker begins at the chunk before the time; by its code, at the one after. Beginning
        # a second earlier is right in both cases, since earlier chunks are skipped.
        return 0, time_ms, StartSpec(frames.Start.TIMESTAMP, max(0, time_ms - 1000))
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= INTEGER_MAX:
        raise InvalidInput(_INVALID_START.format(shown(start)))
    return start, None, StartSpec(frames.Start.OFFSET, start)


def batches_of(
    nodes: Nodes, leaders: Leaders, scan: Scan, idle_s: float, use: Use
) -> Generator[list[RecordBatch], None, None]:
    """Yield the batches of a scan, in lists of those that arrived together; an empty list after `idle_s` of silence."""
    with closing(_chunks(nodes, leaders, scan, idle_s, use)) as lists:
        for chunks in lists:
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
    """Yield a chunk's records within the scan, in several batches if they are many."""
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

    If a node has no replica, or cannot know the end, it refuses before the first chunk. Another node is then used.
    """
    stream, node, hops = scan.stream, None, 0
    while True:
        try:
            with nodes.connection(use, node) as connection:
                yield from _chunks_at(connection, scan, idle_s)
        except (NotTheLeader, NotSettled):
            # The node that is read must know the stream's end.
            bounds = leaders.bounds(stream)
            if use is Use.ANSWER and scan.stop is not None and bounds.end < scan.stop and not bounds.is_sure:
                raise StreamUnavailable(
                    f"The leader of {stream!r} does not answer, and the node that does ends at {bounds.last}, so the "
                    f"messages up to {scan.stop - 1} cannot all be read: try again.",
                    stream=stream,
                ) from None
            if bounds.first is None:
                return
            node = leaders.of(stream) if bounds.is_proven else None
            scan = replace(scan, any_node=not bounds.is_proven)
        except StreamNotHere:
            node, hops = nodes.other_node(stream, node), hops + 1
            if node is None or hops > NODES_TRIED_MAX:
                raise
        except StreamNotFound as error:
            raise nodes.missing_error(error) from None
        else:
            return


def _chunks_at(connection: SocketConnection, scan: Scan, idle_s: float) -> Generator[list[Chunk], None, None]:
    """Yield the chunks from one node. The credit of chunks that the caller has handled is granted again."""
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
            # Chunks are yielded before the event after them, which may be an error.
            for _, run in groupby(events, key=lambda event: type(event) is Chunk):
                if chunks := [chunk for event in run if (chunk := subscription.take(event)) is not None]:
                    yield chunks
                subscription.grant()
    finally:
        subscription.close()


class Subscription:
    """The subscription of a scan, with its credit. `is_over`: All requested chunks have arrived."""

    def __init__(self, connection: SocketConnection, scan: Scan) -> None:
        self._connection = connection
        self._scan = scan
        self._end = scan.stop - 1 if scan.follow and scan.stop is not None else None
        self.is_over = False
        # The end is requested first, so that it is known before the first chunk arrives. Both are sent in one write.
        self._tail = None if scan.follow else attach_at_end(connection, scan.stream)
        self._credit = scan.credit if scan.stop is None else min(SHORT_SCAN_CREDIT, scan.credit)
        self._outstanding = self._credit
        self._attach = Attach(connection, scan.stream, scan.spec, self._credit)

    def take(self, event: Event) -> Chunk | None:
        """Handle an event. Return its chunk if it belongs to this subscription and the scan."""
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
            raise StreamUnavailable(
                f"The broker dropped the subscription to {attach.stream!r}: try again.", stream=attach.stream
            )
        return None

    def grant(self) -> None:
        """Grant credit for the handled chunks, once they are half of the credit, to save system calls."""
        if not self.is_over and self._outstanding * 2 <= self._credit:
            self._credit = min(self._scan.credit, self._credit * 2)
            more = frames.credit(self._attach.subscription, self._credit - self._outstanding)
            self._connection.session.send(more)
            self._outstanding = self._credit

    def close(self) -> None:
        """Unsubscribe. Chunks that still arrive for the old id are dropped."""
        self._attach.end()
        self._connection.flush_or_abandon(CLOSE_TIMEOUT_S)
