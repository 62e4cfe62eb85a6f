"""Asks the broker about the streams to follow: which exist, where to begin, and up to where they are unchanged."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

from relatum.checks import shown
from relatum.collecting._bulk import id_of, id_of_place
from relatum.collecting._handlers import logger
from relatum.errors import (
    AccessRefused,
    ConfigurationError,
    InvalidInput,
    NotAStream,
    OffsetExpired,
    OffsetNotFound,
    StreamNotFound,
    Transient,
)
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX
from relatum.reading import BrokerAddress, Message, SharedReader, StreamBounds, StreamReader

StartAt = Literal["first", "next"] | int
"""Where to begin in a new stream: its first message, the next message to be published, or an offset."""


class NamedStreams:
    """The named streams and super streams, where to begin in each, and the dead-letter stream. Methods block."""

    def __init__(
        self, address: BrokerAddress | None, names: Sequence[str], start: StartAt, dead_letters: str | None
    ) -> None:
        self.names = list(dict.fromkeys(names))
        self._start = start
        self._dead_letters = dead_letters
        self._plain: set[str] = set()
        self._address = address
        self._reader: SharedReader | None = None
        is_offset = isinstance(start, int) and not isinstance(start, bool) and 0 <= start <= INTEGER_MAX
        if start not in ("first", "next") and not is_offset:
            raise InvalidInput(f"start= takes 'first', 'next' or an offset, not {shown(start)}")
        if address is None and (names or dead_letters):
            raise ConfigurationError("streams= and dead_letter_stream= need a broker: give broker=")
        self._without_dead_letters(self.names)

    def _without_dead_letters(self, names: list[str]) -> list[str]:
        if self._dead_letters in names:
            raise ConfigurationError(
                f"the dead-letter stream {self._dead_letters!r} is also followed: each dead letter would be collected "
                "again, for ever"
            )
        return names

    def open(self) -> None:
        """Have a new reader for each start; it connects when it is needed."""
        self._reader = None if self._address is None else SharedReader(self._address)

    def reader(self) -> StreamReader:
        """Return the reader for bodies and for questions about streams; `close` closes it."""
        assert self._reader is not None, "nothing is read without a broker"
        return self._reader.get()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def initial(self, bounds: StreamBounds) -> int:
        """Return the first offset to read in a stream that was never followed."""
        if self._start == "next":
            return bounds.end
        return bounds.first or 0 if self._start == "first" else self._start

    def find(self) -> list[str]:
        """Return the streams to follow: the named streams, and the partitions of the named super streams."""
        if self._plain.issuperset(self.names):
            return self.names
        reader, found = self.reader(), list[str]()
        for name in self.names:
            partitions = [] if name in self._plain else reader.partitions(name)
            if not partitions and name not in self._plain and reader.routes("", name) != []:
                # A plain stream: do not ask again, since the broker logs an error each time.
                self._plain.add(name)
            found += partitions or [name]
        return self._without_dead_letters(found)

    def checked(self) -> list[str]:
        """As `find`, but refuse queues of other kinds. Missing or unreachable streams are waited for later."""
        if self._dead_letters is not None:
            try:
                self.reader().bounds(self._dead_letters)
            except NotAStream:
                logger.info("dead letters go to %r, which is a queue", self._dead_letters)
        names = self.find()
        for name in set(names) - self._plain:
            with suppress(Transient, StreamNotFound, AccessRefused):
                # Tells missing streams from other queues.
                self.reader().bounds(name)
        return names


def last_agreed(
    reader: StreamReader,
    stream: str,
    bounds: StreamBounds,
    last_collected: Callable[[int], tuple[int, str] | None],
) -> int | None:
    """Return the offset of the last collected message that is unchanged in its stream; None if there is none.

    A binary search: the unchanged messages are a prefix. Only messages with a `message_id` can be recognised.
    """
    if bounds.first is None or bounds.last is None:
        return None
    agreed: int | None = None
    low, high = bounds.first, bounds.last
    middle = high
    while low <= high:
        row = last_collected(middle)
        if row is None or row[0] < low:
            low = middle + 1
        elif _is_there(reader, MessageId(stream, row[0]), row[1]):
            agreed, low = row[0], middle + 1
        else:
            high = row[0] - 1
        middle = (low + high) // 2
    return agreed


def _is_there(reader: StreamReader, place: MessageId, message_id: str) -> bool:
    (found,) = reader.read_all([place])
    if isinstance(found, Message):
        return id_of(found) == message_id != id_of_place(place)
    if isinstance(found, OffsetExpired) or (isinstance(found, OffsetNotFound) and found.is_proven):
        return False
    raise found
