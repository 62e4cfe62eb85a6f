"""Publishes control messages to partitions; finds control messages and strays (invalid messages behind a fence)."""

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
from relatum.reading import BrokerAddress, Message, StreamReader, leaders_bounds


def scan(
    reader: StreamReader,
    stream: str,
    from_offset: int,
    is_candidate: Callable[[bytes], bool],
    *,
    is_whole: bool = False,
) -> Generator[Message]:
    """Yield the messages that `is_candidate` accepts, from an offset to the stream's current end. Close the iterator.

    With `is_whole`, the leader gives the end, or `StreamUnavailable` is raised. Otherwise a replica, which may lag.
    """
    bounds = reader.bounds(stream)
    # Track the last offset read: the replica may have fewer messages than its leader has confirmed.
    read_to = from_offset - 1
    with contextlib.closing(reader.batches(stream, from_offset, follow=False, idle_s=DIRECT_TIMEOUT_S)) as batches:
        for batch in batches:
            if batch is None:
                raise ReadTimeout(f"stream {stream!r} delivered no messages for {seconds_text(DIRECT_TIMEOUT_S)}")
            read_to = batch.last_offset
            for offset, record in zip(batch.offsets, batch.records, strict=True):
                if is_candidate(record):
                    yield Message.from_record(stream, offset, record)
    if is_whole and not (bounds.is_sure and (bounds.last is None or bounds.last <= read_to)):
        raise StreamUnavailable(
            f"{stream!r} may not have been read to its end: its leader does not answer, or the replica lags; try again",
            stream=stream,
        )


class ControlStreams(Closing):
    """Publishes and finds control messages, and finds strays. Thread-safe. `header` names contexts, for `search`."""

    def __init__(self, address: BrokerAddress, header: str = "") -> None:
        self.address = address
        self._header = header
        self._publisher = DirectPublisher(address, "a control message")
        self.reader = StreamReader(address)

    def publish(self, stream: str, control: Control) -> None:
        headers, body = encode(control)
        properties = BasicProperties(content_type=CONTENT_TYPE, delivery_mode=2, headers=headers)
        self._publisher.publish(stream, body, properties)

    def end_of(self, stream: str) -> int:
        """Return the offset after a stream's last message, 0 if it is empty. No later message has a lower offset."""
        return self.reader.bounds(stream).end

    def proven_end_of(self, stream: str) -> int:
        """Return the offset after a stream's last confirmed message; see `leaders_bounds`."""
        return leaders_bounds(self.reader, stream).end

    def find(self, stream: str, control: Fence | Marker, from_offset: int) -> int | None:
        """Return the offset of the first fence or marker with the move and epoch of `control`; None: there is none."""
        found = scan(self.reader, stream, from_offset, lambda record: CONTROL_BYTES in record)
        with contextlib.closing(found) as messages:
            return next((message.offset for message in messages if _is_same(message, control)), None)

    def search(self, sent: Sent, from_offset: int, anywhere: bool = False) -> int | None:
        """Search from an offset to the stream's end, and return the stray's offset or None; see `find_stray`."""
        placed = str(sent.wanted).encode()

        def is_candidate(record: bytes) -> bool:
            return CONTROL_BYTES in record or placed in record

        with contextlib.closing(scan(self.reader, sent.stream, from_offset, is_candidate, is_whole=True)) as found:
            entries = ((message.offset, entry_of(message, self._header)) for message in found)
            return find_stray(entries, sent, anywhere=anywhere)

    def close(self) -> None:
        self._publisher.close()
        self.reader.close()


def _is_same(message: Message, control: Fence | Marker) -> bool:
    entry = entry_of(message, "")
    return type(entry) is type(control) and (entry.move_id, entry.epoch) == (control.move_id, control.epoch)
