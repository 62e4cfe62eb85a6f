"""Reading a whole super stream to check the order of its serialization contexts. Nothing is written.

Only the streams say what is in them; PostgreSQL is asked for what they cannot say any more: which partitions were
retired, and which fences and markers retention has dropped.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa

from relatum.checks import checked_name
from relatum.contexts.placement._entries import Entry, entry_of
from relatum.contexts.placement._placement_opening import Opened, open_super_stream
from relatum.contexts.placement._stored_moves import floors_before
from relatum.contexts.serial._order import (
    ContextMessage,
    OrderCheck,
    PartitionsReading,
    SerialReport,
    Unreadable,
)
from relatum.errors import OffsetExpired, OffsetNotFound, StreamNotFound, SuperStreamNotFound
from relatum.headers import CONTEXT_HEADER
from relatum.reading import BrokerAddress, StreamReader
from relatum.store.database import AnyDatabase, as_engine
from relatum.store.translation import translated_errors

PROGRESS_MESSAGES: Final = 20_000
"""Messages between two calls of `progress`."""

Progress = Callable[[SerialReport], None]


def verify(
    super_stream: str,
    *,
    broker: str | BrokerAddress,
    database: AnyDatabase | None = None,
    stream_url: str | None = None,
    header: str | None = None,
    progress: Progress | None = None,
) -> SerialReport:
    """Read all partitions, up to where they end now, and check the order of the contexts in them.

    For each context and each router that published it, its messages must count once and in the order in which they
    were published. Publishers, consumers and moves may go on meanwhile. What is held grows with the contexts and the
    routers, not with the messages.

    Args:
        super_stream: Its name.
        broker: The broker's URL or address.
        database: PostgreSQL's URL, or a `Database`. None reads the streams alone: then the partitions are those that
            are bound now, and where retention has dropped fences, what they made strays seems to count.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
        header: The header that names contexts; None takes the database's word, and "serialization_context" without one.
        progress: Called with what is known so far, about every 20,000 messages.

    Raises:
        SuperStreamNotFound: there is no such super stream.
    """
    with _opened(super_stream, broker, database, stream_url, header) as scope:
        report = SerialReport(super_stream, scope.header, dict(scope.ranges))
        order = OrderCheck(report.add)
        reading = PartitionsReading(scope.look, report.add)
        for counted in scope.read(reading, report, progress):
            report.messages += 1
            report.unplaced += counted.placed is None
            order.add(counted)
    reading.finish(scope.ranges)
    order.finish()
    report.contexts = order.contexts
    return report


@dataclass
class _Scope:
    """What is read: the partitions, from where to where, and what was known of contexts before."""

    reader: StreamReader
    header: str
    ranges: dict[str, tuple[int, int]]
    floors: dict[str, dict[str, int]] = field(default_factory=dict)

    def read(
        self, reading: PartitionsReading, report: SerialReport, progress: Progress | None
    ) -> Iterator[ContextMessage]:
        """What counts in each partition, one after the other, in the order of offsets."""
        seen = 0
        for stream, (first, end) in self.ranges.items():
            reading.begin(stream, self.floors.get(stream, {}))
            for message in self.reader.iterate(stream, first, stop=end) if end > first else ():
                counted = reading.add(message.offset, entry_of(message.headers, message.body, self.header))
                if counted is not None:
                    yield counted
                seen += 1
                if seen % PROGRESS_MESSAGES == 0:
                    self._tell(reading, report, progress)
        self._tell(reading, report, progress)

    @staticmethod
    def _tell(reading: PartitionsReading, report: SerialReport, progress: Progress | None) -> None:
        report.strays, report.moves = len(reading.strays), len(reading.fences)
        report.adopted = len(reading.strays.keys() & reading.adopted.keys())
        if progress is not None:
            progress(report)

    def look(self, stream: str, offset: int) -> Entry | Unreadable:
        """What lies at an offset."""
        try:
            message = self.reader.read(stream, offset)
        except (OffsetExpired, StreamNotFound):
            return Unreadable.OUT_OF_REACH
        except OffsetNotFound:
            return Unreadable.MISSING
        return entry_of(message.headers, message.body, self.header)


@contextmanager
def _opened(
    super_stream: str,
    broker: str | BrokerAddress,
    database: AnyDatabase | None,
    stream_url: str | None,
    header: str | None,
) -> Iterator[_Scope]:
    """What is to be read of a super stream, and a reader to do it with."""
    checked_name("super_stream", super_stream)
    if header is not None:
        checked_name("header", header)
    address = BrokerAddress.of(broker, stream_url)
    with StreamReader.open(address) as reader, ExitStack() as stack:
        connection = None
        if database is not None:
            stack.enter_context(translated_errors())
            connection = stack.enter_context(stack.enter_context(as_engine(database)).connect())
        known = None if connection is None else _known(connection, address.vhost, super_stream)
        partition_ids = {row.stream: row.partition_id for row in known.partitions} if known else {}
        streams = list(partition_ids) if known else _bound_now(reader, address, super_stream)
        ranges = dict(_ranges(reader, streams))
        scope = _Scope(reader, header or (known.header if known else CONTEXT_HEADER), ranges)
        if connection is not None and known is not None:
            for stream, (first, _) in ranges.items():
                scope.floors[stream] = floors_before(connection, partition_ids[stream], first)
            connection.close()
        yield scope


def _known(connection: sa.Connection, vhost: str, super_stream: str) -> Opened | None:
    """What is stored of a super stream; None where nothing was ever placed in it."""
    try:
        return open_super_stream(connection, (vhost, super_stream), None, None)
    except SuperStreamNotFound:
        return None


def _bound_now(reader: StreamReader, address: BrokerAddress, super_stream: str) -> list[str]:
    """The partitions as the broker has them."""
    # The empty name is the default exchange's, to which every stream is bound.
    streams = reader.bound(super_stream) if super_stream else ()
    if not streams:
        raise SuperStreamNotFound(f"there is no super stream {super_stream!r}", super_stream=super_stream)
    return streams


def _ranges(reader: StreamReader, streams: Iterable[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    """From where to where each stream is there; one that was retired and deleted is left out."""
    for stream in streams:
        try:
            bounds = reader.bounds(stream)
        except StreamNotFound:
            continue
        first = bounds.first or 0
        yield stream, (first, first if bounds.last is None else bounds.last + 1)
