"""Fences and markers in the streams: published, and found again."""

import contextlib
from types import TracebackType
from typing import Self

from relatum.contexts.placement._entries import CONTROL_BYTES, Control, Fence, Marker, entry_of
from relatum.contexts.placement._search import publish_control, scan
from relatum.contexts.serial.moving._move_steps import FindControl
from relatum.publishing import DirectPublisher
from relatum.reading import BrokerAddress, Message, StreamReader


class ControlStreams:
    """Publishes and finds control messages. A context manager; threads may share one.

    Args:
        address: The broker's address; it must have an AMQP port.

    Raises:
        ConfigurationError: the address has no AMQP port.
        BrokerUnavailable: nothing answers.
    """

    def __init__(self, address: BrokerAddress) -> None:
        self.server = str(address)
        """The broker's name in the log."""
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
        publish_control(self._publisher, stream, control)

    def find(self, wanted: FindControl) -> int | None:
        """Where the first fence or marker of a move and an epoch lies, up to where the stream ends now.

        Raises:
            StreamNotFound: there is no such stream.
            ReadTimeout: the stream gave nothing, though it has more.
        """
        found = scan(self._reader, wanted.stream, wanted.from_offset, lambda record: CONTROL_BYTES in record)
        with contextlib.closing(found) as messages:
            return next((message.offset for message in messages if _is_it(message, wanted)), None)

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


def _is_it(message: Message, wanted: FindControl) -> bool:
    entry = entry_of(message.headers, message.body, "")
    kind = Fence if wanted.kind == "fence" else Marker
    return isinstance(entry, kind) and (entry.move_id, entry.epoch) == (wanted.move_id, wanted.epoch)
