"""What a batched read holds: the ids asked for, in order, and what has come for them, within bounds. Pure."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

from relatum._ids import MessageId
from relatum.errors import AccessRefused, NotFound, OffsetNotFound
from relatum.reading._message import Message
from relatum.reading._operations import StreamNotHere, check_offset

WINDOW_MESSAGES: Final = 1024
"""Ids planned together: the more, the more neighbours are found; a held message takes about 1 kB with its record."""

WINDOW_BYTES_MAX: Final = 64 << 20
"""Bytes of records held for ids that are not their turn yet; past it, the window is read in smaller parts."""

Result = Message | NotFound | AccessRefused
"""What comes of one id: its message, or why there is none."""


class Window:
    """Takes ids from an iterable part by part, and gives back their results in the order of the ids.

    Args:
        ids: What is asked for; may repeat.
        messages_max: Ids planned together.
        bytes_max: Bytes held.
    """

    def __init__(self, ids: Iterable[MessageId], messages_max: int, bytes_max: int = WINDOW_BYTES_MAX) -> None:
        self._source = iter(ids)
        self._waiting: deque[MessageId] = deque()
        self._asked: deque[MessageId] = deque()
        self._results: dict[MessageId, Result | StreamNotHere] = {}
        self._uses: dict[MessageId, int] = {}
        self._held = 0
        self._messages_max = max(1, messages_max)
        self._part = self._messages_max
        self._bytes_max = bytes_max
        self.is_full = False

    def open(self) -> dict[str, list[int]]:
        """Begin the next part: the offsets to read by stream, ascending; empty when all ids are done."""
        self.is_full = False
        while len(self._asked) < self._part:
            asked = self._waiting.popleft() if self._waiting else next(self._source, None)
            if asked is None:
                break
            asked = MessageId(*asked)
            self._asked.append(asked)
            self._uses[asked] = self._uses.get(asked, 0) + 1
        wanted: dict[str, list[int]] = {}
        for stream, offset in sorted(self._uses):
            wanted.setdefault(stream, []).append(offset)
        return wanted

    def valid(self, wanted: dict[str, list[int]]) -> dict[str, list[int]]:
        """What of a part can be asked for; numbers that are no offsets get their error at once."""
        for stream, offsets in wanted.items():
            for offset in offsets:
                try:
                    check_offset(stream, offset)
                except OffsetNotFound as error:
                    self.put(MessageId(stream, offset), error)
        missing = self.missing()
        return {
            stream: [offset for offset in offsets if MessageId(stream, offset) in missing]
            for stream, offsets in wanted.items()
        }

    def put(self, asked: MessageId, result: Result | StreamNotHere) -> None:
        """Hold a result until its turn; dropped where too much is held already: it will be asked for again."""
        if asked not in self._uses or asked in self._results:
            return
        size = _size(result)
        if self._held and self._held + size > self._bytes_max:
            self.is_full = True
            return
        self._held += size
        self._results[asked] = result

    def missing(self) -> set[MessageId]:
        """The ids of this part without a result."""
        return set(self._uses) - set(self._results)

    def ready(self) -> Iterator[Any]:
        """The results whose turn it is."""
        asked, results, uses = self._asked, self._results, self._uses
        while asked and asked[0] in results:
            each = asked.popleft()
            result = results[each]
            uses[each] -= 1
            if not uses[each]:
                del uses[each], results[each]
                self._held -= _size(result)
            yield result

    def close(self) -> None:
        """End the part. After it was too large, what is not done goes back and the next one is half as large."""
        if not self._asked:
            self._part = min(self._messages_max, self._part * 2)
            return
        self._part = max(1, self._part // 2)
        self._waiting.extendleft(reversed(self._asked))
        self._asked.clear()
        self._results.clear()
        self._uses.clear()
        self._held = 0


def _size(result: object) -> int:
    if not isinstance(result, Message):
        return 0
    return len(result.raw) if result.raw is not None else len(result.body)
