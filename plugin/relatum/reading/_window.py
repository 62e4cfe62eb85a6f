"""What a batched read holds: the ids asked for, in order, and what has come for them, within bounds. Pure."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

from relatum._ids import MessageId
from relatum.errors import AccessRefused, NotFound, OffsetNotFound
from relatum.limits import INTEGER_MAX
from relatum.reading._message import Message
from relatum.reading._operations import StreamNotHere, check_offset

WINDOW_MESSAGES: Final = 1024
"""Ids planned together: the more, the more neighbours are found; a held message takes about 1 kB with its record."""

WINDOW_BYTES_MAX: Final = 64 << 20
"""Bytes of records held for ids that are not their turn yet; past it, the window is read in smaller parts."""

_Place = tuple[str, int]

Result = Message | NotFound | AccessRefused
"""What comes of one id: its message, or why there is none."""


class Window:
    """Takes ids from an iterable part by part, and gives back their results in the order of the ids.

    Some thousand ids pass through in the time of one attach, so a place is a plain tuple in here.

    Args:
        ids: What is asked for; may repeat.
        messages_max: Ids planned together.
        bytes_max: Bytes held.
    """

    def __init__(self, ids: Iterable[MessageId], messages_max: int, bytes_max: int = WINDOW_BYTES_MAX) -> None:
        self._source = iter(ids)
        self._waiting: deque[_Place] = deque()
        self._asked: deque[_Place] = deque()
        self._results: dict[_Place, Result | StreamNotHere] = {}
        self._sizes: dict[_Place, int] = {}
        self._uses: dict[_Place, int] = {}
        self._held = 0
        self._messages_max = max(1, messages_max)
        self._part = self._messages_max
        self._bytes_max = bytes_max
        self.is_full = False

    def open(self) -> dict[str, list[int]]:
        """Begin the next part: the offsets to read by stream, ascending; empty when all ids are done."""
        self.is_full = False
        asked, uses = self._asked, self._uses
        while len(asked) < self._part and self._waiting:
            asked.append(self._waiting.popleft())
        for stream, offset in islice(self._source, self._part - len(asked)):
            asked.append((stream, offset))
        wanted: dict[str, list[int]] = {}
        for place in asked:
            if place in uses:
                uses[place] += 1
            else:
                uses[place] = 1
                wanted.setdefault(place[0], []).append(place[1])
        for offsets in wanted.values():
            offsets.sort()
        return wanted

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
        place = (stream, offset)
        if place not in self._uses or place in self._results:
            return
        held = self._held
        if held and held + size > self._bytes_max:
            self.is_full = True
            return
        self._held = held + size
        self._results[place] = result
        self._sizes[place] = size

    def missing(self) -> list[MessageId]:
        """The ids of this part without a result, ascending."""
        return sorted(MessageId(*place) for place in set(self._uses) - set(self._results))

    def ready(self) -> Iterator[Any]:
        """The results whose turn it is."""
        asked, results, uses = self._asked, self._results, self._uses
        while asked and asked[0] in results:
            place = asked.popleft()
            if uses[place] > 1:
                uses[place] -= 1
                yield results[place]
            else:
                del uses[place]
                self._held -= self._sizes.pop(place)
                yield results.pop(place)

    def close(self) -> None:
        """End the part. After it was too large, what is not done goes back and the next one is half as large."""
        if not self._asked:
            self._part = min(self._messages_max, self._part * 2)
            return
        self._part = max(1, self._part // 2)
        self._waiting.extendleft(reversed(self._asked))
        self._asked.clear()
        self._results.clear()
        self._sizes.clear()
        self._uses.clear()
        self._held = 0
