"""What a batched read holds: the ids asked for, in order, and what has come for them, within bounds. Pure."""

from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final, TypeAlias

from relatum.checks import checked_name
from relatum.errors import AccessRefused, InvalidInput, NotFound, OffsetNotFound, StreamNotHere
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX
from relatum.reading._message import Message
from relatum.reading._stream_errors import check_integers, check_offset

WINDOW_MESSAGES: Final = 1024
"""Ids planned together: the more, the more neighbours are found; a held message takes about 1 kB with its record."""

WINDOW_MAX: Final = 1_000_000
"""The most ids that can be planned together: each takes some hundred bytes before anything is read."""

WINDOW_BYTES_MAX: Final = 64 << 20
"""Bytes of records held for ids that are not their turn yet; past it, the window is read in smaller parts."""

TAKEN_BYTES: Final = 1 << 20
"""Bytes of results that are handed on together, about: whoever goes through them holds them all."""

_Place: TypeAlias = tuple[str, int]

Result: TypeAlias = Message | NotFound | AccessRefused
"""What comes of one id: its message, or why there is none."""

RECORD_BYTES: Final = 256
"""Bytes that a record which is held takes beside its own, about."""

_Held: TypeAlias = tuple[bytes, int] | tuple[Result | StreamNotHere, int]
"""A record with the time of its chunk, or a result with the bytes it takes.

A hundred thousand are held at once, and Python's garbage collector, which visits a message again and again, leaves out
plain tuples of bytes and numbers: so messages are made when it is their turn."""


class Window:
    """Takes ids from an iterable part by part, and gives back their results in the order of the ids.

    Some thousand ids pass through in the time of one attach, so this is written to do little for each.
    """

    def __init__(self, ids: Iterable[tuple[str, int]], messages_max: int, bytes_max: int = WINDOW_BYTES_MAX) -> None:
        self._source = iter(ids)
        self._waiting: deque[_Place] = deque()
        self._asked: deque[_Place] = deque()
        # What this part asks for, by stream and offset: its result and the bytes held for it, None until it comes.
        self._results: dict[str, dict[int, _Held | None]] = {}
        self._repeats: dict[_Place, int] = {}
        self._held = 0
        self._lacking = 0
        # Messages of this part that came, and their bytes; how many bytes can be held, once that is known.
        self._came = self._came_bytes = 0
        self._room: int | None = None
        self._messages_max = max(1, messages_max)
        self._part = self._messages_max
        self._bytes_max = bytes_max
        self.is_full = False

    def open(self) -> dict[str, list[int]]:
        """Begin the next part: the offsets to read by stream, ascending; empty when all ids are done."""
        self.is_full = False
        self._came = self._came_bytes = 0
        asked = self._asked
        while len(asked) < self._part and self._waiting:
            asked.append(self._waiting.popleft())
        asked.extend(islice(self._source, self._part - len(asked)))
        results: dict[str, dict[int, _Held | None]] = {}
        try:
            for stream, offset in asked:
                if stream in results:
                    results[stream][offset] = None
                else:
                    results[stream] = {offset: None}
        except (TypeError, ValueError):
            raise InvalidInput("ids= takes pairs of a stream's name and an offset (MessageId)") from None
        for stream in results:
            checked_name("stream", stream)
        self._results = results
        self._lacking = sum(map(len, results.values()))
        if self._lacking < len(asked):
            self._repeats = {place: uses - 1 for place, uses in Counter(asked).items() if uses > 1}
        for offsets in results.values():
            # One look at the types of all: most are plain integers.
            if set(map(type, offsets)) != {int}:
                check_integers(offsets)
        return {stream: sorted(offsets) for stream, offsets in results.items()}

    def valid(self, wanted: dict[str, list[int]]) -> dict[str, list[int]]:
        """What of a part can be asked for; numbers that are no offsets get their error at once."""
        return {stream: self._valid(stream, offsets) for stream, offsets in wanted.items()}

    def _valid(self, stream: str, offsets: list[int]) -> list[int]:
        if offsets[0] >= 0 and offsets[-1] <= INTEGER_MAX:
            return offsets
        valid = []
        for offset in offsets:
            try:
                check_offset(stream, offset)
            except OffsetNotFound as error:
                self.put(stream, offset, error)
            else:
                valid.append(offset)
        return valid

    def put(self, stream: str, offset: int, result: Result | StreamNotHere, size: int = 0) -> None:
        """Hold a result until its turn; dropped where too much is held already: it will be asked for again."""
        results = self._results[stream]
        # None says that it is asked for and has not come.
        if results.get(offset, 0) is not None:
            return
        held = self._held
        self._came += 1
        self._came_bytes += size
        if held and held + size > self._bytes_max:
            self.is_full = True
            return
        self._held = held + size
        self._lacking -= 1
        results[offset] = (result, size)

    def put_records(self, stream: str, offsets: list[int], records: Iterable[bytes], time_ms: int) -> None:
        """As `put` for messages of a chunk that was written at a time."""
        results, bytes_max = self._results[stream], self._bytes_max
        held = self._held
        for offset, record in zip(offsets, records, strict=True):
            size = RECORD_BYTES + len(record)
            if results.get(offset, 0) is not None:
                continue
            self._came += 1
            self._came_bytes += size
            if held and held + size > bytes_max:
                self.is_full = True
                continue
            held += size
            results[offset] = record, time_ms
            self._lacking -= 1
        self._held = held

    @property
    def lacks_any(self) -> bool:
        """Whether an id of this part has no result yet."""
        return self._lacking > 0

    def missing(self) -> list[MessageId]:
        """The ids of this part without a result, ascending."""
        return sorted(
            MessageId(stream, offset)
            for stream, results in self._results.items()
            for offset, held in results.items()
            if held is None
        )

    def ready(self) -> list[Any]:
        """The next results whose turn it is, which are held no longer; nothing where it is none's turn."""
        asked, repeats, of_streams = self._asked, self._repeats, self._results
        given: list[Any] = []
        message = Message.from_record
        freed = taken = 0
        while asked and taken < TAKEN_BYTES:
            stream, offset = asked[0]
            results = of_streams[stream]
            held = results[offset]
            if held is None:
                break
            if isinstance(held[0], bytes):
                size = RECORD_BYTES + len(held[0])
                given.append(message(stream, offset, *held))
            else:
                size = held[1]
                given.append(held[0])
            taken += size
            place = asked.popleft()
            if repeats and repeats.get(place):
                repeats[place] -= 1
                continue
            del results[offset]
            freed += size
        self._held -= freed
        return given

    def close(self) -> None:
        """End the part. After it was too large, what is not done goes back, and the next one is what can be held."""
        each = max(1, self._came_bytes // max(1, self._came))
        if not self._asked:
            fitting = self._messages_max if self._room is None else self._room // each
            self._part = max(1, min(self._messages_max, self._part * 2, fitting))
            return
        self._room = self._held * 3 // 4
        self._part = max(1, min(self._part // 2, self._room // each))
        self._waiting.extendleft(reversed(self._asked))
        self._asked.clear()
        self._results.clear()
        self._repeats.clear()
        self._held = 0
