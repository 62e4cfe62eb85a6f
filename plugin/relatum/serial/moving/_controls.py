"""Fences and markers in the streams: published, and found again."""

import contextlib
from collections.abc import Generator
from types import TracebackType
from typing import Final, Self, cast

from pika import BasicProperties

from relatum._direct import TIMEOUT_S, DirectPublisher
from relatum.errors import ReadTimeout
from relatum.placement._entries import CONTENT_TYPE, CONTROL_BYTES, Control, Fence, Marker, encode, entry_of
from relatum.reading import BrokerAddress, Message, RecordBatch, StreamReader
from relatum.serial.moving._steps import FindControl

IDLE_S: Final = TIMEOUT_S
"""Seconds without anything from a stream that has more, after which a search ends as `ReadTimeout`."""


class ControlStreams:
    """Publishes and finds control messages. A context manager; threads may share one.

    Args:
        address: The broker's address; it must have an AMQP port.

    Raises:
        ConfigurationError: the address has no AMQP port.
        BrokerUnavailable: nothing answers.
    """

    def __init__(self, address: BrokerAddress) -> None:
        self._publisher = DirectPublisher(address, "a control message")
        self._reader = StreamReader.open(address)

    def end_of(self, stream: str) -> int:
        """The offset behind the last message of a stream; 0 where it is empty. What is published later is not below."""
        last = self._reader.bounds(stream).last
        return 0 if last is None else last + 1

    def publish(self, stream: str, control: Control) -> None:
        """Publish a control message and wait for its confirm.

        Raises:
            PublishUnroutable: there is no such stream.
            PublishNacked: the broker refused it.
            BrokerUnavailable: the broker does not answer, or the connection ended before the confirm.
        """
        headers, body = encode(control)
        self._publisher.publish(
            stream, body, BasicProperties(content_type=CONTENT_TYPE, delivery_mode=2, headers=headers)
        )

    def find(self, wanted: FindControl) -> int | None:
        """Where the first fence or marker of a move and an epoch lies, up to where the stream ends now.

        Raises:
            StreamNotFound: there is no such stream.
            ReadTimeout: the stream gave nothing, though it has more.
        """
        found = self._reader.batches(wanted.stream, wanted.from_offset, follow=False, idle_s=IDLE_S)
        with contextlib.closing(cast("Generator[RecordBatch | None]", found)) as batches:
            for batch in batches:
                if batch is None:
                    raise ReadTimeout(f"the stream {wanted.stream!r} gave nothing for {IDLE_S} s")
                if (at := _first_in(batch, wanted)) is not None:
                    return at
        return None

    def close(self) -> None:
        """Close the connections."""
        self._publisher.close()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _first_in(batch: RecordBatch, wanted: FindControl) -> int | None:
    if batch.messages is not None:
        return next((each.offset for each in batch.messages if _is_it(each, wanted)), None)
    for offset, record in zip(batch.offsets, batch.records, strict=True):
        if CONTROL_BYTES in record and _is_it(Message.from_record(batch.stream, offset, record), wanted):
            return offset
    return None


def _is_it(message: Message, wanted: FindControl) -> bool:
    entry = entry_of(message.headers, message.body, "")
    kind = Fence if wanted.kind == "fence" else Marker
    return isinstance(entry, kind) and (entry.move_id, entry.epoch) == (wanted.move_id, wanted.epoch)
