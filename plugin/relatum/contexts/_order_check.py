"""Reading a whole super stream to check the order of its serialization contexts. Nothing is written.

Only the streams say what is in them; PostgreSQL is asked for what they cannot say any more: which partitions were
retired, and which fences and markers retention has dropped.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final

from relatum.checks import checked_name
from relatum.contexts._entries import Entry, entry_of
from relatum.contexts._super_stream_rows import open_super_stream
from relatum.contexts._stored_moves import floors_before
from relatum.contexts._order import OrderCheck, PartitionsReading, SerialReport, Unreadable
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
    checked_name("super_stream", super_stream)
    if header is not None:
        checked_name("header", header)
    address = BrokerAddress.of(broker, stream_url)
    with StreamReader.open(address) as reader:
        header, ranges, floors = _begin(reader, address, database, super_stream, header)

        def look(stream: str, offset: int) -> Entry | Unreadable:
            try:
                message = reader.read(stream, offset)
            except (OffsetExpired, StreamNotFound):
                return Unreadable.OUT_OF_REACH
            except OffsetNotFound:
                return Unreadable.MISSING
            return entry_of(message.headers, message.body, header)

        report = SerialReport(super_stream, header, dict(ranges))
        order, reading = OrderCheck(report.add), PartitionsReading(look, report.add)

        def tell() -> None:
            report.strays, report.moves = len(reading.strays), len(reading.fences)
            report.adopted = len(reading.strays.keys() & reading.adopted.keys())
            if progress is not None:
                progress(report)

        seen = 0
        for stream, (first, end) in ranges.items():
            reading.begin(stream, floors.get(stream, {}))
            for message in reader.iterate(stream, first, stop=end) if end > first else ():
                counted = reading.add(message.offset, entry_of(message.headers, message.body, header))
                if counted is not None:
                    report.messages += 1
                    report.unplaced += counted.placed is None
                    order.add(counted)
                seen += 1
                if seen % PROGRESS_MESSAGES == 0:
                    tell()
        tell()
    reading.finish(ranges)
    order.finish()
    report.contexts = order.contexts
    return report


def _begin(
    reader: StreamReader,
    address: BrokerAddress,
    database: AnyDatabase | None,
    super_stream: str,
    header: str | None,
) -> tuple[str, dict[str, tuple[int, int]], dict[str, dict[str, int]]]:
    """The header, from where to where each partition is read, and the floors of contexts there."""
    if database is not None:
        # Nothing is stored where nothing was ever placed in it.
        with (
            suppress(SuperStreamNotFound),
            as_engine(database) as engine,
            translated_errors(),
            engine.connect() as connection,
        ):
            known = open_super_stream(connection, (address.vhost, super_stream), None, None)
            ids = {row.stream: row.partition_id for row in known.partitions}
            ranges = dict(_ranges(reader, ids))
            floors = {stream: floors_before(connection, ids[stream], first) for stream, (first, _) in ranges.items()}
            return header or known.header, ranges, floors
    return header or CONTEXT_HEADER, dict(_ranges(reader, _bound_now(reader, super_stream))), {}


def _bound_now(reader: StreamReader, super_stream: str) -> list[str]:
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
