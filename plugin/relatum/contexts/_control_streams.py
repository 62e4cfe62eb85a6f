"""Publishes control messages to streams, and finds them and strays (invalid messages after control messages)."""

import contextlib
from collections.abc import Callable, Generator

from pika import BasicProperties

from relatum.common.checks import seconds_text
from relatum.common.closing import Closing
from relatum.contexts._partition_log import (
    CONTENT_TYPE,
    CONTROL_BYTES,
    Control,
    Fence,
    Marker,
    encode,
    entry_of,
)
from relatum.contexts._placement_cache import Sent
from relatum.contexts._publication import find_stray
from relatum.errors import ReadTimeout, StreamUnavailable
from relatum.own_messages import DIRECT_TIMEOUT_S, DirectPublisher
from relatum.reading import BrokerAddress, Message, SharedReader, StreamReader


def scan(
    reader: StreamReader,
    stream: str,
    from_offset: int,
    may_matter: Callable[[bytes], bool],
    *,
    is_whole: bool = False,
) -> Generator[Message]:
    """Iterate over the messages of a stream that may matter, from an offset to its present end. Close the iterator.

    With `is_whole`, the end comes from the leader, or `StreamUnavailable` is raised; else it may be the end of a
    lagging replica. Messages that retention dropped are skipped.
    """
    bounds = reader.bounds(stream)
    # Compare with what was read: a replica may have less than its leader has confirmed.
    read_to = from_offset - 1
    found = reader.batches(stream, from_offset, follow=False, idle_s=DIRECT_TIMEOUT_S)
    with contextlib.closing(found) as batches:
        for batch in batches:
            if batch is None:
                raise ReadTimeout(f"the stream {stream!r} delivered nothing for {seconds_text(DIRECT_TIMEOUT_S)}")
            read_to = batch.last_offset
            for offset, record in zip(batch.offsets, batch.records, strict=True):
                if may_matter(record):
                    yield Message.from_record(stream, offset, record)
    if is_whole and not (bounds.is_sure and (bounds.last is None or bounds.last <= read_to)):
        raise StreamUnavailable(
            f"cannot tell whether {stream!r} was read to its end: its leader does not answer, or returns nothing yet, "
            "and a replica may lag",
            stream=stream,
        )


class ControlStreams(Closing):
    """Publishes fences, markers and adoptions, and finds them and strays in partitions. Thread-safe.

    Connections are opened on demand, and again after a loss. Only finding strays needs `header`, which names contexts.
    An address without an AMQP port is a `ConfigurationError`.
    """

    def __init__(self, address: BrokerAddress, header: str = "") -> None:
        self.address = address
        self._header = header
        self._publisher = DirectPublisher(address, "a control message")
        self._reader = SharedReader(address)

    def publish(self, stream: str, control: Control) -> None:
        headers, body = encode(control)
        properties = BasicProperties(content_type=CONTENT_TYPE, delivery_mode=2, headers=headers)
        self._publisher.publish(stream, body, properties)

    def reader(self) -> StreamReader:
        return self._reader.get()

    def end_of(self, stream: str) -> int:
        """The offset after a stream's last message, 0 if it is empty. Later messages are not below it."""
        return self.reader().bounds(stream).end

    def find(self, stream: str, control: Fence | Marker, from_offset: int) -> int | None:
        """Find the first fence or marker of the same move and epoch before the stream's present end."""
        found = scan(self.reader(), stream, from_offset, lambda record: CONTROL_BYTES in record)
        with contextlib.closing(found) as messages:
            return next((message.offset for message in messages if _is_it(message, control)), None)

    def search(self, sent: Sent, from_offset: int, anywhere: bool = False) -> int | None:
        """Read from an offset to the stream's end for the offset of a stray; see `find_stray`."""
        placed = str(sent.wanted).encode()

        def may_matter(record: bytes) -> bool:
            return CONTROL_BYTES in record or placed in record

        found = scan(self.reader(), sent.stream, from_offset, may_matter, is_whole=True)
        with contextlib.closing(found) as messages:
            entries = ((each.offset, entry_of(each.headers, each.body, self._header)) for each in messages)
            return find_stray(entries, sent, anywhere=anywhere)

    def close(self) -> None:
        self._publisher.close()
        self._reader.close()


def _is_it(message: Message, wanted: Fence | Marker) -> bool:
    entry = entry_of(message.headers, message.body, "")
    return type(entry) is type(wanted) and (entry.move_id, entry.epoch) == (wanted.move_id, wanted.epoch)
