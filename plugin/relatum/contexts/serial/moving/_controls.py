"""Fences and markers in the streams: published, and found again."""

import contextlib

from relatum.closing import Closing
from relatum.contexts.placement._entries import CONTROL_BYTES, Fence, Marker, entry_of
from relatum.contexts.placement._search import Controls, scan
from relatum.contexts.serial.moving._move_steps import FindControl
from relatum.reading import BrokerAddress, Message


class ControlStreams(Controls, Closing):
    """Publishes and finds fences and markers. A context manager.

    Raises:
        ConfigurationError: the address has no AMQP port.
        BrokerUnavailable: nothing answers.
    """

    def __init__(self, address: BrokerAddress) -> None:
        super().__init__(address, "a control message")
        self.reader()

    def end_of(self, stream: str) -> int:
        """The offset behind the last message of a stream; 0 where it is empty. What is published later is not below."""
        last = self.reader().bounds(stream).last
        return 0 if last is None else last + 1

    def find(self, wanted: FindControl) -> int | None:
        """Where the first fence or marker of a move and an epoch lies, up to where the stream ends now.

        Raises:
            StreamNotFound: there is no such stream.
            ReadTimeout: the stream gave nothing, though it has more.
        """
        found = scan(self.reader(), wanted.stream, wanted.from_offset, lambda record: CONTROL_BYTES in record)
        with contextlib.closing(found) as messages:
            return next((message.offset for message in messages if _is_it(message, wanted)), None)


def _is_it(message: Message, wanted: FindControl) -> bool:
    entry = entry_of(message.headers, message.body, "")
    kind = Fence if wanted.kind == "fence" else Marker
    return isinstance(entry, kind) and (entry.move_id, entry.epoch) == (wanted.move_id, wanted.epoch)
